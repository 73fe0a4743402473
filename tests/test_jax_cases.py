"""Every pair of JAX programs: its verdict, the line it names, and that XLA computes what the graphs say."""

import importlib
import importlib.util
from pathlib import Path

import jax
import jax_cases.case  # noqa: F401 # before jax looks for devices: the host has eight
import numpy as np
import pytest
import torch

from graphguard import jax as gg_jax
from graphguard.capture.jax.dtypes import in_graph
from graphguard.capture.jax.front import functions
from graphguard.capture.jax.trace import arguments_of
from graphguard.graph.ir import Mesh
from graphguard.graph.placement import Shard, piece
from graphguard.oracle.replay import replay, replay_joint

FAMILIES = ("tensor_parallel", "vocabulary", "data_parallel", "contexts", "experts", "pipelines", "modules", "reported")
NEEDS = {"modules": "equinox"}  # which some machines do not have
RUN = [family for family in FAMILIES if importlib.util.find_spec(NEEDS.get(family, "jax")) is not None]
CASES = [case for family in RUN for case in importlib.import_module(f"jax_cases.{family}").ALL]
NAMES = [case.name for case in CASES]


def test_every_family_is_run_and_every_name_is_one():
    files = {file.stem for file in (Path(__file__).parent / "jax_cases").glob("*.py")} - {"__init__", "case"}
    assert files == set(FAMILIES) and len(set(NAMES)) == len(NAMES)
    assert {case.expect for case in CASES} == {"verified", "refuted"}


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_verdict(case):
    report = gg_jax.verify(case.sequential, case.distributed, **case.options)
    assert report.verdict == case.expect, str(report)
    if case.fault is not None:
        file = Path(str(report.findings[0].distributed.file))
        lines = file.read_text().splitlines()
        named = {lines[line.line - 1] for each in report.findings for line in each.lines}
        assert any(line.rstrip().endswith(f"# fault: {case.fault}") for line in named), str(report)


# ---------------------------------------------------------------------- against XLA
def drawn(argument, rng, low, high):
    if np.dtype(argument.dtype).kind in "iu":
        return rng.integers(low or 0, high or 64, argument.shape).astype(argument.dtype)
    made = rng.standard_normal(argument.shape).astype(argument.dtype)
    return made if low is None else low + np.abs(made)


def captured(case):
    front = functions(case.sequential, case.distributed, **case.options)
    problem = front.problem(frozenset())
    return problem.captured, {path: each.placements for path, each in problem.expected.items()}


def part_of(array, placements, mesh, rank):
    """What a rank has of a global array."""
    coordinate = mesh.coordinate(rank)
    for (axis, size), placement in zip(mesh.axes, placements, strict=True):
        if isinstance(placement, Shard):
            begin, end = piece(array.shape[placement.dim], coordinate[axis], size)
            array = np.take(array, range(begin, end), placement.dim)
    return array


def assert_close(got, wanted):
    wanted = np.asarray(wanted, dtype=np.float64)
    scale = np.abs(wanted).max(initial=1e-9)
    assert np.abs(got.double().numpy() - wanted).max(initial=0) / scale < 3e-4


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_xla_computes_what_the_graphs_say(case):
    rng = np.random.default_rng(0)
    arguments = arguments_of(case.sequential, case.args)
    data = [drawn(each, rng, *case.ranges.get(each.name, (None, None))) for each in arguments]
    given = jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(case.args), data)
    graphs, placements = captured(case)
    inputs = {each.name: torch.from_numpy(x.astype(in_graph(each.dtype))) for each, x in zip(arguments, data, strict=True)}

    wanted = jax.tree_util.tree_leaves(case.sequential(*given))
    got = replay(graphs.sequential, inputs)
    for array, path in zip(wanted, graphs.sequential.outputs, strict=True):
        assert_close(got[path], array)

    mesh = Mesh.of(case.mesh)
    runs = replay_joint(graphs.joint, [inputs] * mesh.size)
    wanted = jax.tree_util.tree_leaves(jax.jit(case.distributed)(*given))
    for array, path in zip(wanted, graphs.ranks[0].outputs, strict=True):
        for rank in range(mesh.size) if case.expect == "verified" else [0]:
            assert_close(runs[rank][path], part_of(np.asarray(array), placements[path], mesh, rank))
