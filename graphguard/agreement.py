"""Whether two ranks mean the same communication: one small rule per operator, each giving the words for what differs."""

from __future__ import annotations

import math
from collections.abc import Callable

from graphguard.ir import Node, Value

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
        if text is None and node.op in _RULES:
            sides = (group.index(rank), node), (group.index(other), its)
            text = _RULES[node.op](*sides) or _RULES[node.op](*reversed(sides))
    if text is not None:
        return "collective-mismatch", text
    if node.kwargs.get("strides") != its.kwargs.get("strides") or ("strides" in node.kwargs and _shape(node) != _shape(its)):
        return "strided-buffer", "the memory of their tensors is laid out differently; use `.contiguous()`"
    return None


def pairwise(node: Node) -> bool:
    """Whether a rank must be compared with every other: what one sends is what the other expects. Where all do the same, to
    agree with one is to agree with all."""
    return node.op in _PAIRWISE


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
    count, inputs, outputs = len(group), list(node.operands()), node.outputs
    match node.op:
        case "dist.all_gather" if len(outputs) != count:
            return f"{len(outputs)} output tensors for {count} ranks"
        case "dist.all_gather_into_tensor" if not _is_times(outputs[0], count, inputs[0]):
            return f"{inputs[0].type} from each of {count} ranks does not fill {outputs[0].type}"
        case "dist.reduce_scatter" if len(inputs) != count:
            return f"{len(inputs)} input tensors for {count} ranks"
        case "dist.reduce_scatter_tensor" if not _is_times(inputs[0], count, outputs[0]):
            return f"{inputs[0].type} is not {count} times {outputs[0].type}"
        case "dist.all_to_all" if len(inputs) != count or len(outputs) != count:
            return f"{len(inputs)} input and {len(outputs)} output tensors for {count} ranks"
        case "dist.all_to_all_single" if text := _splits("input", node, count) or _splits("output", node, count):
            return text
        case "dist.gather" if outputs and len(outputs) != count:
            return f"{len(outputs)} output tensors for {count} ranks"
        case "dist.scatter" if inputs and len(inputs) != count:
            return f"{len(inputs)} input tensors for {count} ranks"
    own = (group.index(rank), node)
    return _RULES[node.op](own, own) if node.op in _RULES else None  # what a rank sends to itself


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


def _all_gather(a: Side, b: Side) -> str | None:
    return _fits(next(a[1].operands()), a[1], b[1].outputs[a[0]], b[1])


def _reduce_scatter(a: Side, b: Side) -> str | None:
    return _fits(list(a[1].operands())[b[0]], a[1], b[1].outputs[0], b[1])


def _all_to_all(a: Side, b: Side) -> str | None:
    return _fits(list(a[1].operands())[b[0]], a[1], b[1].outputs[a[0]], b[1])


def _all_to_all_single(a: Side, b: Side) -> str | None:
    sent, received = next(a[1].operands()), b[1].outputs[0]
    rows: int = a[1].kwargs["input_splits"][b[0]]  # type: ignore[index, assignment]
    expected: int = b[1].kwargs["output_splits"][a[0]]  # type: ignore[index, assignment]
    if sent.dtype != received.dtype or rows * math.prod(sent.shape[1:]) != expected * math.prod(received.shape[1:]):
        if rows != expected:
            return f"{rows} rows are sent where {expected} are expected"
        return f"rows of {sent.type} are sent where rows of {received.type} are expected"
    return None


def _gather(a: Side, b: Side) -> str | None:
    return _fits(next(a[1].operands()), a[1], b[1].outputs[a[0]], b[1]) if b[1].outputs else _same_dtype(a, b)


def _scatter(a: Side, b: Side) -> str | None:
    pieces = list(a[1].operands())
    return _fits(pieces[b[0]], a[1], b[1].outputs[0], b[1]) if pieces else None


def _same_dtype(a: Side, b: Side) -> str | None:
    mine, its = next(a[1].operands()), next(b[1].operands())
    return None if mine.dtype == its.dtype else f"{mine.type} against {its.type}"


_RULES: dict[str, Callable[[Side, Side], str | None]] = {
    "dist.all_reduce": _same_input,
    "dist.reduce": _same_input,
    "dist.broadcast": _same_input,
    "dist.all_gather": _all_gather,
    "dist.all_gather_into_tensor": _same_input,
    "dist.reduce_scatter": _reduce_scatter,
    "dist.reduce_scatter_tensor": _same_input,
    "dist.all_to_all": _all_to_all,
    "dist.all_to_all_single": _all_to_all_single,
    "dist.gather": _gather,
    "dist.scatter": _scatter,
}
_PAIRWISE = {"dist.send", "dist.recv", "dist.all_gather", "dist.reduce_scatter", "dist.all_to_all", "dist.all_to_all_single",
             "dist.gather", "dist.scatter"}  # fmt: skip
