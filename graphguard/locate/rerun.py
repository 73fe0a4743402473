"""What the ranks compute if something in their programs is changed: only what comes after the change is run again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from graphguard.aten.kernels import Kernels
from graphguard.errors import ReplayError
from graphguard.graph.ir import Node, Value
from graphguard.graph.matching import Joint
from graphguard.oracle.collectives import exchange
from graphguard.oracle.replay import Run

At = tuple[int, Value]  # a rank, and a tensor of its program


class Made(NamedTuple):
    """A tensor as its operation makes it, before any change."""

    at: At


Key = At | Made


class Change(NamedTuple):
    """What a tensor becomes. needs: what that is computed from, `Made` ones as they were before the change."""

    needs: Sequence[Key]
    result: Callable[[Callable[[Key], torch.Tensor]], torch.Tensor]


Edit = Mapping[At, Change]


class CircleError(Exception):
    """A change that needs what comes of it."""


class Rerun:
    """The values of all ranks, as they were run, and what they become by a change."""

    def __init__(self, joint: Joint, states: Sequence[Run], kernels: Kernels):
        self.joint, self.kernels = joint, kernels
        self.values: dict[At, torch.Tensor] = {(r, v): t for r, state in enumerate(states) for v, t in state.values.items()}
        self.makers: dict[At, Node] = {(r, v): n for r, g in enumerate(joint.graphs) for n in g.nodes for v in n.outputs}
        self.users: dict[At, list[tuple[int, Node]]] = {}
        for rank, graph in enumerate(joint.graphs):
            for node in graph.nodes:
                for value in node.operands():
                    self.users.setdefault((rank, value), []).append((rank, node))
        self.steps = 0  # operations that were run
        self._operands: dict[tuple[int, Node], list[At]] = {}

    # ------------------------------------------------------------------ what depends on what
    def operands(self, rank: int, node: Node) -> list[At]:
        known = self._operands.get((rank, node))
        if known is None:
            known = self._operands[rank, node] = self._read_by(rank, node)
        return known

    def _read_by(self, rank: int, node: Node) -> list[At]:
        if not node.communicates:
            return [(rank, value) for value in node.operands()]
        match = self.joint.match_of(rank, node)
        return [(other, value) for other, each in match.nodes.items() for value in each.operands()]

    def results(self, rank: int, node: Node) -> list[At]:
        if not node.communicates or node.op == "dist.wait":
            return [(rank, value) for value in node.outputs]
        match = self.joint.match_of(rank, node)
        return [(other, value) for other, each in match.nodes.items() for value in each.outputs]

    def before(self, ends: Iterable[At]) -> set[At]:
        """All that some tensors are made from, and they themselves."""
        return _reached(ends, lambda at: self.operands(at[0], self.makers[at]) if at in self.makers else ())

    def leading_to(self, ends: Sequence[Iterable[At]]) -> dict[At, int]:
        """Of each tensor, to which of several ends it leads: one bit for each."""
        found: dict[At, int] = {}
        for number, each in enumerate(ends):
            for at in each:
                found[at] = found.get(at, 0) | 1 << number
        for at in reversed(self._in_order(found)):  # users come before what they use
            for operand in self.operands(at[0], self.makers[at]) if at in self.makers else ():
                found[operand] = found.get(operand, 0) | found[at]
        return found

    def _in_order(self, ends: Iterable[At]) -> list[At]:
        """All that some tensors are made from, each after what it is made from."""
        order: dict[At, None] = {}
        seen: set[At] = set()
        stack = [(at, False) for at in ends]
        while stack:
            at, done = stack.pop()
            if done:
                order[at] = None
            elif at not in seen:
                seen.add(at)
                stack.append((at, True))
                stack += [(each, False) for each in (self.operands(at[0], self.makers[at]) if at in self.makers else ())]
        return list(order)

    def after(self, begins: Iterable[At]) -> set[At]:
        """All that is made from some tensors, and they themselves."""
        return _reached(begins, lambda at: [made for each in self.users.get(at, ()) for made in self.results(*each)])

    def changed(self, edit: Edit, dirty: set[At] | None = None) -> Changed:
        """dirty: what is computed anew where it is asked for; all that comes after the change, if it is not given."""
        return Changed(self, edit, self.after(edit) if dirty is None else dirty)


class Changed:
    """The ranks' tensors after a change, each computed when it is first asked for."""

    def __init__(self, rerun: Rerun, edit: Edit, dirty: set[At]):
        self.rerun, self.edit, self.dirty = rerun, edit, dirty
        self._done: dict[Key, torch.Tensor] = {}

    def __getitem__(self, end: At) -> torch.Tensor:
        stack: list[Key] = [end]
        waiting: set[Key] = set()
        while stack:
            key = stack[-1]
            missing = [each for each in self._needs(key) if self._is_open(each)] if self._is_open(key) else []
            if missing:
                if key in waiting:
                    raise CircleError
                waiting.add(key)
                stack += missing
                continue
            stack.pop()
            if self._is_open(key):
                self._settle(key)
        return self._get(end)

    def _is_open(self, key: Key) -> bool:
        return key not in self._done and (key.at if isinstance(key, Made) else key) in self.dirty

    def _needs(self, key: Key) -> Sequence[Key]:
        if isinstance(key, Made):
            maker = self.rerun.makers.get(key.at)
            return () if maker is None else self.rerun.operands(key.at[0], maker)
        return self.edit[key].needs if key in self.edit else (Made(key),)

    def _get(self, key: Key) -> torch.Tensor:
        if key in self._done:
            return self._done[key]
        return self.rerun.values[key.at if isinstance(key, Made) else key]

    def _settle(self, key: Key) -> None:
        if isinstance(key, Made):
            self._run(key.at)
        else:
            self._done[key] = self.edit[key].result(self._get) if key in self.edit else self._get(Made(key))

    def _run(self, at: At) -> None:
        """Run the operation that makes a tensor. What it reads may have another shape than in the program."""
        rank, node = at[0], self.rerun.makers.get(at)
        self.rerun.steps += 1
        if node is None:
            self._done[Made(at)] = self.rerun.values[at]
            return
        if minds_shapes(node) and any(self._get((rank, value)).shape != value.shape for value in node.operands()):
            raise ReplayError(f"{node} would be given a tensor of another shape")
        try:
            made = self._exchanged(rank, node) if node.communicates else self._computed(rank, node)
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            raise ReplayError(f"{node} failed: {error}") from error
        self._done.update((Made(each), tensor) for each, tensor in made)

    def _exchanged(self, rank: int, node: Node) -> list[tuple[At, torch.Tensor]]:
        match = self.rerun.joint.match_of(rank, node)
        given = {other: [self._get((other, v)) for v in each.operands()] for other, each in match.nodes.items()}
        return [
            ((other, value), result.reshape(value.shape))
            for other, results in exchange(match, given).items()
            for value, result in zip(match.nodes[other].outputs, results, strict=True)
        ]

    def _computed(self, rank: int, node: Node) -> list[tuple[At, torch.Tensor]]:
        results = self.rerun.kernels.run(node, lambda value: self._get((rank, value)))
        return [((rank, value), result) for value, result in zip(node.outputs, results, strict=False)]


def minds_shapes(node: Node) -> bool:
    """Whether an operation fills a tensor whose shape it is given, which torch would resize, and say so on stderr; or has a
    kernel that ends the process where the shapes of what it is given do not fit."""
    return bool(node.writes) or "backward" in node.op or node.op.startswith("aten._scaled_dot_product_")


def _reached(starts: Iterable[At], neighbours: Callable[[At], Iterable[At]]) -> set[At]:
    found: set[At] = set()
    pending = list(starts)
    while pending:
        at = pending.pop()
        if at not in found:
            found.add(at)
            pending += neighbours(at)
    return found
