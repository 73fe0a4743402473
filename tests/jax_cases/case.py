"""A pair of JAX programs, and the verdict that is expected of them. XLA runs them on eight devices of the host."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh

f32, i32 = jnp.float32, jnp.int32


@dataclass(frozen=True)
class Case:
    """fault: the text of the comment that marks the guilty line, where a report should point."""

    name: str
    sequential: Callable[..., Any]
    distributed: Callable[..., Any]
    mesh: dict[str, int]
    args: tuple[Any, ...]
    ranges: dict[str, tuple[int, int]] = field(default_factory=dict)
    expect: str = "verified"
    fault: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        return {"mesh": self.mesh, "args": self.args, "ranges": self.ranges}


def S(*shape: int, dtype: Any = f32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def mesh_of(axes: dict[str, int]) -> Mesh | AbstractMesh:
    """Of devices, where the host has as many."""
    count = math.prod(axes.values())
    if count > len(jax.devices()):
        return AbstractMesh(tuple(axes.values()), tuple(axes))
    types = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types, devices=jax.devices()[:count])


def with_grads(function: Callable[..., Any], *argnums: int) -> Callable[..., Any]:
    """The sum of squares of what a function gives, and its gradients."""

    def loss(*args: Any) -> Any:
        return jnp.sum(function(*args) ** 2)

    loss.__wrapped__ = function  # type: ignore[attr-defined] # names of arguments
    return jax.value_and_grad(loss, argnums=argnums)
