"""Data parallelism, FSDP with tensor parallelism, an optimizer's step, dropout."""

from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax import lax, shard_map
from jax.sharding import PartitionSpec as P

from .case import Case, S, mesh_of

DP = {"dp": 4}
DP_ARGS = (S(16, 8), S(16, 4), S(8, 4))


def mse(x, y, w):
    return jnp.mean((jnp.tanh(x @ w) - y) ** 2)


def data_parallel(reduced, check_vma=True):
    @partial(shard_map, mesh=mesh_of(DP), in_specs=(P("dp"), P("dp"), P()), out_specs=(P(), P()), check_vma=check_vma)
    def step(x, y, w):
        w = lax.pcast(w, ("dp",), to="varying") if check_vma and reduced else w
        loss, g = jax.value_and_grad(mse, argnums=2)(x, y, w)  # fault: not a mean
        return lax.pmean(loss, "dp"), reduced(g) if reduced else g

    return step


@partial(shard_map, mesh=mesh_of(DP), in_specs=(P("dp"), P("dp"), P()), out_specs=(P(), P()), check_vma=False)
def loss_summed(x, y, w):
    """jax-ml/jax #3970: the loss is reduced before it is differentiated, and the psum is transposed to a psum."""

    def loss(w):
        return lax.pmean(mse(x, y, w), "dp")  # fault: reduced inside

    value, g = jax.value_and_grad(loss)(w)
    return value, lax.psum(g, "dp")


FSDP = {"fsdp": 2, "tp": 2}
FSDP_ARGS = (S(8, 16), S(8, 16), S(16, 32), S(32, 16))


def regression(x, y, a, b):
    return jnp.mean((jax.nn.gelu(x @ a) @ b - y) ** 2)


def fsdp(axis):
    @partial(shard_map, mesh=mesh_of(FSDP), in_specs=(P("fsdp"), P("fsdp"), P("fsdp", "tp"), P("tp", "fsdp")), out_specs=P(),
             check_vma=False)  # fmt: skip
    def loss(x, y, a, b):
        a = lax.all_gather(a, "fsdp", axis=0, tiled=True)
        b = lax.all_gather(b, "fsdp", axis=1, tiled=True)
        out = lax.psum(jax.nn.gelu(x @ a) @ b, axis)  # fault: other axis
        return lax.pmean(jnp.mean((out - y) ** 2), "fsdp")

    return loss


def fsdp_checked():
    @partial(shard_map, mesh=mesh_of(FSDP), in_specs=(P("fsdp"), P("fsdp"), P("fsdp", "tp"), P("tp", "fsdp")), out_specs=P())
    def loss(x, y, a, b):
        a = lax.all_gather(a, "fsdp", axis=0, tiled=True)
        b = lax.all_gather(b, "fsdp", axis=1, tiled=True)
        out = lax.psum(jax.nn.gelu(x @ a) @ b, "tp")
        return lax.pmean(jnp.mean((out - y) ** 2), "fsdp")

    return loss


# ---------------------------------------------------------------------- an optimizer
ADAMW = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
PARAMS = {"a": S(8, 16), "b": S(16, 4)}


def net_loss(params, x, y):
    return jnp.mean((jax.nn.relu(x @ params["a"]) @ params["b"] - y) ** 2)


def train_step(params, state, x, y):
    loss, grads = jax.value_and_grad(net_loss)(params, x, y)
    updates, state = ADAMW.update(grads, state, params)
    return {"loss": loss, "params": optax.apply_updates(params, updates), "state": state}


def split_step(reduced):
    @partial(shard_map, mesh=mesh_of(DP), in_specs=(P(), P(), P("dp"), P("dp")), out_specs=P(), check_vma=False)
    def step(params, state, x, y):
        loss, grads = jax.value_and_grad(net_loss)(params, x, y)
        loss, grads = lax.pmean(loss, "dp"), reduced(grads)
        updates, state = ADAMW.update(grads, state, params)
        return {"loss": loss, "params": optax.apply_updates(params, updates), "state": state}

    return step


def mean(grads):
    return jax.tree.map(lambda g: lax.pmean(g, "dp"), grads)


def total(grads):
    return jax.tree.map(lambda g: lax.psum(g, "dp"), grads)  # fault: not averaged


STEP_ARGS = (PARAMS, jax.eval_shape(ADAMW.init, PARAMS), S(16, 8), S(16, 4))
MOMENTS = {f"state.1.0.nu.{name}": (0, None) for name in PARAMS}


# ---------------------------------------------------------------------- dropout
def dropped(key, x, w):
    keep = jax.random.bernoulli(key, 0.5, x.shape)
    return jnp.where(keep, x / 0.5, 0.0) @ w


def split_dropout(key_of):
    @partial(shard_map, mesh=mesh_of({"tp": 2}), in_specs=(P(), P(), P(None, "tp")), out_specs=P(None, "tp"), check_vma=False)
    def body(key, x, w):
        return dropped(key_of(key), x, w)

    return body


def own_key(key):
    return jax.random.fold_in(key, lax.axis_index("tp"))  # fault: a mask of its own on each rank


KEY_ARGS = (S(2, dtype=jnp.uint32), S(4, 8), S(8, 6))
MSE_GRADS, NOT_A_MEAN = jax.value_and_grad(mse, argnums=2), {"expect": "refuted", "fault": "not a mean"}

ALL = [
    Case("mean of gradients", MSE_GRADS, data_parallel(lambda g: lax.pmean(g, "dp")), DP, DP_ARGS),
    Case("sum of gradients", MSE_GRADS, data_parallel(lambda g: lax.psum(g, "dp")), DP, DP_ARGS, expect="refuted"),
    Case("implicit sum of gradients", MSE_GRADS, data_parallel(None), DP, DP_ARGS, expect="refuted"),
    Case("no reduction of gradients", MSE_GRADS, data_parallel(None, False), DP, DP_ARGS, **NOT_A_MEAN),
    Case("gradient of a reduced loss", MSE_GRADS, loss_summed, DP, DP_ARGS, expect="refuted"),
    Case("fsdp x tp", jax.value_and_grad(regression, (2, 3)), jax.value_and_grad(fsdp("tp"), (2, 3)), FSDP, FSDP_ARGS),
    Case(
        "fsdp x tp, check_vma",
        jax.value_and_grad(regression, (2, 3)),
        jax.value_and_grad(fsdp_checked(), (2, 3)),
        FSDP,
        FSDP_ARGS,
    ),
    Case("fsdp x tp, other axis", regression, fsdp("fsdp"), FSDP, FSDP_ARGS, expect="refuted", fault="other axis"),
    Case("adamw with clipping", train_step, split_step(mean), DP, STEP_ARGS, MOMENTS),
    Case("adamw of a sum", train_step, split_step(total), DP, STEP_ARGS, MOMENTS, expect="refuted", fault="not averaged"),
    Case("dropout of one key", dropped, split_dropout(lambda key: key), {"tp": 2}, KEY_ARGS),
    Case("dropout of a key per rank", dropped, split_dropout(own_key), {"tp": 2}, KEY_ARGS, expect="refuted"),
]
