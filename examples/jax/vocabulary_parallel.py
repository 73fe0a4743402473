"""Cross entropy with a split vocabulary: labels of other devices are clipped, looked up and masked."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax, shard_map
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import graphguard as gg

MESH, WORDS = {"tp": 4}, 64
ARGS = (
    jax.ShapeDtypeStruct((8, 16), jnp.float32),
    jax.ShapeDtypeStruct((16, WORDS), jnp.float32),
    jax.ShapeDtypeStruct((8,), jnp.int32),
)
RANGES = {"labels": (0, WORDS)}


def cross_entropy(x, w, labels):
    logp = jax.nn.log_softmax(x @ w)
    return -jnp.mean(jnp.take_along_axis(logp, labels[:, None], axis=1))


def split_cross_entropy(is_mine):
    @partial(shard_map, mesh=AbstractMesh((4,), ("tp",)), in_specs=(P(), P(None, "tp"), P()), out_specs=P())
    def body(x, w, labels):
        logits = x @ w
        size = logits.shape[1]
        largest = lax.pmax(lax.stop_gradient(jnp.max(logits, axis=1)), "tp")
        total = lax.psum(jnp.sum(jnp.exp(logits - largest[:, None]), axis=1), "tp")
        local = labels - lax.axis_index("tp") * size
        picked = jnp.take_along_axis(logits, jnp.clip(local, 0, size - 1)[:, None], axis=1)[:, 0]
        picked = lax.psum(jnp.where(is_mine(local, size), picked, 0.0), "tp")
        return jnp.mean(jnp.log(total) + largest - picked)

    return body


def inside(local, size):
    return (local >= 0) & (local < size)


def one_too_many(local, size):
    # fault: off_by_one
    return (local >= 0) & (local <= size)


def with_gradients(function):
    return jax.value_and_grad(function, argnums=(0, 1))


@gg.check
def split_vocabulary():
    right = split_cross_entropy(inside)
    return gg.jax.verify(with_gradients(cross_entropy), with_gradients(right), mesh=MESH, args=ARGS, ranges=RANGES)


@gg.check(expect="refuted")
def off_by_one():
    return gg.jax.verify(cross_entropy, split_cross_entropy(one_too_many), mesh=MESH, args=ARGS, ranges=RANGES)
