"""The two programs of a check, run for real: one process alone, and one process for each rank, over gloo.

`show(**given)` takes what the check gives `gg.verify_model` or `gg.verify`, draws inputs and parameters, and prints where a
rank's result is not what the sequential program has. Nothing of GraphGuard's proof is used; only `gg.Input` says how inputs
are cut.
"""

import os
import pickle
import sys
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import DTensor, Partial, distribute_tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

TOLERANCE = 1e-4  # of the largest element; programs compute in float32


def show(**given):
    """Print what differs; returns the lines."""
    lines = [str(each) for each in differences(**given)]
    names = " × ".join(f"{axis} {size}" for axis, size in given["mesh"].items())
    lines = lines or ["every rank has what the sequential program has"]
    print(f"real gloo ranks, {names}:", *lines, sep="\n  ")
    return lines


class Difference:
    """One output, with the element that differs most and its value on each rank that has it."""

    def __init__(self, path, element, expected, got):
        self.path, self.element, self.expected, self.got = path, element, expected, got

    def __str__(self):
        ranks = ", ".join(f"rank {rank} has {value:.6g}" for rank, value in self.got.items())
        return f"{self.path}{list(self.element)}: one process has {self.expected:.6g}, {ranks}"


def differences(sequential, distributed, mesh, inputs, step=None, outputs=None, **_):
    """The outputs that differ, the largest relative difference first. A loss that ranks have in parts is left out."""
    size = torch.Size(mesh.values()).numel()
    torch.manual_seed(0)
    full = {name: draw(spec) for name, spec in inputs.items()}
    parts = {path for path, placement in (outputs or {}).items() if isinstance(placement, (dict, Partial))}
    (alone,) = processes(1, lambda rank: run_alone(sequential, step, full))
    expected, parameters = alone
    on_ranks = processes(size, lambda rank: run_rank(distributed, step, mesh, inputs, full, parameters))
    found = [
        compared(path, whole, [ranks[path] for ranks in on_ranks]) for path, whole in expected.items() if path not in parts
    ]
    worst = sorted((each for each in found if each), key=lambda pair: -pair[0])
    return [difference for _, difference in worst]


def draw(spec):
    if spec.dtype == torch.bool:
        return torch.rand(spec.shape) < 0.5
    if spec.dtype.is_floating_point:
        return torch.randn(spec.shape, dtype=spec.dtype)
    return torch.randint(int(spec.low or 0), int(spec.high), spec.shape, dtype=spec.dtype)


def compared(path, whole, mine):
    """How much the ranks differ from the whole, and where; None if they do not."""
    worst, where = 0.0, None
    for rank, (tensor, part) in enumerate(mine):
        have, want = torch.as_tensor(tensor).double(), part(whole).double()
        if have.shape != want.shape:
            raise ValueError(f"{path} is {tuple(have.shape)} on a rank and {tuple(want.shape)} on one process")
        ratio = ((have - want).abs().max() / want.abs().max().clamp_min(1e-12)).item() if want.numel() else 0.0
        if ratio > max(worst, TOLERANCE):
            worst, where = ratio, (rank, want, (have - want).abs().argmax())
    if where is None:
        return None
    who, want, at = where
    element = torch.unravel_index(at, want.shape)
    same = [rank for rank, (_, part) in enumerate(mine) if rank == who or isinstance(part, Whole)]  # others have other parts
    got = {rank: mine[rank][0].double()[element].item() for rank in same}
    return worst, Difference(path, [int(index) for index in element], want[element].item(), got)


# ---------------------------------------------------------------------- one process, and one rank
def run_alone(sequential, step, full):
    if step is None:
        return flat(sequential(**full)), {}
    model = sequential()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():  # norms begin as ones, biases as zeros: here nothing is so simple
            parameter.add_(torch.randn_like(parameter) * 0.1)
    parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return flat(step(model, **full)), parameters


def run_rank(distributed, step, mesh, inputs, full, parameters):
    device_mesh = dist.init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    coordinate = dict(zip(mesh, device_mesh.get_coordinate(), strict=True))
    mine = {name: local(tensor, inputs[name], mesh, coordinate) for name, tensor in full.items()}
    if step is None:
        takes_mesh = "mesh" in distributed.__code__.co_varnames[: distributed.__code__.co_argcount]
        outputs = flat(distributed(**mine, **({"mesh": device_mesh} if takes_mesh else {})))
        return {path: (tensor, Whole()) for path, tensor in outputs.items()}
    model = distributed(device_mesh)
    cuts = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            cuts[f"grads.{name}"] = load(parameter, parameters[name])
    return {path: (tensor, cuts.get(path, Whole())) for path, tensor in flat(step(model, **mine)).items()}


def local(tensor, spec, mesh, coordinate):
    """A rank's part of an input, by its placement."""
    if spec.local is not None:
        return spec.local(tensor, coordinate).contiguous()
    placement = spec.placement if isinstance(spec.placement, dict) else {next(iter(mesh)): spec.placement}
    for axis, each in placement.items():
        if each.is_shard():
            tensor = tensor.chunk(mesh[axis], each.dim)[coordinate[axis]]
    return tensor.clone().contiguous()


class Whole:
    def __call__(self, whole):
        return whole


class Cut:
    """A slice of one dim: what a tensor-parallel rank of Megatron has."""

    def __init__(self, dim, number, of):
        self.dim, self.number, self.of = dim, number, of

    def __call__(self, whole):
        return whole.chunk(self.of, self.dim)[self.number]


def load(parameter, whole):
    """Give a rank's parameter its values; returns which part of the whole it is, once a DTensor is made whole."""
    if isinstance(parameter, DTensor):
        parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None))
        return Whole()
    part = Whole()
    if parameter.shape != whole.shape:
        from megatron.core import parallel_state

        (dim,) = (dim for dim, size in enumerate(parameter.shape) if size != whole.shape[dim])
        number, of = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
        part = Cut(dim, number, of)
    parameter.copy_(part(whole))
    return part


def flat(outputs):
    """Tensors by path, DTensors as their full values."""
    leaves, _ = pytree.tree_flatten_with_path(outputs)
    return {".".join(map(key, path)) or "out": plain(leaf) for path, leaf in leaves if leaf is not None}


def key(entry):
    return str(getattr(entry, "key", getattr(entry, "idx", getattr(entry, "name", entry))))


def plain(leaf):
    return (leaf.full_tensor() if isinstance(leaf, DTensor) else torch.as_tensor(leaf)).detach().clone()


# ---------------------------------------------------------------------- processes
class OnTheCpu(TorchFunctionMode):
    """megatron-core makes tensors on a GPU. There is none here, and they are made on the CPU; the library stays as it is."""

    def __enter__(self):
        torch.cuda.current_device = lambda: torch.device("cpu")
        torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = lambda *args, **given: torch.get_rng_state()
        utilities = sys.modules.get("megatron.core.transformer.moe.moe_utils")
        if utilities is not None and not hasattr(utilities, "te_general_gemm"):
            utilities.te_general_gemm = None  # a name that 0.16.1 asks for, and has only with Transformer Engine
        return super().__enter__()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs = {**kwargs, "device": "cpu"}
        return function(*args, **kwargs)


def processes(size, program):
    """What `program(rank)` returns in each of so many forked processes; a world of one has no process group."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(worker, (size, program, folder), nprocs=size, start_method="fork")
        results = [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(size)]
    for rank, result in enumerate(results):
        if isinstance(result, str):
            raise RuntimeError(f"rank {rank} of {size} raised:\n{result}")
    return results


def worker(rank, size, program, folder):
    try:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        if size > 1:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1")
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            store = f"file://{folder}/store"
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
        with OnTheCpu():
            result = program(rank)
    except Exception:
        result = traceback.format_exc()
    with open(f"{folder}/{rank}", "wb") as file:
        pickle.dump(result, file)
    os._exit(0)  # without the other ranks: one may have raised
