"""Pipelines by ppermute, scans over layers, meshes of several axes, nested and partly manual shard_maps."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax, shard_map
from jax.sharding import PartitionSpec as P

from .case import Case, S, mesh_of, with_grads
from .tensor_parallel import attention, rms

PP = {"pp": 4}


def stages(x, w):  # x [micro, b, d], w [stages, d, d]
    for i in range(w.shape[0]):
        x = jnp.tanh(x @ w[i])
    return x


def gpipe(first=0, scanned=False):
    n, ways = 4, [(i, i + 1) for i in range(3)]

    @partial(shard_map, mesh=mesh_of(PP), in_specs=(P(), P("pp")), out_specs=P(), check_vma=False)
    def body(x, w):
        me, micro = lax.axis_index("pp"), x.shape[0]

        def step(carry, t):
            state, out = carry
            y = jnp.tanh(jnp.where(me == 0, x[jnp.clip(t - first, 0, micro - 1)], state) @ w[0])  # fault: a step late
            slot = jnp.clip(t - (n - 1), 0, micro - 1)
            keep = (me == n - 1) & (t >= n - 1)
            out = out.at[slot].set(jnp.where(keep, y, out[slot]))
            return (lax.ppermute(y, "pp", ways), out), None

        carry = (jnp.zeros(x.shape[1:]), jnp.zeros(x.shape))
        if scanned:
            carry, _ = lax.scan(step, carry, jnp.arange(micro + n - 1))
        else:
            for t in range(micro + n - 1):
                carry, _ = step(carry, t)
        return lax.psum(carry[1], "pp")

    return body


# ---------------------------------------------------------------------- decoders
def block(x, p, heads, kv, d, reduced):
    x = x + attention(rms(x, p["n1"]), p["q"], p["k"], p["v"], p["o"], heads, kv, d, reduced)
    h = rms(x, p["n2"])
    return x + reduced((jax.nn.silu(h @ p["g"]) * (h @ p["u"])) @ p["d"])


def decoder(params, x, heads=8, kv=4, d=4, reduced=lambda y: y, remat=False):
    def layer(x, p):
        return block(x, p, heads, kv, d, reduced), None

    return lax.scan(jax.checkpoint(layer) if remat else layer, x, params)[0]


def shapes(layers, width=16, heads=8, kv=4, d=4, hidden=32):
    column = {"q": heads * d, "k": kv * d, "v": kv * d, "g": hidden, "u": hidden}
    params = {name: S(layers, width, size) for name, size in column.items()}
    return params | {
        "n1": S(layers, width),
        "n2": S(layers, width),
        "o": S(layers, heads * d, width),
        "d": S(layers, hidden, width),
    }


COLUMN, ROW = P(None, None, "tp"), P(None, "tp", None)
LAYERS = {"n1": P(), "n2": P(), "o": ROW, "d": ROW} | dict.fromkeys(("q", "k", "v", "g", "u"), COLUMN)


def tp_decoder(n=4, heads=8, kv=4, d=4, reduced=lambda y: lax.psum(y, "tp"), **more):
    own = partial(decoder, heads=heads // n, kv=kv // n, d=d, reduced=reduced, **more)
    return shard_map(own, mesh=mesh_of({"tp": n}), in_specs=(LAYERS, P()), out_specs=P())


def twice(y):
    return lax.psum(y, "tp") * 2  # fault: twice


DECODER_ARGS = (shapes(2), S(1, 6, 16))

# ---------------------------------------------------------------------- several axes
DP_TP = {"dp": 2, "tp": 2}
MLP_ARGS = (S(8, 16), S(16, 32), S(32, 16))


def mlp(x, a, b):
    return jax.nn.relu(x @ a) @ b


@partial(shard_map, mesh=mesh_of(DP_TP), in_specs=(P("dp"), P(), P()), out_specs=P("dp"), axis_names={"dp"})
def partly_manual(x, a, b):
    return mlp(x, a, b)


@partial(shard_map, mesh=mesh_of(DP_TP), in_specs=(P("dp"), P(), P()), out_specs=P("dp"), axis_names={"dp"})
def nested(x, a, b):
    @partial(shard_map, in_specs=(P(), P(None, "tp"), P("tp")), out_specs=P(), axis_names={"tp"})
    def inner(x, a, b):
        return lax.psum(mlp(x, a, b), "tp")

    return inner(x, a, b)


def two_axes(order):
    """The batch is split by both axes, tp outermost or innermost."""

    @partial(shard_map, mesh=mesh_of(DP_TP), in_specs=(P(order), P(), P()), out_specs=P(order))
    def body(x, a, b):
        return mlp(x, a, b)

    return body


def loss(x, a, b):
    return jnp.mean(mlp(x, a, b) ** 2)


def one_axis_left_out(axes):
    @partial(shard_map, mesh=mesh_of(DP_TP), in_specs=(P("dp"), P(None, "tp"), P("tp")), out_specs=P(), check_vma=False)
    def body(x, a, b):
        return lax.pmean(jnp.mean(lax.psum(mlp(x, a, b), "tp") ** 2), axes)  # fault: over tp alone

    return body


PIPE_ARGS = (S(3, 2, 8), S(4, 8, 8))
ALL = [
    Case("gpipe", stages, gpipe(), PP, PIPE_ARGS),
    Case("gpipe by scan", stages, gpipe(scanned=True), PP, PIPE_ARGS),
    Case("gpipe with gradients", with_grads(stages, 0, 1), with_grads(gpipe(), 0, 1), PP, PIPE_ARGS),
    Case("gpipe, a step late", stages, gpipe(1), PP, PIPE_ARGS, expect="refuted"),
    Case("scan over layers", decoder, tp_decoder(), {"tp": 4}, DECODER_ARGS),
    Case(
        "scan over layers with gradients",
        with_grads(decoder, 0, 1),
        with_grads(tp_decoder(remat=True), 0, 1),
        {"tp": 4},
        DECODER_ARGS,
    ),
    Case(
        "scan over layers, twice", decoder, tp_decoder(reduced=twice), {"tp": 4}, DECODER_ARGS, expect="refuted", fault="twice"
    ),
    Case("partly manual", mlp, partly_manual, DP_TP, MLP_ARGS),
    Case("nested", mlp, jax.jit(nested), DP_TP, MLP_ARGS),
    Case("split by two axes", mlp, two_axes(("dp", "tp")), DP_TP, MLP_ARGS),
    Case("split by two axes, other order", mlp, two_axes(("tp", "dp")), DP_TP, MLP_ARGS),
    Case("two axes", loss, one_axis_left_out("dp"), DP_TP, MLP_ARGS),
    Case("two axes, one left out", loss, one_axis_left_out("tp"), DP_TP, MLP_ARGS, expect="refuted", fault="over tp alone"),
]
