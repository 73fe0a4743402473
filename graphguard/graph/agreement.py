"""Whether two ranks mean the same communication: small rules by the operator's row, each giving the words for what differs."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable

from graphguard.graph.collectives import COLLECTIVES, Count, Share
from graphguard.graph.ir import Node, Value

Side = tuple[int, Node]  # position in the group, node
ONE_ORDER = "every rank makes every group, also those that it is not in, and all in one order"


def disagreement(group: tuple[int, ...], rank: int, node: Node, other: int, its: Node) -> tuple[str, str] | None:
    """The kind of finding and its words, or None where the two ranks agree."""
    if {node.op, its.op} == {"dist.send", "dist.recv"}:
        text = _message(node, its)
    elif called(node) != called(its):
        text = f"{called(node)} against {called(its)}"
    else:
        text = _attributes(node, its)
        if text is None and (rule := _rule(node)) is not None:
            sides = (group.index(rank), node), (group.index(other), its)
            text = rule(*sides) or rule(*reversed(sides))
    if text is not None:
        return "collective-mismatch", text
    if node.kwargs.get("strides") != its.kwargs.get("strides") or ("strides" in node.kwargs and _shape(node) != _shape(its)):
        return "strided-buffer", "the memory of their tensors is laid out differently; use `.contiguous()`"
    return None


def pairwise(node: Node) -> bool:
    """Whether a rank must be compared with every other, not with one of them."""
    row = COLLECTIVES.get(node.op)
    return row is not None and row.pairwise


def form(node: Node) -> Hashable | None:
    """All that others see of a call, if they see the same wherever they stand in the group; None if each sees something of
    its own, as where the parts for different ranks are unlike."""
    operands, outputs = list(node.operands()), node.outputs
    if any(len({value.type for value in values}) > 1 for values in (operands, outputs)):
        return None
    splits = [node.kwargs.get(f"{side}_splits") for side in ("input", "output")]
    if any(len(set(each)) > 1 for each in splits if each is not None):  # type: ignore[arg-type]
        return None
    types = tuple((len(values), values[0].type if values else "") for values in (operands, outputs))
    rest = tuple((name, node.kwargs.get(name)) for name in ("reduce", "root", "strides"))
    return node.op, called(node), types, tuple(each and each[:1] for each in splits), rest  # type: ignore[index]


def other_members(node: Node, its: Node) -> str:
    """The words for two groups that are made under one name."""
    return f"a group of ranks {_ranks(node)} against one of ranks {_ranks(its)}; {ONE_ORDER}"


def _ranks(node: Node) -> list[int]:
    return list(node.kwargs["group"])  # type: ignore[arg-type]


def _shape(node: Node) -> tuple[int, ...]:
    """The shape of the buffer of an elementwise communication."""
    return node.outputs[0].shape if node.outputs else next(node.operands()).shape


def called(node: Node) -> str:
    """What the program called: object collectives are barriers in the graph."""
    return str(node.kwargs.get("objects", node.op))


def inconsistency(group: tuple[int, ...], rank: int, node: Node) -> str | None:
    """What is wrong with one rank's call in itself, whatever the others do."""
    text = _miscounted(len(group), node) or _missized(len(group), node)
    if text is None and (rule := _rule(node)) is not None:
        own = (group.index(rank), node)
        text = rule(own, own)  # what a rank sends to itself
    return text


def _miscounted(count: int, node: Node) -> str | None:
    """Lists have one tensor for each rank; where only the root needs one, there may be none."""
    row = COLLECTIVES[node.op]
    if not (row.reads.is_list or row.fills.is_list):
        return None
    given = (row.reads, sum(1 for _ in node.operands()), "input"), (row.fills, len(node.outputs), "output")
    lists = [each for each in given if each[0].is_list]
    if all(has == count or (has == 0 and tensors is Count.PER_RANK_AT_ROOT) for tensors, has, _ in lists):
        return None
    return f"{' and '.join(f'{has} {name}' for _, has, name in lists)} tensors for {count} ranks"


def _missized(count: int, node: Node) -> str | None:
    share = COLLECTIVES[node.op].share
    if share is None:
        return None
    read, filled = next(node.operands()), node.outputs[0]
    match share:
        case Share.WHOLE if not _as_many(read, filled):
            return f"{read.type} does not fill {filled.type}"
        case Share.GATHERED if not _is_times(filled, count, read):
            return f"{read.type} from each of {count} ranks does not fill {filled.type}"
        case Share.SCATTERED if not _is_times(read, count, filled):
            return f"{read.type} is not {count} times {filled.type}"
        case Share.SPLIT:
            return _splits("input", node, count) or _splits("output", node, count)
    return None


def _is_times(whole: Value, count: int, part: Value) -> bool:
    return whole.dtype == part.dtype and whole.numel == count * part.numel


def _splits(side: str, node: Node, count: int) -> str | None:
    tensor = next(node.operands()) if side == "input" else node.outputs[0]
    splits: tuple[int, ...] = node.kwargs[f"{side}_splits"]  # type: ignore[assignment]
    if len(splits) != count or not tensor.shape or sum(splits) != tensor.shape[0]:
        return f"{side} splits {list(splits)} do not cut {tensor.type} into {count} parts"
    return None


def _attributes(node: Node, its: Node) -> str | None:
    for name, words in (("reduce", "reduce operation"), ("root", "root rank")):
        if node.kwargs.get(name) != its.kwargs.get(name):
            return f"{words} {node.kwargs.get(name)} against {its.kwargs.get(name)}"
    return None


def _message(node: Node, its: Node) -> str | None:
    sender, receiver = (node, its) if node.op == "dist.send" else (its, node)
    sent, expected = next(sender.operands()), receiver.outputs[0]
    if sent.dtype != expected.dtype or sent.numel != expected.numel:
        return f"{sent.type} is sent where {expected.type} is expected"
    return None


def _rule(node: Node) -> Callable[[Side, Side], str | None] | None:
    """What to ask of a rank that sends and one that receives, either of which may be the other, or both the same."""
    row = COLLECTIVES.get(node.op)
    if row is None or row.reads is Count.NONE or row.is_message:
        return None
    if row.share is Share.SPLIT:
        return _rows
    return _piece if row.pairwise else _same_input


def _same_input(a: Side, b: Side) -> str | None:
    """Backends send memory, and look at no shape of another rank: as many elements of one dtype will do."""
    mine, its = next(a[1].operands()), next(b[1].operands())
    return None if _as_many(mine, its) else f"{mine.type} against {its.type}"


def _as_many(a: Value, b: Value) -> bool:
    return a.dtype == b.dtype and a.numel == b.numel


def _fits(sent: Value, a: Node, received: Value, b: Node) -> str | None:
    """What one rank sends is what another one expects: the same type, or as much memory if neither rank's own tensors differ
    in shape, which gloo refuses. Of those, backends take lists of different shapes only if they are exactly right."""
    if sent.type == received.type or (a is not b and _as_many(sent, received) and _is_uniform(a) and _is_uniform(b)):
        return None
    return f"{sent.type} is sent where {received.type} is expected"


def _is_uniform(node: Node) -> bool:
    return len({value.shape for value in (*node.operands(), *node.outputs)}) == 1


def _piece(a: Side, b: Side) -> str | None:
    """The one tensor that a rank has for all, or that of its list that is for the other; and so for what is filled."""
    row, pieces, places = COLLECTIVES[a[1].op], list(a[1].operands()), b[1].outputs
    if not pieces:
        return None  # only the root sends
    if not places:  # only the root receives
        its = next(b[1].operands())
        return None if pieces[0].dtype == its.dtype else f"{pieces[0].type} against {its.type}"
    sent, received = pieces[b[0] if row.reads.is_list else 0], places[a[0] if row.fills.is_list else 0]
    return _fits(sent, a[1], received, b[1])


def _rows(a: Side, b: Side) -> str | None:
    sent, received = next(a[1].operands()), b[1].outputs[0]
    rows: int = a[1].kwargs["input_splits"][b[0]]  # type: ignore[index, assignment]
    expected: int = b[1].kwargs["output_splits"][a[0]]  # type: ignore[index, assignment]
    if sent.dtype != received.dtype or rows * math.prod(sent.shape[1:]) != expected * math.prod(received.shape[1:]):
        if rows != expected:
            return f"{rows} rows are sent where {expected} are expected"
        return f"rows of {sent.type} are sent where rows of {received.type} are expected"
    return None
