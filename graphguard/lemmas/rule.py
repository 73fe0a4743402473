"""Index rules: along which axes an operator works position by position, and which it must see whole.

`"... h, h -> ... h"` with `whole="h"`, or `"... [h], [h] -> ... [h]"`, says that the result at a position of `...` is some
function of the first operand's row there and of the second operand. Nothing else is known: equal rows give equal rows.
`"{v} d, t -> t d"` says that another operand has indices into `v`, which must be whole too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from graphguard.engine.terms.term import Undescribed, Value
from graphguard.errors import UsageError
from graphguard.graph.ir import Arg
from graphguard.graph.ir import Value as Tensor
from graphguard.lemmas.registry import Call

ELLIPSIS = "..."
Dim = tuple[str, ...]  # the axes of a dim, the outermost first; several where the operator sees them as one, as in `(h d)`
Pattern = tuple[Dim, ...]
_TOKEN = re.compile(r"\s*(\.\.\.|\[\s*[A-Za-z_]\w*\s*\]|\{\s*[A-Za-z_]\w*\s*\}|[A-Za-z_]\w*|[()])")


@dataclass(frozen=True)
class Rule:
    """The axes of each operand and of each result; those in `whole` may not be cut, among them those that are indexed."""

    text: str
    operands: tuple[Pattern, ...]
    results: tuple[Pattern, ...]
    whole: frozenset[str]
    indexed: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return f"{self.text}, whole {' '.join(sorted(self.whole))}" if self.whole else self.text

    def parallel(self, ellipsis: int) -> list[str]:
        """The axes along which positions do not know of each other, in the order of the first result."""
        return [axis for dim in spread(self.results[0], ellipsis) for axis in dim if axis not in self.whole]

    # ------------------------------------------------------------------ shapes
    def ellipsis(self, shapes: Sequence[Sequence[int]]) -> int:
        """How many dims `...` stands for. Raises Undescribed if the operands do not fit the rule."""
        if len(shapes) != len(self.operands):
            raise Undescribed(f"{len(shapes)} operands, where the rule {self.text!r} has {len(self.operands)}")
        counts = set()
        for pattern, shape in zip(self.operands, shapes, strict=True):
            extra = len(shape) - (len(pattern) - ((ELLIPSIS,) in pattern))
            if (ELLIPSIS,) in pattern and extra >= 0:
                counts.add(extra)
            elif extra:
                raise Undescribed(f"an operand of shape {tuple(shape)}, which does not fit {self.text!r}")
        if len(counts) > 1:
            raise Undescribed(f"operands whose `...` have different numbers of dims, in {self.text!r}")
        return counts.pop() if counts else 0

    def sizes(self, operands: Sequence[Sequence[int]], results: Sequence[Sequence[int]]) -> dict[str, int]:
        """The size of each axis. Raises Undescribed if the shapes do not say it, or contradict each other."""
        count = self.ellipsis(operands)
        pairs = [pair for p, s in zip(self.operands, operands, strict=True) for pair in _dims(spread(p, count), s)]
        if len(results) != len(self.results):
            raise Undescribed(f"{len(results)} results, where the rule {self.text!r} has {len(self.results)}")
        for pattern, shape in zip(self.results, results, strict=True):
            if len(spread(pattern, count)) != len(shape):
                raise Undescribed(f"a result of shape {tuple(shape)}, which does not fit {self.text!r}")
            pairs += _dims(spread(pattern, count), shape)
        return self._solved(pairs)

    def _solved(self, pairs: Sequence[tuple[Dim, int]]) -> dict[str, int]:
        known: dict[str, int] = {}
        for _ in range(len(pairs) + 1):
            for dim, size in pairs:
                left = [axis for axis in dim if axis not in known]
                given = math.prod(known[axis] for axis in dim if axis in known)
                if (not left and given != size) or (given and size % given):
                    raise Undescribed(f"sizes that contradict each other, in {self.text!r}")
                if len(left) == 1:
                    known[left[0]] = size // given if given else 0
        unknown = sorted({axis for dim, _ in pairs for axis in dim} - known.keys())
        if unknown:
            raise Undescribed(f"nothing says how large {' and '.join(unknown)} are, in {self.text!r}")
        return known

    # ------------------------------------------------------------------ descriptions
    def describe(self, c: Call, operands: Sequence[Value], shapes: Sequence[Sequence[int]], words: Hashable) -> list[Value]:
        """Results of which only the rule is known. `words` is all else that the operator was given."""
        outputs = [tensor.shape for tensor in c.node.outputs]
        count, sizes = self.ellipsis(shapes), self.sizes(shapes, outputs)
        parallel = self.parallel(count)
        rows = [self._rows(c, x, spread(p, count), parallel, sizes) for x, p in zip(operands, self.operands, strict=True)]
        dtypes = tuple(tensor.dtype for tensor in (*c.node.operands(), *c.node.outputs))
        return [
            self._result(c, rows, spread(pattern, count), parallel, sizes, outputs[number], (number, words, str(self), dtypes))
            for number, pattern in enumerate(self.results)
        ]

    @staticmethod
    def _rows(c: Call, x: Value, pattern: Pattern, parallel: Sequence[str], sizes: Mapping[str, int]) -> Value:
        """An operand with all parallel axes first; those that it does not have are broadcast."""
        axes = [axis for dim in pattern for axis in dim]
        own = [axis for axis in axes if axis not in parallel]
        x = c.reshape(x, [sizes[axis] for axis in axes])
        x = c.permute(x, [axes.index(axis) for axis in (*(a for a in parallel if a in axes), *own)])
        x = c.reshape(x, [sizes[a] if a in axes else 1 for a in parallel] + [sizes[a] for a in own])
        return c.expand(x, [sizes[a] for a in (*parallel, *own)])

    @staticmethod
    def _result(
        c: Call,
        rows: Sequence[Value],
        pattern: Pattern,
        parallel: Sequence[str],
        sizes: Mapping[str, int],
        shape: Sequence[int],
        identity: tuple[Hashable, ...],
    ) -> Value:
        axes = [axis for dim in pattern for axis in dim]
        own = [axis for axis in axes if axis not in parallel]
        found = c.opaque(c.node.op, rows, len(parallel), [sizes[axis] for axis in own], identity)
        c.need_defined(found)
        order = [*parallel, *own]
        return c.reshape(c.permute(found, [order.index(axis) for axis in axes]), shape)


def spread(pattern: Pattern, ellipsis: int) -> Pattern:
    """The pattern with `...` as so many axes."""
    return tuple(each for dim in pattern for each in ([(f"...{n}",) for n in range(ellipsis)] if dim == (ELLIPSIS,) else [dim]))


def _dims(pattern: Pattern, shape: Sequence[int]) -> list[tuple[Dim, int]]:
    return list(zip(pattern, shape, strict=True))


# ---------------------------------------------------------------------- reading
def parse(text: str, whole: str | Iterable[str] = ()) -> Rule:
    """The rule that a text says. Raises UsageError where it says none."""
    sides = text.split("->")
    if len(sides) != 2:
        raise UsageError(f"the rule {text!r} is not of the form 'operands -> results', such as '... h, h -> ... h'")
    bracketed: set[str] = set()
    indexed: set[str] = set()
    operands, results = ([_pattern(text, each, bracketed, indexed) for each in side.split(",")] for side in sides)
    stated = set(whole.replace(",", " ").split() if isinstance(whole, str) else whole)
    rule = Rule(text, tuple(operands), tuple(results), frozenset(stated | bracketed | indexed), frozenset(indexed))
    _check(rule, stated)
    return rule


def _pattern(text: str, part: str, bracketed: set[str], indexed: set[str]) -> Pattern:
    dims: list[Dim] = []
    group: list[str] | None = None
    place, part = 0, part.rstrip()
    while place < len(part):
        found = _TOKEN.match(part, place)
        if found is None:
            rest = part[place:].strip()
            if rest.startswith("+"):
                raise UsageError(f"the rule {text!r} has {rest!r}: rules do not say halos; make the axis whole, as in `[s]`")
            raise UsageError(
                f"the rule {text!r} has {rest!r}, which is neither `...`, an axis, `[axis]`, `{{axis}}` nor `(a b)`"
            )
        token, place = found[1], found.end()
        if token in "()":
            if (token == "(") != (group is None):
                raise UsageError(f"the parentheses of the rule {text!r} do not match")
            if group is not None:
                dims.append(tuple(group))
            group = [] if token == "(" else None
            continue
        name = token.strip("[]{} ")
        if token.startswith("["):
            bracketed.add(name)
        elif token.startswith("{"):
            indexed.add(name)
        if group is None:
            dims.append((name,))
        elif name == ELLIPSIS:
            raise UsageError(f"the rule {text!r} has `...` inside of parentheses; name the axes")
        else:
            group.append(name)
    if group is not None:
        raise UsageError(f"the parentheses of the rule {text!r} do not match")
    return tuple(dims)


def _check(rule: Rule, stated: set[str]) -> None:
    for pattern in (*rule.operands, *rule.results):
        axes = [axis for dim in pattern for axis in dim]
        twice = next((axis for axis in axes if axes.count(axis) > 1), None)
        if twice is not None:
            raise UsageError(f"the rule {rule.text!r} has {twice} twice in one tensor")
    read = {axis for pattern in rule.operands for dim in pattern for axis in dim}
    made = [{axis for dim in pattern for axis in dim} for pattern in rule.results]
    for axis in sorted(rule.indexed & set[str]().union(*made)):
        raise UsageError(f"the rule {rule.text!r} has {{{axis}}} in a result: what is indexed does not come out as an axis")
    for axis in sorted(stated):
        if axis == ELLIPSIS or axis not in read.union(*made):
            raise UsageError(f"whole= names {axis!r}, which is no axis of the rule {rule.text!r}")
    for axis in sorted(read.union(*made) - rule.whole):
        if axis not in read:
            raise UsageError(
                f"the rule {rule.text!r} has {axis} in a result alone, so nothing is parallel along it: put it into whole="
            )
        if not all(axis in each for each in made):
            raise UsageError(f"the rule {rule.text!r} takes {axis} away, so an operator needs all of it: put it into whole=")


def spelled(arg: Arg) -> Hashable:
    """An argument as a word; of tensors only the place counts."""
    if type(arg) is Tensor:
        return "%"
    if type(arg) is tuple:
        return tuple(spelled(each) for each in arg)
    return repr(arg)
