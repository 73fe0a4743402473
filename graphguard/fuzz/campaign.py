"""Many random programs: `python -m graphguard.fuzz.campaign`. One of them again, in full: `--show SEED`."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from graphguard.fuzz.page import page
from graphguard.fuzz.program import graphs_of, grown
from graphguard.fuzz.trial import Result, looked_at
from graphguard.mutate.processes import Begin, Died, in_processes

_TOLD_EVERY = 500  # programs
_LEAST_LOOKED_AT = 0.9  # of all programs


@dataclass
class Total:
    """What came of all programs. crashes: what was raised on the way, which is an error of ours."""

    results: list[Result] = field(default_factory=list)
    crashes: list[str] = field(default_factory=list)

    @property
    def looked_at(self) -> list[Result]:
        return [each for each in self.results if each.left_out is None]

    @property
    def false(self) -> list[str]:
        """Claims and proofs that do not hold, one line for each program."""
        return [f"seed {each.seed}: {text}" for each in self.results for text in [*each.false_proofs, *each.wrong][:1]]

    @property
    def left_out(self) -> Counter[str]:
        return Counter(each.left_out.split(":")[0] for each in self.results if each.left_out is not None)

    @property
    def exit_code(self) -> int:
        """1 if something false was said, 2 if something was not judged, or too little was looked at to say anything."""
        few = len(self.looked_at) < _LEAST_LOOKED_AT * len(self.results) or not self.results
        return 1 if self.false else 2 if self.crashes or few else 0


def run(seeds: Sequence[int], jobs: int = 1, until: float | None = None) -> Total:
    """Programs by their numbers. Each process patches torch, and so is one of its own."""
    total = Total()

    def part(number: int, begin: Begin) -> Iterator[Result | str]:
        import torch

        torch.set_num_threads(1)
        for seed in seeds[number::jobs]:
            if until is not None and time.time() >= until:
                return
            begin(f"seed {seed}")
            try:
                yield looked_at(grown(seed))
            except Exception as error:  # the others can be looked at
                yield f"seed {seed}: {type(error).__name__}: {error}"

    begun = time.time()
    for found in in_processes(part, jobs):
        if isinstance(found, Result):
            total.results.append(found)
        else:
            total.crashes.append(found.words if isinstance(found, Died) else found)
        _tell(total, found, begun)
    return total


def _tell(total: Total, found: object, begun: float) -> None:
    if not isinstance(found, Result):
        print(f"CRASH {total.crashes[-1]}", flush=True)
        return
    for text in [*found.false_proofs, *found.wrong][:1]:
        print(f"FALSE seed {found.seed}: {text}", flush=True)
    if len(total.results) % _TOLD_EVERY == 0:
        print(f"{time.time() - begun:6.0f} s: {len(total.results)} programs, {len(total.false)} false", flush=True)


def show(seed: int) -> None:
    """One program: its steps, its graphs, and what is said of it that does not hold."""
    program = grown(seed)
    print(program)
    graphs = graphs_of(program)
    print(graphs.sequential)
    for graph in graphs.joint.graphs:
        print(graph)
    result = looked_at(program)
    for text in [*result.false_proofs, *result.wrong]:
        print(f"FALSE {text}")


def main(arguments: Iterable[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = _options(given)
    if options.show is not None:
        show(options.show)
        return 0
    begun = time.time()
    total = run(range(options.seed, options.seed + options.programs), options.jobs, begun + 60 * options.minutes)
    seconds = time.time() - begun
    print(f"{len(total.results)} programs in {seconds:.0f} s: {len(total.false)} false, {len(total.crashes)} crashes")
    if options.write:
        command = f"python -m graphguard.fuzz.campaign {' '.join(given)}"
        Path(options.write).write_text(page(total.results, total.crashes, command, seconds), encoding="utf-8")
    return total.exit_code


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m graphguard.fuzz.campaign", description="Many random programs.")
    parser.add_argument("--programs", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=0, help="number of the first program")
    parser.add_argument("--jobs", type=int, default=1, choices=range(1, 257), metavar="N", help="processes")
    parser.add_argument("--minutes", type=float, default=24 * 60, help="stop after so long, with what there is")
    parser.add_argument("--write", help="page to write, for example docs/random.md")
    parser.add_argument("--show", type=int, metavar="SEED", help="print one program, and what is wrong about it")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
