"""Tensor and sequence parallelism: MLPs, attention with grouped keys and rotary positions, gradients inside and outside."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax, shard_map
from jax.sharding import PartitionSpec as P

from .case import Case, S, f32, mesh_of, with_grads

TP = {"tp": 4}
MLP_SPECS = {"in_specs": (P(), P(None, "tp"), P("tp", None)), "out_specs": P()}
MLP_ARGS = (S(8, 16), S(16, 64), S(64, 16))


def mlp(x, a, b):
    return jax.nn.gelu(x @ a) @ b


@partial(shard_map, mesh=mesh_of(TP), **MLP_SPECS)
def tp_mlp(x, a, b):
    return lax.psum(jax.nn.gelu(x @ a) @ b, "tp")


@partial(shard_map, mesh=mesh_of(TP), check_vma=False, **MLP_SPECS)
def tp_mlp_unreduced(x, a, b):
    return jax.nn.gelu(x @ a) @ b  # fault: no psum


@partial(shard_map, mesh=mesh_of(TP), check_vma=False, **MLP_SPECS)
def tp_mlp_wrong_groups(x, a, b):
    return lax.psum(jax.nn.gelu(x @ a) @ b, "tp", axis_index_groups=[[0, 1], [2, 3]])  # fault: half of the ranks


@partial(shard_map, mesh=mesh_of(TP), check_vma=False, **MLP_SPECS)
def tp_mlp_two_steps(x, a, b):
    part = lax.psum(jax.nn.gelu(x @ a) @ b, "tp", axis_index_groups=[[0, 1], [2, 3]])
    return lax.psum(part, "tp", axis_index_groups=[[0, 2], [1, 3]])


def inside(check_vma, divided=False):
    """Gradients taken inside of the body. Without check_vma, a psum is transposed to a psum."""

    @partial(shard_map, mesh=mesh_of(TP), in_specs=MLP_SPECS["in_specs"], out_specs=(P(), (P(), P(None, "tp"), P("tp", None))),
             check_vma=check_vma)  # fmt: skip
    def step(x, a, b):
        def loss(x, a, b):
            return jnp.sum(lax.psum(jax.nn.gelu(x @ a) @ b, "tp") ** 2)  # fault: psum of a psum

        value, (gx, ga, gb) = jax.value_and_grad(loss, argnums=(0, 1, 2))(x, a, b)
        if divided:
            ga, gb, gx = ga / 4, gb / 4, lax.psum(gx, "tp") / 4
        return value, (gx, ga, gb)

    return step


def rope(x):  # [b, s, h, d]
    s, d = x.shape[1], x.shape[3]
    freq = 1.0 / (10000.0 ** (jnp.arange(0, d, 2, dtype=f32) / d))
    angle = jnp.arange(s, dtype=f32)[:, None] * freq[None, :]
    cos, sin = jnp.cos(angle)[None, :, None, :], jnp.sin(angle)[None, :, None, :]
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attention(x, wq, wk, wv, wo, heads=8, kv=4, d=4, reduced=lambda y: y, rotated=rope):
    b, s, _ = x.shape
    q = rope((x @ wq).reshape(b, s, heads, d))
    k = rotated((x @ wk).reshape(b, s, kv, d))
    v = (x @ wv).reshape(b, s, kv, d)
    k, v = (jnp.repeat(t, heads // kv, axis=2) for t in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(f32(d))
    mask = jnp.tril(jnp.ones((s, s), bool))
    p = jax.nn.softmax(jnp.where(mask[None, None], scores, -jnp.inf), axis=-1)
    o = jnp.einsum("bhqk,bkhd->bqhd", p, v).reshape(b, s, heads * d)
    return reduced(o @ wo)


ATTENTION_ARGS = (S(2, 6, 16), S(16, 32), S(16, 16), S(16, 16), S(32, 16))
COLUMN, ROW = P(None, "tp"), P("tp", None)


def tp_attention(**changed):
    own = {"heads": 2, "kv": 1, "reduced": lambda y: lax.psum(y, "tp"), **changed}
    return shard_map(partial(attention, **own), mesh=mesh_of(TP), in_specs=(P(), COLUMN, COLUMN, COLUMN, ROW), out_specs=P())


def mean_of(y):
    return lax.pmean(y, "tp")  # fault: mean for a sum


def rms(x, g):
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * g


def block(x, g, a, b):
    return x + jax.nn.silu(rms(x, g) @ a) @ b


SEQUENCE_SPECS = {"in_specs": (P("tp"), P(), COLUMN, ROW), "out_specs": P("tp")}
SEQUENCE_ARGS = (S(8, 16), S(16), S(16, 64), S(64, 16))


@partial(shard_map, mesh=mesh_of(TP), **SEQUENCE_SPECS)
def sequence_parallel(x, g, a, b):
    h = lax.all_gather(rms(x, g), "tp", axis=0, tiled=True)
    return x + lax.psum_scatter(jax.nn.silu(h @ a) @ b, "tp", scatter_dimension=0, tiled=True)


@partial(shard_map, mesh=mesh_of(TP), **SEQUENCE_SPECS)
def sequence_parallel_unreduced(x, g, a, b):
    h = lax.all_gather(rms(x, g), "tp", axis=0, tiled=True)
    rows = x.shape[0]
    return x + lax.dynamic_slice_in_dim(jax.nn.silu(h @ a) @ b, lax.axis_index("tp") * rows, rows)  # fault: cut, not summed


ALL = [
    Case("mlp", mlp, tp_mlp, TP, MLP_ARGS),
    Case("mlp with gradients", with_grads(mlp, 0, 1, 2), with_grads(tp_mlp, 0, 1, 2), TP, MLP_ARGS),
    Case("mlp jitted", jax.jit(mlp), jax.jit(tp_mlp), TP, MLP_ARGS),
    Case("mlp without psum", mlp, tp_mlp_unreduced, TP, MLP_ARGS, expect="refuted", fault="no psum"),
    Case("mlp summed in two steps", mlp, tp_mlp_two_steps, TP, MLP_ARGS),
    Case("mlp summed over half", mlp, tp_mlp_wrong_groups, TP, MLP_ARGS, expect="refuted", fault="half of the ranks"),
    Case("gradients inside, check_vma", with_grads(mlp, 0, 1, 2), inside(True), TP, MLP_ARGS),
    Case(
        "gradients inside, no check_vma",
        with_grads(mlp, 0, 1, 2),
        inside(False),
        TP,
        MLP_ARGS,
        expect="refuted",
        fault="psum of a psum",
    ),
    Case("gradients inside, divided", with_grads(mlp, 0, 1, 2), inside(False, True), TP, MLP_ARGS),
    Case("attention", attention, tp_attention(), TP, ATTENTION_ARGS),
    Case(
        "attention with gradients",
        with_grads(attention, 0, 1, 2, 3, 4),
        with_grads(tp_attention(), 0, 1, 2, 3, 4),
        TP,
        ATTENTION_ARGS,
    ),
    Case(
        "attention by mean",
        attention,
        tp_attention(reduced=mean_of),
        TP,
        ATTENTION_ARGS,
        expect="refuted",
        fault="mean for a sum",
    ),
    Case("attention, keys not rotated", attention, tp_attention(rotated=lambda k: k), TP, ATTENTION_ARGS, expect="refuted"),
    Case(
        "sequence parallel with gradients",
        with_grads(block, 0, 1, 2, 3),
        with_grads(sequence_parallel, 0, 1, 2, 3),
        TP,
        SEQUENCE_ARGS,
    ),
    Case(
        "sequence parallel, cut",
        block,
        sequence_parallel_unreduced,
        TP,
        SEQUENCE_ARGS,
        expect="refuted",
        fault="cut, not summed",
    ),
]
