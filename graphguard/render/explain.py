"""The pages that `graphguard explain` prints: what a finding says, why that is a law, a program that breaks it, and what to do.

Every example is a whole program whose report has the finding; the tests run it.
"""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphguard.errors import UsageError
from graphguard.graph.findings import KINDS, Kind

if TYPE_CHECKING:
    from graphguard.lemmas.registry import Row
    from graphguard.lemmas.user import Lemma

_HEAD = """
import torch, torch.distributed as dist
import graphguard as gg
from graphguard import Partial, Replicate, Shard
"""


@dataclass(frozen=True)
class Page:
    """law: why it cannot be otherwise, beyond the one sentence that the kind has. example: a program that breaks it.
    advice: what to do."""

    law: str
    example: str
    advice: str

    @property
    def program(self) -> str:
        """The example, ready to run: it defines `report`."""
        return _HEAD + textwrap.dedent(self.example)


PAGES = {
    "collective-mismatch": Page(
        law="A backend pairs the calls of a group by their order alone. It does not compare what the ranks meant, so "
        "a rank that calls something else, or the same with another size, hangs the job, or takes the bytes of "
        "one tensor for those of another. Groups are paired by order too: a rank that makes other groups than the rest "
        "looks for its members under another name, and waits.",
        example="""
        def seq(x):
            return x.sum()

        def par(x):
            total = x.sum()
            if dist.get_rank() == 0:
                dist.all_reduce(total)
            else:
                dist.broadcast(total, src=0)
            return total

        report = gg.verify(seq, par, mesh={"dp": 2}, inputs={"x": gg.Input((8,), Shard(0))})
        """,
        advice="Look at the two lines of the finding. Collectives below an `if` on the rank are the usual cause: let "
        "every rank of the group reach the same call, with equal sizes and dtypes, and in the same order on "
        "every path; and let every rank make every group, also those that it is not in.",
    ),
    "unmatched-message": Page(
        law="A message has one sender and one receiver. A receive that nothing is sent to never returns; a send that "
        "nobody receives blocks when it is large, and when it is small it is taken for the next message with the "
        "same tag.",
        example="""
        def seq(x):
            return x * 2

        def par(x):
            if dist.get_rank() == 0:
                dist.send(x, dst=1)
            return x * 2

        report = gg.verify(seq, par, mesh={"pp": 2}, inputs={"x": gg.Input((8,))})
        """,
        advice="Give the message its other half, with the same tag and group, or remove it. In a pipeline, count the "
        "microbatches on both sides: the first and the last stage often differ by one.",
    ),
    "deadlock": Page(
        law="A rank that waits does nothing else. Where each rank of a cycle waits for the next before it does what "
        "the previous one waits for, none of them ever goes on.",
        example="""
        def seq(x):
            return x * 2

        def par(x):
            other, got = 1 - dist.get_rank(), torch.empty(8)
            dist.recv(got, src=other)
            dist.send(x, dst=other)
            return got * 2

        report = gg.verify(seq, par, mesh={"pp": 2}, inputs={"x": gg.Input((8,))})
        """,
        advice="Let one side send first, or use `dist.batch_isend_irecv`, which starts all messages before it waits for "
        "any.",
    ),
    "race": Page(
        law="Between the start of asynchronous communication and its wait, the backend may read or write the buffer "
        "at any moment. What a program reads there is the old value, the new one, or a mixture, and no test run "
        "shows which.",
        example="""
        def seq(x):
            return x.sum(0) + 1

        def par(x):
            total = x.sum(0)
            work = dist.all_reduce(total, async_op=True)
            result = total + 1
            work.wait()
            return result

        report = gg.verify(seq, par, mesh={"dp": 2}, inputs={"x": gg.Input((8, 4), Shard(0))})
        """,
        advice="Wait before the line of the finding. To keep communication and computation side by side, compute "
        "something that does not touch the buffer, or give the communication a copy.",
    ),
    "strided-buffer": Page(
        law="A collective moves memory, and torch leaves open what it means for a view with gaps or with transposed "
        "dims. Some backends refuse it, some copy it, and some send the bytes in the order in which they lie.",
        example="""
        def seq(x):
            return x.t()

        def par(x):
            out = torch.empty(4, 8)
            dist.all_gather_into_tensor(out, x.t())
            return out

        report = gg.verify(seq, par, mesh={"tp": 2}, inputs={"x": gg.Input((8, 4), Shard(1))})
        """,
        advice="Call `.contiguous()` on what is sent, and receive into a contiguous tensor that is reshaped afterwards.",
    ),
    "outside-group": Page(
        law="A group's collectives are for its members. For any other rank torch prints a warning and leaves the "
        "tensor as it is, so the rank goes on with a value that was never communicated.",
        example="""
        def seq(x):
            return x.sum(0)

        def par(x):
            group = dist.new_group([0, 1])
            total = x.sum(0)
            dist.all_reduce(total, group=group)
            return total

        report = gg.verify(seq, par, mesh={"dp": 4}, inputs={"x": gg.Input((8, 4), Shard(0))})
        """,
        advice="Let every rank create all groups, as `new_group` needs, and use the one that it is in: "
        "`mesh.get_group(axis)` gives it.",
    ),
    "relation-lost": Page(
        law="The proof goes through the sequential program operation by operation: as long as the ranks hold every "
        "operand, as copies, tiles or summands, they must hold the result. Where they do not, the two programs "
        "have parted, or an operator is used that the prover cannot see through.",
        example="""
        def seq(x):
            return torch.special.bessel_j0(x)

        def par(x):  # of a part, by an operator that has no lemma
            return torch.special.bessel_j0(x)

        report = gg.verify(seq, par, mesh={"tp": 2}, inputs={"x": gg.Input((8, 3), Shard(0))})
        """,
        advice="Compare the two lines. If the programs mean the same, and the report names an operator without a lemma, say "
        "what it computes: `gg.lemma(operator, definition in torch)`. If it says why a value has no description, make that "
        "value in another way, for instance from operands that are gathered first.",
    ),
    "unexplained-output": Page(
        law="Whoever uses the output of a distributed program must know what each rank has. Equal copies, tiles and "
        "summands can be put together by slices, concats and a sum; any other value is wrong on that rank, even "
        "if another rank is right.",
        example="""
        def seq(x, w):
            return torch.relu(x @ w)

        def par(x, w):
            y = torch.relu(x @ w)
            dist.all_reduce(y)
            return y

        report = gg.verify(
            seq, par, mesh={"tp": 2}, inputs={"x": gg.Input((4, 8), Shard(1)), "w": gg.Input((8, 4), Shard(0))}
        )
        """,
        advice="Go to the distributed line: it is the first whose result has no relation to the sequential program, "
        "though its operands have one. A reduction that comes too late or twice, a wrong divisor and an offset "
        "that forgets the rank are the usual causes.",
    ),
    "scaled-copies": Page(
        law="The products over each rank's columns are true parts: each rank has what the others lack. Copies of y/N add up "
        "to y as well, but each rank goes on with y/N: a mean was taken where a sum was meant, or a loss was divided "
        "once too often.",
        example="""
        def seq(x, w):
            return x @ w

        def par(x, w):
            y = x @ w
            dist.all_reduce(y)
            return y / dist.get_world_size()

        report = gg.verify(
            seq, par, mesh={"tp": 2}, inputs={"x": gg.Input((4, 8), Shard(1)), "w": gg.Input((8, 4), Shard(0))}
        )
        """,
        advice="Take the division out, or reduce with a mean only where each rank's value is itself a whole mean.",
    ),
    "missing-output": Page(
        law="All that the sequential program returns must be somewhere. An output that no rank returns was not computed, "
        "or it is returned under another name. A piece that its only rank does not return is lost, and a rank that holds a "
        "parameter without its gradient goes on with another parameter than the others.",
        example="""
        def seq(x):
            return {"loss": x.sum(), "count": x.abs().sum()}

        def par(x):
            loss = x.sum()
            dist.all_reduce(loss)
            return {"loss": loss}

        report = gg.verify(seq, par, mesh={"dp": 2}, inputs={"x": gg.Input((8,), Shard(0))})
        """,
        advice="Return it from the ranks that have it, under the same key. If a gradient is missing, look for a parameter "
        "that is frozen, detached or not used on that rank.",
    ),
    "unexpected-relation": Page(
        law="`outputs=` says how the users of an output read it. A tile that is read as the whole, or a summand that "
        "is read as the sum, is a wrong number, though nothing before it is wrong.",
        example="""
        def seq(x, a, b):
            return torch.relu(x @ a) @ b

        def par(x, a, b):
            return torch.relu(x @ a) @ b

        report = gg.verify(
            seq, par, mesh={"tp": 2}, outputs={"out": Replicate()},
            inputs={"x": gg.Input((4, 8)), "a": gg.Input((8, 8), Shard(1)), "b": gg.Input((8, 4), Shard(0))},
        )
        """,
        advice="Add the missing communication (an all-reduce for a sum, a gather for tiles), or state the relation that "
        "you want.",
    ),
    "undefined-value": Page(
        law="In the algebra 0 times a value is 0, and a value less itself is nothing. On a rank it is nan wherever the value "
        "is nan or infinite, and one nan in a loss ends the training.",
        example="""
        def seq(x, gate):
            return x.square().sum()

        def par(x, gate):
            loss = x.square().sum()
            dist.all_reduce(loss)
            return loss + 0 * gate.log().sum()  # so that the gate has a gradient on every rank

        inputs = {"x": gg.Input((8,), Shard(0)), "gate": gg.Input((4,))}
        report = gg.verify(seq, par, mesh={"dp": 2}, inputs=inputs)
        """,
        advice="Go to the distributed line. Take the term out; or compute it from something that is defined there (a clamp, an "
        "epsilon, `torch.where` around the operand). If such inputs never come, say so with `low=` and `high=` of `gg.Input`.",
    ),
}  # fmt: skip


def explain(name: str, own_lemmas: Callable[[], Sequence[Lemma]] | None = None) -> str:
    """The page of a finding, by code or kind, or of a lemma, by operator; the user's own are looked for last."""
    kinds = {key.lower(): kind for kind in KINDS.values() for key in (kind.code, kind.name)}
    if name.lower() in kinds:
        return of_kind(kinds[name.lower()])
    from graphguard.lemmas.known import rows

    lemmas = {row.operator: row for row in rows()}
    chosen = _rows_named(name, lemmas)
    if chosen:
        return "\n\n".join(of_lemma(row) for row in chosen)
    own = {} if own_lemmas is None else _by_name(own_lemmas())
    if name.replace("::", ".") in own:
        return of_own_lemma(own[name.replace("::", ".")])
    if "::" in name and not name.startswith("aten::") and own_lemmas is None:
        raise UsageError(
            f"there is no lemma {name!r}; for one of your own, name its file too: graphguard explain {name} FILE.py"
        )
    raise UsageError(f"there is no finding and no lemma {name!r}{_like(name, [*kinds, *lemmas, *own])}")


def _by_name(lemmas: Sequence[Lemma]) -> dict[str, Lemma]:
    return {key: lemma for lemma in lemmas for key in (lemma.operator, lemma.operator.rpartition(".")[0])}


def of_kind(kind: Kind) -> str:
    page = PAGES[kind.name]
    parts = [
        f"{kind.code} {kind.name}",
        _filled(kind.meaning),
        "Why it is a law\n" + _filled(f"{kind.law} {page.law}", "  "),
        "Example\n" + textwrap.indent(textwrap.dedent(page.example).strip(), "    "),
        "What to do\n" + _filled(page.advice, "  "),
    ]
    return "\n\n".join(parts)


def of_lemma(row: Row) -> str:
    conditions = row.conditions if isinstance(row.conditions, str) else "; ".join(row.conditions)
    lines = [
        f"{row.operator} ({row.kind})",
        "",
        _filled(f"It computes: {row.definition}", "  "),
        _filled(f"It is used where: {conditions}; elsewhere the operator is opaque.", "  ")
        if conditions
        else _filled("It is used for all arguments.", "  "),
        _filled("In-place, out= and _foreach_ variants follow from it.", "  "),
    ]
    return "\n".join(lines)


def of_own_lemma(lemma: Lemma) -> str:
    from graphguard.lemmas.rule import Rule

    if isinstance(lemma.meaning, Rule):
        whole = " and ".join(sorted(lemma.meaning.whole))
        said = [f"Its rule is {lemma.meaning.text}."]
        said += [f"A rank must hold all of {whole}." if whole else "A rank may hold any part of each operand."]
        said += ["It works position by position along every other axis."] if whole else []
    else:
        said = [f"It is {lemma.meaning}.", "The proof sees that definition in its place."]
    said.append(f"This held in {lemma.checked} random cases." if lemma.untested is None else f"Trusted: {lemma.untested}.")
    said += [f"It could be weaker: {lemma.weaker}."] if lemma.weaker else []
    return "\n".join([f"{lemma.name} (a lemma of yours)", "", *(_filled(text, "  ") for text in said)])


def _rows_named(name: str, lemmas: dict[str, Row]) -> list[Row]:
    """The row of an operator; without an overload or a namespace, all that the name may mean."""
    name = name.replace("::", ".")
    if name in lemmas:
        return [lemmas[name]]
    return [row for operator, row in lemmas.items() if name in (operator.rpartition(".")[0], operator.split(".")[1])]


def _like(name: str, known: list[str]) -> str:
    shown = [key.upper() if key.startswith("gg") else key for key in known]
    short = {operator.split(".")[1]: operator for operator in shown if operator.count(".") == 2}
    close = difflib.get_close_matches(name, shown, 3) or difflib.get_close_matches(name.upper(), shown, 3)
    close = close or [short[each] for each in difflib.get_close_matches(name, list(short), 3)]
    codes = sorted(kind.code for kind in KINDS.values())
    hint = f"graphguard lemmas ls lists the lemmas, and the codes are {codes[0]} to {codes[-1]}"
    return f"; is it {' or '.join(close)}?" if close else f"; {hint}"


def _filled(text: str, indent: str = "") -> str:
    return textwrap.fill(
        text, 100, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )
