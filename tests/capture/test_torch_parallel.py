"""torch's own parallel libraries: joint replay of the captured ranks equals real processes over gloo."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.pipelining as pipelining
import torch.nn.functional as F
from harness import assert_replays_as_gloo, filled
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from graphguard import Input
from graphguard import Shard as ShardOf

pytestmark = pytest.mark.gloo
F64 = torch.float64
DIM, HIDDEN = 8, 12
WEIGHTS = Input((1000,), dtype=F64)
BATCH = Input((8, DIM), ShardOf(0), F64)
SAME = Input((8, DIM), dtype=F64)


class Block(nn.Module):
    """A residual MLP whose sizes (8, 12, and biases) do not divide evenly by 4 ranks everywhere."""

    def __init__(self, hidden=HIDDEN):
        super().__init__()
        self.norm = nn.LayerNorm(DIM, dtype=F64)
        self.up = nn.Linear(DIM, hidden, dtype=F64)
        self.down = nn.Linear(hidden, DIM, dtype=F64)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def gradients(module):
    return {name: p.grad for name, p in module.named_parameters()}


def parameters(module):
    return {name: p.detach() for name, p in module.named_parameters()}


# ---------------------------------------------------------------------- DistributedDataParallel
def step_of(module, x):
    loss = module(x).pow(2).mean()
    loss.backward()
    return {"loss": loss.detach(), "grads": gradients(module)}


def ddp(x, w):
    return step_of(DDP(filled(Block(), w)), x)


def ddp_with_views(x, w):
    return step_of(DDP(filled(Block(), w), gradient_as_bucket_view=True, bucket_cap_mb=0.0001), x)


def ddp_allreduce_hook(x, w):
    module = DDP(filled(Block(), w))
    module.register_comm_hook(dist.group.WORLD, default_hooks.allreduce_hook)
    return step_of(module, x)


def ddp_own_hook(x, w):
    def sum_with_then(state, bucket):
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0] * 3).then(lambda future: future.value() - 1)

    module = DDP(filled(Block(), w))
    module.register_comm_hook(None, sum_with_then)
    return step_of(module, x)


def ddp_finished_future(x, w):
    def sum_at_once(state, bucket):
        dist.all_reduce(bucket.buffer())
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    module = DDP(filled(Block(), w))
    module.register_comm_hook(None, sum_at_once)
    return step_of(module, x)


def ddp_accumulates(x, w):
    module = DDP(filled(Block(), w))
    first, second = x.chunk(2)
    with module.no_sync():
        module(first).pow(2).sum().backward()
    local = {name: gradient.clone() for name, gradient in gradients(module).items()}
    module(second).pow(2).sum().backward()
    return {"local": local, "total": gradients(module)}


def ddp_batch_norm(x, w):
    """Rank 0's running statistics are broadcast before every forward."""
    module = DDP(nn.Sequential(filled(Block(), w), nn.BatchNorm1d(DIM, dtype=F64)))
    for _ in range(2):
        module(x).pow(2).sum().backward()
    return {"grads": gradients(module), "buffers": dict(module.named_buffers())}


def ddp_of_different_parameters(x, w):
    """Construction gives every rank the parameters and the buffers of rank 0."""
    inner = nn.Sequential(filled(Block(), w * (1 + dist.get_rank())), nn.BatchNorm1d(DIM, dtype=F64))
    inner[1].running_mean.fill_(dist.get_rank())
    module = DDP(inner)
    return {"params": parameters(module), "buffers": dict(module.named_buffers()), **step_of(module, x)}


def ddp_static_graph(x, w):
    module = DDP(filled(Block(), w), static_graph=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        module(x).pow(2).sum().backward()
        optimizer.step()
    return parameters(module)


def ddp_looks_for_unused_parameters(x, w):
    return step_of(DDP(filled(Block(), w), find_unused_parameters=True), x)


def ddp_whose_ranks_use_different_parameters(x, w):
    """Rank 1 has gradients for parameters that it does not use; of one that nobody uses there is none."""

    class Partly(Block):
        def __init__(self):
            super().__init__()
            self.unused = nn.Linear(DIM, DIM, dtype=F64)

        def forward(self, x):
            return self.norm(x) if dist.get_rank() == 1 else super().forward(x)

    inner = Partly()
    filled(inner, w)
    module = DDP(inner, find_unused_parameters=True)
    module(x).pow(2).sum().backward()
    assert inner.unused.weight.grad is None
    return {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}


def ddp_that_nobody_keeps(x, w):
    """The wrapper goes before the backward, and gradients are averaged no more: a capture must not keep it alive."""
    inner = filled(Block(), w)
    DDP(inner)(x).pow(2).sum().backward()
    return {name: parameter.grad for name, parameter in inner.named_parameters()}


def ddp_compressed(x, w):
    """A hook that works on a copy and writes the bucket in a callback."""
    module = DDP(filled(Block(), w))
    module.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return step_of(module, x)


def ddp_in_a_subgroup(x, w):
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return step_of(DDP(filled(Block(), w), process_group=pairs[dist.get_rank() // 2]), x)


DDP_PROGRAMS = [
    ddp, ddp_with_views, ddp_allreduce_hook, ddp_own_hook, ddp_finished_future, ddp_accumulates, ddp_batch_norm,
    ddp_of_different_parameters, ddp_static_graph, ddp_looks_for_unused_parameters,
    ddp_whose_ranks_use_different_parameters, ddp_in_a_subgroup, ddp_that_nobody_keeps,
]  # fmt: skip


@pytest.mark.parametrize("program", DDP_PROGRAMS)
def test_ddp_replays_as_gloo(program):
    assert_replays_as_gloo(program, 4, {"x": BATCH, "w": WEIGHTS})


def test_ddp_with_a_compressing_hook_replays_as_gloo():
    """The order of a sum in float16 is the backend's, hence two ranks only."""
    assert_replays_as_gloo(ddp_compressed, 2, {"x": BATCH, "w": WEIGHTS}, tolerance=1e-2)


# ---------------------------------------------------------------------- FSDP2
class Tower(nn.Module):
    """Two blocks and a head of one row, which most of four ranks hold nothing of."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(hidden=5)])
        self.head = nn.Linear(DIM, 1, dtype=F64)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def sharded(module, **options):
    for block in module.blocks:
        fully_shard(block, **options)
    return fully_shard(module, **options)


def fsdp_step(module, x):
    loss = module(x).pow(2).mean()
    loss.backward()
    return {"loss": loss.detach(), "grads": gradients(module), "full": [p.grad.full_tensor() for p in module.parameters()]}


@pytest.mark.parametrize("reshard", [True, False, 2])
def test_fsdp_replays_as_gloo_for_each_way_to_reshard(reshard):
    def program(x, w):
        return fsdp_step(sharded(filled(Tower(), w), reshard_after_forward=reshard), x)

    assert_replays_as_gloo(program, 4, {"x": BATCH, "w": WEIGHTS})


def fsdp_adamw(x, w):
    module = sharded(filled(Tower(), w))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    for _ in range(2):
        optimizer.zero_grad()
        module(x).pow(2).sum().backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
    return parameters(module)


def fsdp_accumulates(x, w):
    module = sharded(filled(Tower(), w))
    module.set_requires_gradient_sync(False)
    module(x).pow(2).sum().backward()
    module.set_requires_gradient_sync(True)
    module(2 * x).pow(2).sum().backward()
    return gradients(module)


def fsdp_offloaded(x, w):
    return fsdp_step(sharded(filled(Tower(), w), offload_policy=CPUOffloadPolicy(pin_memory=False)), x)


def fsdp_predivided(x, w):
    module = sharded(filled(Tower(), w))
    module.set_gradient_divide_factor(3.0)
    return fsdp_step(module, x)


def fsdp_loaded(x, w):
    """Parameters that are replaced after sharding are the ones that are gathered."""
    module = sharded(filled(Tower(), w))
    module.load_state_dict({name: p.detach() * 2 for name, p in module.state_dict().items()}, assign=True)
    return fsdp_step(module, x)


def fsdp_unsharded_by_hand(x, w):
    module = sharded(filled(Tower(), w), reshard_after_forward=False)
    module.unshard()
    before = [p.detach().clone() for p in module.parameters(recurse=False)]
    result = fsdp_step(module, x)
    module.reshard()
    return {"before": before, **result}


def fsdp_checkpointed(x, w):
    class Checkpointed(Block):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    tower = Tower()
    tower.blocks[0] = Checkpointed()
    return fsdp_step(sharded(filled(tower, w)), x)


@pytest.mark.parametrize(
    "program",
    [fsdp_adamw, fsdp_accumulates, fsdp_offloaded, fsdp_predivided, fsdp_loaded, fsdp_unsharded_by_hand, fsdp_checkpointed],
)
def test_fsdp_replays_as_gloo(program):
    assert_replays_as_gloo(program, 2, {"x": BATCH, "w": WEIGHTS})


def test_fsdp_in_mixed_precision_replays_as_gloo():
    def program(x, w):
        policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=F64)
        return fsdp_step(sharded(filled(Tower(), w), mp_policy=policy), x)

    assert_replays_as_gloo(program, 2, {"x": BATCH, "w": WEIGHTS}, tolerance=1e-5)


def test_hybrid_sharding_replays_as_gloo():
    def program(x, w, mesh):
        return fsdp_step(sharded(filled(Tower(), w), mesh=mesh), x)

    inputs = {"x": Input((8, DIM), {"replicas": ShardOf(0), "shards": ShardOf(0)}, F64), "w": WEIGHTS}
    assert_replays_as_gloo(program, {"replicas": 2, "shards": 2}, inputs)


# ---------------------------------------------------------------------- ZeroRedundancyOptimizer
@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.AdamW, {}), (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adam, {"parameters_as_bucket_view": True})],
)
def test_zero_redundancy_optimizer_replays_as_gloo(kind, options):
    def program(x, w):
        module = DDP(filled(Block(), w))
        optimizer = ZeroRedundancyOptimizer(module.parameters(), kind, lr=0.1, **options)
        for _ in range(2):
            optimizer.zero_grad()
            module(x).pow(2).sum().backward()
            optimizer.step()
        return parameters(module)

    assert_replays_as_gloo(program, 2, {"x": BATCH, "w": WEIGHTS})


# ---------------------------------------------------------------------- DTensor
LAYOUTS = [Replicate(), Shard(0), Shard(1), Partial(), Partial("avg"), Partial("max")]


@pytest.mark.parametrize("uneven", [False, True])
def test_redistribute_between_all_layouts_replays_as_gloo(uneven):
    """All pairs in one program, which keeps the test short; results are named by their pair."""

    def program(x, mesh):
        shape = (6, 7) if uneven else (8, 4)
        full = x[: shape[0] * shape[1]].view(shape)
        results = {}
        for source in LAYOUTS:
            for target in LAYOUTS:
                whole = distribute_tensor(full, mesh, [source]) if not source.is_partial() else None
                local = full * (1 + dist.get_rank()) if source.is_partial() else whole.to_local()
                mine = DTensor.from_local(local, mesh, [source], shape=torch.Size(shape), stride=(shape[1], 1))
                if target.is_partial() and source != target:
                    continue
                results[f"{source} to {target}"] = mine.redistribute(placements=[target]).to_local()
            results[f"{source} full"] = mine.full_tensor()
        return results

    assert_replays_as_gloo(program, 4, {"x": Input((64,), dtype=F64)})


def test_redistribute_on_two_axes_replays_as_gloo():
    single = [Replicate(), Shard(0), Shard(1), Partial()]
    targets = [(Replicate(), Replicate()), (Shard(0), Shard(1)), (Shard(0), Shard(0)), (Shard(1), Replicate())]

    def program(x, mesh):
        results = {}
        for source in [(a, b) for a in single for b in single]:
            divisor = [4 if Shard(dim) == source[0] == source[1] else 2 if Shard(dim) in source else 1 for dim in (0, 1)]
            local = x[: 8 // divisor[0], : 12 // divisor[1]].contiguous()
            for target in targets:
                moved = DTensor.from_local(local, mesh, source).redistribute(placements=target)
                results[f"{source} to {target}"] = moved.to_local()
        return results

    assert_replays_as_gloo(program, {"a": 2, "b": 2}, {"x": Input((32, 12), {"a": ShardOf(0), "b": ShardOf(0)}, F64)})


def test_distributed_tensors_take_the_data_of_rank_0():
    def program(x, mesh):
        mine = x * (1 + dist.get_rank())
        results = {str(p): distribute_tensor(mine, mesh, [p]) for p in (Replicate(), Shard(0), Shard(1), Partial())}
        results["own"] = distribute_tensor(mine, mesh, [Shard(0)], src_data_rank=None)
        results["checked"] = DTensor.from_local(mine, mesh, [Replicate()], run_check=True)
        return {**results, "full": [tensor.full_tensor() for tensor in results.values()]}

    assert_replays_as_gloo(program, 4, {"x": Input((6, 8), dtype=F64)})


def test_gradients_of_dtensor_redistribution_replay_as_gloo():
    def program(x, mesh):
        results = {}
        for source in (Replicate(), Shard(0), Shard(1)):
            for target in (Replicate(), Shard(0), Shard(1)):
                leaf = x.clone().requires_grad_()
                moved = DTensor.from_local(leaf, mesh, [source]).redistribute(placements=[target])
                (moved * moved).to_local().sum().backward()
                results[f"{source} to {target}"] = leaf.grad
        return results

    assert_replays_as_gloo(program, 2, {"x": Input((4, 6), ShardOf(0), F64)})


@pytest.mark.parametrize("kind", [2.0, 3.0])
def test_the_norm_over_dtensors_replays_as_gloo(kind):
    """DTensor divides what every rank has by a root of their number, which is recorded as a root."""

    def program(x, mesh):
        parts = [DTensor.from_local(x, mesh, [placement]) for placement in (Shard(0), Replicate(), Partial())]
        return torch.nn.utils.get_total_norm(parts, kind).full_tensor()

    assert_replays_as_gloo(program, 2, {"x": Input((4, 6), dtype=F64)})


def test_dtensor_arithmetic_on_two_axes_replays_as_gloo():
    def program(x, w, mesh):
        a = distribute_tensor(x, mesh, [Shard(0), Replicate()]).requires_grad_()
        b = distribute_tensor(w[:48].view(8, 6), mesh, [Replicate(), Shard(1)]).requires_grad_()
        y = torch.softmax(a @ b, -1) + a.mean() + (a.t() @ a).sum()
        y.pow(2).sum().backward()
        return {"y": y, "full": y.full_tensor(), "a": a.grad, "b": b.grad, "norm": torch.linalg.vector_norm(b.grad)}

    assert_replays_as_gloo(program, {"dp": 2, "tp": 2}, {"x": SAME, "w": WEIGHTS})


# ---------------------------------------------------------------------- tensor parallelism
class Attention(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM, bias=False, dtype=F64) for _ in range(4))
        self.heads = heads

    def forward(self, x):
        def split(y):
            return y.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        y = F.scaled_dot_product_attention(split(self.q(x)), split(self.k(x)), split(self.v(x)), is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, heads=4, recompute=False):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM, dtype=F64), nn.RMSNorm(DIM, dtype=F64)
        self.attention = Attention(heads)
        self.mlp = nn.Sequential(nn.Linear(DIM, HIDDEN, dtype=F64), nn.SiLU(), nn.Linear(HIDDEN, DIM, dtype=F64))
        self.recompute = recompute

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + (checkpoint(self._mlp, x, use_reentrant=False) if self.recompute else self._mlp(x))

    def _mlp(self, x):
        return self.mlp(self.norm2(x))


TP_PLAN = {"attention.q": ColwiseParallel(), "attention.k": ColwiseParallel(), "attention.v": ColwiseParallel(),
           "attention.o": RowwiseParallel(), "mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel()}  # fmt: skip
SP_PLAN = {
    "norm1": SequenceParallel(), "norm2": SequenceParallel(),
    "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "attention.q": ColwiseParallel(), "attention.k": ColwiseParallel(), "attention.v": ColwiseParallel(),
    "attention.o": RowwiseParallel(output_layouts=Shard(1)),
    "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel(output_layouts=Shard(1)),
}  # fmt: skip
TOKENS = Input((2, 8, DIM), dtype=F64)


@pytest.mark.parametrize("plan", [TP_PLAN, SP_PLAN], ids=["tensor", "sequence"])
@pytest.mark.parametrize(("recompute", "world"), [(False, 4), (True, 2)], ids=["stored", "recomputed"])
def test_parallelize_module_replays_as_gloo(plan, recompute, world):
    def program(x, w, mesh):
        layer = parallelize_module(filled(Layer(4 // mesh.size(), recompute), w), mesh, plan)
        x = x.chunk(mesh.size(), 1)[mesh.get_local_rank()] if plan is SP_PLAN else x
        y = layer(x)
        y.pow(2).sum().backward()
        norm = torch.nn.utils.clip_grad_norm_([p for p in layer.parameters() if isinstance(p, DTensor)], 0.5)
        return {"y": y.detach(), "norm": norm, "grads": gradients(layer)}

    assert_replays_as_gloo(program, world, {"x": TOKENS, "w": WEIGHTS})


def test_loss_parallel_replays_as_gloo():
    def program(x, w, ids, mesh):
        head = filled(nn.Linear(DIM, 16, bias=False, dtype=F64), w)
        head = parallelize_module(head, mesh, ColwiseParallel(output_layouts=Shard(-1), use_local_output=False))
        x = x.requires_grad_()
        with loss_parallel():
            loss = F.cross_entropy(head(x).flatten(0, 1), ids.flatten())
            loss.backward()
        return {"loss": loss.detach(), "x": x.grad, **gradients(head)}

    inputs = {"x": TOKENS, "w": WEIGHTS, "ids": Input((2, 8), dtype=torch.int64, high=16)}
    assert_replays_as_gloo(program, 2, inputs)


def test_fsdp_of_a_tensor_parallel_layer_replays_as_gloo():
    def program(x, w, mesh):
        model = parallelize_module(filled(Layer(2), w), mesh["tp"], SP_PLAN)
        fully_shard(model.attention, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(x).pow(2).sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        grads = {name: gradient.clone() for name, gradient in gradients(model).items()}
        optimizer.step()
        return {"norm": norm.full_tensor(), "grads": grads, "params": parameters(model)}

    inputs = {"x": Input((2, 8, DIM), {"dp": ShardOf(0), "tp": ShardOf(1)}, F64), "w": WEIGHTS}
    assert_replays_as_gloo(program, {"dp": 2, "tp": 2}, inputs)


# ---------------------------------------------------------------------- pipelining
def squared_error(y, target):
    return (y - target).pow(2).sum()


def run_schedule(stages, schedule, x, first, last, with_losses):
    losses = [] if with_losses else None
    given = {"target": 2 * x, **({"losses": losses} if with_losses else {})} if last else {}
    output = schedule.step(*([x] if first else []), **given)
    return {
        "grads": [gradients(stage.submod) for stage in stages],
        "losses": [loss.detach() for loss in losses] if losses else None,
        "output": None if output is None else output.detach(),
    }


def stage_of(index, count, w, static):
    options = {}
    if static:
        example = torch.zeros(2, DIM, dtype=F64)
        options = {
            "input_args": (example.requires_grad_(index > 0),),
            "output_args": (torch.zeros_like(example).requires_grad_(),),
        }
    module = filled(Block(), w[index * 10 :])
    return pipelining.PipelineStage(module, index, count, torch.device("cpu"), **options)


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B"])
@pytest.mark.parametrize(("static", "with_losses"), [(False, True), (True, False)], ids=["shapes inferred", "shapes given"])
def test_pipeline_of_one_stage_per_rank_replays_as_gloo(schedule, static, with_losses):
    def program(x, w):
        rank, world = dist.get_rank(), dist.get_world_size()
        stage = stage_of(rank, world, w, static)
        run = getattr(pipelining, schedule)(stage, 4, loss_fn=squared_error)
        return run_schedule([stage], run, x, rank == 0, rank == world - 1, with_losses)

    assert_replays_as_gloo(program, 3, {"x": SAME, "w": WEIGHTS})


@pytest.mark.parametrize(
    "schedule", ["ScheduleInterleaved1F1B", "ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble",
                 "ScheduleDualPipeV"],
)  # fmt: skip
def test_pipeline_of_two_stages_per_rank_replays_as_gloo(schedule):
    def program(x, w):
        rank, world = dist.get_rank(), dist.get_world_size()
        folded = schedule in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
        indices = [rank, 2 * world - 1 - rank] if folded else [rank, rank + world]
        stages = [stage_of(index, 2 * world, w, False) for index in indices]
        run = getattr(schedules, schedule)(stages, 4, loss_fn=squared_error)
        return run_schedule(stages, run, x, rank == 0, 2 * world - 1 in indices, True)

    assert_replays_as_gloo(program, 2, {"x": SAME, "w": WEIGHTS})
