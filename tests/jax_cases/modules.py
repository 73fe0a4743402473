"""Modules of equinox as people write them: made of a key, mapped over the batch, differentiated by `filter_value_and_grad`."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax, shard_map
from jax.sharding import PartitionSpec as P

from .case import Case, S, i32, mesh_of

TP = {"tp": 4}


class Mlp(eqx.Module):
    norm: eqx.nn.RMSNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    bias: jax.Array

    def __init__(self, width, hidden, key):
        first, second = jax.random.split(key)
        self.norm = eqx.nn.RMSNorm(width)
        self.up = eqx.nn.Linear(width, hidden, key=first)
        self.down = eqx.nn.Linear(hidden, width, use_bias=False, key=second)
        self.bias = jnp.zeros(width)

    def __call__(self, x, reduced):
        hidden = jax.nn.gelu(self.up(self.norm(x)))
        return x + reduced(self.down(hidden)) + self.bias


class MlpOfWholeBias(Mlp):
    def __call__(self, x, reduced):
        hidden = jax.nn.gelu(self.up(self.norm(x)))
        return x + reduced(self.down(hidden) + self.bias)  # fault: once per rank


class Model(eqx.Module):
    words: eqx.nn.Embedding
    blocks: list
    head: eqx.nn.Linear

    def __init__(self, layers, width, hidden, words, key, block=Mlp):
        first, last, *others = jax.random.split(key, layers + 2)
        self.words = eqx.nn.Embedding(words, width, key=first)
        self.blocks = [block(width, hidden, key=each) for each in others]
        self.head = eqx.nn.Linear(width, words, use_bias=False, key=last)

    def __call__(self, ids, reduced=lambda y: y):
        x = jax.vmap(self.words)(ids)
        for block in self.blocks:
            x = jax.vmap(lambda row: block(row, reduced))(x)
        return jax.vmap(self.head)(x)


def loss_of(model, ids, labels, **options):
    logp = jax.nn.log_softmax(jax.vmap(partial(model, **options))(ids))
    return -jnp.mean(jnp.take_along_axis(logp, labels[..., None], axis=-1))


@eqx.filter_jit
def step(model, ids, labels):
    return eqx.filter_value_and_grad(loss_of)(model, ids, labels)


def shapes(block=Mlp):
    return eqx.filter_eval_shape(partial(Model, 2, 8, 16, 12, block=block), jax.random.key(0))


def specs_of(model):
    """The rows of each first weight, and the columns of each second one."""
    everywhere = jax.tree.map(lambda _: P(), model)
    for n in range(len(model.blocks)):
        split = lambda each, n=n: (each.blocks[n].up.weight, each.blocks[n].up.bias, each.blocks[n].down.weight)
        everywhere = eqx.tree_at(split, everywhere, (P("tp"), P("tp"), P(None, "tp")))
    return everywhere


def split_step(model):
    specs = specs_of(model)

    @partial(shard_map, mesh=mesh_of(TP), in_specs=(specs, P(), P()), out_specs=P())
    def loss(model, ids, labels):
        return loss_of(model, ids, labels, reduced=lambda y: lax.psum(y, "tp"))

    return eqx.filter_jit(eqx.filter_value_and_grad(loss))


DATA = (S(2, 3, dtype=i32), S(2, 3, dtype=i32))
RANGES = {"ids": (0, 12), "labels": (0, 12)}
ALL = [
    Case("equinox", step, split_step(shapes()), TP, (shapes(), *DATA), RANGES),
    Case(
        "equinox, a whole bias on each rank",
        step,
        split_step(shapes(MlpOfWholeBias)),
        TP,
        (shapes(MlpOfWholeBias), *DATA),
        RANGES,
        expect="refuted",
        fault="once per rank",
    ),
]
