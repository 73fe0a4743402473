"""Expert parallelism: routes by top_k, exchange by all_to_all, capacity."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax, shard_map
from jax.sharding import PartitionSpec as P

from .case import Case, S, mesh_of, with_grads

EP, E = {"ep": 4}, 8
SPECS = {"in_specs": (P("ep"), P(), P("ep"), P("ep")), "out_specs": P("ep"), "check_vma": False}
ARGS = (S(8, 16), S(16, 8), S(8, 16, 32), S(8, 32, 16))


def gates_of(x, wr):
    top, chosen = lax.top_k(jax.nn.softmax(x @ wr, axis=-1), 2)
    return jnp.sum(jax.nn.one_hot(chosen, E) * top[..., None], axis=1)  # [t, E]


def moe(x, wr, w1, w2):
    h = jax.nn.gelu(jnp.einsum("td,edf->etf", x, w1))
    return jnp.einsum("te,etd->td", gates_of(x, wr), jnp.einsum("etf,efd->etd", h, w2))


def split_moe(back=lambda h: lax.all_to_all(h, "ep", split_axis=1, concat_axis=0, tiled=True)):
    @partial(shard_map, mesh=mesh_of(EP), **SPECS)
    def body(x, wr, w1, w2):  # tokens and experts are split
        sent = jnp.broadcast_to(x[None], (E, *x.shape))
        got = lax.all_to_all(sent, "ep", split_axis=0, concat_axis=1, tiled=True)  # [E/4, 4t, d]
        h = jnp.einsum("etf,efd->etd", jax.nn.gelu(jnp.einsum("etd,edf->etf", got, w1)), w2)
        return jnp.einsum("te,etd->td", gates_of(x, wr), back(h))

    return body


def back_mixed(h):
    back = lax.all_to_all(h, "ep", split_axis=1, concat_axis=2, tiled=True)  # fault: joined along the features
    return back.reshape(E, -1, h.shape[2])


def places(chosen, capacity):
    """[t, E, C]: 1 where a token has a place with an expert."""
    hot = jax.nn.one_hot(chosen, E, dtype=jnp.int32)
    place = jnp.cumsum(hot, axis=0) * hot - 1
    return jax.nn.one_hot(place, capacity) * hot[..., None]


def with_capacity(exchanged):
    def group(x, wr, w1, capacity=2):
        probs = jax.nn.softmax(x @ wr, axis=-1)
        placed = places(jnp.argmax(probs, axis=-1), capacity)
        out = exchanged(jnp.einsum("tec,td->ecd", placed, x), w1)
        return jnp.einsum("tec,ecf->tf", placed * jnp.max(probs, -1)[:, None, None], out)

    return group


def moe_capacity(x, wr, w1):
    """A group of tokens for each rank, as the capacity is counted by group."""
    group = with_capacity(lambda inputs, w1: jnp.einsum("ecd,edf->ecf", inputs, w1))
    return jnp.concatenate([group(part, wr, w1) for part in jnp.split(x, 4)])


def exchanged(inputs, w1):
    got = lax.all_to_all(inputs, "ep", split_axis=0, concat_axis=1, tiled=True)
    return lax.all_to_all(jnp.einsum("ecd,edf->ecf", got, w1), "ep", split_axis=1, concat_axis=0, tiled=True)


def split_capacity(capacity):
    specs = {"in_specs": (P("ep"), P(), P("ep")), "out_specs": P("ep"), "check_vma": False}
    return shard_map(partial(with_capacity(exchanged), capacity=capacity), mesh=mesh_of(EP), **specs)


def scattered_counts(x, chosen):
    """How many tokens each expert has, and their sums, by scatters that drop what is outside."""
    sums = jnp.zeros((E, x.shape[1])).at[chosen].add(x, mode="drop")
    return sums, jnp.zeros((E,), jnp.int32).at[chosen].add(1, mode="drop")


def split_counts(reduced):
    @partial(shard_map, mesh=mesh_of(EP), in_specs=(P("ep"), P("ep")), out_specs=P(), check_vma=False)
    def body(x, chosen):
        return jax.tree.map(reduced, scattered_counts(x, chosen))

    return body


def of_all(part):
    return lax.psum(part, "ep")


def of_largest(part):
    return lax.pmax(part, "ep")  # fault: largest for sum


CAPACITY_ARGS = (S(16, 16), S(16, 8), S(8, 16, 32))
COUNT_ARGS = (S(16, 4), S(16, dtype=jnp.int32))
ALL = [
    Case("moe", moe, split_moe(), EP, ARGS),
    Case("moe with gradients", with_grads(moe, 0, 1, 2, 3), with_grads(split_moe(), 0, 1, 2, 3), EP, ARGS),
    Case("moe, mixed", moe, split_moe(back_mixed), EP, ARGS, expect="refuted"),
    Case("moe with capacity", moe_capacity, split_capacity(2), EP, CAPACITY_ARGS),
    Case("moe with another capacity", moe_capacity, split_capacity(1), EP, CAPACITY_ARGS, expect="refuted"),
    Case("counts of tokens", scattered_counts, split_counts(of_all), EP, COUNT_ARGS, {"chosen": (0, 10)}),
    Case("largest counts of tokens", scattered_counts, split_counts(of_largest), EP, COUNT_ARGS, {"chosen": (0, 10)}, "refuted",
         "largest for sum"),
]  # fmt: skip
