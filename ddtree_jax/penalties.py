"""What changes the target's logits before the temperature: bias, penalties, stops not yet allowed.

In transformers' order: bias, penalties, minimum of new tokens. Every node is penalised for the
committed text and its own path, so a penalised text is the same in every mode. Logits are float32
[b, n, v]; `axis` names the mesh axis of a sharded vocabulary; token ids are global.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["prompt_bv", "output_bv"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Counts:
    """The text so far, by token: whether the prompt holds it, and how often the output does.

    prompt_bv: bool; output_bv: int32, the bonus token included. v is this shard's vocabulary.
    """

    prompt_bv: jax.Array
    output_bv: jax.Array


def empty_counts(prompts: int, samples: int, vocabulary: int) -> Counts:
    """Nothing said yet; several samples share a prompt."""
    return Counts(
        jnp.zeros((prompts, vocabulary), bool),
        jnp.zeros((prompts * samples, vocabulary), jnp.int32),
    )


def _local(tokens: jax.Array, size: int, axis: str | None) -> jax.Array:
    """Columns of this shard; `size`, which scatters drop, for tokens of another and for -1."""
    local = tokens if axis is None else tokens - lax.axis_index(axis) * size
    return jnp.where((tokens >= 0) & (local >= 0) & (local < size), local, size)


def _first(tokens_bp: jax.Array, count_b: jax.Array) -> jax.Array:
    """The first `count` tokens of each row, -1 for the others."""
    return jnp.where(jnp.arange(tokens_bp.shape[1]) < count_b[:, None], tokens_bp, -1)


def count_prompt(
    counts: Counts, tokens_bp: jax.Array, count_b: jax.Array, axis: str | None
) -> Counts:
    """With the first `count` tokens of each row seen in the prompt."""
    seen = counts.prompt_bv
    column = _local(_first(tokens_bp, count_b), seen.shape[1], axis)
    row = jnp.arange(seen.shape[0])[:, None]
    return dataclasses.replace(counts, prompt_bv=seen.at[row, column].set(True, mode="drop"))


def count_output(
    counts: Counts, tokens_bp: jax.Array, count_b: jax.Array, axis: str | None
) -> Counts:
    """With the first `count` tokens of each row emitted."""
    output = counts.output_bv
    column = _local(_first(tokens_bp, count_b), output.shape[1], axis)
    row = jnp.arange(output.shape[0])[:, None]
    return dataclasses.replace(counts, output_bv=output.at[row, column].add(1, mode="drop"))


def add_bias(
    logits_bnv: jax.Array, ids_bk: jax.Array, bias_bk: jax.Array, axis: str | None = None
) -> jax.Array:
    """Adds bias[k] to the logit of token ids[k], -1 where unused."""
    column = _local(ids_bk, logits_bnv.shape[-1], axis)
    row = jnp.arange(logits_bnv.shape[0])[:, None]
    # Rows and columns are neighbours in the index, so the nodes in between come last: [b, k, n].
    added = jnp.broadcast_to(bias_bk[:, :, None], (*ids_bk.shape, logits_bnv.shape[1]))
    return logits_bnv.at[row, :, column].add(added, mode="drop")


def _penalised(logits, seen, output, repetition, presence, frequency):
    """One formula for columns and for single tokens; `seen` in the prompt, `output` times since."""
    divided = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen | (output > 0), divided, logits)
    return logits - presence * (output > 0) - frequency * output


def penalise(
    logits_bnv: jax.Array,
    counts: Counts,
    paths_bnd: jax.Array,
    repetition_b: jax.Array,
    presence_b: jax.Array,
    frequency_b: jax.Array,
    axis: str | None = None,
) -> jax.Array:
    """Penalises the tokens of the committed text and of each node's path.

    Repetition as in transformers: a logit of a token of the prompt or the output is divided by r if
    it is positive, else multiplied. Presence and frequency by OpenAI's published formula, over the
    output alone: logit - count * frequency - (count > 0) * presence.

    Args:
      paths_bnd: int32 tokens of each node's path behind the root, -1 where it is shorter. The root
        is in `counts` already.
    """
    strengths = [part[:, None, None] for part in (repetition_b, presence_b, frequency_b)]
    seen, output = counts.prompt_bv, counts.output_bv
    size = logits_bnv.shape[-1]
    everywhere = _penalised(logits_bnv, seen[:, None], output[:, None], *strengths)
    # The few tokens of the path once more, with their places on it added to the counts.
    column = _local(paths_bnd, size, axis)
    inside = jnp.minimum(column, size - 1)
    b, n, _ = paths_bnd.shape
    row, node = jnp.arange(b)[:, None, None], jnp.arange(n)[None, :, None]
    times = (paths_bnd[..., :, None] == paths_bnd[..., None, :]).sum(axis=-1, dtype=jnp.int32)
    again = _penalised(
        jnp.take_along_axis(logits_bnv, inside, axis=2),
        seen[row, inside],
        output[row, inside] + times,
        *strengths,
    )
    return everywhere.at[row, node, column].set(again, mode="drop")


def forbid(
    logits_bnv: jax.Array, ids_bk: jax.Array, when_bn: jax.Array, axis: str | None = None
) -> jax.Array:
    """-inf for the tokens `ids` (-1 where unused) at the nodes where `when` holds."""
    column = _local(ids_bk, logits_bnv.shape[-1], axis)
    row = jnp.arange(logits_bnv.shape[0])[:, None]
    ban = jnp.where(when_bn, -jnp.inf, jnp.inf)[:, None, :]
    ban = jnp.broadcast_to(ban, (*ids_bk.shape, logits_bnv.shape[1]))
    return logits_bnv.at[row, :, column].min(ban, mode="drop")


def log_probs(logits_bnv: jax.Array, tokens_bn: jax.Array, axis: str | None = None) -> jax.Array:
    """The log-probability [b, n] of one token a node in the unchanged distribution (T = 1)."""
    size = logits_bnv.shape[-1]
    column = _local(tokens_bn, size, axis)
    total = jax.nn.logsumexp(logits_bnv, axis=-1)
    at = jnp.take_along_axis(logits_bnv, jnp.minimum(column, size - 1)[..., None], axis=-1)[..., 0]
    at = jnp.where(column < size, at, -jnp.inf)
    if axis is not None:
        total = jax.nn.logsumexp(lax.all_gather(total, axis), axis=0)
        at = lax.all_gather(at, axis).max(axis=0)
    return at - total
