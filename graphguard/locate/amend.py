"""A small change of the ranks' programs, made in their graphs, so that the proof can be run again with it.

`repair.py` sees in an execution which changes make all outputs right; here they are made. A repair is only told where
the changed programs are proved.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from graphguard.graph.collectives import WAIT
from graphguard.graph.ir import Arg, Graph, Mesh, Node, Value
from graphguard.graph.matching import Joint, join
from graphguard.graph.operators import name_of
from graphguard.graph.prune import prune
from graphguard.oracle.grid import Grid

LEFT_OUT, TIMES, SUMMED, AVERAGED, REGROUPED = "left out", "times", "summed", "averaged", "regrouped"


@dataclass(frozen=True)
class Amend:
    """What is done with the results of an operation, each time that a rank runs it.

    written: the program has the operation; else autograd runs it for the gradient of its line.
    turns: by rank, which times that it runs such an operation on that line are meant.
    """

    node: Node
    what: str
    written: bool
    factor: Fraction = Fraction(1)
    axes: tuple[int, ...] = ()
    turns: frozenset[tuple[int, int]] = frozenset()

    def told(self, mesh: Mesh) -> str:
        """As code, or as near to it as can be said."""
        line = self.node.source
        assert line is not None
        code = linecache.getline(line.file, line.line).strip()
        if self.what == LEFT_OUT and self.node.communicates:
            return f"leave out `{code}` ({line})"
        if self.what == LEFT_OUT:
            word = "division" if name_of(self.node.op) == "div" else "multiplication"
            return f"leave out the {word} in `{code}` ({line})"
        if self.what == REGROUPED:
            where = "all ranks" if not _group(self.axes, mesh) else " and ".join(mesh.names[axis] for axis in self.axes)
            return f"reduce over {where} in `{code}` ({line})"
        subject = f"the result of {line}" if self.written else f"the gradient that comes of {line}"
        if self.what == TIMES:
            inverse = self.factor.numerator == 1
            return (
                f"{f'divide {subject} by {1 / self.factor}' if inverse else f'multiply {subject} by {self.factor}'}: `{code}`"
            )
        name = _name(code) if self.written else None
        if name is None:
            verb = "average" if self.what == AVERAGED else "sum"
            return f"{verb} {subject} over {' and '.join(mesh.names[axis] for axis in self.axes)}"
        return f"insert `dist.all_reduce({name}{_group(self.axes, mesh)}{_op(self.what)})` after {line}"


def _name(code: str) -> str | None:
    """The variable that a line gives a value to."""
    found = re.match(r"(\w+)\s*[-+*/]?=[^=]", code)
    return found[1] if found else None


def _group(axes: Sequence[int], mesh: Mesh) -> str:
    if len(axes) == sum(size > 1 for size in mesh.shape):
        return ""
    return f", group={'_'.join(mesh.names[axis] for axis in axes)}"


def _op(what: str) -> str:
    return ", op=dist.ReduceOp.AVG" if what == AVERAGED else ""


def amended(joint: Joint, amend: Amend, mesh: Mesh) -> Joint | None:
    """The ranks with the change; None where it cannot be made."""
    graphs = [_Writer(graph, rank, amend, mesh).run() for rank, graph in enumerate(joint.graphs)]
    if any(graph is None for graph in graphs):
        return None
    found = join([graph for graph in graphs if graph is not None])
    return None if found.findings else found


class _Writer:
    """Writes one rank's program anew."""

    def __init__(self, graph: Graph, rank: int, amend: Amend, mesh: Mesh):
        self.graph, self.rank, self.amend, self.mesh = graph, rank, amend, mesh
        self.names: dict[Value, Value] = {}
        self.turn = 0
        self.nodes: list[Node] = []
        self.dropped: set[Arg] = set()  # numbers of work that is left out
        self.waiting: dict[Arg, Value] = {}  # by number of work, what is changed when it is done
        self.fresh = 1 + max((value.id for value in graph.values()), default=0)
        works = [node.kwargs.get("work") for node in graph.nodes if node.communicates]
        self.work = 1 + max((work for work in works if isinstance(work, int)), default=0)

    def run(self) -> Graph | None:
        for node in self.graph.nodes:
            if not self._is_meant(node):
                self._pass_on(node)
            elif self.amend.what != LEFT_OUT:
                self._after(node)
            elif not self._leave_out(node):
                return None
        outputs = {path: None if v is None else self.names.get(v, v) for path, v in self.graph.outputs.items()}
        changed = replace(self.graph, nodes=self.nodes, outputs=outputs)
        prune(changed)
        return changed

    def _is_meant(self, node: Node) -> bool:
        meant = self.amend.node
        if (node.op, node.source, node.backward) != (meant.op, meant.source, meant.backward):
            return False
        self.turn += 1
        return (self.rank, self.turn - 1) in self.amend.turns

    def _pass_on(self, node: Node) -> None:
        if node.op == WAIT and node.kwargs.get("work") in self.dropped:
            return
        self.nodes.append(_renamed(node, self.names))
        if node.op == WAIT and node.kwargs.get("work") in self.waiting:
            self._change(self.waiting.pop(node.kwargs["work"]), node)

    def _leave_out(self, node: Node) -> bool:
        output = node.outputs[0]
        alike = [v for v in node.operands() if (v.shape, v.dtype) == (output.shape, output.dtype)]
        if not alike or len(node.outputs) != 1:
            return False
        self.names[output] = self.names.get(alike[0], alike[0])
        self.dropped.add(node.kwargs.get("work"))
        return True

    def _after(self, node: Node) -> None:
        if self.amend.what == REGROUPED:
            group = Grid(self.mesh, tuple(range(self.mesh.size))).lanes_over(self.amend.axes, self.rank)
            its = _renamed(node, self.names)
            kwargs = {**its.kwargs, "group": tuple(group)}
            self.nodes.append(Node(its.op, its.args, kwargs, its.outputs, its.source, its.backward, its.writes))
            return
        self.nodes.append(_renamed(node, self.names))
        if node.communicates and "work" in node.kwargs:
            self.waiting[node.kwargs["work"]] = node.outputs[0]
        else:
            self._change(node.outputs[0], node)

    def _change(self, value: Value, node: Node) -> None:
        result = value
        for op, args, kwargs in self._steps():
            made = Value(self.fresh, value.shape, value.dtype)
            self.fresh += 1
            self.nodes.append(Node(op, (result, *args), kwargs, (made,), self.amend.node.source, self.amend.node.backward))
            if op.startswith("dist."):
                self.nodes.append(Node(WAIT, (), {"work": kwargs["work"]}, (), node.source, node.backward))
            result = made
        self.names[value] = result

    def _steps(self) -> Iterator[tuple[str, tuple[Arg, ...], dict[str, Arg]]]:
        if self.amend.what == TIMES:
            if self.amend.factor.numerator != 1:
                yield "aten.mul.Scalar", (self.amend.factor.numerator,), {}
            if self.amend.factor.denominator != 1:
                yield "aten.div.Scalar", (self.amend.factor.denominator,), {}
            return
        group = Grid(self.mesh, tuple(range(self.mesh.size))).lanes_over(self.amend.axes, self.rank)
        self.work += 1
        reduce = "avg" if self.amend.what == AVERAGED else "sum"
        yield "dist.all_reduce", (), {"group": tuple(group), "reduce": reduce, "work": self.work}


def _renamed(node: Node, names: dict[Value, Value]) -> Node:
    if not any(value in names for value in node.operands()):
        return node

    def put(arg: Arg) -> Arg:
        if type(arg) is Value:
            return names.get(arg, arg)
        return tuple(map(put, arg)) if type(arg) is tuple else arg

    args, kwargs = tuple(map(put, node.args)), {key: put(arg) for key, arg in node.kwargs.items()}
    return Node(node.op, args, kwargs, node.outputs, node.source, node.backward, node.writes)
