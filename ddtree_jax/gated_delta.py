"""Gated DeltaNet over trees, as pure functions (arXiv 2412.06464; checkpoints.md 3.4).

A layer carries a matrix per value head, S <- exp(g) S + k u^T with u = beta (v - (exp(g) S)^T k),
read by o = S^T q. It cannot be cropped, and a copy per tree node would be large. Along one path the
recurrence has a closed form, and nodes that share no path share nothing, so a whole tree is

    (I + A) U = beta (V - exp(G) K S),        A_ij = beta_i exp(G_i - G_j) (k_i . k_j),
    O = exp(G) Q S + M U,                     M_ij = exp(G_i - G_j) (q_i . k_j),

with A over the strict ancestors j of i and M over the ancestors and i itself, G_i the sum of g from
the root to i, and S the committed state, which is only read. `commit` takes the rows of an accepted
path into the state: it needs their k, u and g, nothing else.

Everything here is float32 (`_matmul` says how on a GPU). Axes: b batch, n and m rows (nodes),
p rows of a path, k key heads, r value heads of a key head, x key dim, y value dim, t taps of the
convolution, c its channels of a key head.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

CHUNK = 64  # rows of a causal chunk that are solved together

# Rows, columns and terms from which products run on tensor cores: 14 us less per layer of
# Qwen3.6-27B's in a round of 64 nodes.
TILE = 16

# Everything goes through the state for the rest of the text: no TF32 alone.
_einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)
# Rows are chosen by what is known to be a row: neither clamped nor masked.
_take = functools.partial(jnp.take_along_axis, mode="promise_in_bounds")


def _has_tf32() -> bool:
    """Whether the device's tensor cores multiply TF32 (Ampere, 8.0, and later).

    XLA refuses the whole program where they do not.
    """
    if jax.default_backend() != "gpu":
        return False
    version = str(getattr(jax.devices()[0], "compute_capability", ""))
    generation = version.partition(".")[0]  # "gfx942" where it is not NVIDIA's
    return generation.isdecimal() and int(generation) >= 8


def _matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """a b, float32: on a GPU's tensor cores, as three products of TF32 parts, from TILE on.

    With 128 terms those are off by 3e-6 of |a| |b| at most, half of it lost to the tensor cores'
    cut sums, where float32 is off by 6e-7 and one TF32 product by 1e-3. A whole tree, a state and a
    long chain of commits stay within 1e-5 (tests). Smaller products are bound by what they read.
    """
    fills = min(*a.shape[-2:], b.shape[-1]) >= TILE
    parts = fills and _has_tf32()
    precision = lax.DotAlgorithmPreset.TF32_TF32_F32_X3 if parts else lax.Precision.HIGHEST
    return jnp.matmul(a, b, precision=precision)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["state", "window"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Recurrent:
    """What a layer carries from row to row.

    state: float32 [b, k, x, r, y]. window: [b, k, t - 1, c], the convolution's last inputs, oldest
    first. Key heads stand where a K/V cache has its heads, so that both shard alike.
    """

    state: jax.Array
    window: jax.Array


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["k", "u", "g", "inputs"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Nodes:
    """What rebuilds the state after any path of uncommitted nodes.

    k: float32 [b, n, k, x]. u: float32 [b, n, k, r, y]. g: float32 [b, n, k, r].
    inputs: [b, n, k, c], what the convolution read.
    """

    k: jax.Array
    u: jax.Array
    g: jax.Array
    inputs: jax.Array


def recurrence(state, q_bnkx, k_bnkx, v_bnkry, g_bnkr, beta_bnkr) -> tuple[jax.Array, jax.Array]:
    """The definition, row after row: (o [b, n, k, r, y], the state after the last row)."""

    def step(state, row):
        q, k, v, g, beta = row
        state = jnp.exp(g)[:, :, None, :, None] * state
        u = beta[..., None] * (v - _einsum("bkx,bkxry->bkry", k, state))
        state = state + _einsum("bkx,bkry->bkxry", k, u)
        return state, _einsum("bkx,bkxry->bkry", q, state)

    rows = (q_bnkx, k_bnkx, v_bnkry, g_bnkr, beta_bnkr)
    state, o = lax.scan(step, state, [jnp.swapaxes(row, 0, 1) for row in rows])
    return jnp.swapaxes(o, 0, 1), state


def _decays(g_bkrn: jax.Array, ancestors_bnm: jax.Array) -> tuple[jax.Array, jax.Array]:
    """exp(G_i) [b, k, r, n], and exp(G_i - G_j) [b, k, r, n, m], 0 unless j is i or above it.

    G_i - G_j is the sum of g below j down to i, and it is summed as such: in the difference of two
    sums a strong decay above j would swallow the weak ones below it. Masked before the exponential.
    """
    b, k, r, n = g_bkrn.shape
    strict = ancestors_bnm & ~jnp.eye(n, dtype=bool)
    # One more column: the committed state, which lies above every node.
    above = jnp.pad(strict, ((0, 0), (0, 0), (0, 1)), constant_values=True)
    below = jnp.where(above[:, :, None, None], jnp.moveaxis(g_bkrn, 3, 1)[..., None], 0.0)
    sums = _matmul(ancestors_bnm.astype(jnp.float32), below.reshape(b, n, -1))
    sums = jnp.moveaxis(sums.reshape(b, n, k, r, n + 1), 1, 3)
    between = jnp.where(ancestors_bnm[:, None, None], sums[..., :n], -jnp.inf)
    return jnp.exp(sums[..., n]), jnp.exp(between)


def unit_solve(
    a_bkrnm: jax.Array, right_bkrny: jax.Array, depths_bn: jax.Array, max_depth: int
) -> jax.Array:
    """(I + A)^-1 right, where A_ij is 0 unless j lies above i, by few products.

    Depths are taken in blocks of 4, then of 16, 64, ... levels. Inside a block of 4 levels A^4 is
    0, so (I + A)^-1 is (I - A)(I + A^2). That, applied to the whole system, makes I of every block
    and leaves what leads from block to block, of which 4 are a block of the next size:

        (I + A) U = R,  A = in + out   ->   (I + B) U = T R,  T = (I + in)^-1,  B = T out.

    Entries of T and B are products of the contractions I - beta k k^T, hence at most 1, so little
    is lost at any depth. One series over all depths would lose everything where keys are alike:
    powers of A grow like binomial coefficients (cosine 0.95: 3e-4 at depth 15, 16 at depth 31).
    """
    n = a_bkrnm.shape[-1]
    depth_n, depth_m = depths_bn[:, None, None, :, None], depths_bn[:, None, None, None, :]
    inner, right, size = a_bkrnm, right_bkrny, 1
    while size <= max_depth:
        size *= 4
        several = size <= max_depth
        if several:
            inside = depth_n // size == depth_m // size
            right = jnp.concatenate([jnp.where(inside, 0.0, inner), right], axis=-1)
            inner = jnp.where(inside, inner, 0.0)
        once = _matmul(inner, jnp.concatenate([inner, right], axis=-1))
        right = right - once[..., n:]
        right = right + _matmul(once[..., :n], right)
        if several:
            inner, right = right[..., :n], right[..., n:]
    return right


def _heads_first(q, k, v, g, beta) -> tuple[jax.Array, ...]:
    """Rows last but one or last: every product is then one of matrices, batched over heads."""
    rows_of_values = (jnp.moveaxis(x, 1, 3) for x in (v, g, beta))
    return (q.swapaxes(1, 2), k.swapaxes(1, 2), *rows_of_values)


def _within(q_bknx, k_bknx, g_bkrn, beta_bkrn, ancestors_bnm):
    """What does not depend on the state: exp(G) [b, k, r, n], A and M [b, k, r, n, m]."""
    n = k_bknx.shape[2]
    decay, between = _decays(g_bkrn, ancestors_bnm)
    rows = jnp.concatenate([k_bknx, q_bknx], axis=2)
    scores = _matmul(rows, k_bknx.swapaxes(2, 3))[:, :, None]
    a = beta_bkrn[..., None] * between * scores[..., :n, :]
    a = jnp.where(jnp.eye(n, dtype=bool), 0.0, a)
    return decay, a, between * scores[..., n:, :]


def _read(state, q_bknx, k_bknx, v_bkrny, beta_bkrn, decay, solve, mix):
    """The outputs o and pseudo-values u, both [b, k, r, n, y]; solve(R) is (I + A)^-1 R."""
    b, k, x, r, y = state.shape
    rows = jnp.concatenate([k_bknx, q_bknx], axis=2)
    seen = _matmul(rows, state.reshape(b, k, x, r * y)).reshape(b, k, -1, r, y).swapaxes(2, 3)
    k_seen, q_seen = jnp.split(seen, 2, axis=3)
    u = solve(beta_bkrn[..., None] * (v_bkrny - decay[..., None] * k_seen))
    return decay[..., None] * q_seen + _matmul(mix, u), u


def tree(
    state: jax.Array,
    q_bnkx: jax.Array,
    k_bnkx: jax.Array,
    v_bnkry: jax.Array,
    g_bnkr: jax.Array,
    beta_bnkr: jax.Array,
    ancestors_bnm: jax.Array,
    depths_bn: jax.Array,
    max_depth: int,
) -> tuple[jax.Array, jax.Array]:
    """Every node read along its own path from the committed state, float32 throughout.

    Args:
      state: [b, k, x, r, y], only read.
      q_bnkx, k_bnkx, v_bnkry: normalised queries and keys, values.
      g_bnkr, beta_bnkr: log-decays (<= 0) and step sizes (0 to 1).
      ancestors_bnm: whether node m is node n or its ancestor.
      depths_bn: of the nodes, the root 0.
      max_depth: no node is deeper; static.

    Returns:
      o [b, n, k, r, y] and the pseudo-values u [b, n, k, r, y], which `commit` takes.
    """
    q, k, v, g, beta = _heads_first(q_bnkx, k_bnkx, v_bnkry, g_bnkr, beta_bnkr)
    decay, a, mix = _within(q, k, g, beta, ancestors_bnm)
    solve = functools.partial(unit_solve, a, depths_bn=depths_bn, max_depth=max_depth)
    o, u = _read(state, q, k, v, beta, decay, solve, mix)
    return jnp.moveaxis(o, 3, 1), jnp.moveaxis(u, 3, 1)


def _absorb(state, k_bkpx: jax.Array, u_bkrpy: jax.Array, g_bkrp: jax.Array) -> jax.Array:
    """The state after the rows of one path; a row with u = 0 and g = 0 leaves it as it is."""
    b, k, _, r, y = state.shape
    index = jnp.arange(g_bkrp.shape[-1])
    # Summed as masked: so few numbers are not worth a product's launch.
    later = jnp.where(index[:, None] < index, g_bkrp[..., None, :], 0.0).sum(axis=-1)
    weighted = (jnp.exp(later)[..., None] * u_bkrpy).swapaxes(2, 3).reshape(b, k, -1, r * y)
    taken = _matmul(k_bkpx.swapaxes(2, 3), weighted).reshape(state.shape)
    return jnp.exp(g_bkrp.sum(axis=-1))[:, :, None, :, None] * state + taken


def chunk(
    state, q_bnkx, k_bnkx, v_bnkry, g_bnkr, beta_bnkr, size: int = CHUNK
) -> tuple[jax.Array, jax.Array]:
    """A causal chunk that is accepted whole: (o [b, n, k, r, y], the state after its last row).

    `size` rows at a time. Only what depends on the state is done one after the other.
    """
    b, n = g_bnkr.shape[:2]
    size = min(size, n)
    count = -(-n // size)

    def pieces(rows):
        """[b, n, ...] -> [b * count, size, ...]; rows of zeros at the end change nothing."""
        rows = jnp.pad(rows, ((0, 0), (0, count * size - n), *((0, 0),) * (rows.ndim - 2)))
        return rows.reshape(b * count, size, *rows.shape[2:])

    q, k, v, g, beta = _heads_first(*map(pieces, (q_bnkx, k_bnkx, v_bnkry, g_bnkr, beta_bnkr)))
    index = jnp.broadcast_to(jnp.arange(size), (b * count, size))
    causal = index[:, :, None] >= index[:, None, :]
    decay, a, mix = _within(q, k, g, beta, causal)
    identity = jnp.broadcast_to(jnp.eye(size, dtype=a.dtype), a.shape)
    inverse = unit_solve(a, identity, index, size - 1)

    def step(state, piece):
        q, k, v, g, beta, decay, inverse, mix = piece
        o, u = _read(state, q, k, v, beta, decay, functools.partial(_matmul, inverse), mix)
        return _absorb(state, k, u, g), jnp.moveaxis(o, 3, 1)

    everything = (q, k, v, g, beta, decay, inverse, mix)
    if count == 1:
        return step(state, everything)[::-1]
    by_piece = [jnp.swapaxes(x.reshape(b, count, *x.shape[1:]), 0, 1) for x in everything]
    state, o = lax.scan(step, state, by_piece)
    o = jnp.swapaxes(o, 0, 1)
    return o.reshape(b, count * size, *o.shape[3:])[:, :n], state


def conv_rows(ancestors_bnm: jax.Array, depths_bn: jax.Array, taps: int) -> jax.Array:
    """int32 [b, n, taps]: the rows that each node's convolution reads, the oldest first.

    They count through [taps - 1 committed inputs, the nodes]: the committed inputs are the root's
    ancestors. For taps 4, a root (node 0) reads rows 0 1 2 3, its child (node 5) rows 1 2 3 8.
    """
    rows = []
    for up in reversed(range(taps)):
        wanted = depths_bn - up
        found = ancestors_bnm & (depths_bn[:, None, :] == wanted[:, :, None])
        above = jnp.where(wanted >= 0, jnp.argmax(found, axis=-1), wanted)
        rows.append(taps - 1 + above)
    return jnp.stack(rows, axis=-1).astype(jnp.int32)


def convolve(
    window_bktc: jax.Array, inputs_bnkc: jax.Array, weight_tkc: jax.Array, rows_bnt
) -> jax.Array:
    """silu of the depthwise convolution over each node's own past, float32 [b, n, k, c].

    `rows_bnt` is that of `conv_rows`, or None for a causal chunk.
    """
    source = jnp.concatenate([window_bktc.transpose(0, 2, 1, 3), inputs_bnkc], axis=1)
    n, taps = inputs_bnkc.shape[1], weight_tkc.shape[0]

    def past(tap: int) -> jax.Array:
        if rows_bnt is None:
            return source[:, tap : tap + n]
        return _take(source, rows_bnt[:, :, tap, None, None], axis=1)

    wide = weight_tkc.astype(jnp.float32)
    return jax.nn.silu(sum(wide[tap] * past(tap).astype(jnp.float32) for tap in range(taps)))


def next_window(window_bktc: jax.Array, inputs_bpkc: jax.Array, count_b: jax.Array) -> jax.Array:
    """The convolution's last inputs after the first `count_b` of these rows."""
    source = jnp.concatenate([window_bktc, inputs_bpkc.transpose(0, 2, 1, 3)], axis=2)
    rows = count_b[:, None] + jnp.arange(window_bktc.shape[2])
    return _take(source, rows[:, None, :, None], axis=2)


def commit(
    carried: Recurrent, pending: Nodes | Recurrent, count_b: jax.Array, path_bp: jax.Array | None
) -> Recurrent:
    """What the layer carries after the first `count_b` rows of `path_bp` (None: rows 0, 1, ...).

    A causal chunk has brought the new state itself; there is nothing left to choose.
    """
    if isinstance(pending, Recurrent):
        return pending

    def along(rows: jax.Array) -> jax.Array:
        if path_bp is None:
            return rows
        index = path_bp.reshape(*path_bp.shape, *(1,) * (rows.ndim - 2))
        return _take(rows, index, axis=1)

    k, u, g = along(pending.k), along(pending.u), along(pending.g)
    taken = jnp.arange(g.shape[1]) < count_b[:, None]
    g = jnp.where(taken[:, :, None, None], g, 0.0)
    u = jnp.where(taken[:, :, None, None, None], u, 0.0)
    return Recurrent(
        _absorb(carried.state, k.swapaxes(1, 2), jnp.moveaxis(u, 1, 3), jnp.moveaxis(g, 1, 3)),
        next_window(carried.window, along(pending.inputs), count_b),
    )
