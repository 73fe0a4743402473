"""megatron-core: replicas of a tensor-parallel GPT, with its gradient buffers and finalize_model_grads.

The sequential program is the same model on one rank.
"""

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.tensor_parallel import layers
from megatron_gpt import SEQUENCE, VOCABULARY, alone, build, loss

import graphguard as gg

BATCH = 4


class Replicated(gg.train_step):
    """Each replica has the mean loss of its own part of the batch."""

    def __init__(self, loss_fn=loss, synchronised=True):
        super().__init__(loss_fn)
        self.synchronised = synchronised

    def __call__(self, model, **inputs):
        if not isinstance(model, DistributedDataParallel):
            return super().__call__(model, **inputs)
        loss = self.loss_fn(model, **inputs)
        loss.backward()
        if self.synchronised:
            finalize_model_grads([model])
        return {"loss": loss.detach(), "grads": {name: p.main_grad for name, p in model.module.named_parameters()}}


def verify(step, tp=2, **options):
    def distributed(mesh):
        model = build(tp, **options)
        return DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)

    def split(*shape, high=None, dtype=torch.int64):
        return gg.Input((BATCH, *shape), {"dp": gg.Shard(0)}, dtype, **({} if high is None else {"low": 0, "high": high}))

    return gg.verify_model(
        sequential=alone,
        distributed=distributed,
        step=step,
        mesh={"dp": 2, "tp": tp},
        inputs={
            "ids": split(SEQUENCE, high=VOCABULARY), "positions": split(SEQUENCE, high=SEQUENCE),
            "mask": split(1, SEQUENCE, SEQUENCE, dtype=torch.bool),
        },
        outputs={"loss": {"dp": gg.Partial("avg")}},
    )  # fmt: skip


@gg.check
def replicas():
    return verify(Replicated())


@gg.check
def replicas_with_sequence_parallelism():
    return verify(Replicated(), sequence_parallel=True)


# ---------------------------------------------------------------------- faults
@gg.check(expect="refuted")
def gradients_are_not_finalized():
    return verify(Replicated(synchronised=False))


@gg.check(expect="refuted")
def loss_is_divided_by_the_replicas():
    """The gradients are averaged already."""

    def divided(model, **inputs):
        mean = loss(model, **inputs)
        if isinstance(model, DistributedDataParallel):
            mean = mean / parallel_state.get_data_parallel_world_size()
        return mean

    return verify(Replicated(divided))


@gg.check(expect="refuted")
def row_parallel_without_a_reduction():
    def unreduced(model, **inputs):
        if isinstance(model, DistributedDataParallel):
            layers.reduce_from_tensor_model_parallel_region = lambda x, group=None: x
        return loss(model, **inputs)

    return verify(Replicated(unreduced))
