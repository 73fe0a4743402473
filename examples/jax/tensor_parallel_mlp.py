"""Tensor parallelism by shard_map: in_specs and out_specs say what each device has, and psum adds up the parts."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax, shard_map
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import graphguard as gg

MESH = {"tp": 4}
SPECS = {"in_specs": (P(), P(None, "tp"), P("tp", None)), "out_specs": P()}
ARGS = (
    jax.ShapeDtypeStruct((8, 16), jnp.float32),
    jax.ShapeDtypeStruct((16, 64), jnp.float32),
    jax.ShapeDtypeStruct((64, 16), jnp.float32),
)


def mlp(x, a, b):
    return jax.nn.gelu(x @ a) @ b


@partial(shard_map, mesh=AbstractMesh((4,), ("tp",)), **SPECS)
def tp_mlp(x, a, b):
    return lax.psum(jax.nn.gelu(x @ a) @ b, "tp")


@partial(shard_map, mesh=AbstractMesh((4,), ("tp",)), check_vma=False, **SPECS)
def without_psum(x, a, b):
    # fault: forgotten
    return jax.nn.gelu(x @ a) @ b


def with_gradients(function):
    return jax.value_and_grad(lambda x, a, b: jnp.sum(function(x, a, b) ** 2), argnums=(0, 1, 2))


@gg.check
def forward():
    return gg.jax.verify(mlp, tp_mlp, mesh=MESH, args=ARGS)


@gg.check
def backward():
    return gg.jax.verify(with_gradients(mlp), with_gradients(tp_mlp), mesh=MESH, args=ARGS)


@gg.check(expect="refuted")
def forgotten():
    """`check_vma=False` lets a result leave that is another one on each device."""
    return gg.jax.verify(mlp, without_psum, mesh=MESH, args=ARGS)
