"""The front end for JAX: every primitive computes what XLA computes, indices outside and ties included; the rest is refused."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import jax_cases.case  # noqa: F401 # before jax looks for devices: the host has eight
import numpy as np
import pytest
import torch
from jax import lax, shard_map
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from graphguard import jax as gg_jax
from graphguard.capture.jax.dtypes import in_graph
from graphguard.capture.jax.session import Session
from graphguard.capture.jax.trace import arguments_of, trace
from graphguard.errors import CaptureError, ProgramError, UsageError
from graphguard.graph.ir import Mesh
from graphguard.oracle.replay import replay_joint

f32, i32, u32 = jnp.float32, jnp.int32, jnp.uint32


def S(*shape, dtype=f32):
    return jax.ShapeDtypeStruct(shape, dtype)


# ---------------------------------------------------------------------- what a rank computes
def replayed(function, args, data):
    """What the graph of a rank gives, which nothing is assumed of."""
    arguments = arguments_of(function, args)
    session = Session(Mesh.of({"x": 1}), arguments, {each.name: (None, None) for each in arguments})
    captured = session.capture(trace(lambda *a: a, args, "sequential"), trace(function, args, "distributed"))
    inputs = {
        each.name: torch.from_numpy(np.asarray(x).astype(in_graph(each.dtype))) for each, x in zip(arguments, data, strict=True)
    }
    return captured, list(replay_joint(captured.joint, [inputs])[0].values())


X, Y, W = S(4, 6), S(4, 6), S(6, 3)
IDS = S(5, dtype=i32)  # drawn from -9 to 9: outside of every dim below
T = S(4, 6, dtype=i32)  # with ties
U = S(4, 6, dtype=u32)
KEY = S(2, dtype=u32)

PROGRAMS = {
    "arithmetic": (lambda x, y: (x + y, x - 2, 3 - x, x * y, x / (y * y + 1), -x, x**3, x**2, abs(x)), X, Y),
    "functions": (
        lambda x: (
            jnp.exp(x),
            jnp.tanh(x),
            jax.nn.sigmoid(x),
            lax.erf(x),
            lax.erfc(x),
            jnp.log1p(x * x),
            jnp.expm1(x),
            jnp.sqrt(x * x),
            lax.rsqrt(x * x + 1),
            jnp.sin(x),
            jnp.cos(x),
            jnp.cbrt(x),
            jnp.sign(x),
            jnp.floor(x),
            jnp.ceil(x),
            lax.erf_inv(jnp.tanh(x)),
        ),
        X,
    ),
    "powers": (lambda x, y: ((x * x + 1) ** y, 2.0**x, (x * x) ** 0.5), X, Y),
    "rounding": (lambda x: (jnp.round(4 * x), lax.round(jnp.round(2 * x) / 2, lax.RoundingMethod.AWAY_FROM_ZERO)), X),
    "extremes": (
        lambda x, y: (
            jnp.maximum(x, y),
            jnp.minimum(x, 0),
            jnp.maximum(x, 0.5),
            jnp.clip(x, -0.5, 0.5),
            lax.clamp(y, x, y + 1),
        ),
        X,
        Y,
    ),
    "comparisons": (
        lambda x, y, t: (x < y, x >= 0, x < 0, t == 1, ~(t != 2), (t > 1) & (x < 0), (t > 1) | (x < 0), (t > 1) ^ (x < 0)),
        X,
        Y,
        T,
    ),
    "choices": (
        lambda x, y, t: (
            jnp.where(t > 1, x, y),
            lax.select_n(jnp.clip(t, 0, 2), x, y, -x),
            lax.select_n(jnp.clip(t, 0, 1), x, y),
            jnp.isfinite(x / t),
        ),
        X,
        Y,
        T,
    ),
    "whole numbers": (
        lambda t: (t // 3, t % 3, lax.div(t, 3), lax.rem(t, -4), t**2, jnp.abs(t), t & 6, t | 1, t ^ 5, ~t, t >> 1),
        T,
    ),
    "casts": (
        lambda x, t: (
            x.astype(i32),
            t.astype(f32),
            (t > 0).astype(f32),
            x.astype(bool),
            x.astype(jnp.bfloat16).astype(f32).shape[0] * x,
        ),
        X,
        T,
    ),
    "unsigned": (
        lambda u: (
            u + u,
            u - 5,
            u * np.uint32(2654435761),
            ~u,
            u << 7,
            u >> 9,
            u ^ (u << 3),
            (u >> 1).astype(i32),
            u.astype(i32),
            u % 7,
            u // 3,
            u < np.uint32(2**31),
            u.astype(f32),
            jnp.sum(u, 0),
        ),
        U,
    ),
    "to unsigned": (lambda t: (t.astype(u32), t.astype(u32).astype(i32), lax.bitcast_convert_type(t, u32)), T),
    "shapes": (
        lambda x: (
            x.T,
            x.reshape(3, 8),
            x[1:3, ::2],
            x[::-1],
            jnp.concatenate([x, x[:1]]),
            jnp.tile(x, (2, 1)),
            x[None, :, None],
            jnp.repeat(x, 2, axis=1),
            jnp.roll(x, 1, axis=0),
            jnp.stack([x, -x], 1),
            jnp.flip(x, 1),
        ),
        X,
    ),
    "pads": (
        lambda x: (
            jnp.pad(x, ((1, 2), (0, 3)), constant_values=2.0),
            lax.pad(x, 1.0, ((0, 1, 2), (-1, 2, 0))),
            lax.pad(x, 0.0, ((1, 0, 0), (2, -3, 1))),
        ),
        X,
    ),
    "made": (
        lambda x: (
            x + jnp.arange(6),
            x * jnp.eye(4, 6),
            jnp.tril(x),
            jnp.linspace(0, 1, 4)[:, None] * x,
            lax.broadcasted_iota(f32, (4, 6), 1) + x,
        ),
        X,
    ),
    "products": (
        lambda x, y, w: (
            x @ w,
            x @ y.T,
            jnp.einsum("ab,cb->ac", x, y),
            jnp.einsum("ab,ab->a", x, y),
            jnp.einsum("ab,cd->abcd", x, w),
            jnp.einsum("ab,ab->", x, y),
            lax.dot_general(x, y, (((0,), (0,)), ((), ())), preferred_element_type=f32),
        ),
        X,
        Y,
        W,
    ),
    "products of whole numbers": (lambda t: (t @ t.T, jnp.einsum("ab,ab->a", t, t)), T),
    "sums": (
        lambda x, t: (
            x.sum(),
            x.sum(1),
            x.mean((0, 1)),
            x.max(0),
            x.min(),
            x.prod(1),
            t.sum(0),
            (t > 0).all(1),
            (t > 0).any(),
            jnp.var(x),
        ),
        X,
        T,
    ),
    "running": (
        lambda x: (
            jnp.cumsum(x, 0),
            jnp.cumprod(x, 1),
            lax.cummax(x, 1),
            lax.cummin(x, 0, reverse=True),
            lax.cumlogsumexp(x, 1),
            lax.cumsum(x, 1, reverse=True),
        ),
        X,
    ),
    "windows": (
        lambda x: (
            lax.reduce_window(x, -jnp.inf, lax.max, (2, 3), (1, 2), "VALID"),
            lax.reduce_window(x, 0.0, lax.add, (2, 2), (2, 1), "SAME"),
        ),
        X,
    ),
    "ties": (
        lambda t: (jnp.argmax(t, 1), jnp.argmin(t, 0), lax.top_k(t, 3), jnp.argsort(t, 1), jnp.sort(t, 0), jnp.argmax(t)),
        T,
    ),
    "orders": (
        lambda x, t: (
            jnp.sort(x, 1),
            lax.sort((t, x), num_keys=1),
            lax.sort((t, t[:, ::-1], x), dimension=0, num_keys=2),
            jnp.lexsort((t[0], t[1])),
        ),
        X,
        T,
    ),
    "indexed": (lambda x, i: (x[i], x[i, i], x[:, i], x[i, :2], x[i][:, 1:3]), X, IDS),
    "taken": (
        lambda x, i: (
            jnp.take(x, i, axis=0),
            jnp.take(x, i, axis=1, mode="clip"),
            jnp.take(x, i, axis=1, mode="wrap"),
            jnp.take(x, i, axis=0, mode="fill", fill_value=7.0),
        ),
        X,
        IDS,
    ),
    "taken along": (
        lambda x, t: (
            jnp.take_along_axis(x, t, axis=1),
            jnp.take_along_axis(x, t[:, :2], axis=1),
            jnp.take_along_axis(x, t, axis=0),
        ),
        X,
        T,
    ),
    "taken whole": (
        lambda t, u, i: (jnp.take(t, i, axis=0), t[i], jnp.take(u, i, axis=0), jnp.take(t > 0, i, axis=0)),
        T,
        U,
        IDS,
    ),
    "sliced": (
        lambda x, i: (
            lax.dynamic_slice(x, (i[0], i[1]), (2, 3)),
            lax.dynamic_index_in_dim(x, i[2], 1),
            lax.dynamic_slice_in_dim(x, 2, 3, 1),
        ),
        X,
        IDS,
    ),
    "updated": (
        lambda x, i: (
            lax.dynamic_update_slice(x, x[:2, :3] * 2, (i[0], i[1])),
            lax.dynamic_update_index_in_dim(x, x[0], i[2], 0),
            lax.dynamic_update_slice(x, x[:2, :3] * 2, (1, 9)),
        ),
        X,
        IDS,
    ),
    "windows at data": (lambda x, i: jax.vmap(lambda s: lax.dynamic_slice(x, (s, s + 1), (2, 3)))(i), X, IDS),
    "set": (
        lambda x, i: (
            x.at[i[0]].set(5.0),
            x.at[1].set(2.0),
            x.at[i[1], i[2]].set(3.0),
            x.at[i[0]].set(1.0, mode="clip"),
            x.at[:, i[3]].set(0.0),
            x.at[9].set(1.0),
            x.at[jnp.array([3, 1, 9])].set(x[:3]),
        ),
        X,
        IDS,
    ),
    "added": (
        lambda x, i: (
            x.at[i].add(x[0]),
            x.at[i, i].add(1.0),
            x.at[:, i].add(2.0),
            x.at[i].add(1.0, mode="clip"),
            x.at[1:3].add(1.0),
        ),
        X,
        IDS,
    ),
    "combined": (lambda x, i: (x.at[i].max(0.5), x.at[i].min(-0.5), x.at[i, i].mul(2.0)), X, IDS),
    "gradients of lookups": (
        jax.grad(
            lambda x, i: jnp.sum(jnp.take(x, i, axis=0, mode="fill", fill_value=0.0) ** 2) + jnp.sum(x[jnp.clip(i, 0, 3)] ** 3)
        ),
        X,
        IDS,
    ),
    "gradients of orders": (
        jax.grad(
            lambda x: jnp.sum(lax.top_k(x, 2)[0] ** 2) + jnp.sum(jnp.max(x, 1) ** 2) + jnp.sum(jnp.sort(x, 1)[:, :2] ** 2)
        ),
        X,
    ),
    "convolutions": (
        lambda a, k: (
            lax.conv(a, k, (1, 2), "SAME"),
            lax.conv_general_dilated(a, k, (2, 1), ((1, 0), (2, 1)), (1, 2), (2, 1)),
            lax.conv_general_dilated(
                jnp.moveaxis(a, 1, -1),
                jnp.transpose(k, (2, 3, 1, 0)),
                (1, 1),
                "VALID",
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            ),
        ),
        S(2, 3, 7, 6),
        S(4, 3, 2, 3),
    ),
    "gradient of a convolution": (
        jax.grad(lambda a, k: jnp.sum(lax.conv(a, k, (2, 1), "SAME") ** 2), (0, 1)),
        S(2, 3, 7, 6),
        S(4, 3, 2, 3),
    ),
    "loops": (
        lambda x: (
            lax.scan(lambda c, r: (c + r, c * 2), x[0], x),
            lax.scan(lambda c, r: (c * r, c), x[0], x, reverse=True),
            lax.fori_loop(0, 3, lambda i, c: c * i + x, x),
            lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] * 2), (0, x)),
        ),
        X,
    ),
    "branches": (
        lambda x: (
            lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x),
            lax.switch(jnp.int32(x[0, 0] * 9), [jnp.sin, jnp.cos, jnp.tanh], x),
        ),
        X,
    ),
    "calls": (
        lambda x: (
            jax.jit(jnp.sin)(x),
            jax.checkpoint(jnp.cos)(x),
            jax.nn.relu(x),
            jax.nn.silu(x),
            jax.nn.softmax(x),
            jax.nn.logsumexp(x, 1),
            jax.nn.one_hot(jnp.argmax(x, 1), 6),
            jax.vmap(jnp.dot)(x, x),
        ),
        X,
    ),
    "random": (
        lambda key: (
            jax.random.bits(key, (3, 5)),
            jax.random.uniform(key, (4, 2)),
            jax.random.bernoulli(key, 0.3, (6,)),
            jax.random.key_data(jax.random.split(jax.random.wrap_key_data(key), 3)),
            jax.random.fold_in(key, 7),
            jax.random.uniform(jax.random.PRNGKey(3), (2,), minval=-1.0),
        ),
        KEY,
    ),
    "random, several keys": (
        lambda key: (
            jax.vmap(lambda each: jax.random.uniform(each, (3,)))(jax.random.split(key, 4)),
            jax.vmap(lambda each: jax.random.bits(each, (2, 2)))(jax.random.split(jax.random.wrap_key_data(key), 3)),
            jax.vmap(lambda n: jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(key), n)))(jnp.arange(5)),
            jax.random.key_data(jax.vmap(lambda each: jax.random.split(each, 2)[::-1])(jax.random.split(jax.random.key(3), 3))),
            jax.vmap(lambda seed: jax.random.bits(jax.random.key(seed)))(jnp.arange(3)),
        ),
        KEY,
    ),
    "random, keys that are moved": (
        lambda key: [
            jax.random.uniform(each)
            for each in (
                *jax.random.split(jax.random.wrap_key_data(key), 3),
                jax.random.split(jax.random.wrap_key_data(key), (2, 3)).T.reshape(6)[4],
                jnp.stack([jax.random.wrap_key_data(key), jax.random.key(1)])[1],
            )
        ],
        KEY,
    ),
    "random normal": (lambda key: jax.random.normal(key, (16,)), KEY),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_rank_computes_what_xla_computes(name):
    function, *args = PROGRAMS[name]
    for seed in range(3):
        rng = np.random.default_rng(seed)
        data = [drawn(rng, each) for each in args]
        _, got = replayed(function, tuple(args), data)
        wanted = jax.tree_util.tree_leaves(jax.jit(function)(*data))
        assert len(got) == len(wanted)
        for place, (mine, its) in enumerate(zip(got, wanted, strict=True)):
            np.testing.assert_allclose(
                mine.double().numpy(), np.asarray(its).astype(np.float64), rtol=2e-4, atol=2e-5, err_msg=f"{name} {place}"
            )


def drawn(rng, shape):
    if shape is T:
        return rng.integers(-1, 4, shape.shape).astype(np.int32)
    if shape.dtype == i32:
        return rng.integers(-9, 10, shape.shape).astype(np.int32)
    if shape.dtype == u32:
        return rng.integers(0, 2**32, shape.shape, dtype=np.uint64).astype(np.uint32)
    return rng.standard_normal(shape.shape).astype(np.float32)


# ---------------------------------------------------------------------- what is assumed
def mesh(**axes):
    return AbstractMesh(tuple(axes.values()), tuple(axes))


def split(function, n=2, **specs):
    return shard_map(function, mesh=mesh(tp=n), **{"in_specs": P(), "out_specs": P(), "check_vma": False, **specs})


def test_an_index_of_the_sequential_program_is_assumed_to_lie_inside_and_that_is_listed():
    def rows(w, ids):
        return w[ids]

    args = (S(8, 4), S(3, dtype=i32))
    report = gg_jax.verify(rows, split(rows), mesh={"tp": 2}, args=args)
    assert report.verdict == "verified"
    (listed,) = [text for text in report.assumptions if "indices" in text]
    assert listed.endswith("indices are from 0 to 7; others, which JAX wraps, clamps or fills, are left out")
    stated = gg_jax.verify(rows, split(rows), mesh={"tp": 2}, args=args, ranges={"ids": (0, 8)})
    assert stated.verdict == "verified" and not any("JAX" in text for text in stated.assumptions)


def test_what_a_rank_reads_outside_is_not_assumed_away():
    """Row -1 is the last one in JAX: a rank that shifts the index by one reads it."""

    def rows(w, ids):
        return w[ids]

    def shifted(w, ids):
        return jnp.roll(w, -1, axis=0)[ids - 1]

    def wrong(w, ids):
        return jnp.concatenate([jnp.zeros((1, 4)), w])[ids]

    args, ranges = (S(8, 4), S(3, dtype=i32)), {"ids": (0, 8)}
    assert gg_jax.verify(rows, split(shifted), mesh={"tp": 2}, args=args, ranges=ranges).verdict != "refuted"
    assert gg_jax.verify(rows, split(wrong), mesh={"tp": 2}, args=args, ranges=ranges).verdict == "refuted"


def test_an_index_that_no_input_decides_is_taken_as_it_is():
    """Row -1 is the last one: nothing is assumed of it."""

    def rolled(x):
        return x[jnp.arange(4) - 1]

    report = gg_jax.verify(rolled, split(rolled), mesh={"tp": 2}, args=(S(4, 2),))
    assert report.verdict == "verified" and not any("indices" in text for text in report.assumptions)
    assert gg_jax.verify(rolled, split(lambda x: x), mesh={"tp": 2}, args=(S(4, 2),)).verdict == "refuted"


def test_a_stated_range_with_negative_indices_needs_no_assumption():
    def last(x, lengths):
        return x[lengths - 1]

    report = gg_jax.verify(last, split(last), mesh={"tp": 2}, args=(S(4, 2), S(3, dtype=i32)), ranges={"lengths": (0, 5)})
    assert report.verdict == "verified" and not any("indices" in text for text in report.assumptions)


def test_what_is_computed_outside_of_the_shard_map_is_left_to_xla_and_that_is_listed():
    doubled = split(lambda x: x * 2)
    outside = "outside of shard_map, XLA splits what it computes over the devices without changing it"
    alone = gg_jax.verify(lambda x: x * 2, doubled, mesh={"tp": 2}, args=(S(4),))
    around = gg_jax.verify(lambda x: jnp.sin(x * 2), lambda x: jnp.sin(doubled(x)), mesh={"tp": 2}, args=(S(4),))
    assert alone.verdict == around.verdict == "verified"
    assert outside not in alone.assumptions and outside in around.assumptions


def test_partly_manual_axes_are_an_assumption():
    program = shard_map(lambda x: x * 2, mesh=mesh(dp=2, tp=2), in_specs=P("dp"), out_specs=P("dp"), axis_names={"dp"})
    report = gg_jax.verify(lambda x: x * 2, program, mesh={"dp": 2, "tp": 2}, args=(S(4),))
    assert report.verdict == "verified"
    assert any(text.endswith("XLA splits along tp what it computes without changing it") for text in report.assumptions)


# ---------------------------------------------------------------------- what is refused
def whose_end_is_data(x):
    return lax.while_loop(lambda c: jnp.sum(c) < 9, lambda c: c + 1, x)


def that_may_not_meet(x):
    return lax.cond(x[0] > 0, lambda v: lax.psum(v, "tp"), lambda v: v, x)


REFUSED = {
    "primitive": (split(lambda x: jnp.linalg.cholesky(jnp.outer(x, x))), "the primitive cholesky: it has no exact graph yet"),
    "callback": (split(lambda x: jax.pure_callback(np.sin, S(4), x)), "the primitive pure_callback: it has no exact graph yet"),
    "loop": (
        split(whose_end_is_data),
        "the primitive while: how often it runs depends on data; write a loop of a fixed length",
    ),
    "branch": (
        split(that_may_not_meet),
        "the primitive cond: a branch on data communicates, so whether the ranks meet depends on data",
    ),
    "bits": (
        split(lambda x: lax.bitcast_convert_type(x, i32)),
        "the primitive bitcast_convert_type: the bits of float32 as int32 are no function of numbers",
    ),
    "mesh": (
        split(lambda x: x, 4),
        "the primitive shard_map: it is over the mesh {'tp': 4}, and mesh= says {'tp': 2}; write the same for both",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_exact_graph_is_refused_with_the_line(name):
    program, text = REFUSED[name]
    with pytest.raises(CaptureError) as error:
        gg_jax.verify(lambda x: x, program, mesh={"tp": 2}, args=(S(4),))
    assert str(error.value).endswith(text)
    assert str(error.value).startswith("tests/capture/test_jax.py:") or name == "mesh"  # which no line of ours calls


def test_what_the_user_got_wrong_is_one_sentence():
    def same(x):
        return x

    def check(error, text, sequential=same, distributed=None, **changed):
        options = {"mesh": {"tp": 2}, "args": (S(4),), **changed}
        with pytest.raises(error, match=text):
            gg_jax.verify(sequential, distributed or split(same), **options)

    check(UsageError, r"has no jax.shard_map over tp=2, so nothing in it says what a device does", distributed=jax.jit(same))
    check(UsageError, r"ranges= names 'y', which is no array of args=; they are x", ranges={"y": (0, 4)})
    check(UsageError, r"args= is ShapeDtypeStruct; write a tuple", args=S(4))
    check(UsageError, r"args= has int as x; write jax.ShapeDtypeStruct", args=(4,))
    check(UsageError, r"sequential= is int, not a function", sequential=3)
    check(CaptureError, r"the primitive shard_map: the sequential program must have none", sequential=split(same))
    check(
        ProgramError,
        r"the distributed program raised ValueError: too small",
        distributed=partial(raising, ValueError("too small")),
    )
    check(CaptureError, r"the distributed program is not deterministic: two traces of it differ", distributed=changing)


def raising(error, x):
    raise error


def changing(x, calls=[]):  # noqa: B006
    calls.append(None)
    return split(lambda y: y * len(calls))(x)


# ---------------------------------------------------------------------- many ranks
def mlp(x, a, b):
    return jax.nn.gelu(x @ a) @ b


def tp_mlp(n, reduced):
    specs = {"in_specs": (P(), P(None, "tp"), P("tp")), "out_specs": P()}
    return split(lambda x, a, b: reduced(mlp(x, a, b)), n, **specs)


@pytest.mark.parametrize("n", [4, 64, 4096])
def test_one_trace_serves_all_ranks(n):
    args = (S(2, 8), S(8, n), S(n, 8))
    right = gg_jax.verify(mlp, tp_mlp(n, lambda y: lax.psum(y, "tp")), mesh={"tp": n}, args=args, trials=0)
    assert right.verdict == "verified" and right.stats["classes"] == 1
    wrong = gg_jax.verify(mlp, tp_mlp(n, lambda y: y), mesh={"tp": n}, args=args)
    assert wrong.verdict == ("refuted" if n < 4096 else wrong.verdict) != "verified"


@pytest.mark.parametrize("n", [4, 48])
def test_a_chain_of_many_ranks_is_a_few_classes(n):
    """The first rank only sends, the last one only receives."""

    def shifted(x):
        return jnp.concatenate([jnp.zeros((1, 2)), x[:-1]])

    def by_messages(x):
        return lax.ppermute(x, "tp", [(i, i + 1) for i in range(n - 1)])

    program = split(by_messages, n, in_specs=P("tp"), out_specs=P("tp"))
    report = gg_jax.verify(shifted, program, mesh={"tp": n}, args=(S(n, 2),))
    assert report.verdict == "verified" and report.stats["classes"] == 3
    around = split(
        lambda x: lax.ppermute(x, "tp", [(i, (i + 1) % n) for i in range(n)]), n, in_specs=P("tp"), out_specs=P("tp")
    )
    assert gg_jax.verify(shifted, around, mesh={"tp": n}, args=(S(n, 2),)).verdict == "refuted"
