"""Compares a lemma of the user's with the operator itself: its own CPU kernel, on small random tensors.

Of an index rule: along each axis that it calls parallel, a window of the operands gives that window of the result. Of a
definition: it gives what the operator gives.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from graphguard.aten.custom import call_wide, widely
from graphguard.aten.kernels import tensors_in
from graphguard.aten.operators import operator as facts_of
from graphguard.aten.operators import overload
from graphguard.capture.torch.program import binds
from graphguard.engine.terms.term import Undescribed
from graphguard.errors import UsageError
from graphguard.lemmas.rule import Pattern, Rule, spread
from graphguard.lemmas.user import Definition, Lemma, keyed

EXAMPLES = 8
_SCALES = (1.0, 0.02, 6.0)  # small numbers tell one epsilon from another
_SIZES = (2, 3, 4, 5, 6)
_ROUND = (8, 16, 64)  # sizes that kernels which are particular about them may take
_MOST_ELEMENTS = 1 << 17
_TOLERANCE, _NARROW_TOLERANCE = 1e-9, 1e-4
_FLOATS = {torch.float64: 1e-7, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}  # and how far rounding goes
_WHOLES = (torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool)
_TRIED_IN_DTYPES = 3  # examples
Shape = tuple[int, ...]
Dtypes = tuple[str, ...]


@dataclass(frozen=True)
class Arguments:
    """One call of the operator."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [each for arg in (*self.args, *self.kwargs.values()) for each in tensors_in(arg)]

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> Arguments:
        left = iter(tensors)

        def swap(arg: Any) -> Any:
            if isinstance(arg, torch.Tensor):
                return next(left)
            return [swap(each) for each in arg] if isinstance(arg, (list, tuple)) else arg

        return Arguments(tuple(map(swap, self.args)), {name: swap(arg) for name, arg in self.kwargs.items()})

    def __str__(self) -> str:
        return f"operands of shape {' and '.join(str(tuple(t.shape)) for t in self.tensors) or 'nothing'}"


def vetted(lemma: Lemma, sample: Sequence[Any] | None = None, *, examples: int = EXAMPLES, seed: int = 0) -> Lemma:
    """The lemma, with how often it was seen to hold. Raises UsageError with a counterexample if it does not."""
    function = overload(lemma.operator)
    if facts_of(function).written:
        raise UsageError(f"{lemma.name} changes its arguments in place; lemmas are for operators that return their results")
    trial = _Trial(lemma, function, sample, random.Random(f"{seed} {lemma.operator}"))
    trial.check_count()
    if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(function.name(), "CPU"):
        return replace(lemma, sample=sample, untested="it has no CPU kernel to be compared with")
    for example in range(examples):
        trial.run(example)
    return trial.outcome()


class _Trial:
    def __init__(self, lemma: Lemma, function: Any, sample: Sequence[Any] | None, dice: random.Random):
        self.lemma, self.function, self.sample, self.dice = lemma, function, sample, dice
        self.cases = 0
        self.error: Exception | None = None  # the last one of the operator
        self.rounds = False  # whether its kernel may compute in fewer bits than it is given
        self.cut: dict[str, bool] = {}  # parallel axes, and whether the operator was seen to work on a part of them
        self.needless: dict[str, bool] = {}  # whole axes, and whether each window of them gave that window of the result
        self.accepted: list[list[Shape]] = []  # what the operator takes
        self.raised: str | None = None  # what the definition does not take
        self.agreed: set[tuple[int, ...]] = set()  # numbers of dims for which the definition gave what the operator gives
        self.disagreed: dict[tuple[int, ...], str] = {}
        self.native = False  # whether the operator is called as it is, in the dtypes that it is given
        self.holds: dict[Dtypes, bool] = {}  # the dtypes of the operands in which the lemma was tried
        self.required = sum(not argument.has_default_value() for argument in function._schema.arguments)

    # ------------------------------------------------------------------ the outcome
    def outcome(self) -> Lemma:
        dtypes = frozenset(each for each, held in self.holds.items() if held)
        lemma = replace(self.lemma, sample=self.sample, checked=self.cases, dtypes=dtypes)
        wrong = [ranks for ranks in self.disagreed if ranks in self.agreed or not self.agreed]
        if wrong:
            raise self.refuse(self.disagreed[wrong[0]])
        if isinstance(lemma.meaning, Definition):
            lemma.meaning.fails.update(self.disagreed)
        if not self.cases:
            if self.raised is not None:
                raise self.refuse(self.raised)
            if self.sample is not None:
                raise UsageError(f"{lemma.name} cannot be run on the sample of its lemma: {_first_line(self.error)}")
            if not self.accepted:
                raise UsageError(
                    f"{lemma.name} takes none of the small random tensors that its lemma was tried on "
                    f"({_first_line(self.error)}); give gg.lemma arguments that it takes, sample=(...)"
                )
            return replace(
                lemma, untested=f"its CPU kernel takes no random tensors ({_first_line(self.error)}); sample= would do"
            )
        uncut = sorted(axis for axis, done in self.cut.items() if not done)
        if uncut:
            return replace(lemma, untested=f"no call of it with a part of {' or '.join(uncut)} came through")
        needless = sorted(axis for axis, held in self.needless.items() if held)
        return replace(lemma, weaker=f"{' and '.join(needless)} need not be whole" if needless else None)

    def refuse(self, why: str) -> UsageError:
        return UsageError(f"the lemma of {self.lemma.name} is refused: {why}")

    # ------------------------------------------------------------------ one example
    def run(self, example: int) -> None:
        """An index rule says which shapes it is about: the first that the operator takes will do. A definition does not."""
        for given in self._calls(example):
            results = self._result(given)
            if results is None:
                continue
            if isinstance(self.lemma.meaning, Rule):
                self._check_rule(self.lemma.meaning, given, results)
                self._check_dtypes(given, example)
                return
            if self._check_definition(self.lemma.meaning, given, results):
                self._check_dtypes(given, example)

    # ------------------------------------------------------------------ dtypes
    def _check_dtypes(self, given: Arguments, example: int) -> None:
        """The same call in all dtypes: the lemma is used in those in which it held each time."""
        for dtypes in _mixtures(given.tensors) if example < _TRIED_IN_DTYPES else ():
            part = given.with_tensors([_as(t, dtype) for t, dtype in zip(given.tensors, dtypes, strict=True)])
            key = keyed(str(dtype).removeprefix("torch.") for dtype in dtypes)
            held = self._holds_in(part) if self.holds.get(key, True) else None
            if held is not None:
                self.holds[key] = held

    def _holds_in(self, given: Arguments) -> bool | None:
        """Whether the lemma holds in just these dtypes; None if the operator does not take them."""
        self.native, cases = True, self.cases
        try:
            results = self._result(given)
            if results is None:
                return None
            if isinstance(self.lemma.meaning, Rule):
                self._check_rule(self.lemma.meaning, given, results)
                return True
            return any(self._agrees(call, given, results) for call in (self.lemma.meaning.function, self._defined_widely))
        except UsageError:
            return False
        finally:
            self.native, self.cases = False, cases

    def _agrees(self, function: Callable[..., Any], given: Arguments, results: list[torch.Tensor]) -> bool:
        try:
            with torch.no_grad():
                said = tensors_in(function(*given.args, **given.kwargs))
        except Exception:  # what a definition does not take, it says nothing of
            return False
        return self._disagreement(given, said, results) is None

    def _defined_widely(self, *args: Any, **kwargs: Any) -> Any:
        """What the definition gives in 64 bits."""
        assert isinstance(self.lemma.meaning, Definition)
        wide = Arguments(args, kwargs)
        wide = wide.with_tensors([t.to(torch.float64) if t.is_floating_point() else t for t in wide.tensors])
        return widely(self.lemma.meaning.function, wide.args, wide.kwargs)

    def _result(self, given: Arguments) -> list[torch.Tensor] | None:
        """What the operator gives; None if it does not take the arguments."""
        try:
            with torch.no_grad():
                if self.native:
                    return [tensor.detach() for tensor in tensors_in(self.function(*given.args, **given.kwargs))]
                result, rounds = call_wide(self.function, list(given.args), given.kwargs)
                self.rounds = rounds
                return [tensor.detach() for tensor in tensors_in(result)]
        except Exception as error:  # a kernel may raise anything
            self.error = error
            return None

    def _check_definition(self, definition: Definition, given: Arguments, results: list[torch.Tensor]) -> bool:
        """Whether it gives what the operator gives."""
        if not binds(definition.function, given.args, given.kwargs):
            if len(given.args) + len(given.kwargs) > self.required:
                return False  # a program that calls the operator so is told that the definition does not take it
            raise self.refuse(f"its definition does not take {_count(len(given.args), 'argument')}, as the operator does")
        try:
            with torch.no_grad():
                said = tensors_in(widely(definition.function, given.args, given.kwargs))
        except Exception as error:
            self.raised = f"on {given} its definition raises {type(error).__name__}: {_first_line(error)}"
            return False
        ranks = tuple(t.dim() for t in given.tensors)
        different = self._disagreement(given, said, results)
        if different is None:
            self.agreed.add(ranks)
            self.cases += 1
        else:
            self.disagreed.setdefault(ranks, different)
        return different is None

    def _disagreement(self, given: Arguments, said: list[torch.Tensor], results: list[torch.Tensor]) -> str | None:
        types = [[(tuple(t.shape), _kind(t)) for t in each] for each in (said, results)]
        if types[0] != types[1]:
            return f"on {given} its definition gives {_shown(said)}, where the operator gives {_shown(results)}"
        for mine, its in zip(said, results, strict=True):
            different = self._difference(mine, its, given)
            if different is not None:
                place, a, b = different
                return f"on {given} its definition gives {a:.6g} at {place}, where the operator gives {b:.6g}"
        return None

    # ------------------------------------------------------------------ index rules
    def check_count(self) -> None:
        """A rule has a pattern for each tensor."""
        rule = self.lemma.meaning
        if not isinstance(rule, Rule) or self.sample is not None:
            return
        needed = sum(str(argument.type) == "Tensor" for argument in self.function._schema.arguments)
        most = sum("Tensor" in str(argument.type) for argument in self.function._schema.arguments)
        if not needed <= len(rule.operands) <= most:
            raise self.refuse(f"{rule.text!r} has {_count(len(rule.operands), 'operand')}, where the operator takes {needed}")

    def _check_rule(self, rule: Rule, given: Arguments, results: list[torch.Tensor]) -> None:
        shapes = [tuple(t.shape) for t in given.tensors]
        try:
            sizes, count = rule.sizes(shapes, [tuple(t.shape) for t in results]), rule.ellipsis(shapes)
        except Undescribed as error:
            raise self.refuse(f"on {given} it gives {_shown(results)}: {error}") from None
        again = self._result(given)
        for mine, its in zip(again or results, results, strict=True):
            different = self._difference(mine, its, given)
            if different is not None:
                raise self.refuse(f"the operator is not a function: two calls with the same {given} give different results")
        self.cases += 1
        operands, made = ([spread(p, count) for p in side] for side in (rule.operands, rule.results))
        parallel = rule.parallel(count)
        for axis in [*parallel, *(a for a in sorted(rule.whole) if all(_has(p, a) for p in made))]:
            for low, high in self._windows(sizes[axis]):
                part = given.with_tensors(
                    [_cut(t, p, axis, low, high, sizes) for t, p in zip(given.tensors, operands, strict=True)]
                )
                expected = [_cut(t, p, axis, low, high, sizes) for t, p in zip(results, made, strict=True)]
                self._check_part(rule, given, part, expected, axis, f"{low}:{high}", axis in parallel)
        if count:
            self._check_fewer_dims(rule, given, results, sizes["...0"])

    def _windows(self, size: int) -> list[tuple[int, int]]:
        """One position, which is all that the rule speaks of, and some more."""
        one, first = self.dice.randrange(min(1, size - 1), size), self.dice.randrange(size)
        return [(one, one + 1), (first, self.dice.randint(first + 1, size))]

    def _check_fewer_dims(self, rule: Rule, given: Arguments, results: list[torch.Tensor], size: int) -> None:
        """One position of the first dim of `...`, without that dim: the operator gives the same, or refuses it."""
        at = self.dice.randrange(size)

        def chosen(tensors: Sequence[torch.Tensor], patterns: Sequence[Pattern]) -> list[torch.Tensor]:
            return [
                t.select(p.index(("...",)), at).contiguous() if ("...",) in p else t
                for t, p in zip(tensors, patterns, strict=True)
            ]

        part = given.with_tensors(chosen(given.tensors, rule.operands))
        self._check_part(rule, given, part, chosen(results, rule.results), "...", str(at), True)

    def _check_part(
        self,
        rule: Rule,
        given: Arguments,
        part: Arguments,
        expected: list[torch.Tensor],
        axis: str,
        where: str,
        parallel: bool,
    ) -> None:
        name = "..." if axis.startswith("...") else axis
        done = self.cut if parallel else self.needless
        results = self._result(part)
        if results is None:
            done.setdefault(name, False)
            return
        different: tuple[str, float, float] | None = None
        for mine, its in zip(results, expected, strict=True):
            if different is None:
                same = mine.shape == its.shape
                different = self._difference(mine, its, given) if same else (f"shape {tuple(mine.shape)}", math.nan, math.nan)
        if not parallel:
            self.needless[name] = self.needless.get(name, True) and different is None
            return
        if different is not None:
            place, a, b = different
            raise self.refuse(
                f"{rule.text!r} is not parallel along {name}: on {given}, position {where} of it alone gives {a:.6g} "
                f"at {place}, where the whole gives {b:.6g}"
            )
        self.cut[name] = True
        self.cases += 1

    # ------------------------------------------------------------------ numbers
    def _difference(self, a: torch.Tensor, b: torch.Tensor, given: Arguments) -> tuple[str, float, float] | None:
        """Where two results are not the same but for rounding, and what they are there."""
        mine, its = a.to(torch.float64), b.to(torch.float64)
        finite = its[its.isfinite()]
        size = float(finite.abs().max()) if finite.numel() else 1.0
        apart = torch.where((mine == its) | (mine.isnan() & its.isnan()), 0.0, (mine - its).abs()).nan_to_num(nan=math.inf)
        if self.native:
            coarse = max((_FLOATS.get(t.dtype, 0.0) for t in (a, b, *given.tensors)), default=0.0)
            wrong = (apart > coarse * max(size, 1e-30)) & its.isfinite()  # fewer bits overflow sooner
            if not bool(wrong.any()):
                return None
            place = wrong.nonzero()[0].tolist()
            return str(place), float(mine[tuple(place)]), float(its[tuple(place)])
        wrong = apart > _TOLERANCE * max(size, 1e-30)
        if bool(wrong.any()) and not self._is_exact(given):
            wrong = apart > _NARROW_TOLERANCE * max(size, 1e-30)
        if not bool(wrong.any()):
            return None
        place = wrong.nonzero()[0].tolist()
        return str(place), float(mine[tuple(place)]), float(its[tuple(place)])

    def _is_exact(self, given: Arguments) -> bool:
        """Whether the operator computes in 64 bits. If not, it does not notice that an operand moves by less than it rounds."""
        if not self.rounds:
            return True
        before = self._result(given)
        for place, tensor in enumerate(given.tensors):
            if before is None or not tensor.is_floating_point():
                continue
            moved = [
                self._result(given.with_tensors([t * (1 + by) if n == place else t for n, t in enumerate(given.tensors)]))
                for by in (1e-10, 1e-3)
            ]
            little, much = (sum(int((a != b).sum()) for a, b in zip(each or before, before, strict=True)) for each in moved)
            if little <= much // 2 and much:
                return False
        return True

    # ------------------------------------------------------------------ calls to try
    def _calls(self, example: int) -> Iterator[Arguments]:
        scale, positive = _SCALES[example % len(_SCALES)], example % 4 == 3
        if self.sample is not None:
            plain = Arguments(tuple(self.sample))
            yield plain.with_tensors(
                [
                    self._random(t.shape, t.dtype, scale, positive) if example and t.is_floating_point() else t
                    for t in plain.tensors
                ]
            )
            return
        for shapes in self._shapes(example):
            if sum(map(math.prod, shapes)) > _MOST_ELEMENTS:
                continue
            for dtype in (torch.float64, torch.float32):
                tensors = [self._random(shape, dtype, scale, positive) for shape in shapes]
                for each in self._with_indices(tensors):
                    drawn = self._arguments(each, example % 2 == 1)
                    if drawn is not None and self._takes(drawn):
                        self.accepted.append(shapes)
                        yield drawn

    def _with_indices(self, tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """The tensors; where a rule has an indexed axis, each other operand in turn as indices into it."""
        rule = self.lemma.meaning
        indexed = rule.indexed if isinstance(rule, Rule) else frozenset[str]()
        if not isinstance(rule, Rule) or not indexed:
            yield tensors
            return
        own = [any(axis in indexed for dim in pattern for axis in dim) for pattern in rule.operands]
        sizes = [
            tensor.shape[len(tensor.shape) - len(pattern) + place]
            for tensor, pattern in zip(tensors, rule.operands, strict=True)
            for place, dim in enumerate(pattern)
            if len(dim) == 1 and dim[0] in indexed
        ]
        for place, tensor in enumerate(tensors):
            if not own[place] and sizes:
                generator = torch.Generator().manual_seed(self.dice.randrange(1 << 40))
                yield [*tensors[:place], torch.randint(min(sizes), tensor.shape, generator=generator), *tensors[place + 1 :]]

    def _takes(self, given: Arguments) -> bool:
        """Whether the kernel that knows shapes alone does not object."""
        try:
            with torch.no_grad():
                self.function(*(meta := given.with_tensors([t.to("meta") for t in given.tensors])).args, **meta.kwargs)
        except Exception as error:
            self.error = error
            return False
        return True

    def _random(self, shape: Sequence[int], dtype: torch.dtype, scale: float, positive: bool) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.dice.randrange(1 << 40))
        drawn = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
        return ((drawn.abs() + 0.1) * scale if positive else drawn * scale).to(dtype)

    def _shapes(self, example: int) -> Iterator[list[Shape]]:
        rule, ellipsis = self.lemma.meaning, (2, 1)[example % 2]
        if isinstance(rule, Rule):
            for sizes in (None, *_ROUND):
                drawn: dict[str, int] = {}
                yield [
                    tuple(
                        math.prod(drawn.setdefault(a, sizes or self.dice.choice(_SIZES)) for a in dim)
                        for dim in spread(p, ellipsis)
                    )
                    for p in rule.operands
                ]
            return
        tensors = sum(str(argument.type) == "Tensor" for argument in self.function._schema.arguments)
        yield from _templates(tensors, self.dice.sample(_SIZES, 4))
        if not (self.agreed or self.disagreed or self.raised):
            size = _ROUND[example % len(_ROUND)]
            yield from _templates(tensors, [2, 4, size, size])

    def _arguments(self, tensors: list[torch.Tensor], varied: bool) -> Arguments | None:
        """A call with these tensors. What else the operator takes has its default, or some other value."""
        left, given = list(tensors), {}
        for argument in self.function._schema.arguments:
            kind = str(argument.type)
            if kind == "Tensor" or (kind == "Optional[Tensor]" and left):
                if not left:
                    return None
                given[argument.name] = left.pop(0)
            elif argument.has_default_value():
                if varied and kind in ("float", "bool"):
                    given[argument.name] = _other(argument.default_value, self.dice)
            elif kind in _NUMBERS:
                given[argument.name] = _NUMBERS[kind]
            else:
                return None
        if left:
            return None
        args = []
        for argument in self.function._schema.arguments:  # by position, as programs do, as far as that goes
            if argument.kwarg_only or argument.name not in given:
                break
            args.append(given.pop(argument.name))
        return Arguments(tuple(args), given)


_NUMBERS: dict[str, Any] = {"float": 0.25, "number": 0.25, "int": 2, "bool": False}


def _other(default: Any, dice: random.Random) -> Any:
    return not default if isinstance(default, bool) else default * dice.uniform(0.5, 2.0) if default else 0.5


def _templates(tensors: int, sizes: Sequence[int]) -> Iterator[list[Shape]]:
    """Shapes that operators of so many tensors commonly take: all alike; a tensor and vectors; a product of matrices."""
    b, s, h, k = sizes
    if tensors == 0:
        yield []
        return
    for shape in ((b, h), (b, s, h), (h,), (b, s, h, k)):
        yield [shape] * tensors
    if tensors > 1:
        for lead in ((b, h), (b, s, h)):
            yield [lead, *[(h,)] * (tensors - 1)]
        for second in ((h, k), (k, h)):
            yield [(b, h), second, *[(k,)] * (tensors - 2)]
            yield [(b, s, h), second, *[(k,)] * (tensors - 2)]
        yield [(b, s, h), (b, h, k), *[(b, s, k)] * (tensors - 2)]
    if tensors > 2:
        yield [*[(b, h)] * (tensors - 1), (h,)]


# ---------------------------------------------------------------------- dtypes
def _mixtures(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[torch.dtype, ...]]:
    """The dtypes in which operands may come: as they are; all floats in one dtype; one of them, or all but one, in another."""
    own = [t.dtype for t in tensors]
    floats = [place for place, tensor in enumerate(tensors) if tensor.is_floating_point()]
    yield tuple(own)
    for dtype in (*_FLOATS, *_WHOLES):
        yield tuple(dtype if place in floats else own[place] for place in range(len(own)))
    for one, rest in itertools.permutations((torch.float32, torch.bfloat16, torch.float16), 2):
        for place in floats if len(floats) > 1 else ():
            yield tuple(one if n == place else rest if n in floats else own[n] for n in range(len(own)))


def _as(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.uint8:
        tensor = tensor.abs()  # what a negative float becomes there, C does not say
    return (tensor * 3).to(dtype) if tensor.is_floating_point() and dtype in _WHOLES else tensor.to(dtype)


# ---------------------------------------------------------------------- small things
def _has(pattern: Pattern, axis: str) -> bool:
    return any(axis in dim for dim in pattern)


def _cut(tensor: torch.Tensor, pattern: Pattern, axis: str, low: int, high: int, sizes: dict[str, int]) -> torch.Tensor:
    """A window of one axis, which may be part of a dim."""
    if not _has(pattern, axis):
        return tensor
    axes = [each for dim in pattern for each in dim]
    apart = tensor.reshape([sizes[each] for each in axes]).narrow(axes.index(axis), low, high - low)
    sizes = {**sizes, axis: high - low}
    return apart.reshape([math.prod(sizes[each] for each in dim) for dim in pattern]).contiguous()


def _kind(tensor: torch.Tensor) -> str:
    return "real" if tensor.is_floating_point() else "complex" if tensor.is_complex() else "whole"


def _shown(tensors: Sequence[torch.Tensor]) -> str:
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors) or "no tensor"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _first_line(error: Exception | None) -> str:
    text = str(error).strip().split("\n")[0] if error is not None else ""
    return text if len(text) <= 160 else f"{text[:157]}..."
