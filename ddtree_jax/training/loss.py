"""DFlash's training objective (arXiv 2602.06036; checkpoints.md 6.3): random anchors, masked block.

A packed row is run through the target as one tree: a node sees its own document, causally. The
drafter then predicts, for each anchor, the block of tokens after it from the features before it.

What it is to predict of a token is the distribution that the token was drawn from. The target's
forward knows it, and it is the token itself where the answer is greedy. In expectation that is the
cross-entropy with sampled tokens, without the noise of the draw.

Where rounds sample, candidates are ranked with the noise that the target will choose with
(`sampling.draft_scores`). A share of the loss is that task itself: the target chooses with fresh
noise, and the drafter is to give its choice the best score.
"""

import dataclasses

import jax
import jax.numpy as jnp

from ddtree_jax import cache as caches
from ddtree_jax.models import Drafter, Target
from ddtree_jax.sampling import trust_of


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """anchors: blocks per row. gamma: slot k weighs exp(-(k - 1) / gamma).

    sampled_gamma: the same for sampled documents, of which rounds accept less; None: gamma. noise:
    the share, 0 to 1, that choosing with the noise has in their loss.
    """

    anchors: int = 64
    gamma: float = 4.0
    sampled_gamma: float | None = None
    noise: float = 0.0


def features_of(target: Target, layers: tuple[int, ...], batch) -> tuple[jax.Array, jax.Array]:
    """The target's final hidden rows [b, n, d] and features [b, n, F * d] of packed rows."""
    document, position = batch["document"], batch["position"]
    same = document[:, :, None] == document[:, None, :]
    causal = jnp.arange(document.shape[1])[:, None] >= jnp.arange(document.shape[1])
    rows = document.shape[0]
    dtype = target.embed_vd[...].dtype
    nothing = caches.empty(target.config, rows, 0, dtype)
    zero = jnp.zeros((rows,), jnp.int32)
    hidden, features, _ = target(nothing, batch["tokens"], position, same & causal, zero, layers)
    return hidden, features


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


def places_of(batch, anchors_ba: jax.Array, slots: int) -> tuple[jax.Array, jax.Array]:
    """The places [b, a, slots] in its row of what each anchor's slots predict, and which are real.

    Real are those in the anchor's own document; the others lie anywhere in the row.
    """
    place = anchors_ba[:, :, None] + jnp.arange(1, slots + 1)
    last = batch["tokens"].shape[1] - 1
    inside, place = place <= last, jnp.minimum(place, last)
    own = jnp.take_along_axis(batch["document"], anchors_ba, axis=1)[:, :, None]
    return place, inside & (at_places(batch["document"], place) == own)


def at_places(values_bn: jax.Array, place_bas: jax.Array) -> jax.Array:
    """values_bn[b, place_bas]; further axes of the values stay."""
    return jax.vmap(lambda values, place: values[place])(values_bn, place_bas)


def block_logits(drafter: Drafter, target: Target, features, batch, anchors_ba) -> jax.Array:
    """float32 logits [b, a, t - 1, v] of the masked slots of each anchor's block."""
    return target.logits(block_hidden(drafter, target, features, batch, anchors_ba))


def block_hidden(drafter: Drafter, target: Target, features, batch, anchors_ba) -> jax.Array:
    """The normed rows [b, a, t - 1, d] that the head makes the block's logits of."""
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
    return hidden.reshape(b, a, t, -1)[:, :, 1:]


def drawn_from(logits: jax.Array, temperature: jax.Array, tokens: jax.Array) -> jax.Array:
    """The distribution [..., v], float32, that tokens [...] were drawn from.

    softmax(logits / temperature) where the temperature [...] is above 0; at 0 the token itself.
    """
    hot = temperature > 0
    soft = jax.nn.softmax(logits / jnp.where(hot, temperature, 1.0)[..., None], axis=-1)
    return jnp.where(hot[..., None], soft, jax.nn.one_hot(tokens, logits.shape[-1]))


def noise_at(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Gumbel noise float32 that a target chooses with; as large as logits, so made when needed."""
    return jax.random.gumbel(key, shape, jnp.float32)


def choose(logits: jax.Array, temperature: jax.Array, noise: jax.Array) -> jax.Array:
    """The tokens int32 [...] that a target of these logits [..., v] samples with this noise.

    temperature: float32 [...], above 0.
    """
    return jnp.argmax(logits / temperature[..., None] + noise, axis=-1).astype(jnp.int32)


def choice_entropy(
    drafter: Drafter, logits: jax.Array, target_logits: jax.Array, temperature: jax.Array, noise
) -> jax.Array:
    """-log [..., t - 1] of the target's choice in the softmax of the scores that rank it in rounds.

    Args:
      logits, target_logits: float32 [..., t - 1, v].
      temperature: float32 [..., t - 1], above 0.
      noise: float32 [..., t - 1, v], what the target chooses with.
    """
    trust = trust_of(drafter.config.noise_trust)
    chosen = choose(target_logits, temperature, noise)
    score = trust[:, :1] * logits + trust[:, 1:] * temperature[..., None] * noise
    best = jnp.take_along_axis(score, chosen[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(score, axis=-1) - best


def block_loss(
    drafter: Drafter, target: Target, batch, key: jax.Array, config: LossConfig
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Weighted cross-entropy of the slots with what their tokens were drawn from, and metrics.

    Of sampled documents `config.noise` of it is `choice_entropy` instead.

    Metrics: "loss"; of greedy documents "tau", the mean acceptance length (bonus included) that
    the drafter's greedy chain would have at the anchors, and "slot_accuracy" [t - 1]; of sampled
    documents "overlap" [t - 1], the mean sum of min(p, q) over the vocabulary: how often a sample
    of the target and one of the drafter can be the same at best. Without documents of a kind tau
    is 1 and the others are 0.
    """
    slots = drafter.config.block_size - 1
    hidden, features = jax.lax.stop_gradient(
        features_of(target, drafter.config.target_layer_ids, batch)
    )
    anchors_key, noise_key = jax.random.split(key)
    anchors, real = pick_anchors(anchors_key, batch, config.anchors)
    logits = block_logits(drafter, target, features, batch, anchors)
    place, counted = places_of(batch, anchors, slots)
    counted &= real[:, :, None]
    tokens, temperature = (at_places(batch[name], place) for name in ("tokens", "temperature"))
    hot = temperature > 0
    # Nothing as large as the logits but the two of them has to be stored, without a share of noise:
    # the rest of this is elementwise and sums, of which XLA makes a few passes over them.
    target_logits = jax.lax.stop_gradient(target.logits(at_places(hidden, place - 1)))
    labels = drawn_from(target_logits, temperature, tokens)
    log_sum = jax.nn.logsumexp(logits, axis=-1)
    # A column that only pads the vocabulary has the logit -inf and the label 0.
    entropy = log_sum - jnp.where(labels > 0, labels * logits, 0.0).sum(axis=-1)
    if config.noise:
        heat, noise = jnp.where(hot, temperature, 1.0), noise_at(noise_key, logits.shape)
        of_choice = choice_entropy(drafter, logits, target_logits, heat, noise)
        entropy += jnp.where(hot, config.noise * (of_choice - entropy), 0.0)
    gamma = jnp.where(hot, config.sampled_gamma or config.gamma, config.gamma)
    weight = counted * jnp.exp(-jnp.arange(slots) / gamma)
    loss = (entropy * weight).sum() / jnp.maximum(weight.sum(), 1.0)

    sampled, greedy = counted & hot, counted & ~hot
    greedy_anchors = greedy.any(axis=-1).sum()
    hit = (jnp.argmax(logits, axis=-1) == tokens) & greedy
    accepted = jnp.cumprod(hit, axis=-1).sum()
    overlap = jnp.minimum(labels, jnp.exp(logits - log_sum[..., None])).sum(axis=-1)

    def mean(values, chosen):
        return (values * chosen).sum((0, 1)) / jnp.maximum(chosen.sum((0, 1)), 1)

    metrics = {
        "loss": loss,
        "tau": 1.0 + accepted / jnp.maximum(greedy_anchors, 1),
        "slot_accuracy": mean(hit, greedy),
        "overlap": mean(overlap, sampled),
    }
    return loss, metrics
