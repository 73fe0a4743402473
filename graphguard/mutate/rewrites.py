"""Changes that leave what a program computes as it is. Each function rewrites one operation, or says that it cannot."""

from __future__ import annotations

import math

from graphguard.graph.collectives import Share, of_share
from graphguard.graph.ir import Arg, Node, Value
from graphguard.mutate.site import (
    ELEMENTWISE,
    MOVES,
    PRODUCTS,
    Change,
    Site,
    base,
    dims_of,
    flat,
    is_elementwise,
    is_float,
    same_type,
)

_LINEAR = PRODUCTS | MOVES | {"aten.sum.dim_IntList", "aten.sum.default", "aten.neg.default", "aten.clone.default"}
_COMMUTATIVE = {"aten.add.Tensor", "aten.mul.Tensor"}


# ---------------------------------------------------------------------- products
def chunk_contraction(site: Site) -> str | None:
    """A product, as the sum of the products of two halves of the dim that is summed."""
    if site.op not in PRODUCTS | {"aten.addmm.default"} or site.node.kwargs:
        return None
    a, b = site.operands[-2:]
    size = a.shape[-1]
    if size < 2:
        return None
    cut = site.random.randrange(1, size)
    inner, outer = len(a.shape) - 1, len(b.shape) - 2
    halves = [(site.cut(a, inner, low, high), site.cut(b, outer, low, high)) for low, high in ((0, cut), (cut, size))]
    op = "aten.bmm.default" if len(a.shape) == 3 else "aten.mm.default"
    if site.op == "aten.addmm.default":
        first = site.call(site.op, site.node.args[0], *halves[0], shape=site.output.shape)
    else:
        first = site.call(op, *halves[0], shape=site.output.shape)
    second = site.call(op, *halves[1], shape=site.output.shape)
    site.give("aten.add.Tensor", first, second)
    return f"{site.node.op} in two halves of the sum"


def transpose_product(site: Site) -> str | None:
    if site.op != "aten.mm.default":
        return None
    a, b = (site.call("aten.t.default", value, shape=value.shape[::-1]) for value in site.operands)
    product = site.call("aten.mm.default", b, a, shape=site.output.shape[::-1])
    site.give("aten.t.default", product)
    return "a product, transposed"


def distribute_product(site: Site) -> str | None:
    """(a + b) c = ac + bc"""
    if site.op not in PRODUCTS | {"aten.mul.Tensor"} or len(site.operands) != 2:
        return None
    for number, operand in enumerate(site.operands):
        total = site.maker(operand)
        if total is None or base(total) != "aten.add.Tensor" or total.kwargs or not _both_like(total, operand):
            continue
        parts = []
        for part in total.operands():
            pair = [part if i == number else value for i, value in enumerate(site.operands)]
            parts.append(site.call(site.op, *pair, shape=site.output.shape))
        site.give("aten.add.Tensor", *parts)
        return f"{site.node.op} of a sum, written out"
    return None


def _both_like(node: Node, value: Value) -> bool:
    return len(node.args) == 2 and all(same_type(arg, value) for arg in node.args) and is_float(value)


# ---------------------------------------------------------------------- order
def reassociate(site: Site) -> str | None:
    """(a + b) + c = a + (b + c), and the same of products."""
    if site.op not in _COMMUTATIVE | {"aten.mm.default"} or site.node.kwargs or len(site.node.args) != 2:
        return None
    first, c = site.node.args
    inner = site.maker(first)
    if inner is None or base(inner) != site.op or inner.kwargs or not all(type(arg) is Value for arg in (*inner.args, c)):
        return None
    a, b = inner.operands()
    assert type(c) is Value
    if not (is_float(a) and a.dtype == b.dtype == c.dtype):
        return None
    shape = (b.shape[0], c.shape[1]) if site.op == "aten.mm.default" else _broadcast(b.shape, c.shape)
    site.give(site.op, a, site.call(site.op, b, c, shape=shape))
    return f"{site.node.op} in another order"


def _broadcast(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    longest = max(len(a), len(b))
    a, b = (1,) * (longest - len(a)) + a, (1,) * (longest - len(b)) + b
    return tuple(y if x == 1 else x for x, y in zip(a, b, strict=True))


def commute(site: Site) -> str | None:
    """a + b = b + a; and an elementwise function before a move of elements in place of after it."""
    node = site.node
    if site.op in _COMMUTATIVE and not node.kwargs and same_type(*node.args[:2]) and node.args[0] is not node.args[1]:
        site.give(site.op, node.args[1], node.args[0])
        return f"the operands of {node.op} change places"
    move = site.maker(node.args[0]) if is_elementwise(node) else None
    if move is None or base(move) not in MOVES or site.op not in ELEMENTWISE:
        return None
    given = next(move.operands())
    early = site.value(given.shape, site.output.dtype)
    site.again(node, [given, *node.args[1:]], (early,))
    site.again(move, [early, *move.args[1:]], node.outputs)
    return f"{node.op} before {move.op}"


def recompute(site: Site) -> str | None:
    """Computed twice, once for each use."""
    node = site.node
    if node.communicates or len(node.outputs) != 1 or not node.op.startswith("aten.") or not _is_function(node):
        return None
    users = [user for user in site.users(site.output) if not user.communicates]
    if len(users) < 2:
        return None
    chosen = site.random.choice(users)
    copy = site.value(site.output.shape, site.output.dtype)
    site.change()
    site.again(node, node.args, (copy,))
    site.elsewhere[chosen] = {site.output: copy}
    return f"{node.op} a second time"


def _is_function(node: Node) -> bool:
    """Whether equal operands give equal results, with nothing left to chance."""
    return not any(word in node.op for word in ("rand", "dropout", "bernoulli", "empty", "multinomial"))


# ---------------------------------------------------------------------- scales
def move_scale(site: Site) -> str | None:
    """A scale after a linear operation in place of before it; where there is none, one and its inverse around it."""
    if not (site.op in _LINEAR or _is_linear_collective(site)) or len(site.node.outputs) != 1 or not is_float(site.output):
        return None
    given = site.node.args[0]
    if not is_float(given):
        return None
    assert type(given) is Value
    scale = site.maker(given)
    if scale is not None and base(scale) in ("aten.mul.Scalar", "aten.div.Scalar") and is_float(scale.args[0]):
        before, number, op = scale.args[0], scale.args[1], base(scale)
        words = f"{scale.op} after {site.node.op}"
    else:
        number, op = float(site.random.choice((2, 3, 4, 7))), "aten.mul.Scalar"
        before = site.call("aten.div.Scalar", given, number, shape=given.shape)
        words = f"{number:g} divided before {site.node.op} and multiplied after"
    late = site.value(site.output.shape, site.output.dtype)
    _repeat_on(site, before, late)
    site.give(op, late, number)
    return words


def _is_linear_collective(site: Site) -> bool:
    return site.op in of_share(Share.GATHERED) or site.node.kwargs.get("reduce") in ("sum", "avg")


def _repeat_on(site: Site, first: Arg, output: Value) -> None:
    """The node's operation on another first operand."""
    node = site.node
    if node.communicates:
        kwargs = {name: arg for name, arg in node.kwargs.items() if name not in ("work", "strides")}
        site.communicate(node.op, (first, *node.args[1:]), (output,), **kwargs)
    else:
        site.again(node, [first, *node.args[1:]], (output,))


# ---------------------------------------------------------------------- batches
def split_batch(site: Site) -> str | None:
    """Two parts of the rows, or of the columns of a product, one after the other."""
    node = site.node
    pieces: list[Value] = []
    if is_elementwise(node):
        given = site.operands[0]
        dims = dims_of(given, 1)
        if not dims:
            return None
        dim = site.random.choice(dims)
        cut = site.random.randrange(1, given.shape[dim])
        for low, high in ((0, cut), (cut, given.shape[dim])):
            part = site.cut(given, dim, low, high)
            piece = site.value(part.shape, site.output.dtype)
            site.again(node, [part, *node.args[1:]], (piece,))
            pieces.append(piece)
    elif site.op in PRODUCTS:
        a, b = site.operands
        dim = site.random.choice([len(a.shape) - 2, len(a.shape) - 1])
        size = site.output.shape[dim]
        if size < 2:
            return None
        cut = site.random.randrange(1, size)
        for low, high in ((0, cut), (cut, size)):
            shape = list(site.output.shape)
            shape[dim] = high - low
            rows = dim == len(a.shape) - 2
            pair = (site.cut(a, dim, low, high), b) if rows else (a, site.cut(b, dim, low, high))
            pieces.append(site.call(site.op, *pair, shape=shape))
    else:
        return None
    site.give("aten.cat.default", tuple(pieces), dim)
    return f"{node.op} in two parts along dim {dim}"


# ---------------------------------------------------------------------- communication
def split_all_reduce(site: Site) -> str | None:
    """An all-reduce as a reduce-scatter and an all-gather."""
    if site.op != "dist.all_reduce":
        return None
    given, count = site.operands[0], len(site.group)
    if given.shape and given.shape[0] % count == 0:
        whole, part = given, (given.shape[0] // count, *given.shape[1:])
    elif math.prod(given.shape) % count == 0:
        whole = site.reshaped(given, flat(given))
        part = (whole.shape[0] // count,)
    else:
        return None
    mine = site.collect("dist.reduce_scatter_tensor", whole, part, **site.reduction)
    gathered = site.collect("dist.all_gather_into_tensor", mine, whole.shape)
    site.give("aten.view.default", gathered, site.output.shape)
    return "an all-reduce as a reduce-scatter and an all-gather"


def gather_and_sum(site: Site) -> str | None:
    """An all-reduce as an all-gather and a sum on every rank."""
    if site.op != "dist.all_reduce" or site.node.kwargs["reduce"] not in ("sum", "max") or not is_float(site.output):
        return None
    given, count = site.operands[0], len(site.group)
    row = site.reshaped(given, flat(given))
    gathered = site.collect("dist.all_gather_into_tensor", row, (count * row.shape[0],))
    rows = site.reshaped(gathered, (count, *given.shape))
    if site.node.kwargs["reduce"] == "sum":
        site.give("aten.sum.dim_IntList", rows, (0,))
    else:
        site.give("aten.amax.default", rows, (0,))
    return "an all-reduce as an all-gather and a reduction"


def split_collective(site: Site) -> str | None:
    """An all-reduce of two parts, one after the other."""
    if site.op != "dist.all_reduce":
        return None
    given = site.operands[0]
    dims = dims_of(given, 1)
    if not dims:
        return None
    dim = site.random.choice(dims)
    cut = site.random.randrange(1, given.shape[dim])
    parts = [site.cut(given, dim, low, high) for low, high in ((0, cut), (cut, given.shape[dim]))]
    reduced = [site.collect(site.op, part, part.shape, **site.reduction) for part in parts]
    site.give("aten.cat.default", tuple(reduced), dim)
    return f"an all-reduce in two parts along dim {dim}"


def reduce_addends(site: Site) -> str | None:
    """The sum of two all-reduces in place of the all-reduce of a sum."""
    if site.op != "dist.all_reduce" or site.node.kwargs["reduce"] not in ("sum", "avg"):
        return None
    total = site.maker(site.operands[0])
    if total is None or base(total) != "aten.add.Tensor" or total.kwargs or not _both_like(total, site.output):
        return None
    parts = [site.collect(site.op, part, part.shape, **site.reduction) for part in total.operands()]
    site.give("aten.add.Tensor", *parts)
    return "an all-reduce of each addend"


def scatter_by_slice(site: Site) -> str | None:
    """A reduce-scatter as an all-reduce of which each rank keeps its part."""
    if site.op != "dist.reduce_scatter_tensor":
        return None
    given = site.operands[0]
    whole = site.collect("dist.all_reduce", given, given.shape, **site.reduction)
    row = site.reshaped(whole, flat(whole))
    size = math.prod(site.output.shape)
    start = site.group.index(site.rank) * size
    site.give("aten.view.default", site.cut(row, 0, start, start + size), site.output.shape)
    return "a reduce-scatter as an all-reduce and a slice"


def gather_by_sum(site: Site) -> str | None:
    """An all-gather as an all-reduce of tensors that are zero where the others' parts are."""
    if site.op != "dist.all_gather_into_tensor" or not is_float(site.output):
        return None
    part = site.operands[0]
    row = site.reshaped(part, flat(part))
    zeros = site.call("aten.zeros_like.default", row, shape=row.shape)
    pieces = [row if rank == site.rank else zeros for rank in site.group]
    padded = site.call("aten.cat.default", tuple(pieces), shape=(len(pieces) * row.shape[0],))
    whole = site.collect("dist.all_reduce", padded, padded.shape, reduce="sum")
    site.give("aten.view.default", whole, site.output.shape)
    return "an all-gather as an all-reduce of padded parts"


REWRITES: dict[str, Change] = {
    "chunk a contraction": chunk_contraction,
    "split a batch": split_batch,
    "transpose a product": transpose_product,
    "distribute a product": distribute_product,
    "reassociate": reassociate,
    "swap commuting operations": commute,
    "recompute": recompute,
    "move a scale": move_scale,
    "all-reduce as reduce-scatter and all-gather": split_all_reduce,
    "all-reduce as all-gather and sum": gather_and_sum,
    "all-reduce in two parts": split_collective,
    "all-reduce of each addend": reduce_addends,
    "reduce-scatter as all-reduce and slice": scatter_by_slice,
    "all-gather as all-reduce of padded parts": gather_by_sum,
}
