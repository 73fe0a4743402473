"""The problem that two programs pose along the path of a sample.

A path is all inputs for which the sequential program decides as it does on the sample. That the ranks decide alike is not
assumed: each decision of a rank is an output that the prover has to show to be a part of a sequential one. What a rank receives
must follow from what the others decide. On such a path the whole numbers are known, and both programs are written for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from graphguard.aten.kernels import constant_of, looks_unwritten
from graphguard.capture.front import Along, Captured, Decision, Problem
from graphguard.errors import InternalError, UsageError
from graphguard.graph.ir import Graph, Node, Value
from graphguard.graph.matching import join
from graphguard.oracle.replay import Run, run, run_joint
from graphguard.oracle.trial import seeded
from graphguard.relation.expectation import Expectation
from graphguard.routes.counterparts import Counterparts, Part
from graphguard.routes.decisions import Decided, Flow, decided_alone, decided_together, determined, name_of_operator
from graphguard.routes.evaluated import is_whole
from graphguard.routes.lowering import lowered
from graphguard.routes.sample import same_on, same_ranks_on

Tensors = Mapping[str, torch.Tensor]
Reads = Sequence[Sequence[Value]]


def along(problem: Problem, reads: Reads, sample: Tensors) -> Problem:
    """The same problem on the path of a sample. reads: by program, the sequential one first, the values that it read."""
    return _Path(problem, reads, sample).problem()


@dataclass
class _Rank:
    """What is known of a rank on the path."""

    decided: Decided
    state: Run
    parts: dict[Value, Part] = field(default_factory=dict)  # its decisions as parts of sequential ones
    known: dict[Value, torch.Tensor] = field(default_factory=dict)


class _Path:
    def __init__(self, problem: Problem, reads: Reads, sample: Tensors):
        self.before, self.raw, self.sample = problem, problem.captured, sample
        self.sequential = self.raw.sequential
        with seeded(0):
            self.state = run(self.sequential, sample, wide=True)
        self.local = [
            _outputs(run(relation, {name: sample[name] for name in relation.inputs}, wide=True))
            for relation in self.raw.relations
        ]
        with seeded(0):
            states = run_joint(self.raw.joint, self.local, wide=True)
        self.mine = decided_alone(self.sequential, reads[0])
        each = decided_together(self.raw.joint, reads[1:])
        self.ranks = [_Rank(decided, state) for decided, state in zip(each, states, strict=True)]
        self.flow = Flow.of(self.sequential)
        self.of_ranks: dict[str, str] = {}
        self.unexplained: dict[str, None] = {}
        self.known: dict[Value, torch.Tensor] = {}

    def problem(self) -> Problem:
        self._match()
        self._follow()
        expected = self._state()
        decisions = self._decisions()
        captured = self._written()
        sample = {name: constant_of(tensor) for name, tensor in self.sample.items()}
        each = [self.known, *(rank.known for rank in self.ranks)]
        deciding = tuple({value: constant_of(tensor) for value, tensor in known.items()} for known in each)
        path = Along(sample, self.raw, decisions, deciding, self.of_ranks, tuple(self.unexplained))
        return replace(self.before, captured=captured, expected={**self.before.expected, **expected}, along=path)

    # ------------------------------------------------------------------ what is known
    def _match(self) -> None:
        """Find what the ranks' decisions are parts of, and which inputs of the sequential program are read."""
        counterparts = Counterparts(self.sequential, self.state.values)
        for number, rank in enumerate(self.ranks):
            flow = Flow.of(rank.state.graph)
            for value in rank.decided.decisions:
                part = counterparts.of(value, flow, rank.state.values)
                if part is None:
                    self._leave_open(number, f"{_words(flow.makers[value])} decides what the sequential program does not")
                else:
                    rank.parts[value] = part
                    self.mine.decisions[part.of] = None
                rank.known[value] = rank.state.values[value]
            for name, value in rank.decided.inputs.items():
                self._input(number, name)
                rank.known[value] = rank.state.values[value]
        for value in (*self.mine.decisions, *self.mine.inputs.values()):
            self.known[value] = self.state.values[value]

    def _input(self, number: int, name: str) -> None:
        """A rank's whole numbers come from those of the sequential program by the input relation alone."""
        relation = self.raw.relations[number]
        needed = {relation.outputs[name]}
        for node in reversed(relation.nodes):
            if any(value in needed for value in node.outputs):
                needed.update(node.operands())
        sources = {source: self.sequential.inputs[source] for source, value in relation.inputs.items() if value in needed}
        self.mine.inputs |= {source: value for source, value in sources.items() if is_whole(value)}
        if not all(map(is_whole, sources.values())):
            self._leave_open(number, f"its input {name} is made of numbers that are not whole")
        if any(node.op == "gg.part" and any(value in needed for value in node.outputs) for node in relation.nodes):
            self._leave_open(number, f"its input {name} is a summand, of which only the sum is known")

    def _follow(self) -> None:
        """What a rank receives is known if all that is sent to it is."""
        known = [set(rank.known) for rank in self.ranks]
        sure = determined(self.raw.joint, known, [rank.decided.received for rank in self.ranks])
        for number, rank in enumerate(self.ranks):
            for value, node in rank.decided.received.items():
                rank.known[value] = rank.state.values[value]
                if value not in sure[number] or looks_unwritten(rank.known[value]):
                    self._leave_open(number, f"what it receives from {_words(node)} does not follow from what is decided")

    def _leave_open(self, rank: int, why: str) -> None:
        self.unexplained[f"rank {rank}: {why}"] = None

    # ------------------------------------------------------------------ what is to be shown
    def _state(self) -> dict[str, Expectation]:
        """Every decision of a rank as an output, and what is expected of it."""
        size, mesh = len(self.ranks), self.before.mesh
        names = self._names()
        graphs: dict[str, list[Graph | None]] = {}
        wholes: dict[str, Value] = {}
        for number, rank in enumerate(self.ranks):
            turns: dict[Value, int] = {}
            for value, part in rank.parts.items():
                turn = turns[part.of] = turns.get(part.of, -1) + 1  # recomputation and microbatches repeat them
                path = names[part.of] if turn == 0 else f"{names[part.of]}, time {turn + 1}"
                if path in self.sequential.outputs:
                    raise UsageError(f"an output is named {path!r}, as a decision is; give it another name")
                rank.state.graph.outputs[path] = value
                wholes[path] = part.of
                graphs.setdefault(path, [None] * size)[number] = part.graph(number, mesh)
        self.sequential.outputs |= wholes
        self.of_ranks = {path: _words(self.flow.makers[value]) for path, value in wholes.items()}
        text = "the part that the rank has rows of"
        return {path: Expectation(text, graphs=tuple(each)) for path, each in graphs.items()}

    def _names(self) -> dict[Value, str]:
        """The outputs that are decisions: `what topk at moe.py:318 decides`."""
        names: dict[Value, str] = {}
        for value in self.mine.decisions:
            name = f"what {_words(self.flow.makers[value])} decides"
            again = sum(each.split(" (")[0] == name for each in names.values())
            names[value] = f"{name} ({again + 1})" if again else name
        return names

    def _decisions(self) -> tuple[Decision, ...]:
        made = [Decision(_words(self.flow.makers[v]), constant_of(self.state.values[v])) for v in self.mine.decisions]
        given = [Decision(f"the input {name}", constant_of(self.sample[name])) for name in self.mine.inputs]
        return (*given, *made)

    # ------------------------------------------------------------------ the graphs
    def _written(self) -> Captured:
        """Both programs for this path, and compared on the sample with what was recorded."""
        sequential = lowered(self.sequential, self.known)
        ranks = [lowered(rank.state.graph, rank.known) for rank in self.ranks]
        made = [
            (self.sequential, sequential),
            *((rank.state.graph, graph) for rank, graph in zip(self.ranks, ranks, strict=True)),
        ]
        for raw, graph in made:
            self._require_decisions(raw, graph)
        joint = join(ranks)
        if not same_on(self.sequential, sequential, self.sample) or not same_ranks_on(self.raw.joint, joint, self.local):
            raise InternalError("a program written for its path computes other numbers than it does; please report it")
        return replace(self.raw, sequential=sequential, ranks=ranks, joint=joint)

    def _require_decisions(self, raw: Graph, made: Graph) -> None:
        """A decision that is taken for a constant would be related to anything."""
        makers = {value: node for node in made.nodes for value in node.outputs}
        for path in self.of_ranks:
            value = raw.outputs.get(path)
            if value is not None and (made.outputs.get(path) is not value or value not in makers):
                raise InternalError(f"{path}: once a program is written for its path, this is a constant; please report it")


def _outputs(state: Run) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in state.outputs().items() if tensor is not None}


def _words(node: Node) -> str:
    return f"{name_of_operator(node.op)} at {node.source}" if node.source is not None else name_of_operator(node.op)
