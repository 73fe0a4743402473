"""Causal ring attention: keys and values go around by ppermute, and the softmax is rescaled at every step."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax, shard_map
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import graphguard as gg

RANKS = 4
MESH = {"sp": RANKS}
ARGS = (jax.ShapeDtypeStruct((2, 16, 4), jnp.float32),) * 3


def attention(q, k, v):  # heads, positions, features
    scores = jnp.einsum("hqd,hkd->hqk", q, k) / jnp.sqrt(jnp.float32(q.shape[2]))
    place = jnp.arange(q.shape[1])
    scores = jnp.where(place[:, None] >= place, scores, -jnp.inf)
    return jnp.einsum("hqk,hkd->hqd", jax.nn.softmax(scores, axis=-1), v)


def ring(owner):
    """owner: whose keys a rank has after some steps."""
    around = [(rank, (rank + 1) % RANKS) for rank in range(RANKS)]

    @partial(
        shard_map, mesh=AbstractMesh((RANKS,), ("sp",)), in_specs=(P(None, "sp"),) * 3, out_specs=P(None, "sp"), check_vma=False
    )
    def body(q, k, v):
        me, size = lax.axis_index("sp"), q.shape[1]
        mine = me * size + jnp.arange(size)

        def step(carry, count):
            largest, total, out, k, v = carry
            scores = jnp.einsum("hqd,hkd->hqk", q, k) / jnp.sqrt(jnp.float32(q.shape[2]))
            theirs = owner(me, count) * size + jnp.arange(size)
            scores = jnp.where(mine[:, None] >= theirs, scores, -jnp.inf)
            new = jnp.maximum(largest, jnp.max(scores, axis=-1))
            weights, old = jnp.exp(scores - new[..., None]), jnp.exp(largest - new)
            total = total * old + jnp.sum(weights, axis=-1)
            out = out * old[..., None] + jnp.einsum("hqk,hkd->hqd", weights, v)
            return (new, total, out, *(lax.ppermute(each, "sp", around) for each in (k, v))), None

        start = (jnp.full(q.shape[:2], -jnp.inf), jnp.zeros(q.shape[:2]), jnp.zeros(q.shape), k, v)
        (_, total, out, _, _), _ = lax.scan(step, start, jnp.arange(RANKS))
        return out / total[..., None]

    return body


def before_me(me, count):
    return (me - count) % RANKS


def after_me(me, count):
    # fault: other_way_round
    return (me + count) % RANKS


@gg.check
def causal_ring():
    return gg.jax.verify(attention, ring(before_me), mesh=MESH, args=ARGS)


@gg.check(expect="refuted")
def other_way_round():
    return gg.jax.verify(attention, ring(after_me), mesh=MESH, args=ARGS)
