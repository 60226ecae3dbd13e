"""The sampled choice among what top-k, top-p and min-p keep, without the lowest score they keep.

Every filter keeps the scores from some lowest one upwards, so whether it keeps a given token is
told by what lies strictly above it: top-k by the number, top-p by the mass. The kernel takes the
best of score + noise among all tokens and asks that of it. Where the answer is no, so it is for all
that score less or the same: it takes the best among the others, and asks again. A token that top-p
does not keep is drawn with probability 1 - p, so once is mostly enough; for top-k the search begins
at a bound that few but the k largest are above.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import filters

CHUNK = (32, 128)  # scores that are read at a time: a tensor copy moves up to 256 along an axis
SIZE = CHUNK[0] * CHUNK[1]
SLOTS = 12  # chunks in shared memory
RANGE = 64.0  # below the largest score, where the bound is searched
HALVINGS = 20  # of that range


def reference(
    scores_bnv: jax.Array,
    noise_bdv: jax.Array,
    depths_bn: jax.Array,
    top_k_b: jax.Array | None,
    top_p_b: jax.Array | None,
    min_p_b: jax.Array | None,
) -> jax.Array:
    """The token int32 [b, n] with the largest score + noise of those kept, the lowest id on ties.

    Args:
      scores_bnv: float32, the log-probabilities over T up to a constant.
      noise_bdv: float32 noise of each depth.
      depths_bn: each node's depth, below d.
      top_k_b, top_p_b, min_p_b: see filters.py; None where no row asks.
    """
    if top_k_b is not None:
        scores_bnv = filters.top_k(scores_bnv, top_k_b)
    if top_p_b is not None:
        scores_bnv = filters.top_p(scores_bnv, top_p_b)
    if min_p_b is not None:
        scores_bnv = filters.min_p(scores_bnv, min_p_b)
    noise_bnv = jnp.take_along_axis(noise_bdv, depths_bn[:, :, None], axis=1)
    return jnp.argmax(scores_bnv + noise_bnv, axis=-1).astype(jnp.int32)


def unsupported_reason(v: int, dtype) -> str | None:
    """Why the kernel cannot take scores of a vocabulary of v, or None."""
    if dtype != jnp.float32:
        return f"{jnp.dtype(dtype).name}; the kernel takes float32"
    return f"a vocabulary of {v}; the kernel takes multiples of 128" if v % CHUNK[1] else None


@functools.partial(jax.jit, static_argnames=("interpret",))
def sample(
    scores_bnv: jax.Array,
    noise_bdv: jax.Array,
    depths_bn: jax.Array,
    top_k_b: jax.Array | None,
    top_p_b: jax.Array | None,
    min_p_b: jax.Array | None,
    *,
    interpret=None,
) -> jax.Array:
    """The kernel; arguments and result as for the reference.

    A block has one node, whose choice depends on nothing but its own row: it is the same in a tree
    as alone. The row is read from the second-level cache a few times.
    """
    if top_k_b is not None and top_p_b is not None:
        # Top-p's total is that of what top-k keeps, for which the lowest of that has to be known.
        scores_bnv, top_k_b = filters.top_k(scores_bnv, top_k_b), None
    b, n, v = scores_bnv.shape

    def per_node(x_b: jax.Array) -> jax.Array:
        return jnp.repeat(x_b.astype(jnp.float32), n)

    everything = jnp.full((b,), jnp.inf)
    if top_k_b is not None:
        limit_b = jnp.where(top_k_b > 0, top_k_b, everything)
    else:
        limit_b = everything if top_p_b is None else jnp.where(top_p_b < 1, top_p_b, everything)
    min_p_b = jnp.zeros((b,)) if min_p_b is None else min_p_b
    first_b = jnp.arange(b, dtype=jnp.int32) * noise_bdv.shape[1]
    token = _sample(
        scores_bnv.reshape(b * n, v // CHUNK[1], CHUNK[1]),
        noise_bdv.reshape(-1, v // CHUNK[1], CHUNK[1]),
        (first_b[:, None] + depths_bn).reshape(-1).astype(jnp.int32),
        per_node(limit_b),
        per_node(jnp.log(min_p_b)),
        by_mass=top_p_b is not None,
        interpret=interpret,
    )
    return token.reshape(b, n)


def _sample(scores, noise, noise_row, limit, min_p, *, by_mass: bool, interpret) -> jax.Array:
    """int32 [m], the choice of each row.

    Args:
      scores, noise: float32 [m, v / 128, 128] and [rows of noise, v / 128, 128].
      noise_row: int32 [m], which row of the noise.
      limit: float32 [m], kept is what fewer scores lie above or, `by_mass`, less of the
        probabilities; infinity keeps everything.
      min_p: float32 [m], the logarithm of the least probability over the largest.
    """
    m, v = scores.shape[0], scores.shape[1] * CHUNK[1]
    steps = -(-v // SIZE)
    tail = v % SIZE

    def sample_kernel(
        scores_ref, noise_ref, noise_row_ref, limit_ref, min_p_ref, o_ref, buffer, full
    ):
        row = lax.axis_index("row")
        limit = limit_ref[row]
        scores_source, noise_source = (scores_ref, row), (noise_ref, noise_row_ref[row])

        def lane():
            rows, columns = (lax.broadcasted_iota(jnp.int32, CHUNK, axis) for axis in range(2))
            return rows * CHUNK[1] + columns

        def sweep(sources, visit, carry):
            """visit(step, chunk of each source, carry) over the row; -inf after its last score."""
            ahead = SLOTS // len(sources)

            def slots(step):
                return [lax.rem(step, ahead) * len(sources) + i for i in range(len(sources))]

            def fetch(step):
                plgpu.commit_smem()  # copies write where all threads have read
                for (ref, line), slot in zip(sources, slots(step), strict=True):
                    source = ref.at[line, pl.ds(step * CHUNK[0], CHUNK[0])]
                    plgpu.copy_gmem_to_smem(source, buffer.at[slot], full.at[slot])

            def read(step):
                for slot in slots(step):
                    plgpu.barrier_wait(full.at[slot])
                return [buffer[slot] for slot in slots(step)]

            def body(step, carry):
                carry = visit(step, read(step), carry)

                @pl.when(step + ahead < steps)
                def _():
                    fetch(step + ahead)

                return carry

            lax.fori_loop(0, min(ahead, steps), lambda step, _: fetch(step), None)
            carry = lax.fori_loop(0, v // SIZE, body, carry)
            if tail:
                step = jnp.int32(v // SIZE)
                first, *others = read(step)
                carry = visit(step, [jnp.where(lane() < tail, first, -jnp.inf), *others], carry)
            return carry

        def best_above(bound, least):
            """The token with the largest score + noise, and that sum; -inf if there is none."""

            def visit(step, chunks, carry):
                best, at = carry
                x, z = chunks
                y = jnp.where((x > bound) & (x >= least), x + z, -jnp.inf)
                better = y > best
                return jnp.where(better, y, best), jnp.where(better, step, at)

            start = jnp.full(CHUNK, -jnp.inf, jnp.float32), jnp.zeros(CHUNK, jnp.int32)
            best, at = sweep([scores_source, noise_source], visit, start)
            top = jnp.max(best)
            worst = jnp.iinfo(jnp.int32).max
            return jnp.min(jnp.where(best == top, at * SIZE + lane(), worst)), top

        def is_kept(score, peak):
            zeros = jnp.zeros(CHUNK, jnp.float32)
            if not by_mass:

                def count(step, chunks, above):
                    return above + jnp.where(chunks[0] > score, 1.0, 0.0)

                return jnp.sum(sweep([scores_source], count, zeros)) < limit

            def weigh(step, chunks, carry):
                above, total = carry
                weight = jnp.exp(chunks[0] - peak)
                return above + jnp.where(chunks[0] > score, weight, 0.0), total + weight

            above, total = (jnp.sum(x) for x in sweep([scores_source], weigh, (zeros, zeros)))
            # At p = 0 the most probable token still stays.
            return above < jnp.maximum(limit * total, jnp.finfo(jnp.float32).tiny)

        # The largest score of each lane, of which there are as many as a chunk has scores.
        largest = sweep(
            [scores_source],
            lambda step, chunks, largest: jnp.maximum(largest, chunks[0]),
            jnp.full(CHUNK, -jnp.inf, jnp.float32),
        )
        peak = jnp.max(largest)
        bound = jnp.float32(-jnp.inf)
        if not by_mass:
            # Where k lanes have a score above it, a number is below the k-th largest. A lane seldom
            # has two of the largest, so the greatest such number has few others above it.
            def halve(_, ends):
                low, high = ends
                middle = 0.5 * (low + high)
                above = jnp.sum(jnp.where(largest > middle, 1.0, 0.0))
                enough = above >= limit
                return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

            low, _ = lax.fori_loop(0, HALVINGS, halve, (peak - RANGE, peak))
            bound = jnp.where(low > peak - RANGE, low, bound)
        least = peak + min_p_ref[row]

        def attempt(carry):
            bound, token, _ = carry
            candidate, top = best_above(bound, least)
            # Of a row of NaN nothing is ever kept: it ends where nothing is left.
            found = top > -jnp.inf
            token = jnp.where(found, candidate, token)
            score = scores_ref[row, token // CHUNK[1], lax.rem(token, CHUNK[1])]
            again = found & jnp.logical_not(is_kept(score, peak))
            return score, token, again.astype(jnp.int32)

        start = bound, jnp.int32(0), jnp.int32(1)
        _, token, _ = lax.while_loop(lambda carry: carry[2] > 0, attempt, start)
        o_ref[row] = token

    return plgpu.kernel(
        sample_kernel,
        out_type=jax.ShapeDtypeStruct((m,), jnp.int32),
        grid=(m,),
        grid_names=("row",),
        num_threads=1,
        thread_name="wg",
        scratch_types=(
            plgpu.SMEM((SLOTS, *CHUNK), jnp.float32),
            plgpu.Barrier(num_barriers=SLOTS),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(scores, noise, noise_row, limit, min_p)
