"""jax-ml/jax #3970: a loss that is reduced before it is differentiated. Without check_vma, a psum is transposed to a psum."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax, shard_map
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import graphguard as gg

MESH = {"dp": 4}
SPECS = {"in_specs": (P("dp"), P("dp"), P()), "out_specs": (P(), P())}
ARGS = (
    jax.ShapeDtypeStruct((16, 8), jnp.float32),
    jax.ShapeDtypeStruct((16, 4), jnp.float32),
    jax.ShapeDtypeStruct((8, 4), jnp.float32),
)


def loss_of(x, y, w):
    return jnp.mean((jnp.tanh(x @ w) - y) ** 2)


def step(x, y, w):
    return jax.value_and_grad(loss_of, argnums=2)(x, y, w)


@partial(shard_map, mesh=AbstractMesh((4,), ("dp",)), check_vma=False, **SPECS)
def reduced_after(x, y, w):
    loss, grad = jax.value_and_grad(loss_of, argnums=2)(x, y, w)
    return lax.pmean(loss, "dp"), lax.pmean(grad, "dp")


@partial(shard_map, mesh=AbstractMesh((4,), ("dp",)), check_vma=False, **SPECS)
def reduced_inside(x, y, w):
    def loss(w):
        # fault: buggy
        return lax.psum(loss_of(x, y, w), "dp") / 4

    value, grad = jax.value_and_grad(loss)(w)
    return value, lax.psum(grad, "dp")


@partial(shard_map, mesh=AbstractMesh((4,), ("dp",)), **SPECS)
def reduced_inside_checked(x, y, w):
    """With check_vma, JAX knows that w is the same everywhere, and sums its gradient."""
    return jax.value_and_grad(lambda w: lax.pmean(loss_of(x, y, w), "dp"))(w)


@gg.check
def fixed():
    return gg.jax.verify(step, reduced_after, mesh=MESH, args=ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.jax.verify(step, reduced_inside, mesh=MESH, args=ARGS)


@gg.check
def checked():
    return gg.jax.verify(step, reduced_inside_checked, mesh=MESH, args=ARGS)
