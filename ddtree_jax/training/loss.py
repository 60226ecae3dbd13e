"""DFlash's training objective (arXiv 2602.06036; checkpoints.md 6.3): random anchors, masked block.

A packed row is run through the target as one tree: a node sees its own document, causally. The
drafter then predicts, for each anchor, the block of tokens after it from the features before it.
"""

import dataclasses

import jax
import jax.numpy as jnp

from ddtree_jax import cache as caches
from ddtree_jax.models import Drafter, Target


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """anchors: blocks per row. gamma: slot k weighs exp(-(k - 1) / gamma)."""

    anchors: int = 64
    gamma: float = 4.0


def features_of(target: Target, layers: tuple[int, ...], batch) -> jax.Array:
    """Target features [b, n, F * d] of packed rows."""
    document, position = batch["document"], batch["position"]
    same = document[:, :, None] == document[:, None, :]
    causal = jnp.arange(document.shape[1])[:, None] >= jnp.arange(document.shape[1])
    rows = document.shape[0]
    dtype = target.embed_vd[...].dtype
    nothing = caches.empty(target.config, rows, 0, dtype)
    zero = jnp.zeros((rows,), jnp.int32)
    _, features, _ = target(nothing, batch["tokens"], position, same & causal, zero, layers)
    return features


def pick_anchors(key: jax.Array, batch, anchors: int) -> tuple[jax.Array, jax.Array]:
    """Random places [b, anchors] in answers where something follows, and which of them are real.

    Worked example: in a document "p q | A B C" (answer after the bar) the anchors are A and B: the
    bonus token of a round is always an answer token, and something must follow it.
    """
    document, in_answer = batch["document"], batch["in_answer"]
    next_same = jnp.pad(document[:, 1:] == document[:, :-1], ((0, 0), (0, 1)))
    possible = in_answer & next_same & (document >= 0)
    noise = jax.random.uniform(key, possible.shape)
    score, place = jax.lax.top_k(jnp.where(possible, noise, -1.0), anchors)
    return place, score >= 0


def block_logits(drafter: Drafter, target: Target, features, batch, anchors_ba) -> jax.Array:
    """float32 logits [b, a, t - 1, v] of the masked slots of each anchor's block."""
    config = drafter.config
    b, n = batch["tokens"].shape
    a, t = anchors_ba.shape[1], config.block_size

    def at_anchor(values):
        return jnp.take_along_axis(values, anchors_ba, axis=1)

    bonus = at_anchor(batch["tokens"])
    masks = jnp.full((b, a, t - 1), config.mask_token_id, jnp.int32)
    ids = jnp.concatenate([bonus[:, :, None], masks], axis=2).reshape(b, a * t)
    block_positions = (at_anchor(batch["position"])[:, :, None] + jnp.arange(t)).reshape(b, a * t)
    positions = jnp.concatenate([batch["position"], block_positions], axis=1)
    # Rows a block sees: its own document before the anchor, and its own slots.
    earlier = jnp.arange(n) < anchors_ba[:, :, None]
    same = batch["document"][:, None, :] == at_anchor(batch["document"])[:, :, None]
    context = jnp.repeat(earlier & same, t, axis=1)
    owner = jnp.arange(a * t) // t
    own = jnp.broadcast_to(owner[:, None] == owner, (b, a * t, a * t))
    visible = jnp.concatenate([context, own], axis=2)
    nothing = caches.empty(config, b, 0, features.dtype)
    hidden, _ = drafter.attend_block(
        nothing,
        jnp.zeros((b,), jnp.int32),
        drafter.project_features(features),
        target.embed(ids),
        positions,
        visible,
    )
    assert hidden is not None  # a block was given
    return target.logits(hidden.reshape(b, a, t, -1)[:, :, 1:])


def block_loss(
    drafter: Drafter, target: Target, batch, key: jax.Array, config: LossConfig
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Weighted cross-entropy of the slots, and metrics.

    Metrics: "loss"; "tau", the mean acceptance length (bonus included) that the drafter's greedy
    chain would have at the anchors, against the documents' own continuation; "slot_accuracy" [t-1].
    """
    slots = drafter.config.block_size - 1
    features = jax.lax.stop_gradient(features_of(target, drafter.config.target_layer_ids, batch))
    anchors, real = pick_anchors(key, batch, config.anchors)
    logits = block_logits(drafter, target, features, batch, anchors)
    length = batch["tokens"].shape[1]
    place = anchors[:, :, None] + jnp.arange(1, slots + 1)
    inside = place < length
    place = jnp.minimum(place, length - 1).reshape(anchors.shape[0], -1)

    def at_slots(values):
        return jnp.take_along_axis(values, place, axis=1).reshape(logits.shape[:3])

    own = jnp.take_along_axis(batch["document"], anchors, axis=1)[:, :, None]
    counted = inside & (at_slots(batch["document"]) == own) & real[:, :, None]
    labels = at_slots(batch["tokens"])
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    entropy = jax.nn.logsumexp(logits, axis=-1) - chosen
    weight = counted * jnp.exp(-jnp.arange(slots) / config.gamma)
    loss = (entropy * weight).sum() / jnp.maximum(weight.sum(), 1.0)
    hit = (jnp.argmax(logits, axis=-1) == labels) & counted
    accepted = jnp.cumprod(hit, axis=-1).sum(axis=-1)
    metrics = {
        "loss": loss,
        "tau": 1.0 + (accepted * real).sum() / jnp.maximum(real.sum(), 1),
        "slot_accuracy": hit.sum((0, 1)) / jnp.maximum(counted.sum((0, 1)), 1),
    }
    return loss, metrics
