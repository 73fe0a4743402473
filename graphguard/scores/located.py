"""How often a report names the faulty line first or second: `python -m graphguard.scores.located`, from the repository's root.

Known faults are split by a hash of their names. The points of `locate/ranking.py` are fitted on one half; the other half says
how good they are. `--fit` prints points that fit the first half better; `--write` writes docs/located.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from graphguard.locate.ranking import POINTS
from graphguard.mutate.tally import as_markdown, as_text, share
from graphguard.scores.fit import fitted
from graphguard.scores.known_faults import Known, bugs, cases, mutants

GROUPS = {"bugs": "examples of bugs", "cases": "faulty proof cases", "mutants": "mutants of proof cases"}
HEAD = ("faults", "fitted: first", "fitted: first two", "other half: first", "other half: first two")
PAGE = """# Faulty lines

How often a report names the faulty line: as the line of its first finding, or as one of the first two lines of the ranks that
it names. `python -m graphguard.scores.located --write docs/located.md` writes this page.

Known faults are split in two by a hash of their names, so that nobody chooses. The points by which clues are weighed
(`graphguard/locate/ranking.py`) are fitted on one half. The other half had no part in that last step, but it is not untouched:
where the points start from, and the form of the sum, were chosen among several with both halves in view, and detectors were
written with these programs at hand. Expect less of programs that nobody here has seen.

{table}

## Points

What each kind of evidence is worth. A line has the points of the best that was seen there, 0.3 times those of what else speaks
for it, and all that speaks against it; [how lines are found](inside/locating.md) says who sees what.

{points}
"""


def rows(known: Sequence[Known], points: Mapping[str, float]) -> Iterator[tuple[str, ...]]:
    for group, name in [*GROUPS.items(), (None, "all")]:
        mine = [each for each in known if group in (None, each.group)]
        if mine:
            yield name, *(_share(mine, points, fit, most) for fit in (True, False) for most in (1, 2))


def _share(known: Iterable[Known], points: Mapping[str, float], is_fitted: bool, most: int) -> str:
    mine = [each for each in known if each.is_fitted == is_fitted]
    return share(sum(each.is_located(points, most) for each in mine), len(mine))


def page(known: Sequence[Known], points: Mapping[str, float]) -> str:
    ordered = sorted(points.items(), key=lambda item: -item[1])
    return PAGE.format(
        table=as_markdown(HEAD, list(rows(known, points))),
        points=as_markdown(("evidence", "points"), [(name, f"{number:g}") for name, number in ordered]),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(sys.argv[1:] if arguments is None else arguments)
    known = [
        *bugs(),
        *(cases(options.cases, options.every) if options.cases else ()),
        *(mutants(options.cases, options.mutants) if options.cases and options.mutants else ()),
    ]
    print(as_text(HEAD, list(rows(known, POINTS))))
    if options.missed:
        print("\n".join(f"missed: {each.group} {each.name}" for each in known if not each.is_located(POINTS)))
    if options.fit:
        points = fitted([each for each in known if each.is_fitted], POINTS)
        print(as_text(HEAD, list(rows(known, points))))
        print("\n".join(f"    {name!r}: {number:g}," for name, number in points.items()))
    if options.write:
        Path(options.write).write_text(page(known, POINTS), encoding="utf-8")
    return 0


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m graphguard.scores.located", description=__doc__)
    parser.add_argument("--cases", default="tests/cases", help="the folder of the proof cases; empty for none")
    parser.add_argument("--every", type=int, default=1, help="one of so many faulty proof cases")
    parser.add_argument("--mutants", type=int, default=150, help="how many")
    parser.add_argument("--fit", action="store_true", help="print points that fit the first half better")
    parser.add_argument("--missed", action="store_true", help="print the faults whose line is not named")
    parser.add_argument("--write", default="", help="the page")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
