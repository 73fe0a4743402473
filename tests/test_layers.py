"""Who may import whom. Imports at the top, inside of functions and for type checkers count alike."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import graphguard

ROOT = Path(graphguard.__file__).parents[1]

# From the floor up: each room with the rooms that it imports, all of which come before it in this list. A room is a folder of
# the package or a module at its top; in `engine` and in `capture`, each folder and each module is one.
ROOMS = {
    "errors": "",
    "scope": "",
    "graph": "errors",
    "aten": "errors graph",
    "relation": "graph",
    # the prover: no torch, and no lemma that is not handed in
    "engine.limits": "graph",
    "engine.terms": "graph",
    "engine.store": "graph engine.limits engine.terms",
    "engine.algebra": "engine.terms engine.store",
    "engine.tensors": "engine.terms engine.store engine.algebra",
    "engine.ranks": "graph engine.terms engine.store engine.algebra engine.tensors",
    "engine.interpret": "graph engine.terms engine.store engine.algebra engine.tensors engine.ranks",
    "engine.numeric": "graph engine.terms engine.store engine.interpret",
    "engine.proof": "graph relation",
    "engine.second_attempt": "engine.limits engine.proof",
    "engine.relate": "graph relation engine.terms engine.store engine.algebra engine.tensors engine.ranks engine.interpret "
    "engine.proof",
    "engine.prove": "graph relation engine.limits engine.terms engine.store engine.algebra engine.tensors engine.ranks "
    "engine.interpret engine.proof engine.relate",
    "lemmas": "errors scope graph engine.terms engine.store engine.algebra engine.tensors engine.interpret",
    # execution: it never captures
    "oracle": "errors graph aten relation engine.store engine.interpret engine.proof engine.relate lemmas",
    "counterexample": "errors graph aten relation oracle",
    "locate": "errors graph aten relation oracle",
    # front ends: what they make is in `capture.front`
    "capture.front": "errors graph relation",
    "routes": "errors graph aten relation oracle capture.front",
    "capture.torch": "errors scope graph aten relation oracle capture.front routes",
    "capture.jax": "errors graph aten relation capture.front",
    "capture.hlo": "errors graph relation capture.front capture.jax",
    # from a problem to a report
    "render": "errors graph engine.proof lemmas oracle",
    "report": "errors graph engine.proof oracle render",
    "verdict": "errors graph aten relation engine.limits engine.proof oracle counterexample locate capture.front render report",
    "pipeline": "errors graph engine.limits engine.proof engine.second_attempt engine.prove lemmas routes capture.front report "
    "verdict",
    "cache": "graph relation engine.proof capture.front oracle report verdict pipeline",
    # what users call
    "audit": "errors scope graph aten engine.terms engine.store engine.algebra engine.interpret engine.numeric engine.relate "
    "lemmas oracle capture.torch",
    "api": "scope lemmas capture.front capture.torch report pipeline audit",
    "jax": "errors scope capture.front capture.jax capture.hlo report pipeline",
    "testing": "report api",
    "checks": "errors scope lemmas capture.front report verdict pipeline cache api",
    "pytest_plugin": "scope report checks",
    # what is run with them
    "bench": "errors graph relation engine.store engine.interpret engine.prove lemmas capture.torch pipeline jax",
    "mutate": "errors graph aten relation engine.limits engine.interpret engine.proof engine.second_attempt engine.prove "
    "lemmas oracle capture.front capture.torch routes verdict pipeline audit api",
    "fuzz": "errors graph aten relation engine.interpret engine.numeric engine.proof engine.relate engine.prove lemmas oracle "
    "capture.torch audit mutate",
    "sweep": "errors report api",
    "gallery": "errors render report checks",
    "scores": "errors graph engine.proof engine.second_attempt engine.prove lemmas locate verdict pipeline checks mutate "
    "gallery",
    "cli": "errors graph lemmas capture.front render verdict pipeline audit jax checks bench mutate sweep gallery",
    "__main__": "cli",
}
ALLOWED = {(room, other) for room, others in ROOMS.items() for other in others.split()}

# Modules that need each other, for a reason: one of them, and what the names of the others begin with.
TANGLES = {
    "graphguard.graph.ir": "graphguard.graph.",  # a graph has findings, and a finding names lines of a graph
}


class Import(NamedTuple):
    importer: str
    imported: str
    line: int
    for_types: bool

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def modules() -> dict[str, Path]:
    found = {}
    for file in sorted((ROOT / "graphguard").rglob("*.py")):
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = file
    return found


MODULES = modules()


def imports_of(name: str, node: ast.AST, for_types: bool = False) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                if alias.name.split(".")[0] == "graphguard":
                    yield Import(name, alias.name, child.lineno, for_types)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"{name}:{child.lineno} imports relative to itself"
            if (child.module or "").split(".")[0] == "graphguard":
                for alias in child.names:
                    full = f"{child.module}.{alias.name}"
                    yield Import(name, full if full in MODULES else str(child.module), child.lineno, for_types)
        else:
            types = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
            yield from imports_of(name, child, for_types or types)


# Python imports the package before any of its modules, so `import graphguard` itself is no edge; the names that it lends to
# users are loaded when they are first used.
IMPORTS = [
    each
    for name, file in MODULES.items()
    if name != "graphguard"
    for each in imports_of(name, ast.parse(file.read_text()))
    if each.imported != "graphguard"
]


def room_of(module: str) -> str:
    parts = module.split(".")[1:]
    return ".".join(parts[: 2 if parts[0] in ("engine", "capture") else 1])


def test_rooms_import_only_rooms_below_them():
    order = list(ROOMS)
    upwards = [(room, other) for room, other in ALLOWED if order.index(other) >= order.index(room)]
    assert not upwards
    wrong = [str(each) for each in IMPORTS if (edge := (room_of(each.importer), room_of(each.imported))) not in ALLOWED
             and edge[0] != edge[1]]  # fmt: skip
    assert not wrong, "imports that ROOMS does not allow:\n" + "\n".join(wrong)


def test_every_allowed_edge_is_used():
    used = {(room_of(each.importer), room_of(each.imported)) for each in IMPORTS}
    assert sorted(ALLOWED - used) == []


def test_no_import_hides_a_cycle_of_modules():
    """Inside of `capture.torch`, types may refer to each other: what patches torch holds on to the recorder that it serves."""
    graph: dict[str, set[str]] = {}
    for each in IMPORTS:
        among_torch = room_of(each.importer) == room_of(each.imported) == "capture.torch"
        if each.importer != each.imported and not (each.for_types and among_torch):
            graph.setdefault(each.importer, set()).add(each.imported)
    for name, others in TANGLES.items():
        members = tangle(graph, name)
        assert members, f"{name} is in no cycle any more: take it from TANGLES"
        assert [each for each in members if each != name and not each.startswith(others)] == []
        for member in members:
            graph[member] -= members
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("these import each other: " + " -> ".join(reversed(error.args[1])))


def tangle(graph: dict[str, set[str]], name: str) -> set[str]:
    """The modules that a module needs and that need it."""
    return {each for each in reached(graph, name) if name in reached(graph, each)}


def reached(graph: dict[str, set[str]], name: str) -> set[str]:
    seen: set[str] = set()
    todo = [name]
    while todo:
        for each in graph.get(todo.pop(), set()) - seen:
            seen.add(each)
            todo.append(each)
    return seen


@pytest.mark.parametrize("module", ["graphguard.api", "graphguard.pipeline"])
def test_nobody_imports_private_names_of(module):
    files = [*(ROOT / "graphguard").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    taken = [
        f"{file.relative_to(ROOT)}:{node.lineno} {alias.name}"
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == module
        for alias in node.names
        if alias.name.startswith("_")
    ]
    assert not taken
