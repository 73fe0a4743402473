"""A front end makes a problem of graphs alone, and the rest of GraphGuard asks for no more."""

import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import snippets
import torch

import graphguard as gg
from graphguard import Shard
from graphguard.capture.front import ranges_of
from graphguard.errors import UsageError
from graphguard.graph.ir import Graph, Value
from graphguard.pipeline import Job, collecting, run

ROOT = Path(gg.__file__).parents[1]


def test_the_page_on_front_ends_runs(tmp_path):
    snippets.run_page(ROOT / "docs" / "inside" / "adding_a_front_end.md", tmp_path)


def test_what_front_ends_make_needs_no_framework():
    code = "import sys, graphguard.capture.front; print(sorted({'torch', 'jax'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def problem_of(**options):
    with collecting() as jobs:
        gg.verify(
            lambda x, i: {"y": x * 2, "z": x[i]},
            lambda x, i: {"y": x * 2, "z": x[i]},
            mesh={"tp": 2},
            inputs={"x": gg.Input((4, 2), Shard(1)), "i": gg.Input((3,), dtype=torch.int64, low=0.5, high=3.5)},
            outputs={"y": lambda full, coord: full.chunk(2, 1)[coord["tp"]], "z": Shard(1)},
            **options,
        )
    return jobs[0].front.problem(frozenset())


def parts_of(item, seen):
    """The modules of the classes of everything that a value holds."""
    if id(item) in seen:
        return
    seen[id(item)] = item
    yield type(item).__module__.split(".")[0], item
    if is_dataclass(item):
        inner = [getattr(item, each.name) for each in fields(item)]
    elif isinstance(item, dict):
        inner = [*item, *item.values()]
    elif isinstance(item, (list, tuple, set, frozenset)):
        inner = list(item)
    else:
        names = [name for kind in type(item).__mro__ for name in getattr(kind, "__slots__", ())]
        inner = [*vars(item).values()] if hasattr(item, "__dict__") else []
        inner += [getattr(item, name) for name in names if hasattr(item, name)]
    for each in inner:
        yield from parts_of(each, seen)


def test_a_problem_of_torch_programs_has_no_objects_of_torch():
    problem = problem_of()
    assert problem.expected["y"].graphs is not None and problem.bounds == {"x": (None, None), "i": (0.5, 3.5)}
    found = list(parts_of(problem, {}))
    assert any(isinstance(item, Graph) for _, item in found)
    assert {module for module, _ in found} <= {"builtins", "graphguard"}


def test_bounds_of_whole_numbers_are_whole_for_the_proof():
    inputs = {name: Value(n, (2,), name) for n, name in enumerate(("float32", "int64", "uint8", "bool", "complex64"))}
    found = ranges_of(Graph("sequential", inputs), dict.fromkeys(inputs, (0.5, 3.5)) | {"uint8": (None, None)})
    assert found == {"float32": (0.5, 3.5), "int64": (1, 4)}


def test_a_job_is_checked_before_its_programs_are_run():
    class Never:
        def problem(self, opaque, progress=None):
            raise AssertionError

    for options in ({"trials": -1}, {"seed": "0"}, {"lemmas": ["aten::mm"]}):
        with pytest.raises(UsageError, match=f"^{next(iter(options))}= "):
            run(Job(Never(), **options))
