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

from graphguard.capture.front import Along
from graphguard.counterexample.script import script_of
from graphguard.counterexample.shrinking import Difference, shrunk
from graphguard.counterexample.small_input import Shrunk
from graphguard.engine.proof import Relation
from graphguard.errors import ReplayError, UnsteadyError
from graphguard.graph.expanded import ExpandedJoint
from graphguard.graph.ir import Graph, Mesh
from graphguard.graph.limits import Stop, Stops
from graphguard.graph.matching import Joint
from graphguard.graph.rank_class import RankClass
from graphguard.locate.amend import Amend
from graphguard.locate.clue import Clue, clues_at
from graphguard.locate.cut import clues_of_cuts
from graphguard.locate.divergence import clues_of, parting_of
from graphguard.locate.first_wrong import Suspects, suspects_of
from graphguard.locate.ranking import RAISES
from graphguard.locate.repair import Repairs, tried
from graphguard.locate.substitutes import mends_of
from graphguard.locate.traits import Traits
from graphguard.locate.way import way_of
from graphguard.oracle import draws, second_look
from graphguard.oracle.budget import affordable, cost, cost_of_classes
from graphguard.oracle.difference import Counterexample
from graphguard.oracle.draws import Given, Ranges, Regime
from graphguard.oracle.indexed import indexed
from graphguard.oracle.outcome import Evidence, Output
from graphguard.oracle.progress import Tell, Watch
from graphguard.oracle.second_look import look_again
from graphguard.oracle.slice import Programs, sliced, sliced_alone
from graphguard.oracle.thresholds import Thresholds, thresholds
from graphguard.oracle.trial import Trial, UndefinedError, execute
from graphguard.relation.expectation import Expectation
from graphguard.verdict.limits import Limits
from graphguard.verdict.on_path import OnPath

FAILED = "it cannot be executed"  # begins why nothing was, if it was tried: the machine may be at fault
TRIALS = 3
_FURTHER = (Regime(1.0, positive=True), Regime(0.1), Regime(0.1, positive=True))  # where nothing was defined so far
_OTHERS = (  # where there is no proof and no difference: clips may be inactive, and ties or zeros may matter
    *(Regime(1.0, mixture=number) for number in range(1, 5)),
    *(Regime(8.0), Regime(0.125), Regime(64.0), Regime(1.0, positive=True, mixture=6)),
    *(Regime(1.0, mixture=draws.FIRST_PEAK + number) for number in range(4)),  # of which rank the largest number is
)
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
    clues: what the execution says of where the ranks go wrong.
    traits: what is known of the lines themselves.
    amends: changes that were seen to make all outputs right, the most telling first. repair: one that is proved, as code.
    heals_all: some one change was seen to make all outputs right.
    stopped: limits of work that were reached.
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
    clues: tuple[Clue, ...] = ()
    traits: Traits | None = None
    amends: tuple[Amend, ...] = ()
    repair: str | None = None
    heals_all: bool = False
    stopped: tuple[Stop, ...] = ()


class Found(NamedTuple):
    """What an execution shows of outputs that differ."""

    example: Counterexample | None = None
    clues: tuple[Clue, ...] = ()
    amends: tuple[Amend, ...] = ()
    heals_all: bool = False


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
    no_parts: Mapping[str, str] | None = None,
    progress: Tell | None = None,
    small: bool = True,
    limits: Limits | None = None,
    classes: Sequence[RankClass] | None = None,
    along: Along | None = None,
) -> Judgement:
    """Execute both programs and look at every output. Of outputs in `proved` only that relation is evaluated.

    no_parts: outputs that are known to be sums over ranks of what are no parts, which numbers alone may not show, and the kind
        of finding that says so.
    trials: how often, at first; 0 if what is proved is not to be looked at. What is not proved always is.
    small: whether time is spent on making a counterexample small.
    progress: told how many operations of how many were run, where that takes longer than a second.
    classes: of very many ranks, which are written out only if that can be afforded.
    along: the path on which the programs were recorded: nothing is said of inputs on which they would go another way.
    """
    begun = time.perf_counter()
    if joint.findings:
        return Judgement(skipped="the ranks' communication does not fit together")
    if trials == 0 and all(path in (proved or {}) for path, value in sequential.outputs.items() if value is not None):
        return Judgement(skipped="trials=0 was asked for")
    programs, left_out = Programs(sequential, joint, relations), None
    limits = Limits() if limits is None else limits
    stops = Stops(limits.oracle)
    needed = cost(programs.graphs) if classes is None else cost_of_classes(sequential, classes)
    count, reason = affordable(needed, trials or TRIALS, stops)
    if reason is not None:
        part = None if classes is not None else _affordable_part(programs, proved or {}, stops)
        if part is None:
            return Judgement(skipped=reason, stopped=stops.reached())
        programs, path = part
        count, left_out = 1, f"the oracle executed {path} and what it is made from alone, because in all {reason}"
    if isinstance(joint, ExpandedJoint):  # which can be afforded
        programs = Programs(sequential, joint.written_out(), list(relations))
    judging = _Judging(programs, expected, proved or {}, no_parts or {}, small, trials != 0, stops, Stops(limits.locate))
    judging.on_path = None if along is None else OnPath(along, ranges)
    judging.watch = None if progress is None else Watch(progress, judging.operations * count)
    try:
        judging.run(ranges, count, seed)
        return replace(judging.judgement(begun), left_out=left_out)
    except ReplayError as error:
        if isinstance(error, UnsteadyError):
            raise
        return Judgement(skipped=f"{FAILED}: {error}", seconds=time.perf_counter() - begun)
    except UndefinedError as error:
        return Judgement(skipped=f"no inputs were found on which it is defined: {error}", seconds=time.perf_counter() - begun)


def are_seen_to_differ(
    sequential: Graph,
    joint: Joint,
    relations: Sequence[Graph],
    expected: Mapping[str, Expectation],
    ranges: Ranges,
    *,
    seed: int = 0,
    limits: Limits | None = None,
) -> bool:
    """Whether the first trials show it, before anything is proved. What cannot be afforded, or does not run, shows nothing."""
    programs, limits = Programs(sequential, joint, relations), Limits() if limits is None else limits
    stops = Stops(limits.oracle)
    if isinstance(joint, ExpandedJoint) or joint.findings:
        return False
    count, reason = affordable(cost(programs.graphs), TRIALS, stops)
    if reason is not None:
        return False
    judging = _Judging(programs, expected, {}, {}, False, True, stops, Stops(limits.locate))
    try:
        judging.run(ranges, count, seed, others=False)
        return judging.shows_difference()
    except (ReplayError, UndefinedError):
        return False


def _affordable_part(programs: Programs, proved: Iterable[str], stops: Stops) -> tuple[Programs, str] | None:
    """The output without a proof that costs least, with what it is made from, where that can be afforded."""
    open_ends = [path for path, value in programs.sequential.outputs.items() if value is not None and path not in set(proved)]
    alone = ((path, cost([sliced_alone(programs.sequential, [path])])) for path in open_ends[:_MOST_PARTS])
    near = [path for path, needed in alone if affordable(needed, 1, stops)[1] is None]  # before all ranks are looked at
    parts = [(sliced(programs, [path]), path) for path in near]
    parts = [(part, path) for part, path in parts if affordable(cost(part.graphs), 1, stops)[1] is None]
    return min(parts, key=lambda each: cost(each[0].graphs).seconds, default=None)


class _Judging:
    def __init__(
        self,
        programs: Programs,
        expected: Mapping[str, Expectation],
        proved: Mapping[str, Relation],
        no_parts: Mapping[str, str],
        small: bool,
        recheck: bool,
        stops: Stops,
        locating: Stops,
    ):
        self.stops, self.locating = stops, locating
        self.programs, self.small, self.recheck = programs, small, recheck
        self.sequential, self.joint, self.relations = programs
        self.expected = {path: each for path, each in expected.items() if each.states_relation}
        self.plain = {path for path, each in expected.items() if each.wrong or each.unmet(self.joint.returning(path))}
        self.proved, self.no_parts = proved, no_parts
        mesh = self.joint.graphs[0].mesh
        self.mesh = mesh if mesh is not None else Mesh.of({"world": len(self.joint.graphs)})
        self.trials: list[Trial] = []
        self.further: list[Trial] = []  # of other kinds, for outputs without a proof
        self.watch: Watch | None = None
        self.on_path: OnPath | None = None
        self.looks = affordable(cost(programs.graphs), second_look.MOST, stops)[0]

    @property
    def operations(self) -> int:
        """How many are run in a trial."""
        return 2 * len(self.sequential.nodes) + sum(len(graph.nodes) for graph in self.joint.graphs)

    # ------------------------------------------------------------------ execution
    def run(self, ranges: Ranges, count: int, seed: int, others: bool = True) -> None:
        """others: whether more is tried, where nothing is proved and nothing differs."""
        if self.on_path is not None:
            self._run_on(self.on_path, count, seed)
            return
        self.special = thresholds([self.sequential, *self.joint.graphs[:1], *self.joint.graphs[1:][-1:]], ranges)
        self.indexed = indexed(self.sequential, ranges, self.joint.graphs)
        self.ranges = [self.indexed.bounds]
        for number, regime in enumerate(draws.regimes(count)):
            self.trials.append(self._trial_or_plain(regime, seed + number))
        for number, regime in enumerate(_FURTHER, count):
            if all(self._output(path).claimed for path in self._paths()):
                break
            self.trials.append(self._trial(regime, seed + number))
        if others and count > 1 and self._shows_nothing():  # one is all that can be afforded, or was asked for
            most = affordable(cost(self.programs.graphs), len(_OTHERS), self.stops)[0]
            for number, regime in enumerate(_OTHERS[:most], len(self.trials)):
                with suppress(UndefinedError):
                    self.further.append(self._trial(regime, seed + number))

    def _run_on(self, path: OnPath, count: int, seed: int) -> None:
        """On the sample of a path, and near it."""
        for number in range(count):
            inputs = path.inputs(number, seed)
            try:
                trial = execute(self.sequential, self.joint, self.relations, inputs, path.regime, seed + number, self.watch)
            except (UndefinedError, ReplayError):
                if number == 0:
                    raise
                continue
            if path.has(trial.sequential, trial.ranks):
                trial.keep_outputs()
                self.trials.append(trial)
            elif number == 0:
                raise UndefinedError(second_look.OFF_PATH)

    def _narrower(self) -> list[Ranges]:
        """Small numbers, for a program that indexes with integers in ways that nothing is known of, and raises."""
        known = self.ranges[0]
        free = draws.has_free_integers(self.sequential, known)
        return [known, *(draws.narrowed(self.sequential, known, high) for high in _NARROWER if free)]

    def shows_difference(self) -> bool:
        return any(each.kind is not None for each in self._settled()[0].values())

    def _shows_nothing(self) -> bool:
        """Whether some output is not proved, and none differs."""
        outcomes, _ = self._settled()
        return any(path not in self.proved for path in self._paths()) and all(each.kind is None for each in outcomes.values())

    def _trial_or_plain(self, regime: Regime, seed: int) -> Trial:
        """Where the sequential program raises on a mixture, random numbers have to do."""
        try:
            return self._trial(regime, seed)
        except UndefinedError:
            if regime.mixture is None:
                raise
            return self._trial(regime._replace(mixture=None), seed)

    def _trial(self, regime: Regime, seed: int) -> Trial:
        """On inputs for which the sequential program does not raise."""
        try:
            return self._executed(self.ranges[0], regime, self.special, seed)
        except UndefinedError as error:
            last = error
        if len(self.ranges) == 1:
            self.ranges += self._narrower()
        for within in self.ranges[1:]:
            for special in (self.special, {}) if regime.mixture is not None and self.special else ({},):
                try:
                    return self._executed(within, regime, special, seed)
                except UndefinedError as error:
                    last = error
        raise last

    def _executed(self, within: Ranges, regime: Regime, special: Thresholds, seed: int) -> Trial:
        drawn = self.indexed.placed(self.sequential, draws.draws_of(self.sequential, within, regime, special))
        trial = execute(self.sequential, self.joint, self.relations, drawn, regime, seed, self.watch)
        trial.keep_outputs()
        return trial

    def _paths(self) -> list[str]:
        """The outputs that some rank returns, and of which numbers can say something."""
        returned = {path for graph in self.joint.graphs for path, value in graph.outputs.items() if value is not None}
        returned -= self.plain
        return [path for path, value in self.sequential.outputs.items() if value is not None and path in returned]

    def _output(self, path: str) -> Output:
        value = self.sequential.outputs[path]
        assert value is not None
        trials = self.trials if path in self.proved else [*self.trials, *self.further]
        return Output(path, value.dtype, self.mesh, trials, self.no_parts.get(path), self.stops)

    def _outcome(self, output: Output) -> Evidence:
        stated = self.expected.get(output.path)
        return output.free() if stated is None else output.expected(stated)

    # ------------------------------------------------------------------ judgement
    def judgement(self, begun: float) -> Judgement:
        outcomes, contradicted = self._settled()
        paths = self._paths()
        undecided = {path: self._undecided(path) for path in paths if not self._output(path).claimed}
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
            clues=found.clues,
            traits=Traits(self.sequential, self.joint) if kinds else None,
            amends=found.amends,
            heals_all=found.heals_all,
            stopped=(*self.stops.reached(), *self.locating.reached()),
        )

    def _settled(self) -> tuple[dict[str, Evidence], list[str]]:
        """What is seen of outputs without a proof, and which proofs are contradicted: by nothing that may be rounding."""
        while True:
            outcomes, where = {}, {}
            for path in self._paths():
                output = self._output(path)
                stated = self.expected.get(path)
                if output.claimed and path not in self.proved:
                    outcomes[path] = self._outcome(output)
                    if outcomes[path].kind is not None:
                        where[path] = output.difference(stated)[0]
                elif output.claimed and self.recheck:
                    contradicting = output.contradicting(self.proved[path], stated)
                    where |= {} if contradicting is None else {path: contradicting}
            unsure = {id(trial): trial for path, trial in where.items() if self._may_be_rounding(trial, path)}
            if not unsure:
                return outcomes, [path for path in where if path in self.proved]
            for trial in unsure.values():
                runs = second_look.NEXT if trial.looks else second_look.FIRST
                stays = None if self.on_path is None else self.on_path.has
                look_again(self.programs, trial, min(runs, max(1, self.looks - trial.looks)), stays)

    def _may_be_rounding(self, trial: Trial, path: str) -> bool:
        """Whether it was not looked at again, or not often enough for numbers that move."""
        return not trial.looks or (trial.looks < self.looks and trial.wavers(path))

    def _first_counterexample(self, kinds: Mapping[str, str]) -> Found:
        """Of the output that is wrong first; what would make all outputs right; and where they become wrong."""
        path = self._earliest(kinds)
        found = Difference(*self._output(path).difference(self.expected.get(path)))
        whole = execute(self.sequential, self.joint, self.relations, found.trial.draws, found.trial.regime, found.trial.seed)
        suspects = suspects_of(self.sequential, self.joint, whole, self.mesh, self.locating)
        example = self._counterexample(path, kinds[path], found, suspects)
        clues = [] if example.parting is None else list(clues_of(example.parting))
        if suspects is None:
            return Found(example, tuple(clues))
        repairs = Repairs(suspects, self.expected, sorted(kinds, key=path.__ne__))
        way, works = way_of(repairs), tried(repairs)
        strong = [each for each in works if not each.weak]
        explained = bool(strong) or (way is not None and way.sure and way.heals)
        mends = () if explained else mends_of(repairs)
        clues += [clue for each in works for clue in each.clues(bool(strong) and each.kind == strong[0].kind)]
        clues += way.clues() if way is not None else ()
        clues += [mend.clue(mend is mends[0]) for mend in mends]
        if any(clue.backward for clue in clues):
            for graph in {id(each): each for each in (self.joint.graphs[0], self.joint.graphs[-1])}.values():
                clues += clues_of_cuts(graph, suspects.own_lines)
        for node, why in list(whole.outside.items())[:1]:
            text = f"a rank would raise here: {why}"
            clues += clues_at(RAISES, [suspects.own_lines.of(node.source)], node.backward, text)
        amends = tuple(each.amend for each in strong if each.amend is not None)
        return Found(example, tuple(clues), amends, explained or bool(mends) or (way is not None and way.heals))

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
        if any(trial.looks for trial in self.trials):
            return "rounding alone decides it on the trial inputs"
        return "the sequential program gives no finite number on the trial inputs"

    def _earliest(self, paths: Iterable[str]) -> str:
        """The output that the sequential program has first."""
        places = {value: place for place, node in enumerate(self.sequential.nodes) for value in node.outputs}
        return min(paths, key=lambda path: places.get(self.sequential.outputs[path], -1))  # type: ignore[arg-type]

    def _counterexample(self, path: str, kind: str, found: Difference, suspects: Suspects | None) -> Counterexample:
        stated = self.expected.get(path)
        part = sliced(self.programs, [path])
        executed = part if self.on_path is None else self.programs  # a part may not decide all that leads the way
        look = partial(self._difference, executed, path, kind, found.trial)
        sure = partial(self._is_sure, executed, path, kind)
        names, runs, on_path = executed.sequential.inputs, _runs(executed), self.on_path is not None
        smaller = shrunk(found, look, sure, names, runs, on_path) if self.small else None
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
        if self.on_path is not None and not self.on_path.has(trial.sequential, trial.ranks):
            return None
        return self._in_one(trial, path, kind)

    def _in_one(self, trial: Trial, path: str, kind: str) -> Difference | None:
        """What differs in a trial, if it is of a kind."""
        value = self.sequential.outputs[path]
        assert value is not None
        output = Output(path, value.dtype, self.mesh, [trial], stops=self.stops)
        if not output.claimed or self._outcome(output).kind != kind:
            return None
        return Difference(*output.difference(self.expected.get(path)))

    def _is_sure(self, part: Programs, path: str, kind: str, found: Difference) -> bool:
        look_again(part, found.trial, second_look.FIRST)
        return self._in_one(found.trial, path, kind) is not None


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
