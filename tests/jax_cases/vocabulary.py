"""A split vocabulary: embedding and cross entropy, with the ways in which JAX treats an index that is outside."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax, shard_map
from jax.sharding import PartitionSpec as P

from .case import Case, S, i32, mesh_of, with_grads

TP = {"tp": 4}
CE_ARGS = (S(8, 16), S(16, 64), S(8, dtype=i32))
LABELS = {"labels": (0, 64)}


def cross_entropy(x, w, labels):
    logp = jax.nn.log_softmax(x @ w)
    return -jnp.mean(jnp.take_along_axis(logp, labels[:, None], axis=1))


def split_cross_entropy(wide=1):
    @partial(shard_map, mesh=mesh_of(TP), in_specs=(P(), P(None, "tp"), P()), out_specs=P())
    def body(x, w, labels):
        logits = x @ w
        v = logits.shape[1]
        m = lax.pmax(lax.stop_gradient(jnp.max(logits, axis=1)), "tp")
        z = lax.psum(jnp.sum(jnp.exp(logits - m[:, None]), axis=1), "tp")
        local = labels - lax.axis_index("tp") * v
        mine = (local >= 0) & (local < v * wide)  # fault: too wide
        picked = jnp.take_along_axis(logits, jnp.clip(local, 0, v - 1)[:, None], axis=1)[:, 0]
        picked = lax.psum(jnp.where(mine, picked, 0.0), "tp")
        return jnp.mean(jnp.log(z) + m - picked)

    return body


def one_hot_cross_entropy(x, w, labels):
    logits = x @ w
    return -jnp.mean(jnp.sum(jax.nn.one_hot(labels, logits.shape[1]) * jax.nn.log_softmax(logits), axis=-1))


@partial(shard_map, mesh=mesh_of(TP), in_specs=(P(), P(None, "tp"), P()), out_specs=P())
def split_one_hot(x, w, labels):
    logits = x @ w
    v = logits.shape[1]
    m = lax.pmax(lax.stop_gradient(jnp.max(logits, axis=1)), "tp")
    z = lax.psum(jnp.sum(jnp.exp(logits - m[:, None]), axis=1), "tp")
    hot = jax.nn.one_hot(labels - lax.axis_index("tp") * v, v)
    return jnp.mean(jnp.log(z) + m - lax.psum(jnp.sum(hot * logits, axis=1), "tp"))


def taken(ids, w):
    return jnp.take(w, ids, axis=0)


def indexed(ids, w):
    return w[ids]


def split_embedding(lookup):
    @partial(shard_map, mesh=mesh_of(TP), in_specs=(P(), P("tp", None)), out_specs=P())
    def body(ids, w):
        return lax.psum(lookup(ids - lax.axis_index("tp") * w.shape[0], w), "tp")

    return body


def masked(local, w):
    mine = (local >= 0) & (local < w.shape[0])
    return jnp.where(mine[..., None], w[jnp.where(mine, local, 0)], 0.0)


def masked_after(local, w):
    """What is outside is clamped by XLA, and masked then."""
    mine = (local >= 0) & (local < w.shape[0])
    return jnp.where(mine[..., None], jnp.take(w, local, axis=0, mode="clip"), 0.0)


def filled(local, w):
    """A negative index would count from the end: it is sent behind it."""
    return jnp.take(w, jnp.where(local < 0, w.shape[0], local), axis=0, mode="fill", fill_value=0.0)


def filled_from_the_end(local, w):
    return jnp.take(w, local, axis=0, mode="fill", fill_value=0.0)  # fault: -1 is the last row


def clamped(local, w):
    return w[jnp.clip(local, 0, w.shape[0] - 1)]  # fault: not masked


EMBEDDING_ARGS = (S(2, 6, dtype=i32), S(64, 16))
IDS = {"ids": (0, 64)}


def embedding(name, sequential, lookup, ranges=IDS, **more):
    return Case(name, with_grads(sequential, 1), with_grads(split_embedding(lookup), 1), TP, EMBEDDING_ARGS, ranges, **more)


ALL = [
    Case("cross entropy", cross_entropy, split_cross_entropy(), TP, CE_ARGS, LABELS),
    Case(
        "cross entropy with gradients",
        jax.value_and_grad(cross_entropy, (0, 1)),
        jax.value_and_grad(split_cross_entropy(), (0, 1)),
        TP,
        CE_ARGS,
        LABELS,
    ),
    Case("cross entropy, no ranges", cross_entropy, split_cross_entropy(), TP, CE_ARGS),
    Case("cross entropy too wide", cross_entropy, split_cross_entropy(2), TP, CE_ARGS, LABELS, "refuted", "too wide"),
    Case(
        "cross entropy by one_hot",
        jax.value_and_grad(one_hot_cross_entropy, (0, 1)),
        jax.value_and_grad(split_one_hot, (0, 1)),
        TP,
        CE_ARGS,
        LABELS,
    ),
    embedding("embedding taken", taken, masked),
    embedding("embedding indexed, no ranges", indexed, masked, {}),
    embedding("embedding masked after", taken, masked_after),
    embedding("embedding filled", taken, filled),
    embedding("embedding filled from the end", taken, filled_from_the_end, expect="refuted", fault="-1 is the last row"),
    embedding("embedding not masked", taken, clamped, expect="refuted", fault="not masked"),
]
