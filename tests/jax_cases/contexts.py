"""Context parallelism: rings by ppermute, exchange of heads (Ulysses), gathered keys."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax, shard_map
from jax.sharding import PartitionSpec as P

from .case import Case, S, f32, mesh_of, with_grads

SP, N = {"sp": 4}, 4
SPECS = {"in_specs": (P(None, "sp"),) * 3, "out_specs": P(None, "sp")}
ARGS = (S(2, 16, 4),) * 3


def attention(causal=False, number=-jnp.inf):
    def plain(q, k, v):
        s = jnp.einsum("hqd,hkd->hqk", q, k) / jnp.sqrt(f32(q.shape[2]))
        if causal:
            i = jnp.arange(q.shape[1])
            s = jnp.where(i[None, :, None] >= i[None, None, :], s, number)
        return jnp.einsum("hqk,hkd->hqd", jax.nn.softmax(s, axis=-1), v)

    return plain


def ring(causal=False, rescaled=True, backwards=False, loop="scan", number=-jnp.inf, first=-jnp.inf):
    ways = [(i, (i + 1) % N) for i in range(N)]

    @partial(shard_map, mesh=mesh_of(SP), check_vma=False, **SPECS)
    def body(q, k, v):  # [h, s/n, d]
        me, c = lax.axis_index("sp"), q.shape[1]

        def step(carry, i):
            m, z, o, k, v = carry
            s = jnp.einsum("hqd,hkd->hqk", q, k) / jnp.sqrt(f32(q.shape[2]))
            if causal:
                source = (me + i) % N if backwards else (me - i) % N  # fault: block of another rank
                mine, its = me * c + jnp.arange(c), source * c + jnp.arange(c)
                s = jnp.where(mine[None, :, None] >= its[None, None, :], s, number)
            new = jnp.maximum(m, jnp.max(s, axis=-1))
            p, fix = jnp.exp(s - new[..., None]), jnp.exp(m - new)
            z = z * fix + jnp.sum(p, axis=-1)
            o = o * (fix[..., None] if rescaled else 1.0) + jnp.einsum("hqk,hkd->hqd", p, v)  # fault: not rescaled
            return (new, z, o, lax.ppermute(k, "sp", ways), lax.ppermute(v, "sp", ways)), None

        carry = (jnp.full(q.shape[:2], first), jnp.zeros(q.shape[:2]), jnp.zeros(q.shape), k, v)
        if loop == "scan":
            carry, _ = lax.scan(step, carry, jnp.arange(N))
        elif loop == "for":
            for i in range(N):
                carry, _ = step(carry, i)
        else:
            carry = lax.fori_loop(0, N, lambda i, c: step(c, i)[0], carry)
        return carry[2] / carry[1][..., None]

    return body


def ulysses(causal, order=lambda t: t):
    @partial(shard_map, mesh=mesh_of(SP), check_vma=False, **SPECS)
    def body(q, k, v):  # [h, s/n, d]
        q, k, v = (lax.all_to_all(t, "sp", split_axis=0, concat_axis=1, tiled=True) for t in (q, k, v))
        o = attention(causal)(q, k, v)
        return order(lax.all_to_all(o, "sp", split_axis=1, concat_axis=0, tiled=True))  # fault: other heads

    return body


@partial(shard_map, mesh=mesh_of(SP), **SPECS)
def gathered(q, k, v):
    k, v = (lax.all_gather(t, "sp", axis=1, tiled=True) for t in (k, v))
    mine = lax.axis_index("sp") * q.shape[1] + jnp.arange(q.shape[1])
    s = jnp.einsum("hqd,hkd->hqk", q, k) / jnp.sqrt(f32(q.shape[2]))
    s = jnp.where(mine[None, :, None] >= jnp.arange(k.shape[1])[None, None, :], s, -jnp.inf)
    return jnp.einsum("hqk,hkd->hqd", jax.nn.softmax(s, axis=-1), v)


HEADS = (S(8, 16, 4),) * 3
SMALL = (S(1, 8, 2),) * 3
SMALLEST = float(jnp.finfo(f32).min)


def numbered(number, **options):
    """Masked by a number in the place of minus infinity."""
    return attention(True, number), ring(True, number=number, **options)


def trained(sequential, distributed):
    return with_grads(sequential, 0, 1, 2), with_grads(distributed, 0, 1, 2)


ALL = [
    Case("ring, for", attention(), ring(loop="for"), SP, ARGS),
    Case("ring, scan", attention(), ring(), SP, ARGS),
    Case("ring, fori_loop", attention(), ring(loop="fori"), SP, ARGS),
    Case("ring, causal", attention(True), ring(True), SP, ARGS),
    Case("ring with gradients", with_grads(attention(), 0, 1, 2), with_grads(ring(), 0, 1, 2), SP, ARGS),
    Case("ring, causal, with gradients", *trained(attention(True), ring(True)), SP, SMALL),
    Case("ring, causal, backwards, with gradients", *trained(attention(True), ring(True, backwards=True)), SP, SMALL,
         expect="refuted"),
    Case("ring, causal by -1e30", *numbered(-1e30), SP, ARGS),
    Case("ring, causal by -1e30 from -1e30", *numbered(-1e30, first=-1e30), SP, ARGS),
    Case("ring, causal by the smallest number", *numbered(SMALLEST), SP, ARGS),
    Case("ring, causal by -1e30, backwards", *numbered(-1e30, backwards=True), SP, ARGS, expect="refuted"),
    Case("ring, causal by -1e30, not rescaled", *numbered(-1e30, rescaled=False), SP, ARGS, expect="refuted",
         fault="not rescaled"),
    Case("ring, not rescaled", attention(), ring(rescaled=False), SP, ARGS, expect="refuted", fault="not rescaled"),
    Case("ring, causal, backwards", attention(True), ring(True, backwards=True), SP, ARGS, expect="refuted"),
    Case("ulysses with gradients", with_grads(attention(True), 0, 1, 2), with_grads(ulysses(True), 0, 1, 2), SP, HEADS),
    Case("ulysses, other heads", attention(), ulysses(False, lambda t: jnp.flip(t, 0)), SP, HEADS, expect="refuted"),
    Case("gathered keys with gradients", with_grads(attention(True), 0, 1, 2), with_grads(gathered, 0, 1, 2), SP, ARGS),
]  # fmt: skip
