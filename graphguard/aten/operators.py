"""What the recorder must know of an ATen operator, read once from its schema."""

from __future__ import annotations

import torch

from graphguard.errors import CaptureError
from graphguard.graph.ir import Symbol

BUILT_IN = {"aten", "prims", "gg", "dist", "c10d", "_c10d_functional"}
# Operators that return an alias of an argument although their schema does not say so.
UNDECLARED_VIEWS = {"aten._unsafe_view.default", "aten._reshape_alias.default", "aten.lift_fresh.default",
                    "aten.unsafe_split.Tensor", "aten.unsafe_split_with_sizes.default"}  # fmt: skip
# Where the bytes come from is not a value: a node that keeps them would not replay on another device.
IRRELEVANT_KEYWORDS = {"device", "layout", "pin_memory", "memory_format", "generator", "non_blocking"}
DYNAMIC_TAGS = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
SCALAR_READS = {"aten._local_scalar_dense.default", "aten.item.default", "aten.equal.default", "aten.is_nonzero.default",
                "aten.allclose.default"}  # fmt: skip

DTYPE_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_SYMBOLS: dict[type, str] = {torch.dtype: "dtype", torch.layout: "layout", torch.memory_format: "memory_format"}


def symbol(argument: object) -> Symbol | None:
    """The name of a framework object, or None if it is not one."""
    kind = _SYMBOLS.get(type(argument))
    if kind is None:
        return None
    name = DTYPE_NAMES[argument] if kind == "dtype" else str(argument).removeprefix("torch.")
    return Symbol(kind, name)


class Operator:
    """One overload."""

    __slots__ = (
        "cacheable", "composite", "custom", "draws", "dynamic", "elementwise", "func", "has_dtype", "is_factory", "is_view",
        "name", "namespace", "random", "reads_scalar", "renames_dims", "written",
    )  # fmt: skip

    def __init__(self, func: torch._ops.OpOverload):
        if not isinstance(func, torch._ops.OpOverload):
            raise CaptureError(f"the higher-order operator {func} is not modelled; write it with plain operators")
        schema, tags = func._schema, set(func.tags)
        self.func, self.name, self.namespace = func, str(func), func.namespace
        self.written = tuple(
            (position, argument.name, argument.kwarg_only)
            for position, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
        returns_alias = any(r.alias_info is not None for r in schema.returns)
        self.is_view = not self.written and (returns_alias or self.name in UNDECLARED_VIEWS)
        self.composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
        self.custom = self.namespace not in BUILT_IN
        self.renames_dims = torch.Tag.inplace_view in tags
        self.dynamic = bool(tags & DYNAMIC_TAGS)
        self.reads_scalar = self.name in SCALAR_READS
        self.cacheable = self.namespace == "aten" and not (self.is_view or self.renames_dims or self.dynamic)
        names = {argument.name for argument in schema.arguments}
        self.has_dtype = "dtype" in names
        self.is_factory = "device" in names
        self.elementwise = torch.Tag.pointwise in tags or self.name.startswith(("aten._foreach_", "aten.copy_."))
        self.draws = "generator" in names
        self.random = self.draws or torch.Tag.nondeterministic_seeded in tags


_OPERATORS: dict[object, Operator] = {}


def operator(func: torch._ops.OpOverload) -> Operator:
    known = _OPERATORS.get(func)
    if known is None:
        known = _OPERATORS[func] = Operator(func)
    return known


def overload(name: str) -> torch._ops.OpOverload:
    """The overload of a name such as 'aten.add.Tensor'."""
    namespace, packet, variant = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), variant)
