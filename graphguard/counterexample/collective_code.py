"""Collectives as lines of plain torch arithmetic over the variables of all ranks: what the oracle computes, in print."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from graphguard.errors import ReplayError
from graphguard.graph.collectives import COLLECTIVES, Meanings, Share
from graphguard.graph.ir import Node, Value
from graphguard.graph.matching import Match

Names = Mapping[Value, str]
Operands = Mapping[int, Sequence[str]]
Results = dict[int, Sequence[str]]
MEANINGS: Meanings[Callable[[Match, Operands], Results]] = Meanings()


def exchanged(match: Match, names: Names, needed: set[Value]) -> list[str]:
    """Assignments to the outputs that are needed."""
    operands = {rank: [names[value] for value in node.operands()] for rank, node in match.nodes.items()}
    results = MEANINGS[match.op](match, operands)
    lines: list[str] = []
    for rank, expressions in results.items():
        node = match.nodes[rank]
        for value, expression in zip(node.outputs, expressions, strict=True):
            if value in needed:
                same = COLLECTIVES[match.op].share is Share.WHOLE and _shapes(match) == {value.shape}
                lines.append(f"{names[value]} = {expression if same else f'({expression}).reshape({value.shape})'}")
    return _once(lines)


def _once(lines: list[str]) -> list[str]:
    """What several ranks get alike is computed once."""
    first: dict[str, str] = {}
    result = []
    for line in lines:
        name, expression = line.split(" = ", 1)
        result.append(f"{name} = {first[expression]}" if expression in first else line)
        first.setdefault(expression, name)
    return result


def _reduced(match: Match, items: Sequence[str]) -> str:
    if len(_shapes(match)) > 1:
        items = _flat(items)
    match match.any_node.kwargs["reduce"]:
        case "sum":
            return " + ".join(items)
        case "avg":
            total = " + ".join(items)
            if _is_float(match.any_node):
                return f"({total}) / {len(items)}"
            return f"torch.div({total}, {len(items)}, rounding_mode='trunc')"
        case "premul_sum":
            factors = [match.nodes[rank].kwargs["factor"] for rank in match.group]
            return " + ".join(f"{item} * {factor!r}" for item, factor in zip(items, factors, strict=True))
        case "product":
            return " * ".join(items)
        case "min" | "max" as kind:
            text = items[0]
            for item in items[1:]:
                text = f"torch.{kind}imum({text}, {item})"
            return text
        case "band" | "bor" | "bxor" as kind:
            return f" {_BITWISE[kind]} ".join(items)
        case other:
            raise ReplayError(f"unknown reduce operation {other!r}")


_BITWISE = {"band": "&", "bor": "|", "bxor": "^"}


def _is_float(node: Node) -> bool:
    return next(node.operands()).dtype.startswith(("float", "bfloat", "complex"))


def _shapes(match: Match) -> set[tuple[int, ...]]:
    return {operand.shape for node in match.nodes.values() for operand in node.operands()}


def _first(match: Match, operands: Operands) -> list[str]:
    return [operands[rank][0] for rank in match.group]


def _flat(items: Sequence[str]) -> list[str]:
    return [f"{item}.reshape(-1)" for item in items]


@MEANINGS.of("dist.all_reduce")
def _all_reduce(match: Match, operands: Operands) -> Results:
    total = _reduced(match, _first(match, operands))
    return {rank: [total] for rank in match.group}


@MEANINGS.of("dist.reduce")
def _reduce(match: Match, operands: Operands) -> Results:
    total = _reduced(match, _first(match, operands))
    root = match.any_node.kwargs["root"]
    nothing = "float('nan')" if _is_float(match.any_node) else "0"
    return {rank: [total if rank == root else f"torch.full_like({operands[rank][0]}, {nothing})"] for rank in match.group}


@MEANINGS.of("dist.all_gather")
def _all_gather(match: Match, operands: Operands) -> Results:
    return dict.fromkeys(match.group, _first(match, operands))


@MEANINGS.of("dist.all_gather_into_tensor")
def _all_gather_into_tensor(match: Match, operands: Operands) -> Results:
    joined = f"torch.cat([{', '.join(_flat(_first(match, operands)))}])"
    return {rank: [joined] for rank in match.group}


@MEANINGS.of("dist.reduce_scatter")
def _reduce_scatter(match: Match, operands: Operands) -> Results:
    return {rank: [_reduced(match, [operands[r][i] for r in match.group])] for i, rank in enumerate(match.group)}


@MEANINGS.of("dist.reduce_scatter_tensor")
def _reduce_scatter_tensor(match: Match, operands: Operands) -> Results:
    total = _reduced(match, _flat(_first(match, operands)))
    return {rank: [f"({total}).chunk({len(match.group)})[{i}]"] for i, rank in enumerate(match.group)}


@MEANINGS.of("dist.all_to_all")
def _all_to_all(match: Match, operands: Operands) -> Results:
    return {rank: [operands[r][i] for r in match.group] for i, rank in enumerate(match.group)}


@MEANINGS.of("dist.all_to_all_single")
def _all_to_all_single(match: Match, operands: Operands) -> Results:
    splits = {rank: list(match.nodes[rank].kwargs["input_splits"]) for rank in match.group}  # type: ignore[arg-type]
    return {
        rank: [f"torch.cat([{', '.join(_flat([f'{operands[r][0]}.split({splits[r]}, 0)[{i}]' for r in match.group]))}])"]
        for i, rank in enumerate(match.group)
    }


@MEANINGS.of("dist.broadcast")
def _broadcast(match: Match, operands: Operands) -> Results:
    sent = operands[match.any_node.kwargs["root"]][0]  # type: ignore[index]
    return {rank: [sent] for rank in match.group}


@MEANINGS.of("dist.gather")
def _gather(match: Match, operands: Operands) -> Results:
    root = match.any_node.kwargs["root"]
    return {rank: _first(match, operands) if rank == root else [] for rank in match.group}


@MEANINGS.of("dist.scatter")
def _scatter(match: Match, operands: Operands) -> Results:
    sent = operands[match.any_node.kwargs["root"]]  # type: ignore[index]
    return {rank: [piece] for rank, piece in zip(match.group, sent, strict=True)}


@MEANINGS.of("dist.send", "dist.recv")
def _message(match: Match, operands: Operands) -> Results:
    sender, receiver = match.group
    return {sender: [], receiver: [operands[sender][0]]}


@MEANINGS.of("dist.barrier")
def _barrier(match: Match, operands: Operands) -> Results:
    return {rank: [] for rank in match.group}
