"""How many classes the ranks of programs are: `python docs/hooks/classes.py` runs them, and writes the table of capture.md.

The programs are those of `examples`, on more ranks. A library that is not installed has its row left as it was.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT), str(ROOT / "examples" / "libraries")]

import written  # noqa: E402

import graphguard as gg  # noqa: E402
from graphguard.api import capture_function, capture_model  # noqa: E402
from graphguard.capture.front import Captured  # noqa: E402

PAGE = ROOT / "docs" / "capture.md"
HEAD = ["| program | mesh | ranks | classes captured | classes proved |", "|---|---|---:|---:|---:|"]
Mesh = dict[str, int]


class Program(NamedTuple):
    title: str
    mesh: Mesh
    capture: Callable[[Mesh], Captured]
    needs: str = "torch"

    @property
    def ranks(self) -> int:
        size = 1
        for each in self.mesh.values():
            size *= each
        return size


# ---------------------------------------------------------------------- by hand
def tensor_parallel(mesh: Mesh) -> Captured:
    def ranks(x: Any, up: Any, down: Any, mesh: Any) -> Any:
        y = torch.relu(x @ up) @ down
        dist.all_reduce(y, group=mesh.get_group("tp"))
        return y

    inputs = {
        "x": gg.Input((64, 8), {"dp": gg.Shard(0)}),
        "up": gg.Input((8, 64), {"tp": gg.Shard(1)}),
        "down": gg.Input((64, 8), {"tp": gg.Shard(0)}),
    }
    return capture_function(lambda x, up, down: torch.relu(x @ up) @ down, ranks, mesh=mesh, inputs=inputs)


def pipeline(mesh: Mesh) -> Captured:
    """The stages in the middle do the same, each with the next one."""

    def ranks(x: Any, mesh: Any) -> Any:
        stage, last, group = mesh.get_local_rank("pp"), mesh["pp"].size() - 1, mesh.get_group("pp")
        if stage > 0:
            dist.recv(x, group=group, group_src=stage - 1)
        y = torch.tanh(x)
        dist.all_reduce(y, group=mesh.get_group("tp"))
        if stage < last:
            dist.send(y, group=group, group_dst=stage + 1)
            return None
        return y

    return capture_function(torch.tanh, ranks, mesh=mesh, inputs={"x": gg.Input((8, 8))})


def ring(mesh: Mesh) -> Captured:
    def ranks(x: Any) -> Any:
        rank, size, total, received = dist.get_rank(), dist.get_world_size(), x, torch.empty_like(x)
        for _ in range(3):
            to, source = dist.isend(x, (rank + 1) % size), dist.irecv(received, (rank - 1) % size)
            to.wait(), source.wait()  # type: ignore[union-attr]
            x, received = received, torch.empty_like(x)
            total = total + x
        return total

    return capture_function(lambda x: x * 1, ranks, mesh=mesh, inputs={"x": gg.Input((64, 4), gg.Shard(0))})


def groups_by_hand(mesh: Mesh) -> Captured:
    def ranks(x: Any) -> Any:
        size = dist.get_world_size()
        for members in ([*range(start, start + size // 2)] for start in (0, size // 2)):
            group = dist.new_group(members)
            if dist.get_rank() in members:
                own = group
        y = x.clone()
        dist.all_reduce(y, group=own)
        return y

    return capture_function(lambda x: x * 1, ranks, mesh=mesh, inputs={"x": gg.Input((4, 4))})


# ---------------------------------------------------------------------- torch
def tokens(library: Any, mesh: Mesh, **placements: Any) -> dict[str, gg.Input]:
    each = gg.Input((mesh.get("dp", 1), library.SEQUENCE), placements, torch.int64, low=0, high=library.VOCABULARY)
    return {"ids": each, "labels": each}


def of_transformer(wrapped: Callable[[Any, Any], torch.nn.Module], mesh: Mesh) -> Captured:
    library = importlib.import_module("torch_tensor_parallel")
    return capture_model(
        library.Transformer,
        lambda ranks: wrapped(library, ranks),
        mesh=mesh,
        inputs=tokens(library, mesh, dp=gg.Shard(0)),
        step=gg.train_step(library.loss),
    )


def dtensor(mesh: Mesh) -> Captured:
    from torch.distributed.tensor.parallel import parallelize_module

    return of_transformer(lambda it, ranks: parallelize_module(it.Transformer(), ranks["tp"], it.SEQUENCE_TOO), mesh)


def data_parallel(mesh: Mesh) -> Captured:
    from torch.nn.parallel import DistributedDataParallel

    return of_transformer(lambda it, ranks: DistributedDataParallel(it.Transformer()), mesh)


def fully_sharded(mesh: Mesh) -> Captured:
    sharded = importlib.import_module("torch_fully_shard").sharded
    return of_transformer(lambda it, ranks: sharded(ranks), mesh)


def fully_sharded_over_tensor_parallel(mesh: Mesh) -> Captured:
    from torch.distributed.tensor.parallel import parallelize_module

    sharded = importlib.import_module("torch_fully_shard").sharded

    def wrapped(it: Any, ranks: Any) -> Any:
        return sharded(ranks["dp"], parallelize_module(it.Transformer(), ranks["tp"], it.SEQUENCE_TOO))

    return of_transformer(wrapped, mesh)


def context_parallel(mesh: Mesh) -> Captured:
    library, parallel = (importlib.import_module(f"torch_{name}") for name in ("tensor_parallel", "context_parallel"))
    each = gg.Input((2, 4 * mesh["cp"]), dtype=torch.int64, low=0, high=library.VOCABULARY)
    return capture_model(
        library.Transformer,
        lambda ranks: library.Transformer(),
        mesh=mesh,
        inputs={"ids": each, "labels": each},
        step=parallel.step_of("alltoall"),
    )


def zero(mesh: Mesh) -> Captured:
    from torch.nn.parallel import DistributedDataParallel

    library = importlib.import_module("torch_zero")
    batch = gg.Input((mesh["dp"], library.WIDTH), gg.Shard(0))
    return capture_model(
        library.Net,
        lambda ranks: DistributedDataParallel(library.Net()),
        mesh=mesh,
        inputs={"x": batch, "target": batch},
        step=library.step_of(torch.optim.Adam, {}, steps=1),
    )


def pipelining(mesh: Mesh) -> Captured:
    from torch.distributed.pipelining import PipelineStage, schedules

    library = importlib.import_module("torch_pipelining")

    def step(model: Any, x: Any, target: Any) -> Any:
        if not dist.is_initialized():
            return gg.train_step(library.whole_loss)(model, x=x, target=target)
        ((number, layer),) = model.layers.items()
        stage = PipelineStage(layer, int(number), mesh["pp"], torch.device("cpu"), group=model.group)
        run = schedules.Schedule1F1B(stage, mesh["pp"], loss_fn=library.loss_fn)
        first, last = number == "0", int(number) == mesh["pp"] - 1
        run.step(*([x] if first else []), **({"target": target} if last else {}))
        return {"grads": {name: parameter.grad for name, parameter in model.named_parameters()}}

    def distributed(ranks: Any) -> Any:
        model = library.Stack([ranks.get_local_rank("pp")])
        model.group = ranks.get_group("pp")
        return model

    batch = gg.Input((4 * mesh["dp"], library.WIDTH), {"dp": gg.Shard(0)})
    return capture_model(
        lambda: library.Stack(range(mesh["pp"])), distributed, mesh=mesh, inputs={"x": batch, "target": batch}, step=step
    )


# ---------------------------------------------------------------------- others
def transformers(mesh: Mesh) -> Captured:
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    library = importlib.import_module("transformers_tp")
    ids = gg.Input((mesh["dp"], 8), {"dp": gg.Shard(0)}, torch.int64, low=0, high=library.VOCABULARY)

    def distributed(ranks: Any) -> Any:
        model = library.build(library.LlamaForCausalLM)
        return apply_tensor_parallelism(model, ranks["tp"], dict(model.tp_plan))

    return capture_model(
        lambda: library.build(library.LlamaForCausalLM),
        distributed,
        mesh=mesh,
        inputs={"ids": ids},
        step=gg.train_step(library.loss),
    )


def megatron(mesh: Mesh) -> Captured:
    library = importlib.import_module("megatron_gpt")
    shape, placed = (mesh["dp"], library.SEQUENCE), {"dp": gg.Shard(0)}
    inputs = {
        "ids": gg.Input(shape, placed, torch.int64, low=0, high=library.VOCABULARY),
        "positions": gg.Input(shape, placed, torch.int64, low=0, high=library.SEQUENCE),
        "mask": gg.Input((mesh["dp"], 1, library.SEQUENCE, library.SEQUENCE), placed, torch.bool),
    }
    return capture_model(
        library.alone, lambda ranks: library.build(mesh["tp"]), mesh=mesh, inputs=inputs, step=gg.train_step(library.loss)
    )


def torchtitan(mesh: Mesh) -> Captured:
    from torch.distributed.tensor.parallel import loss_parallel

    library = importlib.import_module("torchtitan_llama")

    def step(model: Any, ids: Any, labels: Any) -> Any:
        with loss_parallel():
            return gg.train_step(library.loss)(model, ids=ids, labels=labels)

    return capture_model(
        library.sequential,
        lambda ranks: library.distributed(True, **mesh),
        mesh=mesh,
        inputs=tokens(library, mesh, dp=gg.Shard(0)),
        step=step,
    )


def prepared(name: str, step: Callable[[Any], Any], mesh: Mesh) -> Captured:
    library = importlib.import_module(name)
    batch = gg.Input((2 * mesh["dp"], library.WIDTH), gg.Shard(0))
    inputs = {"x": batch, "target": batch}
    return capture_model(library.Net, lambda ranks: library.Net(), mesh=mesh, inputs=inputs, step=step(library))


def accelerate(mesh: Mesh) -> Captured:
    return prepared("accelerate_data_parallel", lambda library: library.step_of(), mesh)


def zero_2(mesh: Mesh) -> Captured:
    return prepared("deepspeed_zero", lambda library: library.step_of(2), mesh)


def zero_3(mesh: Mesh) -> Captured:
    return prepared("deepspeed_zero", lambda library: library.step_of(3), mesh)


PROGRAMS = [
    Program("tensor parallelism by hand", {"dp": 8, "tp": 8}, tensor_parallel),
    Program("tensor parallelism by hand", {"dp": 64, "tp": 16}, tensor_parallel),
    Program("pipeline by hand, with tensor parallelism", {"pp": 8, "tp": 8}, pipeline),
    Program("ring by hand", {"cp": 64}, ring),
    Program("groups made in a loop", {"dp": 16}, groups_by_hand),
    Program("DTensor, tensor and sequence parallelism", {"dp": 32, "tp": 2}, dtensor),
    Program("DistributedDataParallel", {"dp": 64}, data_parallel),
    Program("fully_shard (FSDP2)", {"dp": 32}, fully_sharded),
    Program("fully_shard over DTensor", {"dp": 32, "tp": 2}, fully_sharded_over_tensor_parallel),
    Program("torch.distributed.pipelining, 1F1B", {"dp": 16, "pp": 4}, pipelining),
    Program("context_parallel, ring", {"cp": 8}, context_parallel),
    Program("ZeroRedundancyOptimizer", {"dp": 16}, zero),
    Program("transformers, Llama with its plan", {"dp": 32, "tp": 2}, transformers, "transformers"),
    Program("megatron-core, GPT", {"dp": 32, "tp": 2}, megatron, "megatron.core.models.gpt.gpt_layer_specs"),
    Program("torchtitan, Llama 3, fully sharded over its plan", {"dp": 8, "tp": 2}, torchtitan, "torchtitan"),
    Program("accelerate, Accelerator", {"dp": 64}, accelerate, "accelerate"),
    Program("deepspeed, ZeRO 2", {"dp": 8}, zero_2, "deepspeed"),
    Program("deepspeed, ZeRO 3", {"dp": 8}, zero_3, "deepspeed"),
]


def row(program: Program) -> str:
    captured = program.capture(program.mesh)
    found = "one by one" if captured.classes is None else str(captured.classes)
    mesh = " × ".join(f"{name} {size}" for name, size in program.mesh.items())
    return f"{_begin(program, mesh)} {found} | {len(captured.world().classes)} |"


def _begin(program: Program, mesh: str) -> str:
    return f"| {program.title} | {mesh} | {program.ranks} |"


def table(programs: list[Program] = PROGRAMS) -> list[str]:
    rows = []
    for program in programs:
        mesh = " × ".join(f"{name} {size}" for name, size in program.mesh.items())
        kept = re.findall(rf"^{re.escape(_begin(program, mesh))}.*$", PAGE.read_text(), re.MULTILINE)
        try:
            importlib.import_module(program.needs)
        except ImportError:
            rows += kept
        else:
            rows.append(row(program))
            print(rows[-1], flush=True)
    return [*HEAD, *rows]


if __name__ == "__main__":
    PAGE.write_text(written.with_table(PAGE.read_text(), "classes", table(), "classes.py"))
