"""Faults around the algebra: what is returned, dtypes, ranges, labels that do not count, what is not defined everywhere."""

from __future__ import annotations

from graphguard.graph.ir import Symbol, Value
from graphguard.mutate.site import Site, is_float, same_type, substitute

_DTYPES = ("int64", "int32", "int16", "int8", "uint8", "bool")
_IGNORED = (-100, 0, 1, 255)
_IGNORE_INDEX = {"aten.nll_loss_forward.default": 4, "aten.nll_loss_backward.default": 5}


def drop_output(site: Site) -> str | None:
    """A rank that returns nothing at a path. Where the others are no part of the mesh, no relation could be stated of them."""
    paths = _paths(site)
    if not paths or sum(size > 1 for size in site.mesh.shape) > 1:
        return None
    path = site.random.choice(paths)
    site.change()
    site.returned[path] = None
    return f"{path} is not returned"


def change_output_path(site: Site) -> str | None:
    """Two outputs of one type, each in the other's place."""
    pairs = [
        (path, other)
        for path in _paths(site)
        for other, value in site.graph.outputs.items()
        if same_type(value, site.graph.outputs[path]) and value is not site.graph.outputs[path]
    ]
    if not pairs:
        return None
    path, other = site.random.choice(pairs)
    site.change()
    site.returned.update({path: site.graph.outputs[other], other: site.graph.outputs[path]})
    return f"{path} and {other} change places"


def change_dtype(site: Site) -> str | None:
    """The result of an operation passes through another dtype."""
    if not _makes_one(site) or site.output.dtype == "bool":
        return None
    dtype = site.random.choice([name for name in _DTYPES if name != site.output.dtype])
    before = _before(site)
    narrow = site.value(before.shape, dtype)
    site.put("aten._to_copy.default", (before,), {"dtype": Symbol("dtype", dtype)}, (narrow,))
    site.give("aten._to_copy.default", narrow, dtype=Symbol("dtype", before.dtype))
    return f"the result of {site.node.op} passes through {dtype}"


def change_range(site: Site) -> str | None:
    """Whole numbers that an operation reads, cut off above."""
    whole = [v for v in dict.fromkeys(site.operands) if v.dtype == "int64" and v not in site.graph.constants]
    if not whole or site.node.communicates:
        return None
    value, most = site.random.choice(whole), site.random.choice((0, 1, 2, 3))
    cut = site.call("aten.clamp.default", value, None, most, shape=value.shape)
    site.change([substitute(arg, {value: cut}) for arg in site.node.args])
    return f"{site.node.op} reads no number above {most}"


def change_ignored(site: Site) -> str | None:
    """Another label that does not count."""
    place = _IGNORE_INDEX.get(site.op)
    if place is None or len(site.node.args) <= place:
        return None
    args = list(site.node.args)
    args[place] = site.random.choice([label for label in _IGNORED if label != args[place]])
    site.change(args)
    return f"{site.node.op} ignores {args[place]}"


def make_undefined(site: Site) -> str | None:
    """What gives the result back, but not everywhere."""
    if not _makes_one(site) or not is_float(site.output):
        return None
    before, form = _before(site), site.random.choice(("log", "divided", "root", "remainder", "logit"))
    shape = before.shape
    match form:
        case "log":
            site.give("aten.exp.default", site.call("aten.log.default", before, shape=shape))
        case "divided":
            site.give("aten.mul.Tensor", site.call("aten.div.Tensor", before, before, shape=shape), before)
        case "root":
            site.give("aten.square.default", site.call("aten.sqrt.default", before, shape=shape))
        case "remainder":
            rest = site.call("aten.remainder.Tensor", before, before, shape=shape)
            site.give("aten.add.Tensor", before, site.call("aten.mul.Scalar", rest, 0, shape=shape))
        case _:
            site.give("aten.sigmoid.default", site.call("aten.logit.default", before, shape=shape))
    return f"the result of {site.node.op} by a {form} that is not defined everywhere"


def _paths(site: Site) -> list[str]:
    """The outputs that the node makes."""
    return [path for path, value in site.graph.outputs.items() if value is not None and value in site.node.outputs]


def _makes_one(site: Site) -> bool:
    return len(site.node.outputs) == 1 and site.node.op.startswith("aten.") and not site.node.writes


def _before(site: Site) -> Value:
    """The result of the node, as an operand of what takes its place."""
    before = site.value(site.output.shape, site.output.dtype)
    site.again(site.node, site.node.args, (before,))
    return before
