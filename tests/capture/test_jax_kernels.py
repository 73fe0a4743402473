"""Kernels by Pallas: proved through what the user says of them, which is compared with the kernel; refused without."""

from functools import partial

import jax
import jax.numpy as jnp
import jax_cases.case  # noqa: F401 # before jax looks for devices: the host has eight
import pytest
from jax import lax, shard_map
from jax.experimental import pallas as pl
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from graphguard import jax as gg_jax
from graphguard.errors import CaptureError, UsageError


def S(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def gated(g, u):
    """silu(g) * u, a block of rows at a time."""

    def swiglu(g_ref, u_ref, out_ref):
        g = g_ref[...]
        out_ref[...] = g / (1 + jnp.exp(-g)) * u_ref[...]

    rows = pl.BlockSpec((2, g.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(swiglu, out_shape=jax.ShapeDtypeStruct(g.shape, g.dtype), grid=g.shape[0] // 2,
                          in_specs=[rows, rows], out_specs=rows, name="swiglu")(g, u)  # fmt: skip


def plain(g, u):
    return jax.nn.silu(g) * u


def mlp(act, reduced=lambda y: y):
    return lambda x, a, b, c: reduced(act(x @ a, x @ b) @ c)


ARGS = (S(4, 6), S(6, 8), S(6, 8), S(8, 6))


def split(reduced=lambda y: lax.psum(y, "tp")):
    specs = {"in_specs": (P(), P(None, "tp"), P(None, "tp"), P("tp")), "out_specs": P()}
    return shard_map(mlp(gated, reduced), mesh=AbstractMesh((2,), ("tp",)), check_vma=False, **specs)


verify = partial(gg_jax.verify, mesh={"tp": 2}, args=ARGS)


def test_a_kernel_is_what_its_lemma_says():
    lemma = gg_jax.lemma("swiglu", plain)
    for sequential in (mlp(plain), mlp(gated)):
        report = verify(sequential, split(), lemmas=[lemma])
        assert report.verdict == "verified", str(report)
        assert "the kernel swiglu is plain, a lemma of yours that held in 3 random cases" in report.assumptions
    assert verify(mlp(plain), split(lambda y: y), lemmas=[lemma]).verdict == "refuted"


def test_a_kernel_without_a_lemma_is_refused_with_the_line():
    with pytest.raises(CaptureError) as error:
        verify(mlp(plain), split())
    assert str(error.value).startswith("tests/capture/test_jax_kernels.py:")
    assert str(error.value).endswith(
        "the primitive pallas_call: the kernel swiglu is opaque; say what it computes by "
        "lemmas=[gg.jax.lemma('swiglu', function)]"
    )


def test_a_lemma_that_does_not_hold_is_refused_with_the_numbers():
    with pytest.raises(UsageError, match=r"does not hold: element \[0, 0\] of its result is \S+, where the kernel gives \S+"):
        verify(mlp(plain), split(), lemmas=[gg_jax.lemma("swiglu", lambda g, u: jax.nn.gelu(g) * u)])
    with pytest.raises(UsageError, match=r"gives float32\[4\], where the kernel gives float32\[4, 4\]"):
        verify(mlp(plain), split(), lemmas=[gg_jax.lemma("swiglu", lambda g, u: g[:, 0])])
    with pytest.raises(UsageError, match=r"the lemma of the kernel swiglu raised ValueError: no"):
        verify(mlp(plain), split(), lemmas=[gg_jax.lemma("swiglu", raising)])
    with pytest.raises(UsageError, match=r"write gg.jax.lemma\(name, function\)"):
        gg_jax.lemma(plain, "swiglu")


def raising(g, u):
    raise ValueError("no")


def test_a_kernel_that_cannot_be_run_here_is_trusted_and_that_is_listed(monkeypatch):
    from jax._src.pallas import hlo_interpreter

    def fails(*args, **params):
        raise NotImplementedError("on this machine")

    monkeypatch.setattr(hlo_interpreter, "pallas_call_hlo_interpret", fails)
    report = verify(mlp(plain), split(), lemmas=[gg_jax.lemma("swiglu", plain)])
    trusted = "trusted: the kernel swiglu is plain, a lemma of yours; the kernel cannot be run here: on this machine"
    assert report.verdict == "verified" and trusted in report.assumptions
