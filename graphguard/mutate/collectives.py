"""Faults of communication. Each function changes one collective, or says that it cannot."""

from __future__ import annotations

import itertools
import math

from graphguard.graph.collectives import Share, of_share
from graphguard.graph.ir import Mesh, Node, Value
from graphguard.mutate.site import Site, flat, is_elementwise, keeps_shape, same_type

_GATHERS, _SCATTERS = of_share(Share.GATHERED), of_share(Share.SCATTERED)
_REDUCTIONS = ("sum", "avg", "max", "min", "product")


# ---------------------------------------------------------------------- drop, duplicate, replace
def drop_collective(site: Site) -> str | None:
    """The call is forgotten: the rank goes on with what it has itself."""
    node = site.node
    if node.op in _GATHERS:
        _repeat(site, site.operands[0])
    elif node.op in _SCATTERS:
        _own_part(site, site.operands[0])
    elif keeps_shape(node):
        site.keep(site.operands[0])
    elif not _keep_lists(site):
        return None
    return f"{node.op} is left out"


def _repeat(site: Site, part: Value) -> None:
    """The gathered tensor, made of copies of one part."""
    count = len(site.group)
    row = site.reshaped(part, flat(part))
    rows = site.call("aten.cat.default", (row,) * count, shape=(count * row.shape[0],))
    site.give("aten.view.default", rows, site.output.shape)


def _own_part(site: Site, whole: Value) -> None:
    """The rank's part of a tensor that is not reduced."""
    row = site.reshaped(whole, flat(whole))
    size = math.prod(site.output.shape)
    start = site.group.index(site.rank) * size
    site.give("aten.view.default", site.cut(row, 0, start, start + size), site.output.shape)


def _keep_lists(site: Site) -> bool:
    node, given = site.node, site.operands
    match node.op:
        case "dist.all_gather":
            pairs = [(output, given[0]) for output in node.outputs]
        case "dist.reduce_scatter":
            pairs = [(site.output, given[site.group.index(site.rank)])]
        case "dist.all_to_all":
            pairs = list(zip(node.outputs, given, strict=True))
        case _:
            return False
    if not all(same_type(old, new) for old, new in pairs):
        return False
    for old, new in pairs:
        site.keep(new, old)
    return True


def duplicate_collective(site: Site) -> str | None:
    """What is reduced once is reduced twice."""
    node, given = site.node, site.operands
    if keeps_shape(node):
        kwargs = {name: arg for name, arg in node.kwargs.items() if name not in ("group", "channel", "work", "strides")}
        first = site.collect(node.op, given[0], site.output.shape, **kwargs)
        site.communicate(node.op, (first,), node.outputs, **kwargs)
        return f"{node.op} is called twice"
    if node.op in _GATHERS | _SCATTERS and given[0].dtype != "bool":
        summed = site.collect("dist.all_reduce", given[0], given[0].shape, reduce="sum")
        site.change([summed])
        return f"dist.all_reduce before {node.op}"
    return None


def replace_collective(site: Site) -> str | None:
    """Another collective of the same shape."""
    node, given = site.node, site.operands
    if not site.group or not given:
        return None
    root = site.random.choice(site.group)
    if node.op == "dist.all_reduce":
        other = site.random.choice(("dist.broadcast", "dist.reduce"))
        kwargs = {"root": root} if other == "dist.broadcast" else {"root": root, **site.reduction}
        site.communicate(other, (given[0],), node.outputs, **kwargs)
        return f"{other} from rank {root} in place of {node.op}"
    if node.op in ("dist.broadcast", "dist.reduce"):
        if given[0].dtype == "bool":
            return None
        site.communicate("dist.all_reduce", (given[0],), node.outputs, **(site.reduction or {"reduce": "sum"}))
        return f"dist.all_reduce in place of {node.op}"
    if node.op in _GATHERS | _SCATTERS:
        sent = site.collect("dist.broadcast", given[0], given[0].shape, root=root)
        if node.op in _GATHERS:
            _repeat(site, sent)
        else:
            _own_part(site, sent)
        return f"dist.broadcast from rank {root} in place of {node.op}"
    return None


# ---------------------------------------------------------------------- reduce operation, group, order
def change_reduction(site: Site) -> str | None:
    now = site.node.kwargs.get("reduce")
    if now not in _REDUCTIONS or site.operands[0].dtype == "bool":
        return None
    choices = [name for name in _REDUCTIONS if name != now and (name != "avg" or site.operands[0].dtype.startswith("float"))]
    chosen = site.random.choice(choices)
    site.change(reduce=chosen)
    return f"{site.node.op} with {chosen} in place of {now}"


def change_group(site: Site) -> str | None:
    """The collective runs among other ranks."""
    node = site.node
    if node.op not in of_share(Share.WHOLE) | _GATHERS | _SCATTERS:
        return None
    partitions = [
        partition
        for partition in _partitions(site.mesh)
        if not any(set(block) == set(site.group) for block in partition)
        and (node.op == "dist.all_reduce" or all(len(block) == len(site.group) for block in partition))
    ]
    if not partitions:
        return None
    partition = site.random.choice(partitions)
    group = next(block for block in partition if site.rank in block)
    root = node.kwargs.get("root")
    if root is not None and root not in group:
        site.change(group=group, root=group[0])
    else:
        site.change(group=group)
    return f"{node.op} among {list(group)} in place of {list(site.group)}"


def _partitions(mesh: Mesh) -> list[list[tuple[int, ...]]]:
    """Ways to cut the ranks into groups: along some axes of the mesh, in halves of those, or each rank alone."""
    found: list[list[tuple[int, ...]]] = []
    for count in range(len(mesh.names) + 1):
        for axes in itertools.combinations(mesh.names, count):
            blocks: dict[tuple[int, ...], list[int]] = {}
            for rank in range(mesh.size):
                place = tuple(index for name, index in mesh.coordinate(rank).items() if name not in axes)
                blocks.setdefault(place, []).append(rank)
            partition = [tuple(block) for block in blocks.values()]
            halves = [part for block in partition for part in (block[: len(block) // 2], block[len(block) // 2 :]) if part]
            found += [p for p in (partition, halves) if p not in found]
    return found


def swap_shards(site: Site) -> str | None:
    """The parts of a tensor in another order: of the ranks, of the pieces that are joined, or of those that are cut."""
    node = site.node
    if node.op in _GATHERS | _SCATTERS | {"dist.reduce_scatter"} and len(site.group) > 1:
        order = list(site.group)
        site.random.shuffle(order)
        if tuple(order) == site.group:
            order.reverse()
        site.change(group=tuple(order))
        return f"{node.op} in the order {order}"
    if site.op in ("aten.cat.default", "aten.stack.default") and isinstance(node.args[0], tuple):
        pieces = list(node.args[0])
        pairs = [(i, j) for i, j in itertools.combinations(range(len(pieces)), 2) if _may_swap(pieces[i], pieces[j])]
        if not pairs:
            return None
        i, j = site.random.choice(pairs)
        pieces[i], pieces[j] = pieces[j], pieces[i]
        site.change([tuple(pieces), *node.args[1:]])
        return f"the pieces {i} and {j} of {node.op} change places"
    if len(node.outputs) > 1 and (node.communicates or "split" in node.op or "unbind" in node.op):
        return _swap_outputs(site)
    return _offsets_of_the_next_rank(site)


def _may_swap(a: object, b: object) -> bool:
    return same_type(a, b) and a is not b


def _swap_outputs(site: Site) -> str | None:
    outputs = site.node.outputs
    pairs = [(i, j) for i, j in itertools.combinations(range(len(outputs)), 2) if same_type(outputs[i], outputs[j])]
    if not pairs:
        return None
    i, j = site.random.choice(pairs)
    site.change()
    site.keep(outputs[j], outputs[i])
    site.keep(outputs[i], outputs[j])
    return f"the results {i} and {j} of {site.node.op} change places"


def _offsets_of_the_next_rank(site: Site) -> str | None:
    mine, its = site.node, site.peer
    if its is None or mine.communicates or mine.op != its.op or len(mine.args) != len(its.args):
        return None
    if [v.shape for v in mine.outputs] != [v.shape for v in its.outputs] or _shapes(mine) != _shapes(its):
        return None
    args = [b if type(a) is int and type(b) is int else a for a, b in zip(mine.args, its.args, strict=True)]
    if args == list(mine.args):
        return None
    site.change(args)
    return f"{mine.op} with the offsets of the next rank"


def _shapes(node: Node) -> list[tuple[int, ...]]:
    return [value.shape for value in node.operands()]


# ---------------------------------------------------------------------- order of operations
def move_across_collective(site: Site) -> str | None:
    """An operation that follows a collective comes before it, or the other way round."""
    return _before(site) if not site.node.communicates else _after(site)


def _before(site: Site) -> str | None:
    node = site.node
    for number, operand in enumerate(node.args):
        collective = site.maker(operand)
        if type(operand) is not Value or collective is None or not collective.communicates or len(node.outputs) != 1:
            continue
        given = next(collective.operands(), None)
        if given is None or len(collective.outputs) != 1 or isinstance(collective.args[0], tuple):
            continue
        moves = is_elementwise(node) or (keeps_shape(collective) and _is_local(node, operand))
        if not moves or site.output.dtype != operand.dtype:
            continue
        early = site.value(given.shape, site.output.dtype)
        site.again(node, [given if i == number else arg for i, arg in enumerate(node.args)], (early,))
        if site.is_used_once(operand):
            site.removed.add(collective)
        _same_communication(site, collective, early)
        return f"{node.op} before {collective.op}"
    return None


def _after(site: Site) -> str | None:
    collective = site.node
    given = collective.args[0] if collective.args else None
    maker = site.maker(given)
    if maker is None or maker.communicates or type(given) is not Value or len(collective.outputs) != 1:
        return None
    for number, operand in enumerate(maker.args):
        if not same_type(operand, given) or not (
            is_elementwise(maker) or (keeps_shape(collective) and _is_local(maker, given) and len(maker.outputs) == 1)
        ):
            continue
        assert type(operand) is Value
        late = site.value(site.output.shape, operand.dtype)
        _same_communication(site, collective, operand, late)
        site.again(maker, [late if i == number else arg for i, arg in enumerate(maker.args)], collective.outputs)
        return f"{maker.op} after {collective.op}"
    return None


def _is_local(node: Node, like: Value) -> bool:
    """Whether the result has the shape of an operand, so that the operation may as well be done before."""
    return node.outputs[0].shape == like.shape and len(node.outputs) == 1 and node.op.startswith("aten.")


def _same_communication(site: Site, collective: Node, operand: Value, output: Value | None = None) -> None:
    kwargs = {name: arg for name, arg in collective.kwargs.items() if name not in ("work", "strides")}
    outputs = site.node.outputs if output is None else (output,)
    site.communicate(collective.op, (operand,), outputs, **kwargs)
