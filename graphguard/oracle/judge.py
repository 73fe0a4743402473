"""The numeric judge: runs both programs on random inputs, and says whether the ranks' outputs are what they should be.

It proves nothing. `different` means that concrete numbers were seen that no clean relation, or not the stated one, explains.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from graphguard.counterexample import Counterexample
from graphguard.engine.proof import Relation
from graphguard.errors import ReplayError
from graphguard.expectation import Expectation
from graphguard.ir import Graph, Mesh
from graphguard.joint import Joint
from graphguard.lines import OwnLines, helpers_of
from graphguard.oracle import draws
from graphguard.oracle.budget import affordable, cost
from graphguard.oracle.draws import Given, Ranges, Regime
from graphguard.oracle.indexed import Indexed, indexed
from graphguard.oracle.mend import Mend, mends_of
from graphguard.oracle.outcome import Outcome, Output
from graphguard.oracle.parting import parting_of
from graphguard.oracle.repair import Repairs, Tried, tried
from graphguard.oracle.script import script_of
from graphguard.oracle.shrinking import Difference, shrunk
from graphguard.oracle.shrunk import Shrunk
from graphguard.oracle.slice import Programs, sliced
from graphguard.oracle.suspects import Suspects, suspects_of
from graphguard.oracle.trial import Trial, UndefinedError, execute
from graphguard.oracle.watch import Tell, Watch
from graphguard.oracle.way import Way, way_of

TRIALS = 3
_FURTHER = (Regime(1.0, positive=True), Regime(0.1), Regime(0.1, positive=True))  # where nothing was defined so far
_OTHER_SCALES = (Regime(8.0), Regime(0.125), Regime(64.0))  # where there is no proof and no difference: clips may be inactive
_SECONDS_TO_SHRINK, _PER_RUN = 0.25, 5e-3  # a counterexample, as estimated, and what any run takes
_MOST_HINTS = 16  # outputs that are looked at for what was meant
_MOST_PARTS = 64  # outputs that are looked at one by one, where all are too many
_NARROWER = (8, 4, 2, 1)  # ranges for integers that index in ways that nothing is known of


@dataclass(frozen=True)
class Judgement:
    """different: numbers were seen that nothing explains; the first of them is the counterexample.

    kinds: by output that differs, the kind of finding that suits it.
    conjecture: by output that does not, the relation that the numbers suggest.
    undecided: outputs of which nothing could be said, and why.
    contradicted: outputs whose proved relation the numbers do not show.
    skipped: why nothing was executed. left_out: why only a part was.
    hints: what may have been meant by outputs that differ.
    orders: by output that differs, who holds which slices, where all are there in another order.
    repairs: changes that were tried, and that make all outputs right.
    way: the operation that is wrong first on the way to an output.
    mends: other operations that were tried, where neither of these explains it, and that make all outputs right.
    helpers: functions that the ranks call from several lines, as file and name.
    shared: lines that the sequential program runs, as file and number.
    """

    different: bool = False
    counterexample: Counterexample | None = None
    conjecture: dict[str, str] = field(default_factory=dict)
    skipped: str | None = None
    trials: int = 0
    seconds: float = 0.0
    kinds: dict[str, str] = field(default_factory=dict)
    undecided: dict[str, str] = field(default_factory=dict)
    contradicted: tuple[str, ...] = ()
    left_out: str | None = None
    hints: tuple[str, ...] = ()
    orders: dict[str, str] = field(default_factory=dict)
    repairs: tuple[Tried, ...] = ()
    way: Way | None = None
    mends: tuple[Mend, ...] = ()
    helpers: frozenset[tuple[str, str]] = frozenset()
    shared: frozenset[tuple[str, int]] = frozenset()


class Found(NamedTuple):
    """What an execution shows of outputs that differ."""

    example: Counterexample | None = None
    repairs: tuple[Tried, ...] = ()
    way: Way | None = None
    mends: tuple[Mend, ...] = ()


def judge(
    sequential: Graph,
    joint: Joint,
    relations: Sequence[Graph],
    expected: Mapping[str, Expectation],
    ranges: Ranges,
    *,
    trials: int | None = None,
    seed: int = 0,
    proved: Mapping[str, Relation] | None = None,
    progress: Tell | None = None,
    small: bool = True,
) -> Judgement:
    """Execute both programs and look at every output. Of outputs in `proved` only that relation is evaluated.

    small: whether time is spent on making a counterexample small.
    progress: told how many operations of how many were run, where that takes longer than a second.
    """
    begun = time.perf_counter()
    if joint.findings:
        return Judgement(skipped="the ranks' communication does not fit together")
    if trials == 0:
        return Judgement(skipped="trials=0 was asked for")
    programs, left_out = Programs(sequential, joint, relations), None
    count, reason = affordable(programs.graphs, TRIALS if trials is None else trials)
    if reason is not None:
        part = _affordable_part(programs, proved or {})
        if part is None:
            return Judgement(skipped=reason)
        programs, path = part
        count, left_out = 1, f"the oracle executed {path} and what it is made from alone, because in all {reason}"
    judging = _Judging(programs, expected, proved or {}, small)
    judging.watch = None if progress is None else Watch(progress, judging.operations * count)
    try:
        judging.run(indexed(sequential, ranges), count, seed)
        return replace(judging.judgement(begun), left_out=left_out)
    except ReplayError as error:
        return Judgement(skipped=f"it cannot be executed: {error}", seconds=time.perf_counter() - begun)
    except UndefinedError as error:
        return Judgement(skipped=f"no inputs were found on which it is defined: {error}", seconds=time.perf_counter() - begun)


def _affordable_part(programs: Programs, proved: Iterable[str]) -> tuple[Programs, str] | None:
    """The output without a proof that costs least, with what it is made from, where that can be afforded."""
    open_ends = [path for path, value in programs.sequential.outputs.items() if value is not None and path not in set(proved)]
    parts = [(sliced(programs, [path]), path) for path in open_ends[:_MOST_PARTS]]
    parts = [(part, path) for part, path in parts if affordable(part.graphs, 1)[1] is None]
    return min(parts, key=lambda each: cost(each[0].graphs).seconds, default=None)


class _Judging:
    def __init__(self, programs: Programs, expected: Mapping[str, Expectation], proved: Mapping[str, Relation], small: bool):
        self.programs, self.small = programs, small
        self.sequential, self.joint, self.relations = programs
        self.expected, self.proved = expected, proved
        mesh = self.joint.graphs[0].mesh
        self.mesh = mesh if mesh is not None else Mesh.of({"world": len(self.joint.graphs)})
        self.trials: list[Trial] = []
        self.further: list[Trial] = []  # at other scales, for outputs without a proof
        self.watch: Watch | None = None

    @property
    def operations(self) -> int:
        """How many are run in a trial."""
        return 2 * len(self.sequential.nodes) + sum(len(graph.nodes) for graph in self.joint.graphs)

    # ------------------------------------------------------------------ execution
    def run(self, ranges: Indexed, count: int, seed: int) -> None:
        for number, regime in enumerate(draws.regimes(count)):
            self.trials.append(self._trial(ranges, regime, seed + number))
        for number, regime in enumerate(_FURTHER, count):
            if all(self._output(path).claimed for path in self._paths()):
                break
            self.trials.append(self._trial(ranges, regime, seed + number))
        if count > 1 and not self._shows_enough():  # one is all that can be afforded, or was asked for
            for number, regime in enumerate(_OTHER_SCALES, len(self.trials)):
                with suppress(UndefinedError):
                    trial = self._trial(ranges, regime, seed + number)
                    self.further += [] if trial.overflows else [trial]  # an exp of large scores says nothing of real numbers

    def _shows_enough(self) -> bool:
        """Whether something differs, or all is proved."""
        outputs = [self._output(path) for path in self._paths() if path not in self.proved]
        return not outputs or any(self._outcome(output).kind is not None for output in outputs if output.claimed)

    def _trial(self, ranges: Indexed, regime: Regime, seed: int) -> Trial:
        tried: list[Ranges] = [ranges.bounds]
        if draws.has_free_integers(self.sequential, ranges.bounds):
            tried += [draws.narrowed(self.sequential, ranges.bounds, high) for high in _NARROWER]
        for number, within in enumerate(tried):
            drawn = ranges.placed(self.sequential, draws.draws_of(self.sequential, within, regime))
            try:
                trial = execute(self.sequential, self.joint, self.relations, drawn, regime, seed, self.watch)
                trial.keep_outputs()
                return trial
            except UndefinedError:
                if number == len(tried) - 1:
                    raise
        raise AssertionError("some range is tried")

    def _paths(self) -> list[str]:
        """The outputs that some rank returns."""
        returned = {path for graph in self.joint.graphs for path, value in graph.outputs.items() if value is not None}
        return [path for path, value in self.sequential.outputs.items() if value is not None and path in returned]

    def _output(self, path: str) -> Output:
        value = self.sequential.outputs[path]
        assert value is not None
        return Output(path, value.dtype, self.mesh, self.trials if path in self.proved else [*self.trials, *self.further])

    def _outcome(self, output: Output) -> Outcome:
        stated = self.expected.get(output.path)
        return output.free() if stated is None else output.expected(stated)

    # ------------------------------------------------------------------ judgement
    def judgement(self, begun: float) -> Judgement:
        outcomes: dict[str, Outcome] = {}
        undecided: dict[str, str] = {}
        contradicted = []
        for path in self._paths():
            output = self._output(path)
            if not output.claimed:
                undecided[path] = self._undecided(path)
            elif path in self.proved:
                if output.contradicts(self.proved[path], self.expected.get(path)):
                    contradicted.append(path)
            else:
                outcomes[path] = self._outcome(output)
        kinds = {path: outcome.kind for path, outcome in outcomes.items() if outcome.kind is not None}
        found = self._first_counterexample(kinds) if kinds else Found()
        return Judgement(
            different=bool(kinds),
            counterexample=found.example,
            conjecture={path: outcome.clean.text for path, outcome in outcomes.items() if outcome.clean is not None},
            trials=len(self.trials) + len(self.further),
            seconds=time.perf_counter() - begun,
            kinds=kinds,
            undecided=undecided,
            contradicted=tuple(contradicted),
            hints=self._hints(kinds),
            orders=self._orders(kinds),
            repairs=found.repairs,
            way=found.way,
            mends=found.mends,
            helpers=helpers_of(self.joint.graphs) if kinds else frozenset(),
            shared=OwnLines(self.sequential).shared if kinds else frozenset(),
        )

    def _first_counterexample(self, kinds: Mapping[str, str]) -> Found:
        """Of the output that is wrong first; what would make all outputs right; and where they become wrong."""
        path = self._earliest(kinds)
        found = Difference(*self._output(path).difference(self.expected.get(path)))
        again = execute(self.sequential, self.joint, self.relations, found.trial.draws, found.trial.regime, found.trial.seed)
        suspects = suspects_of(self.sequential, self.joint, again, self.mesh)
        example = self._counterexample(path, kinds[path], found, suspects)
        if suspects is None:
            return Found(example)
        repairs = Repairs(suspects, self.expected, sorted(kinds, key=path.__ne__))
        way = way_of(repairs)
        works = tried(repairs)
        explained = any(not each.weak for each in works) or (way is not None and way.sure and way.heals)
        return Found(example, works, way, () if explained else mends_of(repairs))

    def _orders(self, kinds: Mapping[str, str]) -> dict[str, str]:
        found = {}
        for path in [path for path, kind in kinds.items() if kind == "unexplained-output"][:_MOST_HINTS]:
            order = self._output(path).reordered()
            if order is not None:
                meant = f'; if that is meant, state it as outputs={{"{path}": fn}}, with fn(full, coord)'
                found[path] = order + ("" if path in self.expected else meant)
        return found

    def _hints(self, kinds: Mapping[str, str]) -> tuple[str, ...]:
        """Means are what data parallelism has by habit, and are never inferred."""
        means: dict[tuple[str, ...], list[str]] = {}
        for path in [path for path, kind in kinds.items() if kind == "unexplained-output"][:_MOST_HINTS]:
            means.setdefault(self._output(path).averaged_over(), []).append(path)
        return tuple(
            f"{path}{f' and {len(others)} more' if others else ''}: the mean over {' and '.join(axes)} of what the ranks hold "
            'is the sequential value; either an average is missing, or it is meant, and outputs= should state Partial("avg")'
            for axes, (path, *others) in means.items()
            if axes
        )

    def _undecided(self, path: str) -> str:
        if all(path not in trial.references for trial in self.trials):
            return "it depends on random numbers"
        return "the sequential program gives no finite number on the trial inputs"

    def _earliest(self, paths: Iterable[str]) -> str:
        """The output that the sequential program has first."""
        places = {value: place for place, node in enumerate(self.sequential.nodes) for value in node.outputs}
        return min(paths, key=lambda path: places.get(self.sequential.outputs[path], -1))  # type: ignore[arg-type]

    def _counterexample(self, path: str, kind: str, found: Difference, suspects: Suspects | None) -> Counterexample:
        stated = self.expected.get(path)
        part = sliced(self.programs, [path])
        look = partial(self._difference, part, path, kind, found.trial)
        smaller = shrunk(found, look, part.sequential.inputs, _runs(part)) if self.small else None
        trial, element, allowed = smaller or found
        output = self._output(path)
        parting = None if suspects is None else parting_of(suspects, element, None if smaller is None else trial)
        if parting is not None and element.shape is not None:  # the rank has no number there
            parting = replace(parting, expected=None, actual=None)
        return Counterexample(
            trial.seed,
            {name: self.sequential.inputs[name].shape for name in trial.draws},
            element,
            parting,
            script_of(
                *part,
                trial,
                element,
                allowed,
                stated=stated,
                reduced=output.reduction(stated) if element.reduced is not None else None,
            ),
            _words(trial),
            _raised(trial) if element.actual != element.actual else None,
        )

    def _difference(
        self, part: Programs, path: str, kind: str, before: Trial, inputs: Mapping[str, Given]
    ) -> Difference | None:
        """What differs in the same way as before, on other inputs, whatever the other trials show."""
        try:
            trial = execute(*part, inputs, before.regime, before.seed)
        except (UndefinedError, ReplayError):
            return None
        value, stated = self.sequential.outputs[path], self.expected.get(path)
        assert value is not None
        output = Output(path, value.dtype, self.mesh, [trial])
        if not output.claimed or (output.free() if stated is None else output.expected(stated)).kind != kind:
            return None
        return Difference(*output.difference(stated))


def _runs(part: Programs) -> int:
    """How often the programs may be run for a smaller counterexample."""
    return int(_SECONDS_TO_SHRINK / (cost(part.graphs).seconds + _PER_RUN))


def _raised(trial: Trial) -> str | None:
    """The first operation of the ranks that indexes outside of a tensor."""
    return next((f"{n.op.removesuffix('.default')} at {n.source}: {why}" for n, why in trial.outside.items()), None)


def _words(trial: Trial) -> tuple[str, ...]:
    """What the inputs are, where they were made small."""
    inputs = {name: draw for name, draw in trial.draws.items() if isinstance(draw, Shrunk)}
    told = [text for name, draw in inputs.items() for text in draw.texts(name)]
    told += [
        f"{name} = {draw.rest} {'everywhere' if draw.is_plain else 'elsewhere'}"
        for name, draw in inputs.items()
        if draw.rest != 0 and (draw.is_plain or not draw.is_all)
    ]
    if any(draw.rest == 0 and (draw.is_plain or not draw.is_all) for draw in inputs.values()):
        told.append("0 elsewhere" if told else "0 everywhere")
    return tuple(told)
