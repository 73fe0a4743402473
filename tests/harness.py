"""What the tests share: random inputs, eager runs, and real ranks over gloo."""

from __future__ import annotations

import datetime
import inspect
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from graphguard.api import capture_function
from graphguard.capture.front import Captured, mesh_of
from graphguard.capture.torch.program import FunctionProgram, path_name
from graphguard.capture.torch.relation.inputs import Input, bounds_of
from graphguard.capture.torch.relation.outputs import expectations
from graphguard.capture.torch.session import capture, capture_sequential
from graphguard.capture.torch.subject import Subject
from graphguard.cli import main
from graphguard.graph.alike import classes_of
from graphguard.graph.class_matching import join_classes
from graphguard.graph.ir import Graph, Mesh
from graphguard.graph.matching import Joint, join
from graphguard.graph.world import Messages, World
from graphguard.oracle.replay import replay, replay_joint
from graphguard.verdict.judge import Judgement, judge

ROOT = Path(__file__).parent.parent  # of the repository
Tensors = dict[str, torch.Tensor]
Outputs = dict[str, torch.Tensor | None]
# One switch runs the capture tests a second time without the memory of output shapes.
USE_CACHE = os.environ.get("GRAPHGUARD_TEST_SHAPE_CACHE", "on") != "off"


def random_inputs(inputs: Mapping[str, Input], seed: int = 0, high: int = 8) -> Tensors:
    """Random tensors of the inputs' shapes and dtypes."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, spec in inputs.items():
        if spec.dtype == torch.bool:
            made[name] = torch.rand(spec.shape, generator=generator) < 0.5
        elif spec.dtype.is_floating_point or spec.dtype.is_complex:
            made[name] = torch.randn(spec.shape, generator=generator, dtype=spec.dtype)
        else:
            made[name] = torch.randint(0, int(spec.high or high), spec.shape, generator=generator, dtype=spec.dtype)
    return made


def flat(outputs: Any) -> Outputs:
    """Outputs by path, as a graph names them, with plain local tensors."""
    leaves, _ = pytree.tree_flatten_with_path(outputs)
    return {path_name(path): _plain(leaf) for path, leaf in leaves} if outputs is not None else {}


def _plain(leaf: Any) -> torch.Tensor | None:
    if leaf is None:
        return None
    leaf = leaf.to_local() if hasattr(leaf, "to_local") else leaf
    leaf = leaf.wait() if hasattr(leaf, "wait") else leaf
    return torch.as_tensor(leaf).detach().clone()


def copies(tensors: Tensors) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def filled(module: Any, weights: torch.Tensor) -> Any:
    """The module with its parameters read from one flat tensor, so that programs take their weights as an input."""
    start = 0
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(weights[start : start + parameter.numel()].view(parameter.shape))
            start += parameter.numel()
    return module


# ---------------------------------------------------------------------- sequential programs
def capture_one(function: Callable[..., Any], inputs: Mapping[str, Input]) -> Graph:
    return capture_sequential(FunctionProgram(function, "sequential"), inputs, use_cache=USE_CACHE)


def assert_replays_as_eager(function: Callable[..., Any], inputs: Mapping[str, Input], **random: Any) -> Graph:
    """Capture, replay, and compare with plain execution, bit for bit."""
    graph = capture_one(function, inputs)
    given = random_inputs(inputs, **random)
    torch.manual_seed(1)
    expected = flat(function(**copies(given)))
    torch.manual_seed(1)
    assert_same(replay(graph, given), expected, exactly=True)
    return graph


def assert_same(
    got: Mapping[str, Any], expected: Mapping[str, Any], *, exactly: bool = False, tolerance: float | None = None, who: str = ""
) -> None:
    assert list(got) == list(expected), f"{who}: outputs {list(got)}, expected {list(expected)}"
    for path, want in expected.items():
        have = got[path]
        assert (have is None) == (want is None), f"{who}: {path} is {have}, expected {want}"
        if want is None:
            continue
        assert have.dtype == want.dtype and have.shape == want.shape, f"{who}: {path} is {have.dtype} {tuple(have.shape)}"
        if exactly:
            assert torch.equal(have, want) or _equal_with_nans(have, want), f"{who}: {path} differs"
        else:
            limit = tolerance or (1e-12 if want.dtype in (torch.float64, torch.complex128) else 1e-5)
            torch.testing.assert_close(have, want, rtol=limit, atol=limit, msg=lambda text: f"{who}: {path}: {text}")


def _equal_with_nans(have: torch.Tensor, want: torch.Tensor) -> bool:
    return have.is_floating_point() and torch.equal(have.nan_to_num(7.25), want.nan_to_num(7.25))


# ---------------------------------------------------------------------- ranks
def capture_both(
    sequential: Callable[..., Any],
    distributed: Callable[..., Any],
    mesh: Mapping[str, int] | int,
    inputs: Mapping[str, Input],
    local_inputs: Any = None,
) -> Captured:
    programs = FunctionProgram(sequential, "sequential"), FunctionProgram(distributed, "distributed")
    return capture(Subject(*programs, mesh_of(mesh), inputs, local_inputs), use_cache=USE_CACHE)


def capture_ranks(distributed: Callable[..., Any], mesh: Mapping[str, int] | int, inputs: Mapping[str, Input]) -> Captured:
    """Capture a distributed program alone; the sequential one only passes its inputs through."""
    return capture_both(lambda **given: dict(given), distributed, mesh, inputs)


def join_both_ways(graphs: Sequence[Graph]) -> Joint:
    """Ranks matched one by one, as ever; and by classes, which must say the same: each rank a class of its own in the same
    words, and ranks that are alike in one class that the same is wrong, or who meets whom."""
    joint = join(graphs)
    relations = [Graph(f"inputs of rank {rank}") for rank in range(len(graphs))]
    mesh = graphs[0].mesh or Mesh.of({"world": len(graphs)})
    apart = join_classes(classes_of(graphs, relations, apart=True), mesh)
    alike = join_classes(classes_of(graphs, relations), mesh)
    assert [each.message for each in apart.findings[:1]] == [each.message for each in joint.findings[:1]]
    assert [each.kind for each in alike.findings[:1]] == [each.kind for each in joint.findings[:1]]
    for world in (apart, alike) if not joint.findings else ():
        assert met_by_classes(world) == met_by_ranks(joint)
    return joint


def met_by_ranks(joint: Joint) -> set[tuple[tuple[int, int], ...]]:
    """Each communication, as the ranks and positions of its operations."""
    place = {id(node): n for graph in joint.graphs for n, node in enumerate(graph.nodes)}
    matches = [match for match in joint.matches if match.op != "dist.new_group"]
    return {tuple(sorted((rank, place[id(node)]) for rank, node in match.nodes.items())) for match in matches}


def met_by_classes(world: World) -> set[tuple[tuple[int, int], ...]]:
    found = set()
    for (number, position), call in world.calls.items():
        ranks = world.classes[number].members
        if isinstance(call, Messages):
            for (other, there), mine, its in call.peers:
                ends = zip(mine.tolist(), its.tolist(), strict=True)
                found |= {tuple(sorted([(ranks[a], position), (world.classes[other].members[b], there)])) for a, b in ends}
        else:
            position_of = dict(call.places)
            found |= {tuple(sorted((rank, position_of[world.class_of[rank]]) for rank in row)) for row in call.members.tolist()}
    return found


def rank_inputs(captured: Captured, full: Tensors) -> list[Tensors]:
    """Every rank's inputs, by the captured input relation."""
    return [replay(relation, full) for relation in captured.relations]  # type: ignore[misc]


def assert_replays_as_gloo(
    distributed: Callable[..., Any],
    mesh: Mapping[str, int] | int,
    inputs: Mapping[str, Input],
    *,
    tolerance: float | None = None,
    **random: Any,
) -> Captured:
    """Capture every rank, replay them jointly, and compare with real processes over gloo."""
    captured = capture_ranks(distributed, mesh, inputs)
    assert not captured.joint.findings, captured.joint.findings
    full = random_inputs(inputs, **random)
    mine = rank_inputs(captured, full)
    expected = run_on_gloo(distributed, mesh, mine)
    got = replay_joint(captured.joint, mine)
    for rank, (have, want) in enumerate(zip(got, expected, strict=True)):
        assert_same(have, want, tolerance=tolerance, who=f"rank {rank}")
    return captured


def assert_means(
    program: Callable[..., Any], size: int, inputs: Mapping[str, Input], meaning: Callable[..., Any], exactly: bool = False
) -> None:
    """Replay, and compare with `meaning(each input of all ranks)`: every rank's output, computed by hand."""
    captured = capture_ranks(program, size, inputs)
    assert not captured.joint.findings, captured.joint.findings
    mine = rank_inputs(captured, random_inputs(inputs))
    expected = meaning(*[[given[name] for given in mine] for name in inputs])
    for rank, (have, want) in enumerate(zip(replay_joint(captured.joint, mine), expected, strict=True)):
        assert_same(have, {} if want is None else {"out": want}, exactly=exactly, who=f"rank {rank}")


def run_on_gloo(
    function: Callable[..., Any], mesh: Mapping[str, int] | int, inputs: list[Tensors], seconds: int = 60
) -> list[Outputs]:
    """Run a distributed program on real processes (forked, over gloo on loopback), and return every rank's outputs."""
    axes = mesh_of(mesh)
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(axes.size):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                pid = os.fork()
            if pid == 0:
                _rank_process(function, axes, rank, inputs[rank], folder, seconds)
            children.append(pid)
        _wait_for(children, time.monotonic() + seconds)
        results = []
        for rank in range(axes.size):
            path = f"{folder}/result{rank}"
            assert os.path.exists(path), f"rank {rank} gave no result within {seconds} s"
            with open(path, "rb") as file:
                result = pickle.load(file)
            assert not isinstance(result, str), f"rank {rank} failed:\n{result}"
            results.append(result)
        return results


def _wait_for(children: list[int], deadline: float) -> None:
    alive = set(children)
    while alive and time.monotonic() < deadline:
        for pid in list(alive):
            if os.waitpid(pid, os.WNOHANG)[0]:
                alive.remove(pid)
        time.sleep(0.01)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _rank_process(function: Any, axes: Any, rank: int, inputs: Tensors, folder: str, seconds: int) -> None:
    try:
        torch.set_num_threads(1)
        os.environ.update(
            GLOO_SOCKET_IFNAME="lo", RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(axes.size), MASTER_ADDR="127.0.0.1"
        )
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=axes.size,
            timeout=datetime.timedelta(seconds=seconds),
        )
        mesh = dist.init_device_mesh("cpu", axes.shape, mesh_dim_names=axes.names)
        given: dict[str, Any] = {name: tensor.clone().contiguous() for name, tensor in inputs.items()}
        if "mesh" in function.__code__.co_varnames[: function.__code__.co_argcount]:
            given["mesh"] = mesh
        result: Any = flat(function(**given))
        dist.barrier()
    except BaseException:
        result = traceback.format_exc()
    with open(f"{folder}/result{rank}.part", "wb") as file:
        pickle.dump(result, file)
    os.rename(f"{folder}/result{rank}.part", f"{folder}/result{rank}")
    os._exit(0)


# ---------------------------------------------------------------------- verdicts
def judged(
    sequential: Callable[..., Any],
    distributed: Callable[..., Any],
    inputs: Mapping[str, Input],
    mesh: Mapping[str, int] | int = 2,
    outputs: Mapping[str, Any] | None = None,
    local_inputs: Any = None,
    **options: Any,
) -> Judgement:
    """What execution alone says: nothing is proved, unless `proved` says so."""
    axes = {"tp": mesh} if isinstance(mesh, int) else mesh
    captured = capture_function(sequential, distributed, mesh=axes, inputs=inputs, local_inputs=local_inputs)
    expected = expectations(outputs or {}, captured, mesh_of(axes))
    return judge(captured.sequential, captured.joint, captured.relations, expected, bounds_of(inputs), **options)


# ---------------------------------------------------------------------- tables of programs
def named(*functions: Callable[..., Any]) -> Any:
    """Parametrise a test by programs, each case named as its function."""
    return pytest.mark.parametrize("program", functions, ids=lambda function: function.__name__)


def marked(program: Callable[..., Any], marks: str) -> list[int]:
    """The lines of a function that end in `# <mark>`, in the order of the marks."""
    lines, first = inspect.getsourcelines(program)
    found = {text.rsplit("# ", 1)[1].strip(): first + number for number, text in enumerate(lines) if "# " in text}
    return [found[mark] for mark in marks]


def line_of(file: str | Path, mark: str) -> int:
    """The one line of a file that ends in this text."""
    (found,) = [number for number, text in enumerate(Path(file).read_text().splitlines(), 1) if text.rstrip().endswith(mark)]
    return found


# ---------------------------------------------------------------------- the command line, and processes
def command(capture: Any, *args: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `graphguard ARGS`; capture is pytest's capsys or capfd."""
    with pytest.raises(SystemExit) as stop:
        main(list(args))
    return stop.value.code or 0, *capture.readouterr()  # type: ignore[return-value]


def python(code: str) -> str:
    """What this code prints in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def fails(script):
    """The error that a script ends with when nothing but torch is there."""
    assert "graphguard" not in script
    before = torch.get_default_dtype()
    try:
        with pytest.raises(AssertionError) as caught:
            exec(compile(script, "counterexample", "exec"), {"print": lambda *words: None})
    finally:
        torch.set_default_dtype(before)
    return str(caught.value)
