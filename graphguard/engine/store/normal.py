"""The normal form of a term: equal terms come out alike as often as possible, and always denote what went in.

Variables with one element become positions, neighbours that only occur together become one variable, impulses and steps become
ranges or boxes where they can, powers are collected, idle sums are counted, and each variable starts where its first atom does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from fractions import Fraction
from itertools import pairwise
from math import floor, gcd
from typing import Literal, Protocol

import numpy as np

from graphguard.engine.terms.lane import Lane, Lanes, collapse, equal, everywhere, larger, smaller
from graphguard.engine.terms.term import (
    FIRST_ID,
    IMPULSE,
    ONE,
    STEP,
    WINDOW,
    Factor,
    Index,
    Range,
    Term,
    Variable,
    bounds,
    combined,
    extent,
    scaled,
    substitute,
)

_SPECIAL = {"impulse", "step", "window", "delta"}


class Known(Protocol):
    """What is known of elements of atoms."""

    def holds(self, kind: Literal["nonnegative"], factor: Factor, ranges: Mapping[Variable, Range]) -> bool: ...
    def subject_span(self, delta: Factor, ranges: Mapping[Variable, Range]) -> tuple[int, int] | None: ...


def normal(term: Term, facts: Known) -> Term | None:
    """The term in normal form; None if it is zero in every lane."""
    work = _Work(term, facts)
    return work.result() if work.run() else None


class _Work:
    """A term while it is being normalised."""

    def __init__(self, term: Term, facts: Known):
        self.coefficient, self.weight = term.coefficient, term.weight
        self.factors = list(term.factors)
        self.ranges = dict(term.ranges)
        self.dims = [list(dim) for dim in term.dims]
        self.box = list(term.box)
        self.facts = facts

    def result(self) -> Term:
        return Term(
            self.coefficient, tuple(self.factors), self.ranges, tuple(map(tuple, self.dims)), tuple(self.box), self.weight
        )

    def run(self) -> bool:
        """False if the term turns out to be zero."""
        if not self.coefficient or not self._drop_empty_lanes():
            return False
        self._place_points()
        self._collect()
        self._fuse()
        while any(factor.atom.kind in _SPECIAL for factor in self.factors) and self._rewrite_special():
            if not self._drop_empty_lanes():
                return False
            self._place_points()
            self._collect()
            self._fuse()
        self._count_idle_sums()
        self._sort()
        self._count_upwards()
        self._anchor()
        return self._settle_weight()

    # ------------------------------------------------------------------ lanes without a share
    def _drop_empty_lanes(self) -> bool:
        visible = self._visible()
        shown = [span for v, span in self.ranges.items() if v in visible]
        for low, high in [*shown, *self.box]:
            if type(low) is int and type(high) is int:
                if high <= low:
                    return False
            elif not everywhere(high > low):
                self.weight = collapse(self.weight * np.asarray(high > low, dtype=np.int64))
        if any(everywhere(high <= low) for low, high in self.ranges.values()):
            return False  # a sum over nothing; over nothing in some lanes is fine as it is
        if isinstance(self.weight, np.ndarray):
            if not self.weight.any():
                return False
            self._fill_absent(self.weight)
        return not equal(self.weight, 0)

    def _settle_weight(self) -> bool:
        self.weight = collapse(self.weight)
        if isinstance(self.weight, np.ndarray):
            common = gcd(*self.weight.tolist())
            common = -common if self.weight[np.flatnonzero(self.weight)[0]] < 0 else common
            self.coefficient, self.weight = self.coefficient * common, self.weight // common
        elif self.weight != 1:
            self.coefficient, self.weight = self.coefficient * self.weight, 1
        return bool(self.coefficient)

    def _fill_absent(self, weight: Lanes) -> None:
        """What lanes without a share are said to hold is void: let it look like what the first one with a share holds."""
        absent = weight == 0
        if not absent.any():
            return
        first = int(np.flatnonzero(~absent)[0])

        def filled(number: Lane) -> Lane:
            return collapse(np.where(absent, number[first], number)) if isinstance(number, np.ndarray) else number

        self.ranges = {v: (filled(low), filled(high)) for v, (low, high) in self.ranges.items()}
        self.box = [(filled(low), filled(high)) for low, high in self.box]
        self.factors = [f._replace(at=tuple(Index(i.terms, filled(i.offset)) for i in f.at)) for f in self.factors]

    # ------------------------------------------------------------------ variables
    def _substitute(self, replacements: Mapping[Variable, Index]) -> None:
        self.factors = list(substitute(self.factors, replacements))

    def _visible(self) -> set[Variable]:
        return {v for dim in self.dims for v in dim}

    def _place_points(self) -> None:
        """A variable with one element is that position."""
        points = {v: Index((), low) for v, (low, high) in self.ranges.items() if equal(high - low, 1)}
        if points:
            self._substitute(points)
            self.ranges = {v: span for v, span in self.ranges.items() if v not in points}
            self.dims = [[v for v in dim if v not in points] for dim in self.dims]

    def _mentioned(self) -> set[Variable]:
        return {v for factor in self.factors for v in factor.variables()}

    def _count_idle_sums(self) -> None:
        """A sum over a variable that nothing mentions counts its elements; a broadcast one has no position of its own."""
        used = self._mentioned()
        idle = [v for v in self.ranges if v not in used]
        if not idle:
            return
        visible = self._visible()
        for variable in idle:
            size = extent(self.ranges[variable])
            if variable in visible:
                self.ranges[variable] = (0, size)
                continue
            del self.ranges[variable]
            if type(size) is int:
                self.coefficient *= size
            else:
                self.weight = self.weight * size

    def _fuse(self) -> None:
        """Two variables that only occur together, as D h + d with D elements of d, are one."""
        groups = [dim for dim in self.dims if len(dim) > 1]
        visible = self._visible()
        summed = [v for v in self.ranges if v not in visible]
        if not groups and len(summed) < 2:
            return
        places: dict[Variable, dict[tuple[int, int], int]] = {v: {} for v in self.ranges}
        for number, factor in enumerate(self.factors):
            for axis, index in enumerate(factor.at):
                for variable, stride in index.terms:
                    places[variable][number, axis] = stride
        for group in groups:
            at = len(group) - 2
            while at >= 0:
                if self._fuse_pair(group[at], group[at + 1], places):
                    del group[at]
                at -= 1
        for outer in summed:
            for inner in summed:
                if inner != outer and outer in self.ranges and inner in self.ranges and places[outer]:
                    self._fuse_pair(outer, inner, places)

    def _fuse_pair(self, outer: Variable, inner: Variable, places: dict[Variable, dict[tuple[int, int], int]]) -> bool:
        size = extent(self.ranges[inner])
        mine, its = places[outer], places[inner]
        if type(size) is not int or mine.keys() != its.keys():
            return False
        if mine and outer not in self._visible() and all(mine[p] == -size * its[p] for p in mine):
            self._reverse(outer)
        elif any(mine[p] != size * its[p] for p in mine):
            return False
        low, high = self.ranges.pop(outer)
        start = self.ranges[inner][0]
        self.ranges[inner] = (collapse(size * low + start), collapse(size * high + start))
        if mine:
            self.factors = [
                f._replace(at=tuple(Index(tuple(t for t in i.terms if t[0] != outer), i.offset) for i in f.at))
                for f in self.factors
            ]
        return True

    def _reverse(self, variable: Variable) -> None:
        """Count a summed variable from the other end."""
        low, high = self.ranges[variable]
        self._substitute({variable: Index(((variable, -1),), collapse(low + high - 1))})

    def _count_upwards(self) -> None:
        """A sum that begins at the last of its elements is the same from the first one on."""
        visible = self._visible()
        if not any(s < 0 and v not in visible for factor in self.factors for index in factor.at for v, s in index.terms):
            return
        first: dict[Variable, int] = {}
        for factor in sorted(self.factors, key=lambda factor: factor.atom.id < FIRST_ID):
            for index in factor.at:
                for variable, stride in index.terms:
                    first.setdefault(variable, stride)
        for variable, stride in first.items():
            if stride < 0 and variable not in visible:
                self._reverse(variable)

    def _anchor(self) -> None:
        """Shift each variable so that the first index that it occurs in, of a tensor if there is one, has no offset."""
        anchored: set[Variable] = set()
        for number in sorted(range(len(self.factors)), key=lambda n: self.factors[n].atom.id < FIRST_ID):
            for axis in range(len(self.factors[number].at)):
                index = self.factors[number].at[axis]
                if not equal(index.offset, 0):
                    for variable, stride in index.terms:
                        if variable not in anchored and everywhere(index.offset % stride == 0):
                            self._shift(variable, collapse(index.offset // stride))
                            break
                anchored.update(v for v, _ in index.terms)

    def _shift(self, variable: Variable, distance: Lane) -> None:
        low, high = self.ranges[variable]
        self.ranges[variable] = (collapse(low + distance), collapse(high + distance))
        self._substitute({variable: Index(((variable, 1),), collapse(-distance))})

    # ------------------------------------------------------------------ factors
    def _collect(self) -> None:
        """Equal atoms at equal positions as one power. Opposite powers of what may be zero stay apart."""
        if len(self.factors) == 1 and not self.factors[0].atom.indicator and self.factors[0].atom.number is None:
            return
        powers: dict[object, Factor] = {}
        for factor in self.factors:
            keeps = self._keeps_root(factor)
            place: object = factor.place if factor.atom.positive else (factor.place, factor.power > 0, keeps)
            known = powers.get(place)
            power = factor.power if known is None else known.power + factor.power
            if power.denominator == 1 and keeps:
                place, power = (place, len(powers)), factor.power
            if factor.atom.indicator and power > 0:
                power = ONE
            powers[place] = factor._replace(power=power)
        self.factors = []
        for factor in powers.values():
            if factor.atom.number is not None:
                whole = floor(factor.power)
                self.coefficient *= factor.atom.number**whole
                factor = factor._replace(power=factor.power - whole)
            if factor.power:
                self.factors.append(factor)

    def _keeps_root(self, factor: Factor) -> bool:
        """Whether the power says that its base is not negative, which the whole power that two roots make would forget."""
        if factor.power.denominator == 1 or factor.atom.nonnegative:
            return False
        return not self.facts.holds("nonnegative", factor, self.ranges)

    def _sort(self) -> None:
        """By age; the same atom at several places, by where the variables of each place occur besides, so that it does not
        matter which place was mentioned first."""
        if len(self.factors) < 2:
            return
        self.factors.sort(key=_order)
        keys = [_order(factor) for factor in self.factors]
        if not any(a == b for a, b in pairwise(keys)):
            return
        alike = {key for key, count in Counter(keys).items() if count > 1}
        occurs: dict[Variable, list[tuple[int, ...]]] = {v: [] for v in self.ranges}
        for number, group in enumerate(self.dims):
            for place, variable in enumerate(group):
                occurs[variable].append((-1, number, place))
        for factor, key in zip(self.factors, keys, strict=True):
            for axis, index in enumerate(factor.at) if key not in alike else ():
                for variable, stride in index.terms:
                    occurs[variable].append((factor.atom.id, axis, stride))
        roles = {variable: sorted(found) for variable, found in occurs.items()}
        self.factors.sort(key=lambda factor: (_order(factor), [sorted((roles[v], s) for v, s in i.terms) for i in factor.at]))

    def _rewrite_special(self) -> bool:
        """One step with an impulse, a step or two deltas; False if there is none left to take."""
        for number, factor in enumerate(self.factors):
            match factor.atom.kind:
                case "impulse":
                    if self._rewrite_impulse(number, factor.at[0]):
                        return True
                case "step" | "window":
                    if self._rewrite_step(number, factor.at[0]):
                        return True
                case "delta":
                    if self._rewrite_delta(number, factor):
                        return True
        return False

    def _rewrite_impulse(self, number: int, index: Index) -> bool:
        if not index.terms:
            del self.factors[number]
            self.weight = collapse(self.weight * np.asarray(index.offset == 0, dtype=np.int64))
            return True
        low, high = bounds(index, self.ranges)
        if everywhere((low > 0) | (high < 0)):
            self.coefficient = Fraction(0)
            self.weight = 0
            del self.factors[number]
            return True
        if self._part_impulse(number, index) or self._unfold_impulse(number, index):
            return True
        visible = self._visible()
        for variable, stride in sorted(index.terms, key=lambda term: term[0] in visible):
            if abs(stride) != 1:
                continue
            rest = scaled(Index(tuple(t for t in index.terms if t[0] != variable), index.offset), -stride)
            if variable not in visible:
                if self._confine(rest, self.ranges[variable]):
                    del self.factors[number]
                    del self.ranges[variable]
                    self._substitute({variable: rest})
                    return True
            elif not rest.terms and self._narrow(variable, rest.offset, collapse(rest.offset + 1)):
                del self.factors[number]
                return True
        return False

    def _part_impulse(self, number: int, index: Index) -> bool:
        """S A + B = 0 with |B| < S means A = 0 and B = 0: equal rows and equal columns."""
        largest = abs(index.terms[0][1])
        outer = tuple((v, s // largest) for v, s in index.terms if s % largest == 0)
        if largest == 1 or len(outer) == len(index.terms):
            return False
        rest = Index(tuple(t for t in index.terms if t[1] % largest), index.offset)
        low, high = bounds(rest, self.ranges)
        if not (everywhere(low > -largest) and everywhere(high < largest)):
            return False
        self.factors[number : number + 1] = [Factor(IMPULSE, (Index(outer),)), Factor(IMPULSE, (rest,))]
        return True

    def _unfold_impulse(self, number: int, index: Index) -> bool:
        """A position c = S a + b that counts the rows and columns of summed variables: the dim is (a b) then."""
        visible = self._visible()
        shown = [(v, s) for v, s in index.terms if v in visible]
        if len(shown) != 1 or abs(shown[0][1]) != 1 or len(index.terms) < 3:
            return False
        variable, sign = shown[0]
        digits = sorted(((v, -s * sign) for v, s in index.terms if v != variable), key=lambda term: -term[1])
        size = 1
        for digit, stride in reversed(digits):
            count = extent(self.ranges[digit])
            if stride != size or type(count) is not int:
                return False
            size *= count
        position = Index(tuple(digits), collapse(index.offset * -sign))
        if not self._shows_only(variable, bounds(position, self.ranges)[0], size):
            return False
        del self.factors[number]
        del self.ranges[variable]
        self._substitute({variable: position})
        self.dims = [[w for v in dim for w in ([d for d, _ in digits] if v == variable else [v])] for dim in self.dims]
        return True

    def _shows_only(self, variable: Variable, first: Lane, size: int) -> bool:
        """Whether a variable of dims runs over these positions, or could be narrowed to them: the term is 0 elsewhere."""
        low, high = self.ranges[variable]
        if equal(first, low) and equal(high - low, size):
            return True
        inside = everywhere(first >= low) and everywhere(first + size <= high)
        return inside and self._narrow(variable, first, collapse(first + size))

    def _confine(self, index: Index, span: Range) -> bool:
        """Restrict the term to where an index lies in a range; False if that has no form."""
        low, high = bounds(index, self.ranges)
        if everywhere(low >= span[0]) and everywhere(high < span[1]):
            return True
        if not index.terms:
            inside = np.asarray((index.offset >= span[0]) & (index.offset < span[1]), dtype=np.int64)
            self.weight = collapse(self.weight * inside)
            return True
        if len(index.terms) > 1 or abs(index.terms[0][1]) != 1:
            return False
        variable, stride = index.terms[0]
        if stride == 1:
            return self._narrow(variable, collapse(span[0] - index.offset), collapse(span[1] - index.offset))
        return self._narrow(variable, collapse(index.offset - span[1] + 1), collapse(index.offset - span[0] + 1))

    def _narrow(self, variable: Variable, start: Lane, stop: Lane) -> bool:
        """Restrict a variable to a range: a summed one, or one that leads a dim, whose box follows."""
        low, high = self.ranges[variable]
        first = smaller(larger(low, start), larger(start, stop))  # an empty range lies inside, too
        last = larger(first, smaller(high, stop))
        if equal(first, low) and equal(last, high):
            return False
        for dim, group in enumerate(self.dims):
            if variable in group:
                if group[0] != variable:
                    return False
                begin, row = self.box[dim][0], self._elements(group[1:])
                self.box[dim] = (collapse(begin + (first - low) * row), collapse(begin + (last - low) * row))
        self.ranges[variable] = (first, last)
        return True

    def _elements(self, group: Iterable[Variable]) -> Lane:
        """How many elements variables of a dim run over together."""
        count: Lane = 1
        for variable in group:
            count = count * extent(self.ranges[variable])
        return count

    def _rewrite_step(self, number: int, index: Index) -> bool:
        low, high = bounds(index, self.ranges)
        passes, fails = low > 0, high <= 0
        if everywhere(passes | fails):
            del self.factors[number]
            self.weight = collapse(self.weight * np.asarray(passes, dtype=np.int64))
            return True
        if self._coarsen_step(number, index) or self._drop_blocks(index) or self._meet_step(number, index):
            return True
        if len(index.terms) != 1 or abs(index.terms[0][1]) != 1:
            return False
        (variable, stride), offset = index.terms[0], index.offset
        if self.factors[number].atom is not WINDOW and not self._is_digit(variable):
            return False
        low, high = self.ranges[variable]
        span = (collapse(1 - offset), high) if stride == 1 else (low, offset)
        if not self._narrow(variable, *span):
            return False
        del self.factors[number]
        return True

    def _meet_step(self, number: int, index: Index) -> bool:
        """Two steps towards each other leave nothing, or one position between them."""
        for other in range(number + 1, len(self.factors)):
            if self.factors[other].atom not in (STEP, WINDOW):
                continue
            between = combined([index, self.factors[other].at[0]])
            if between.terms or not (everywhere(between.offset <= 1) or equal(between.offset, 2)):
                continue
            del self.factors[other]
            if equal(between.offset, 2):
                self.factors[number] = Factor(IMPULSE, (Index(index.terms, collapse(index.offset - 1)),))
            else:
                self.weight = 0
            return True
        return False

    def _is_digit(self, variable: Variable) -> bool:
        """Whether a variable counts blocks: a mask of whole blocks says which of them there are."""
        found = [index for factor in self.factors for index in factor.at if any(v == variable for v, _ in index.terms)]
        return any(len(index.terms) > 1 for index in found)

    def _drop_blocks(self, index: Index) -> bool:
        """A sum over blocks without those at its ends of which a step leaves nothing."""
        visible = self._visible()
        for variable, stride in index.terms:
            if variable in visible or abs(stride) == 1 or len(index.terms) == 1:
                continue
            _, most = bounds(Index(tuple(t for t in index.terms if t[0] != variable), index.offset), self.ranges)
            low, high = self.ranges[variable]
            span = (collapse(-most // stride + 1), high) if stride > 0 else (low, collapse(-(most // stride)))
            if self._narrow(variable, *span):
                return True
        return False

    def _coarsen_step(self, number: int, index: Index) -> bool:
        """S A + B > 0 says A > t if every B there is says so."""
        largest = abs(index.terms[0][1])
        outer = tuple((v, s // largest) for v, s in index.terms if s % largest == 0)
        rest = Index(tuple(t for t in index.terms if t[1] % largest), index.offset)
        if largest == 1:
            return False
        low, high = bounds(rest, self.ranges)
        first, last = collapse((-high) // largest), collapse((-low) // largest)
        if not equal(first, last):
            return False
        self.factors[number] = self.factors[number]._replace(at=(Index(outer, collapse(-first)),))
        return True

    def _rewrite_delta(self, number: int, factor: Factor) -> bool:
        """Two deltas of one subject select one position; a delta that is alone in a sum over all values is 1."""
        for other in range(number + 1, len(self.factors)):
            its = self.factors[other]
            if its.atom is factor.atom and _same_subject(factor, its):
                distance = combined([factor.at[-1], scaled(its.at[-1], -1)])
                self.factors[other] = Factor(IMPULSE, (distance,))
                return True
        span = self.facts.subject_span(factor, self.ranges)
        if span is None:
            return False
        index = factor.at[-1]
        low, high = bounds(index, self.ranges)
        if everywhere(low >= span[0]) and everywhere(high < span[1]):
            return self._whole_delta(number, index, span)
        if not index.terms:  # void where it is outside, as the weight then says
            inside = Index((), larger(span[0], smaller(index.offset, span[1] - 1)))
            self.factors[number] = factor._replace(at=(*factor.at[:-1], inside))
        return self._confine(index, span)

    def _whole_delta(self, number: int, index: Index, span: tuple[int, int]) -> bool:
        if len(index.terms) != 1 or abs(index.terms[0][1]) != 1:
            return False
        variable = index.terms[0][0]
        others = {v for n, f in enumerate(self.factors) if n != number for v in f.variables()}
        others |= {v for i in self.factors[number].at[:-1] for v, _ in i.terms}
        if variable in others or variable in self._visible() or not equal(extent(self.ranges[variable]), span[1] - span[0]):
            return False
        del self.factors[number]
        del self.ranges[variable]
        return True


def _same_subject(a: Factor, b: Factor) -> bool:
    return all(x.key == y.key for x, y in zip(a.at[:-1], b.at[:-1], strict=True))


def _order(factor: Factor) -> tuple[int, Fraction, tuple[int, ...]]:
    """By age; the same atom at several points, by the points."""
    return factor.atom.id, factor.power, tuple([i.offset for i in factor.at if not i.terms and type(i.offset) is int])
