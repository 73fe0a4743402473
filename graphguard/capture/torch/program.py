"""What is captured: a function of named tensors, or a module with a step. Calls it, and names what comes out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.utils import _pytree as pytree

from graphguard.aten.kernels import constant_of
from graphguard.capture.torch.record.recorder import Recorder
from graphguard.capture.torch.wrappers import layout_by_marks, named_parameters
from graphguard.errors import CaptureError, UsageError
from graphguard.graph.ir import Layout
from graphguard.graph.placement import REDUCTIONS, Partial, read

PARAMETERS = "params."  # prefix of a graph's inputs that are parameters of a module


class Program(Protocol):
    def check(self, names: list[str] | None) -> None:
        """Raise a UsageError if the program does not take these inputs (None: not known yet)."""

    def run(self, recorder: Recorder, inputs: dict[str, Any], mesh: Any | None) -> Any:
        """Run under the recorder, and return the program's outputs."""


@dataclass(frozen=True)
class FunctionProgram:
    """A function that is given its inputs as keywords, and the mesh if it has a parameter of that name."""

    function: Callable[..., Any]
    role: str

    def check(self, names: list[str] | None) -> None:
        if not callable(self.function):
            raise UsageError(f"the {self.role} program is {type(self.function).__name__}, not a function")
        if names is not None:
            check_parameters(self.function, names, f"the {self.role} program {_name(self.function)}", given=("mesh",))

    def run(self, recorder: Recorder, inputs: dict[str, Any], mesh: Any | None) -> Any:
        if mesh is not None and "mesh" not in inputs and _takes(self.function, "mesh"):
            inputs = {**inputs, "mesh": mesh}
        with recorder:
            return self.function(**inputs)


@dataclass(frozen=True)
class ModelProgram:
    """A module and what is done with it. The parameters become inputs of the graph, by their names."""

    construct: Callable[..., torch.nn.Module]
    step: Callable[..., Any]
    role: str

    def check(self, names: list[str] | None) -> None:
        if not callable(self.construct):
            raise UsageError(f"{self.role}= must be a function that builds the module, such as `lambda: Net(config)`")

    def run(self, recorder: Recorder, inputs: dict[str, Any], mesh: Any | None) -> Any:
        with recorder:
            module = self.construct() if mesh is None else self.construct(mesh)
            if not isinstance(module, torch.nn.Module):
                raise UsageError(f"{self.role}= returned {type(module).__name__}, not a module")
        construction = len(recorder.graph.nodes)
        recorder.sources.modules.add(module)
        with recorder:
            firsts: dict[int, str] = {}
            owners: dict[str, int] = {}
            for name, parameter in named_parameters(module):
                if owners.setdefault(name, id(parameter)) != id(parameter) or PARAMETERS + name in inputs:
                    raise UsageError(f"two parameters or inputs have the name {PARAMETERS + name!r}; rename one of them")
                first = firsts.setdefault(id(parameter), name)
                if first != name:
                    recorder.graph.ties[PARAMETERS + name] = PARAMETERS + first
                    continue
                recorder.rename_as_input(PARAMETERS + name, _local(parameter.detach()))
                layout = _layout(recorder, parameter) if isinstance(parameter, DTensor) else layout_by_marks(parameter)
                if layout is not None:
                    ranks: tuple[Any, ...] = tuple(recorder.number(rank) for rank in layout.mesh_ranks)
                    recorder.graph.input_layouts[PARAMETERS + name] = layout._replace(mesh_ranks=ranks)
            outputs = self.step(module, **inputs)
        recorder.graph.built = construction
        return outputs


def call_model(model: torch.nn.Module, **inputs: Any) -> Any:
    """The default step."""
    return model(**inputs)


def check_parameters(function: Callable[..., Any], names: list[str], who: str, given: tuple[str, ...] = ()) -> None:
    """Every input is taken, and everything that must be given is."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in names:
        parameter = parameters.get(name)
        if not takes_any and (parameter is None or parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY)):
            raise UsageError(f"{who} takes no input {name!r}; it takes {[p for p in parameters if p not in given]}")
    for name, parameter in parameters.items():
        required = parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        )
        if required and name not in names and name not in given:
            raise UsageError(f"{who} needs {name!r}, which is not among its inputs {names}")


def binds(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:  # a builtin, which has no signature
        return True
    return True


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _takes(function: Callable[..., Any], name: str) -> bool:
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


# ---------------------------------------------------------------------- outputs
def record_outputs(recorder: Recorder, outputs: Any) -> None:
    """Name the program's outputs by their path, and say which values they are."""
    recorder.check_adopted()
    if recorder.ended is not None and any(node.communicates for node in recorder.graph.nodes[recorder.ended :]):
        raise recorder.failed(CaptureError("the program communicates after it has ended torch.distributed"))
    leaves = [] if outputs is None else pytree.tree_flatten_with_path(outputs)[0]
    named = _by_path(leaves, "outputs")
    recorder.graph.outputs = dict.fromkeys(named)
    with recorder:
        for name, leaf in named.items():
            if isinstance(leaf, torch.Tensor):
                _record_tensor(recorder, name, leaf)
    for name, leaf in named.items():
        if isinstance(leaf, (bool, int, float, complex)):
            number = torch.tensor(leaf, dtype=torch.float64 if isinstance(leaf, float) else None)
            recorder.graph.outputs[name] = recorder.new_constant(constant_of(number), number.dtype)
        elif leaf is not None and not isinstance(leaf, torch.Tensor):
            raise UsageError(f"output {name!r} is of type {type(leaf).__name__}; programs return tensors, or dicts and "
                             "lists of tensors")  # fmt: skip


def _record_tensor(recorder: Recorder, name: str, output: torch.Tensor) -> None:
    if output.layout is not torch.strided:
        layout = str(output.layout).removeprefix("torch.")
        raise UsageError(f"output {name!r} is a tensor of layout {layout}; return a dense one (`.to_dense()`)")
    if isinstance(output, DTensor):
        output = _in_words_of_relations(output)
        recorder.graph.layouts[name] = _layout(recorder, output)
    tensor = _local(output.detach())
    recorder.graph.outputs[name] = recorder.value(tensor)
    recorder.races.returned(recorder.aliases.cell(tensor))


def _in_words_of_relations(tensor: DTensor) -> DTensor:
    """The same DTensor, reduced by its own placements where no relation has a word for them: products, and parts of norms."""
    wanted = [placement if _is_relation(placement) else Replicate() for placement in tensor.placements]
    return tensor if wanted == list(tensor.placements) else tensor.redistribute(placements=wanted)


def _is_relation(placement: Placement) -> bool:
    known = read(repr(placement))
    return known.reduce in REDUCTIONS if isinstance(known, Partial) else known is not None


def path_name(path: tuple[Any, ...]) -> str:
    """`out` for a bare tensor, else keys and indices joined by dots."""
    parts = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path]
    return ".".join(parts) or "out"


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor that this rank holds."""
    while type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        elif isinstance(tensor, AsyncCollectiveTensor):
            tensor = tensor.wait()
        else:
            raise UsageError(f"tensors of type {type(tensor).__name__} are not supported as inputs or outputs")
    return tensor


def _layout(recorder: Recorder, tensor: DTensor) -> Layout:
    placements = tuple(repr(placement) for placement in tensor.placements)
    return Layout(tuple(tensor.shape), *recorder.form_of(tensor.device_mesh), placements)


def flat_inputs(inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors among a rank's inputs, by path."""
    leaves, _ = pytree.tree_flatten_with_path(dict(inputs))
    return _by_path([(path, leaf) for path, leaf in leaves if isinstance(leaf, torch.Tensor)], "inputs of a rank")


def _by_path(leaves: Iterable[tuple[tuple[Any, ...], Any]], what: str) -> dict[str, Any]:
    named: dict[str, Any] = {}
    keys: dict[str, tuple[Any, ...]] = {}
    for path, leaf in leaves:
        name = path_name(path)
        if name in named:
            both = " and ".join(pytree.keystr(each) for each in (keys[name], path))
            raise UsageError(f"two {what} have the path {name!r}: {both}; rename one of them")
        named[name], keys[name] = leaf, path
    return named
