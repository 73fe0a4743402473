"""The atoms of one proof, and the products and sums that are filed under them.

The sequential run files each sum that it makes. A later product that contains it, whichever way it came about, is folded back
by elimination: for a summed variable, look up the product of the factors that mention it; if it is filed, its atom takes their
place. So the ranks may associate their contractions as they like, and partial sums need no marks: once a range is whole, the
product is the filed one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

from graphguard.engine.definition import Abstract, Definition, Part, Pattern, Product, abstract, fitting, shape_of
from graphguard.engine.facts import Facts, Kind
from graphguard.engine.lane import Lane, key, varies
from graphguard.engine.normal import normal
from graphguard.engine.part import Whole
from graphguard.engine.positive import is_not_zero, is_positive
from graphguard.engine.rational import prime_powers
from graphguard.engine.term import (
    FIRST_ID,
    ONE,
    SPECIAL,
    Atom,
    Factor,
    Index,
    Range,
    Term,
    Undescribed,
    Variable,
    extent,
    mentioned,
    substituted,
)
from graphguard.engine.trace import Trace
from graphguard.engine.widen import widened

if TYPE_CHECKING:
    from graphguard.engine.span import Span

MOST_FACTORS = 24
What = tuple[str, str, tuple[Hashable, ...], int]  # kind, name, parameters, number of operands


NOT_ZERO: Kind = "nonzero"
NOT_NEGATIVE: Kind = "nonnegative"
DEFINED: Kind = "computed"  # of a function or an operator


class Need(NamedTuple):
    """What an operation needs of an atom, where a factor reads it."""

    kind: Kind
    factor: Factor
    ranges: Mapping[Variable, Range]
    weight: Lane
    exposed: bool  # whether an output shows where it is not met

    @property
    def key(self) -> Hashable:
        """Equal for needs that are alike but for the names of variables."""
        names = {v: n for n, v in enumerate(dict.fromkeys(self.factor.variables()))}
        at = tuple((tuple((names[v], s) for v, s in index.terms), key(index.offset)) for index in self.factor.at)
        spans = tuple((key(self.ranges[v][0]), key(self.ranges[v][1])) for v in names)
        return self.kind, self.factor.atom.id, at, spans, key(self.weight), self.exposed


class _Definitions(dict[int, Definition]):
    """What atoms are. Those made by taking a trace again are put together when someone asks."""

    def __init__(self, table: Table):
        super().__init__()
        self._table = table
        self.structures: dict[int, tuple[int, Pattern, tuple[int, ...]]] = {}  # shape, pattern and atoms of each
        self.later: dict[int, tuple[Definition, Mapping[int, Atom]]] = {}

    def get(self, key: int, default: Any = None) -> Any:
        trace = self._table.trace
        if trace is not None:
            structure = self.structures.get(key)
            trace.asked(_structure, (key,), structure and structure[:2])
            if structure is not None:
                trace.found(_made_of, (key,), _made_of(self._table, (key,)))
        if key in self.later:
            self[key] = _renamed(*self.later.pop(key))
        return super().get(key, default)

    def __getitem__(self, key: int) -> Definition:
        found = self.get(key)
        if found is None:
            raise KeyError(key)
        return found  # type: ignore[no-any-return]

    def __contains__(self, key: object) -> bool:
        return self.get(key) is not None  # type: ignore[arg-type]


def _structure(table: Table, ids: tuple[int, ...]) -> Any:
    found = table.definitions.structures.get(ids[0])
    return found and found[:2]


def _made_of(table: Table, ids: tuple[int, ...]) -> list[Atom]:
    return [table.by_id(each) for each in table.definitions.structures[ids[0]][2]]


def _renamed(definition: Definition, atoms: Mapping[int, Atom]) -> Definition:
    operands = tuple(
        tuple(p._replace(factors=tuple(f._replace(atom=atoms[f.atom.id]) for f in p.factors)) for p in operand)
        for operand in definition.operands
    )
    return definition._replace(operands=operands)


class Table:
    def __init__(self) -> None:
        self._atoms: dict[tuple[str, Hashable], Atom] = {}
        self._by_id: dict[int, Atom] = {atom.id: atom for atom in SPECIAL}
        self._shapes: dict[Hashable, int] = {}
        self._defined: dict[tuple[int, tuple[int, ...]], dict[Pattern, Atom]] = {}  # by shape and atoms, then by pattern
        self._ids = itertools.count(FIRST_ID)
        self._filed: set[int] = set()  # the sums of the sequential run, and other atoms that are asked for
        self._filed_products: dict[Hashable, list[Range]] = {}  # over what, by the atoms that they are sums of products of
        self.trace: Trace | None = None  # of the description that is being made
        self.definitions = _Definitions(self)
        self.facts = Facts(self)  # what is known of some elements of atoms
        self._wholes: dict[int, Whole] = {}  # what atoms are parts of
        self._sums: dict[int, list[Atom]] = {}  # sums of several products, by an atom that occurs in them
        self.names = itertools.count()
        self.operands: list[Term] = []  # sums that the sequential program passes to functions
        self._operands: frozenset[int] = frozenset()
        self.leaves: dict[int, frozenset[int]] = {}  # what sums are made of
        self.vanishing: dict[int, bool] = {}  # whether the exp of an atom may be 0
        self.infinite: dict[int, bool] = {}  # whether an atom may be minus infinity
        self.garbage: dict[int, bool] = {}  # whether unwritten memory is in an atom
        self.maskable: dict[int, bool] = {}  # whether a mask may make an atom zero
        self.needs: list[Need] = []  # of the ranks
        self.spans: dict[int, Span] = {}  # stated bounds of inputs that are no whole numbers
        self.written = 0  # terms written out so far
        self.folding = True  # off while sums are written out
        self.recording = True  # while the sequential program is described
        self.ignores_by_default = True  # whether a label may be the one that losses leave out by default
        self.exposed = True  # whether what is undefined in the result of the operation that is described is seen in an output

    # ------------------------------------------------------------------ atoms
    def atom(self, kind: str, key: Hashable, **facts: bool) -> Atom:
        """The one atom of this kind and key."""
        known = self._atoms.get((kind, key))
        if known is None:
            known = self._atoms[kind, key] = self._new(kind, **facts)
        if self.trace is not None:
            self.trace.fixed(known) if kind == "number" else self.trace.spoil()
        return known

    def _new(self, kind: str, **facts: bool) -> Atom:
        atom = Atom(next(self._ids), kind, **facts)
        self._by_id[atom.id] = atom
        return atom

    def by_id(self, number: int) -> Atom:
        return self._by_id[number]

    def note_infinite(self, atom: Atom) -> None:
        """Some elements of it are no numbers."""
        self.spoil_trace()
        self.infinite[atom.id] = self.vanishing[atom.id] = True

    def atoms(self) -> Iterable[tuple[tuple[str, Hashable], Atom]]:
        self.spoil_trace()
        return self._atoms.items()

    def spoil_trace(self) -> None:
        """What is done now cannot be done again by the trace alone."""
        if self.trace is not None:
            self.trace.spoil()

    def define(
        self,
        kind: str,
        name: str,
        parameters: tuple[Hashable, ...],
        operands: int,
        parts: Sequence[Part],
        ranges: Mapping[Variable, Range],
        **facts: bool,
    ) -> tuple[Atom, tuple[Index, ...]]:
        """The atom of a definition, and the positions at which it is read. The label of each part begins with its operand
        and its coefficient."""
        orders = abstract(parts, ranges)
        known = self._known((kind, name, parameters, operands), orders)
        if known is not None:
            return known
        found = abstract(parts, ranges, apart=True)[0]
        return self.add((kind, name, parameters, operands), found.products, len(found.axes), **facts), found.axes

    def find(
        self, kind: str, name: str, parts: Sequence[Part], ranges: Mapping[Variable, Range]
    ) -> tuple[Atom, tuple[Index, ...]] | None:
        """The atom of one operand's definition, if there is one."""
        return self._known((kind, name, (), 1), abstract(parts, ranges))

    def add(self, what: What, products: Sequence[Product], axes: int, **facts: bool) -> Atom:
        """The atom of products that are numbered already."""
        kind, name, parameters, operands = what
        shape, ids, pattern = shape_of(products)
        number = self._shapes.setdefault((what, shape), len(self._shapes))
        known = self._look_up(number, ids)
        if known and pattern in known:
            return known[pattern]
        grouped = tuple(tuple(p for p in products if p.label[0] == each) for each in range(operands))  # type: ignore[index]
        definition = Definition(name, parameters, grouped, axes)

        def make(shape: int, ids: tuple[int, ...], pattern: Pattern, atoms: Mapping[int, Atom] | None) -> Atom:
            atom = self._new(kind, **facts)
            self._defined.setdefault((shape, ids), {})[pattern] = atom
            self.definitions.structures[atom.id] = shape, pattern, ids
            if atoms is None:
                self.definitions[atom.id] = definition
            else:
                self.definitions.later[atom.id] = definition, atoms
            return atom

        atom = make(number, ids, pattern, None)
        if self.trace is not None:
            self.trace.added(number, ids, pattern, atom, make)
        return atom

    def defined(self, shape: int, ids: tuple[int, ...]) -> Mapping[Pattern, Atom] | None:
        """The atoms of a shape that are made of these atoms, by pattern."""
        return self._defined.get((shape, ids))

    def _look_up(self, shape: int, ids: tuple[int, ...]) -> Mapping[Pattern, Atom] | None:
        found = self._defined.get((shape, ids))
        if self.trace is not None:
            self.trace.looked_up(shape, ids, found)
        return found

    def _known(self, what: What, orders: Sequence[Abstract]) -> tuple[Atom, tuple[Index, ...]] | None:
        loose: list[tuple[Abstract, Mapping[Pattern, Atom]]] = []
        for found in orders:
            shape = self._shapes.setdefault((what, found.shape), len(self._shapes))
            atoms = self._look_up(shape, found.atoms)
            if atoms:
                exact = atoms.get(found.pattern)
                if exact is not None:
                    return exact, found.axes
                loose.append((found, atoms))
        for found, others in loose:
            for pattern, atom in others.items():
                axes = fitting(pattern, found)
                if axes is not None:
                    return atom, axes
        return None

    # ------------------------------------------------------------------ notes about atoms
    def sums_with(self, atom: int) -> Sequence[Atom]:
        """The sums that are noted under an atom that occurs in them."""
        found = self._sums.get(atom, ())
        if self.trace is not None:
            self.trace.found(_sums_with, (atom,), found)
        return found

    def note_sum(self, member: Atom, total: Atom) -> None:
        known = self._sums.setdefault(member.id, [])
        if total not in known:
            known.append(total)
        if self.trace is not None:
            self.trace.told(lambda there, atoms: there.note_sum(*atoms), (member, total))

    def whole_of(self, part: int) -> Whole | None:
        """What an atom is a part of."""
        found = self._wholes.get(part)
        if self.trace is not None:
            self.trace.asked(_form_of_whole, (part,), found and found.form)
            self.trace.found(_atoms_of_whole, (part,), found.atoms if found else [])
        return found

    def note_whole(self, part: Atom, whole: Whole) -> None:
        self._wholes[part.id] = whole
        if self.trace is not None:
            self.trace.told(lambda there, atoms: there.note_whole(atoms[0], whole.of(atoms[1:])), (part, *whole.atoms))

    def note_operand(self, term: Term) -> None:
        """A sum that the sequential program passes to a function."""
        self.operands.append(term)
        if self.trace is not None:
            self.trace.told(_note_operand, (term.factors[0].atom,), term)

    def is_operand(self, atom: int) -> bool:
        """Whether the sequential program passes this sum to a function."""
        known = atom in self._known_operands()
        if self.trace is not None:
            self.trace.asked(_is_known_operand, (atom,), known)
        return known

    def _known_operands(self) -> frozenset[int]:
        if len(self._operands) != len(self.operands):
            self._operands = frozenset(term.factors[0].atom.id for term in self.operands)
        return self._operands

    def need(self, kind: Kind, factor: Factor, ranges: Mapping[Variable, Range], weight: Lane = 1) -> None:
        """Note what is needed of an atom where a factor reads it, so that an operation is defined. Of the sequential program
        that holds, as it is taken to be defined; of the ranks it has to be shown."""
        if kind != DEFINED and factor.atom.positive:
            return
        if self.recording:
            self.facts.note(kind, factor, ranges)
            return
        ranges = {v: ranges[v] for v in factor.variables()}
        self.needs.append(Need(kind, factor, ranges, weight, self.exposed))
        if self.trace is not None:
            self.trace.told(_need, (factor.atom,), kind, factor, ranges, weight)

    def root(self, number: Fraction, exponent: Fraction) -> tuple[Fraction, tuple[Factor, ...]]:
        """A power of a positive number: a rational, and powers of primes between 0 and 1."""
        scale, factors, primes = ONE, [], prime_powers(number)
        for prime, times in ((number, 1),) if primes is None else primes:
            whole, rest = divmod(times * exponent, 1)
            scale *= Fraction(prime) ** whole
            if rest:
                factors.append(Factor(self._number(Fraction(prime)), (), rest))
        return scale, tuple(factors)

    def _number(self, number: Fraction) -> Atom:
        """A positive number as an atom: its powers need not be rational."""
        atom = self.atom("number", number, positive=True)
        atom.number = number
        return atom

    def pi(self) -> Atom:
        return self.atom("number", repr(math.pi), positive=True)

    # ------------------------------------------------------------------ sums
    def settle(self, term: Term) -> Term | None:
        """The normal form, with filed sums in place of what they stand for; the sequential run files what is left."""
        found = normal(term, self.facts)
        if found is None:
            return None
        found = self._cancelled(found)
        if not self.folding:
            return found
        folded = self._fold(found)
        folded = folded if folded is found else self._cancelled(folded)
        return self.filed(folded, masks=False) if self.recording else folded

    def _cancelled(self, term: Term) -> Term:
        """The term without what it is multiplied with and divided by, if that is not zero anywhere."""
        for below in term.factors:
            if below.power.numerator > 0 or below.atom.positive or below.atom.kind not in ("sum", "lin"):
                continue
            above = next((f for f in term.factors if f.power > 0 and f.place == below.place), None)
            if above is None or not is_not_zero(self, below, term.ranges, term.weight):
                continue
            power = above.power + below.power
            rest = tuple(f for f in term.factors if f is not above and f is not below)
            found = normal(term.with_(factors=(*rest, below._replace(power=power)) if power else rest), self.facts)
            assert found is not None
            return self._cancelled(found)
        return term

    def filed(self, term: Term, masks: bool = True) -> Term:
        """The term without sums: an atom for each. Masks, which are sums of deltas over values, may stay open."""
        while pending := [
            v for v in term.summed if not varies(extent(term.ranges[v])) and (masks or not _is_mask(term.factors, v))
        ]:
            inside, bound = connected(term, pending[0], set(pending))
            part = Part((0, ONE), inside, bound)
            atom, axes = self.define("sum", "sum", (), 1, [part], term.ranges, **signs(inside))
            if self.recording:
                spans = tuple(term.ranges[v] for v in bound if not any(varies(end) for end in term.ranges[v]))
                self._file(atom, tuple(f.atom for f in inside), tuple(f.power for f in inside), spans)
            term = self._replaced(term, inside, bound, atom, axes)
        return term

    def _file(self, total: Atom, atoms: tuple[Atom, ...], powers: tuple[Fraction, ...], spans: tuple[Range, ...]) -> None:
        self._filed.add(total.id)
        known = self._filed_products.setdefault(_product_key([atom.id for atom in atoms], powers), [])
        known += [span for span in spans if span not in known]
        if self.trace is not None:
            self.trace.told(lambda there, images: there._file(images[0], images[1:], powers, spans), (total, *atoms))

    def file(self, atom: Atom) -> None:
        """Note an atom of the sequential run that is no sum."""
        self._filed.add(atom.id)
        if self.trace is not None:
            self.trace.told(lambda there, atoms: there.file(*atoms), (atom,))

    def is_filed(self, total: Atom) -> bool:
        """Whether the sequential run made this sum."""
        filed = total.id in self._filed
        if self.trace is not None:
            self.trace.asked(_is_filed, (total.id,), filed)
        return filed

    def _filed_spans(self, factors: Sequence[Factor]) -> Sequence[Range] | None:
        """The ranges of filed sums of products of the same atoms; None if there is no such sum."""
        ids, powers = tuple(f.atom.id for f in factors), tuple(f.power for f in factors)
        found = self._filed_products.get(_product_key(ids, powers))
        if self.trace is not None:
            answer = None if found is None else list(found)
            self.trace.asked(_spans_of, ids, answer, powers)
        return found

    def _fold(self, term: Term) -> Term:
        summed = term.summed
        while summed:
            folded = self._folded_once(term, summed) or self._regrouped(term, summed)
            if folded is None:
                break
            term = folded
            summed = term.summed
        if len(term.factors) > MOST_FACTORS:
            raise Undescribed(f"a product of more than {MOST_FACTORS} factors")
        return term

    def _folded_once(self, term: Term, summed: Sequence[Variable]) -> Term | None:
        """The term with a filed sum in place of its members, or with a sum that it is divided by, which cancels."""
        even = {v for v in summed if not varies(extent(term.ranges[v]))}
        divisors = {f.place: f for f in term.factors if f.power.numerator < 0 and f.atom.kind == "sum"}
        for variable in sorted(summed):
            inside = tuple(f for f in term.factors if variable in f.variables())
            whole = self._whole_part(term, inside, variable)
            if whole is not None:
                return whole
            spans = self._filed_spans(inside)
            if spans is None and not divisors:
                continue
            outside = mentioned(f for f in term.factors if variable not in f.variables())
            for ranges in [term.ranges, *widened(inside, term.ranges, variable, spans or ())]:
                same = even if ranges is term.ranges else even | {variable}
                if variable not in same:
                    continue
                closed = tuple(sorted(v for v in mentioned(inside) if v in same and v not in outside))
                for bound in ((variable,), closed) if len(closed) > 1 else ((variable,),):
                    found = self.find("sum", "sum", [Part((0, ONE), inside, bound)], ranges)
                    if found is None:
                        continue
                    divisor = divisors.get(Factor(*found).place)
                    if self.is_filed(found[0]) or (divisor and is_positive(self, divisor, ranges, term.weight)):
                        return self._replaced(term, inside, bound, *found)
        return self._folded_chain(term, even) if len(even) > 1 else None

    def _folded_chain(self, term: Term, even: set[Variable]) -> Term | None:
        """A filed sum over several variables at once, no one of which is in all of its factors."""
        left = set(even)
        while left:
            inside, bound = connected(term, min(left), even)
            left -= set(bound)
            if len(bound) < 2 or self._filed_spans(inside) is None:
                continue
            found = self.find("sum", "sum", [Part((0, ONE), inside, bound)], term.ranges)
            if found is not None and self.is_filed(found[0]):
                return self._replaced(term, inside, bound, *found)
        return None

    def _regrouped(self, term: Term, summed: Sequence[Variable]) -> Term | None:
        """Σ_i a_i (Σ_h b_ih c_h) as Σ_h (Σ_i a_i b_ih) c_h, where the sequential program has that pair. A rank that holds a
        part of the i can only sum over h; once a reduction has all i, the order is free. One sum less must be left."""
        if self.recording:
            return None
        for variable in sorted(summed):
            inside = [f for f in term.factors if variable in f.variables()]
            if len(inside) < 2 or any(varies(end) for end in term.ranges[variable]):
                continue
            for factor in inside:
                opened = self._with_opened(term, inside, factor, variable)
                if opened is None:
                    continue
                found = self._folded_once(opened, [v for v in opened.summed if v in term.ranges])
                while found is not None and len(found.summed) >= len(summed):
                    found = self._folded_once(found, found.summed)
                if found is not None:
                    return found
        return None

    def _with_opened(self, term: Term, inside: Sequence[Factor], factor: Factor, variable: Variable) -> Term | None:
        """The term with the members of a sum in place of it, if those that mention the variable are in a filed sum with what
        else mentions it."""
        if factor.atom.kind != "sum" or factor.power != 1:
            return None
        members, ranges = self._members(factor)
        spans = self._filed_spans([f for f in inside if f is not factor] + [f for f in members if variable in f.variables()])
        if spans is None or term.ranges[variable] not in spans:
            return None
        kept = [f for f in term.factors if f is not factor]
        return normal(term.with_(factors=(*kept, *members), ranges={**term.ranges, **ranges}), self.facts)

    def _members(self, factor: Factor) -> tuple[list[Factor], dict[Variable, Range]]:
        """What a sum is a sum of products of, read where it is, and the ranges of the variables that it binds."""
        (member,) = self.definitions[factor.atom.id].operands[0]
        names: dict[int, Index] = {-1 - n: index for n, index in enumerate(factor.at)}
        ranges: dict[Variable, Range] = {}
        for number, size in enumerate(member.extents):
            variable = next(self.names)
            names[number], ranges[variable] = Index(((variable, 1),)), (0, size)
        return [f._replace(at=tuple(substituted(i, names) for i in f.at)) for f in member.factors], ranges

    def _whole_part(self, term: Term, inside: tuple[Factor, ...], variable: Variable) -> Term | None:
        """The sum of all parts of a tensor is the tensor."""
        if len(inside) != 1 or inside[0].power != 1:
            return None
        whole = self.whole_of(inside[0].atom.id)
        if whole is None or not whole.is_summed(inside[0], variable, term.ranges):
            return None
        return self._with(
            term.with_(coefficient=term.coefficient * whole.coefficient), inside, (variable,), whole.read_at(inside[0].at)
        )

    def _replaced(
        self, term: Term, inside: tuple[Factor, ...], bound: Iterable[Variable], atom: Atom, axes: tuple[Index, ...]
    ) -> Term:
        return self._with(term, inside, bound, (Factor(atom, axes),))

    def _with(self, term: Term, inside: Sequence[Factor], bound: Iterable[Variable], factors: tuple[Factor, ...]) -> Term:
        """The term with these factors in place of others and of sums over bound variables."""
        gone = {id(factor) for factor in inside}
        kept = tuple(factor for factor in term.factors if id(factor) not in gone)
        ranges = {v: span for v, span in term.ranges.items() if v not in bound}
        found = normal(term.with_(factors=(*kept, *factors), ranges=ranges), self.facts)
        assert found is not None
        return found


def connected(term: Term, start: Variable, pending: set[Variable]) -> tuple[tuple[Factor, ...], tuple[Variable, ...]]:
    """The factors that hang together with a summed variable through summed variables, and those variables."""
    variables = {start}
    while True:
        inside = tuple(f for f in term.factors if variables & set(f.variables()))
        grown = variables | (mentioned(inside) & pending)
        if grown == variables:
            return inside, tuple(sorted(variables))
        variables = grown


def _product_key(ids: Iterable[int], powers: Iterable[Fraction]) -> Hashable:
    return tuple(sorted(zip(ids, powers, strict=True)))


def _sums_with(table: Table, ids: tuple[int, ...]) -> Sequence[Atom]:
    return table.sums_with(*ids)


def _is_known_operand(table: Table, ids: tuple[int, ...]) -> bool:
    return ids[0] in table._known_operands()


def _is_filed(table: Table, ids: tuple[int, ...]) -> bool:
    return ids[0] in table._filed


def _spans_of(table: Table, ids: tuple[int, ...], powers: tuple[Fraction, ...]) -> list[Range] | None:
    return table._filed_products.get(_product_key(ids, powers))


def _form_of_whole(table: Table, ids: tuple[int, ...]) -> object:
    found = table.whole_of(*ids)
    return found and found.form


def _atoms_of_whole(table: Table, ids: tuple[int, ...]) -> Sequence[Atom]:
    found = table.whole_of(*ids)
    return found.atoms if found else []


def _note_operand(table: Table, atoms: tuple[Atom, ...], term: Term) -> None:
    table.note_operand(term.with_(factors=(term.factors[0]._replace(atom=atoms[0]),)))


def _need(
    table: Table, atoms: tuple[Atom, ...], kind: Kind, factor: Factor, ranges: Mapping[Variable, Range], weight: Lane
) -> None:
    table.need(kind, factor._replace(atom=atoms[0]), ranges, weight)


def _is_mask(factors: tuple[Factor, ...], variable: Variable) -> bool:
    """Whether a variable only says which values a delta accepts."""
    inside = [f for f in factors if variable in f.variables()]
    return len(inside) == 1 and inside[0].atom.kind == "delta" and inside[0].at[-1].terms == ((variable, 1),)


def signs(factors: Iterable[Factor]) -> dict[str, bool]:
    """What is known of the sign of a product."""
    nonnegative = [f.atom.nonnegative or (f.power % 2 == 0 and f.power > 0) for f in factors]
    return {"positive": all(f.atom.positive for f in factors), "nonnegative": all(nonnegative)}
