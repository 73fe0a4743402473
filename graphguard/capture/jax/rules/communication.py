"""Ranks: where they are, what they hold of global arrays, and how they communicate."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphguard.capture.jax.builder import per_rank
from graphguard.capture.jax.dtypes import numpy_of
from graphguard.capture.jax.known_arrays import Known
from graphguard.capture.jax.lowering import Diverged, Lowering, Sharded, Spec, rule
from graphguard.capture.jax.mesh import Along, axes_of
from graphguard.errors import CaptureError
from graphguard.graph.ir import Value


@rule("shard_map")
def shard_map(low: Lowering, equation: Any, *operands: Any) -> list[Any]:
    params = equation.params
    _require_mesh(low, params["mesh"])
    manual = {*params["newly_manual_axes"], *params["mesh"].manual_axes}
    left = [axis for axis in low.build.mesh.names if axis not in manual]
    if any(dict(low.build.mesh.axes)[axis] > 1 for axis in left):
        low.build.assumptions.add(
            f"{low.build.source}: XLA splits along {', '.join(left)} what it computes without changing it"
        )
    specs = [spec_of(spec, variable) for spec, variable in zip(params["in_specs"], equation.invars, strict=True)]
    parts = [low.part(operand, spec) for operand, spec in zip(operands, specs, strict=True)]
    low.inside += 1
    results = low.run(params["jaxpr"], (), parts)
    low.inside -= 1
    return [
        Sharded(spec_of(spec, variable), result, tuple(variable.aval.shape), str(variable.aval.dtype))
        for result, spec, variable in zip(results, params["out_specs"], equation.outvars, strict=True)
    ]


def _require_mesh(low: Lowering, mesh: Any) -> None:
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    if low.build.is_sequential:
        raise CaptureError("the sequential program must have none; it is the reference that one device would run")
    if sizes != dict(low.build.mesh.axes):
        raise CaptureError(f"it is over the mesh {sizes}, and mesh= says {dict(low.build.mesh.axes)}; write the same for both")


def spec_of(spec: Any, variable: Any) -> Spec:
    if getattr(spec, "unreduced", None) or getattr(spec, "reduced", None):
        raise CaptureError(f"{spec} has no exact graph yet: sums that are not reduced do not leave or enter a shard_map")
    dims = [axes_of(axes) for axes in tuple(spec)]
    return tuple(dims + [()] * (len(variable.aval.shape) - len(dims)))


@rule("axis_index")
def axis_index(low: Lowering, equation: Any) -> Known:
    return Known(low.build.place_in(Along(axes_of(equation.params["axis_name"]))).astype(np.int32))


def along_of(params: Any, name: str = "axis_name") -> Along:
    given = params[name]
    if isinstance(given, Along):
        return given
    groups = params.get("axis_index_groups")
    return Along(axes_of(given), None if groups is None else tuple(map(tuple, groups)))


_REDUCED = {"psum": "sum", "psum_invariant": "sum", "pmax": "max", "pmin": "min"}


@rule(*_REDUCED)
def reduced(low: Lowering, equation: Any, *operands: Any) -> Any:
    along, how = along_of(equation.params, "axes"), _REDUCED[equation.primitive.name]
    made = []
    for operand, variable in zip(operands, equation.outvars, strict=True):
        x = low.tensor(operand)
        made.append(low.wrapped(low.build.collective("all_reduce", x, x.shape, along, reduce=how), variable.aval.dtype))
    return made if equation.primitive.multiple_results else made[0]


@rule("all_gather", "all_gather_invariant")
def all_gather(low: Lowering, equation: Any, x: Any) -> Value:
    params = equation.params
    return low.gathered(low.tensor(x), along_of(params), params["all_gather_dimension"], params["tiled"])


@rule("reduce_scatter", "psum_scatter")
def reduce_scatter(low: Lowering, equation: Any, x: Any) -> Value:
    params, x = equation.params, low.tensor(x)
    along = along_of(params)
    rows = _parts_in_front(low, x, params["scatter_dimension"], low.build.places.size(along), params["tiled"])
    made = low.build.collective("reduce_scatter_tensor", rows, [1, *rows.shape[1:]], along, reduce="sum")
    aval = equation.outvars[0].aval
    return low.wrapped(low.view(made, aval.shape), aval.dtype)


def _parts_in_front(low: Lowering, x: Value, dim: int, count: int, tiled: bool) -> Value:
    """The parts of a dim as the rows of a new first one."""
    if tiled:
        x = low.view(x, [*x.shape[:dim], count, x.shape[dim] // count, *x.shape[dim + 1 :]])
    return low.moved(x, dim, 0)


@rule("all_to_all")
def all_to_all(low: Lowering, equation: Any, x: Any) -> Any:
    """The parts of one dim go to the members, and what comes is joined along another. JAX has made it `tiled` already."""
    params, along = equation.params, along_of(equation.params)
    count = low.build.places.size(along)
    if isinstance(x, Known) and len(low.build.ranks) == low.build.mesh.size:
        return _known_parts(low, x, along, params["split_axis"], params["concat_axis"])
    x = low.tensor(x)
    rows = _parts_in_front(low, x, params["split_axis"], count, tiled=True)
    ones = (1,) * count
    made = low.build.collective("all_to_all_single", rows, rows.shape, along, output_splits=ones, input_splits=ones)
    return low.view(low.moved(made, 0, params["concat_axis"]), equation.outvars[0].aval.shape)


def _known_parts(low: Lowering, x: Known, along: Along, split: int, joined: int) -> Known:
    """Of what is known on all ranks it is known what comes: of offsets that are exchanged, for one."""
    mesh = low.build.mesh.size
    array = np.broadcast_to(x.array, (mesh, *x.shape))
    members = [low.build.member(along, np.full(mesh, place)) for place in range(low.build.places.size(along))]
    own = low.build.place_in(along)
    rows = []
    for rank in range(mesh):
        parts = [np.split(array[each[rank]], len(members), split)[own[rank]] for each in members]
        rows.append(np.concatenate(parts, joined))
    return Known(np.stack(rows))


@rule("pbroadcast")
def broadcast(low: Lowering, equation: Any, x: Any) -> Value:
    x, along = low.tensor(x), along_of(equation.params)
    root = low.build.member(along, np.full(len(low.build.ranks), equation.params["source"]))
    return low.build.collective("broadcast", x, x.shape, along, root=per_rank(root))


@rule("ppermute")
def ppermute(low: Lowering, equation: Any, x: Any) -> Any:
    """Who is sent nothing has zeros. Ranks that only send, or only receive, are walked by themselves."""
    x, along = low.tensor(x), along_of(equation.params)
    count = low.build.places.size(along)
    target, origin = np.full(count, -1), np.full(count, -1)
    for source, goal in equation.params["perm"]:
        target[source], origin[goal] = goal, source
    place = low.build.place_in(along)
    mine, its = target[place], origin[place]
    ways = (mine >= 0) * 2 + (its >= 0) + (mine == place) * 4
    if len(np.unique(ways)) > 1:
        raise Diverged(ways)
    if ways[0] & 4:
        return x
    peers = [low.build.member(along, each) if each[0] >= 0 else None for each in (mine, its)]
    received = low.build.exchange(x, along, *peers)
    return received if received is not None else low.full(x.shape, Known(np.zeros(1, dtype=numpy_of(x.dtype))))
