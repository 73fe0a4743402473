"""torch's fully_shard (FSDP2) around a transformer: alone, with replicas (HSDP), and over tensor parallelism."""

import torch
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch_tensor_parallel import BATCH, SEQUENCE, SEQUENCE_TOO, VOCABULARY, Transformer, loss

import graphguard as gg


def sharded(mesh, model=None):
    model = model or Transformer()
    fully_shard(model.attention, mesh=mesh)
    fully_shard(model.mlp, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def verify(distributed, mesh, *data_axes, loss_fn=loss):
    tokens = gg.Input((2 * BATCH, SEQUENCE), dict.fromkeys(data_axes, gg.Shard(0)), torch.int64, low=0, high=VOCABULARY)
    return gg.verify_model(
        sequential=Transformer,
        distributed=distributed,
        step=gg.train_step(loss_fn, loss=dict.fromkeys(data_axes, gg.Partial("avg"))),
        mesh=mesh,
        inputs={"ids": tokens, "labels": tokens},
    )


@gg.check
def fully_sharded():
    return verify(sharded, {"dp": 2}, "dp")


@gg.check
def hybrid():
    return verify(sharded, {"replicas": 2, "shards": 2}, "replicas", "shards")


@gg.check
def over_tensor_parallelism():
    def distributed(mesh):
        return sharded(mesh["dp"], parallelize_module(Transformer(), mesh["tp"], SEQUENCE_TOO))

    return verify(distributed, {"dp": 2, "tp": 2}, "dp")


@gg.check
def hybrid_over_tensor_parallelism():
    """Three axes: replicas of shards of tensor-parallel ranks."""

    def distributed(mesh):
        return sharded(mesh["replicas", "shards"], parallelize_module(Transformer(), mesh["tp"], SEQUENCE_TOO))

    return verify(distributed, {"replicas": 2, "shards": 2, "tp": 2}, "replicas", "shards")


# ---------------------------------------------------------------------- faults
@gg.check(expect="refuted")
def gradients_are_not_synchronised():
    def distributed(mesh):
        model = sharded(mesh)
        model.set_requires_gradient_sync(False)
        return model

    return verify(distributed, {"dp": 2}, "dp")


@gg.check(expect="refuted")
def gradients_are_summed():
    def distributed(mesh):
        model = sharded(mesh)
        model.mlp.set_gradient_divide_factor(1.0)
        return model

    return verify(distributed, {"dp": 2}, "dp")


@gg.check(expect="refuted")
def loss_is_divided_twice():
    """The loss is already divided by the tokens of all ranks, and fully_shard takes the mean of the gradients."""

    def divided(model, ids, labels):
        return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), reduction="sum") / (2 * BATCH * SEQUENCE)

    return verify(sharded, {"dp": 2}, "dp", loss_fn=divided)
