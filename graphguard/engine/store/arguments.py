"""What a question is asked with: the like question of other atoms has those in place of its own."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from graphguard.engine.terms.term import Atom, Factor, Term

Images = Mapping[int, Atom]  # the atoms that stand for those of a question, by the ids of those


class Ids(tuple[int, ...]):
    """Atoms by their ids."""

    __slots__ = ()


class Arguments:
    """Arguments in which every atom can be replaced: atoms, factors, a term, and what has `atoms` and is the like thing `of`
    others. Of ranges, only those of the variables at which a factor is read count."""

    __slots__ = ("_args", "_places", "ids")

    def __init__(self, args: tuple[Any, ...]):
        self._args = list(args)
        self._places: list[int] = []  # of the arguments that have atoms
        self.ids: list[int] = []  # of those atoms
        for place, arg in enumerate(args):
            kind = type(arg)
            if kind is dict:
                read = [variable for each in args if type(each) is Factor for variable in each.variables()]
                self._args[place] = {variable: arg[variable] for variable in read}
            elif kind is not str and kind is not int and (ids := _ids(arg, kind)):
                self._places.append(place)
                self.ids += ids

    @property
    def key(self) -> Hashable:
        return tuple([_key(arg) for arg in self._args])

    def of(self, images: Images) -> list[Any]:
        args = self._args.copy()
        for place in self._places:
            args[place] = _renamed(args[place], images)
        return args


def _ids(arg: Any, kind: type) -> Sequence[int]:
    if kind is Atom:
        return (arg.id,)
    if kind is Factor:
        return (arg.atom.id,)
    if kind is Ids:
        return arg  # type: ignore[no-any-return]
    if kind is tuple:
        return [each for part in arg for each in _ids(part, type(part))]
    if kind is Term:
        return [factor.atom.id for factor in arg.factors]
    return [atom.id for atom in arg.atoms] if hasattr(kind, "of") else ()


def _renamed(arg: Any, images: Images) -> Any:
    kind = type(arg)
    if kind is Atom:
        return images[arg.id]
    if kind is Ids:
        return Ids([images[each].id for each in arg])
    if kind is Factor:
        return Factor(images[arg.atom.id], arg.at, arg.power)
    if kind is Term:
        return arg.with_(factors=tuple([_renamed(factor, images) for factor in arg.factors]))
    if kind is tuple:
        return tuple([_renamed(each, images) for each in arg])
    return arg.of([images[atom.id] for atom in arg.atoms]) if hasattr(kind, "of") else arg


def _key(arg: Any) -> Hashable:
    kind = type(arg)
    if kind is Factor:
        return arg.atom.id, tuple([index.key for index in arg.at]), arg.power
    if kind is dict:
        return tuple([(v, _key(low), _key(high)) for v, (low, high) in arg.items()])
    return arg.tobytes() if kind is np.ndarray else arg  # type: ignore[no-any-return]
