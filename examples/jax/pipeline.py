"""GPipe by ppermute: each device has a stage; microbatches go down the chain, and the last stage keeps what it makes."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax, shard_map
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import graphguard as gg

STAGES = 4
MESH = {"pp": STAGES}
ARGS = (jax.ShapeDtypeStruct((3, 2, 8), jnp.float32), jax.ShapeDtypeStruct((STAGES, 8, 8), jnp.float32))


def stages(x, w):  # x: microbatches, batch, features
    for stage in range(STAGES):
        x = jnp.tanh(x @ w[stage])
    return x


def gpipe(full):
    """full: after how many steps the last stage has its first microbatch."""
    chain = [(stage, stage + 1) for stage in range(STAGES - 1)]

    @partial(shard_map, mesh=AbstractMesh((STAGES,), ("pp",)), in_specs=(P(), P("pp")), out_specs=P(), check_vma=False)
    def body(x, w):
        me, count = lax.axis_index("pp"), x.shape[0]

        def step(carry, time):
            state, out = carry
            y = jnp.tanh(jnp.where(me == 0, x[jnp.minimum(time, count - 1)], state) @ w[0])
            place = jnp.clip(time - full, 0, count - 1)
            # fault: one_step_early
            keep = (me == STAGES - 1) & (time >= full)
            out = out.at[place].set(jnp.where(keep, y, out[place]))
            return (lax.ppermute(y, "pp", chain), out), None

        carry = (jnp.zeros(x.shape[1:]), jnp.zeros(x.shape))
        (_, out), _ = lax.scan(step, carry, jnp.arange(count + STAGES - 1))
        return lax.psum(out, "pp")

    return body


@gg.check
def pipeline():
    return gg.jax.verify(stages, gpipe(STAGES - 1), mesh=MESH, args=ARGS)


@gg.check(expect="refuted")
def one_step_early():
    return gg.jax.verify(stages, gpipe(STAGES - 2), mesh=MESH, args=ARGS)
