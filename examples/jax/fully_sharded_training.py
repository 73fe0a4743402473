"""A flax module and an optax optimizer: parameters are sharded (FSDP), gathered where they are used, and updated in parts."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax import lax, shard_map
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import graphguard as gg

MESH = {"fsdp": 4}
OPTIMIZER = optax.adam(1e-3)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(jnp.tanh(nn.Dense(16)(x)))


def loss_of(params, x, y):
    return jnp.mean((Net().apply(params, x) - y) ** 2)


X, Y = jax.ShapeDtypeStruct((8, 12), jnp.float32), jax.ShapeDtypeStruct((8, 4), jnp.float32)
PARAMS = jax.eval_shape(Net().init, jax.random.key(0), X)
STATE = jax.eval_shape(OPTIMIZER.init, PARAMS)
RANGES = {f"state.0.nu.params.{layer}.{name}": (0, None) for layer in ("Dense_0", "Dense_1") for name in ("kernel", "bias")}


def step(params, state, x, y):
    loss, grads = jax.value_and_grad(loss_of)(params, x, y)
    updates, state = OPTIMIZER.update(grads, state, params)
    return {"loss": loss, "params": optax.apply_updates(params, updates), "state": state}


def by_first_dim(tree):
    return jax.tree.map(lambda leaf: P("fsdp") if leaf.shape else P(), tree)


def gathered(params):
    return jax.tree.map(lambda part: lax.all_gather(part, "fsdp", tiled=True), params)


def fully_sharded(scattered):
    specs = by_first_dim(PARAMS), by_first_dim(STATE)
    results = {"loss": P(), "params": specs[0], "state": specs[1]}

    @partial(
        shard_map,
        mesh=AbstractMesh((4,), ("fsdp",)),
        in_specs=(*specs, P("fsdp"), P("fsdp")),
        out_specs=results,
        check_vma=False,
    )
    def body(params, state, x, y):
        loss, grads = jax.value_and_grad(loss_of)(gathered(params), x, y)
        parts = jax.tree.map(scattered, grads)
        updates, state = OPTIMIZER.update(parts, state, params)
        return {"loss": lax.pmean(loss, "fsdp"), "params": optax.apply_updates(params, updates), "state": state}

    return body


def mean_of_parts(grad):
    return lax.psum_scatter(grad, "fsdp", tiled=True) / 4


def sum_of_parts(grad):
    # fault: not_averaged
    return lax.psum_scatter(grad, "fsdp", tiled=True)


@gg.check
def sharded_step():
    return gg.jax.verify(step, fully_sharded(mean_of_parts), mesh=MESH, args=(PARAMS, STATE, X, Y), ranges=RANGES)


@gg.check(expect="refuted")
def not_averaged():
    return gg.jax.verify(step, fully_sharded(sum_of_parts), mesh=MESH, args=(PARAMS, STATE, X, Y), ranges=RANGES)
