"""`graphguard bench jax`: a Llama-like decoder in JAX, a scan over its layers, tensor parallel by shard_map."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax, shard_map
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

from graphguard.errors import InternalError
from graphguard.jax import verify

RUNS = ((32, 8, True), (2, 4096, False))  # layers, devices, with gradients
_HEAD, _POSITIONS = 4, 6
_COLUMNS = ("q", "k", "v", "gate", "up")


def _normed(x: Any, weight: Any) -> Any:
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * weight


def _attention(x: Any, layer: dict[str, Any], heads: int) -> Any:
    batch, length, _ = x.shape
    q, k, v = ((x @ layer[name]).reshape(batch, length, heads, _HEAD) for name in ("q", "k", "v"))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(jnp.float32(_HEAD))
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
    out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), v)
    return out.reshape(batch, length, heads * _HEAD) @ layer["out"]


def decoder(params: Any, x: Any, heads: int, reduced: Callable[[Any], Any] = lambda y: y) -> Any:
    def step(x: Any, layer: Any) -> tuple[Any, None]:
        x = x + reduced(_attention(_normed(x, layer["norm1"]), layer, heads))
        h = _normed(x, layer["norm2"])
        return x + reduced((jax.nn.silu(h @ layer["gate"]) * (h @ layer["up"])) @ layer["down"]), None

    return lax.scan(jax.checkpoint(step), x, params)[0]


def _shapes(layers: int, heads: int, width: int, inner: int) -> dict[str, Any]:
    columns = {"q": heads * _HEAD, "k": heads * _HEAD, "v": heads * _HEAD, "gate": inner, "up": inner}
    sizes: dict[str, tuple[int, ...]] = {name: (layers, width, size) for name, size in columns.items()}
    sizes |= {"out": (layers, heads * _HEAD, width), "down": (layers, inner, width)}
    sizes |= dict.fromkeys(("norm1", "norm2"), (layers, width))
    return {name: jax.ShapeDtypeStruct(size, jnp.float32) for name, size in sizes.items()}


def _with_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    made: Callable[..., Any] = jax.value_and_grad(lambda params, x: jnp.mean(function(params, x) ** 2), argnums=(0, 1))
    return made


def measure(layers: int, devices: int, gradients: bool) -> tuple[float, dict[str, float], int]:
    """Seconds in all, of capture and of proof; and operations of all devices."""
    heads, width = max(8, devices), 32
    specs = dict.fromkeys(_COLUMNS, P(None, None, "tp")) | {
        "out": P(None, "tp"),
        "down": P(None, "tp"),
        "norm1": P(),
        "norm2": P(),
    }
    own = partial(decoder, heads=heads // devices, reduced=lambda y: lax.psum(y, "tp"))
    split = shard_map(own, mesh=AbstractMesh((devices,), ("tp",)), in_specs=(specs, P()), out_specs=P())
    programs = [partial(decoder, heads=heads), split]
    if gradients:
        programs = [_with_gradients(each) for each in programs]
    args = (_shapes(layers, heads, width, 4 * heads), jax.ShapeDtypeStruct((1, _POSITIONS, width), jnp.float32))
    begun = time.perf_counter()
    report = verify(*programs, mesh={"tp": devices}, args=args, trials=0)
    if report.verdict != "verified":
        raise InternalError(f"the decoder of {layers} layers on {devices} devices is {report.verdict}; please report it")
    return time.perf_counter() - begun, report.stats["seconds"], report.stats["ops"]


def main() -> None:
    table = Table("layers", "devices", "pass", "operations", "trace and matching", "graphs", "proof")
    for layers, devices, gradients in RUNS:
        total, seconds, operations = measure(layers, devices, gradients)
        trace = total - seconds["capture"] - seconds["proof"]
        what = "forward and backward" if gradients else "forward"
        shown = [f"{each:.1f} s" for each in (trace, seconds["capture"], seconds["proof"])]
        table.add_row(str(layers), str(devices), what, str(operations), *shown)
    Console().print(table)
