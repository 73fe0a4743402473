"""What `gg.lemma` does: finds the operator, reads what the user says of it, compares the two, and keeps the lemma."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from graphguard.audit.vetting import vetted
from graphguard.capture.torch.definitions import trace
from graphguard.errors import UsageError
from graphguard.lemmas import known
from graphguard.lemmas.rule import Rule, parse
from graphguard.lemmas.user import Definition, Lemma, qualified
from graphguard.scope import keep_lemma


def registered_lemma(
    name: str, meaning: str | Callable[..., Any], whole: str | Iterable[str], sample: Sequence[Any] | None
) -> Lemma:
    """The lemma of an operator; a UsageError if it is none, or if the operator does something else."""
    operator = overload_name(name)
    if known.lookup(operator) is not None:
        raise UsageError(
            f"{qualified(operator)} has a lemma of its own (`graphguard lemmas ls`); only operators without one take yours"
        )
    found: Rule | Definition
    if isinstance(meaning, str):
        found = parse(meaning, whole)
    elif not callable(meaning):
        raise UsageError(f"the lemma of {name} is {type(meaning).__name__}; write an index rule or a function in torch")
    elif whole:
        raise UsageError(f"whole= is for index rules; the definition of {name} says by itself what must be whole")
    else:
        found = Definition(meaning, trace)
    made = vetted(Lemma(operator, found), sample)
    keep_lemma(operator, made)
    return made


def overload_name(name: str) -> str:
    """`mylib.rms_norm.default` for `mylib::rms_norm`, if there is such an operator."""
    namespace, _, rest = name.replace("::", ".", 1).partition(".") if isinstance(name, str) else ("", "", "")
    packet, _, overload = rest.partition(".")
    if not namespace or not packet:
        raise UsageError(f"{name!r} is not the name of an operator, such as 'mylib::rms_norm'")
    found = getattr(getattr(torch.ops, namespace), packet, None) if packet.isidentifier() else None
    if found is None:
        raise UsageError(f"torch knows no operator {namespace}::{packet}; import or define it before its lemma")
    if (overload or "default") not in found.overloads():
        raise UsageError(f"{namespace}::{packet} has the overloads {', '.join(found.overloads())}; name one, as in "
                         f"'{namespace}::{packet}.{found.overloads()[0]}'")  # fmt: skip
    return f"{namespace}.{packet}.{overload or 'default'}"
