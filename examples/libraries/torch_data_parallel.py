"""torch's DistributedDataParallel around a transformer: the mean loss of the ranks, and every gradient."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch_tensor_parallel import BATCH, SEQUENCE, VOCABULARY, Transformer, loss

import graphguard as gg


def step_of(loss_fn=loss, synchronised=True):
    """`loss` is the mean over the ranks' own losses."""

    def step(model, ids, labels):
        quiet = dist.is_initialized() and not synchronised
        with model.no_sync() if quiet else nullcontext():
            return gg.train_step(loss_fn)(model, ids=ids, labels=labels)

    return step


def verify(step, left_out=()):
    def distributed(mesh):
        model = Transformer()
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(left_out))
        return DistributedDataParallel(model)

    tokens = gg.Input((2 * BATCH, SEQUENCE), gg.Shard(0), torch.int64, low=0, high=VOCABULARY)
    names = [f"grads.{name}" for name, _ in Transformer().named_parameters()]
    return gg.verify_model(
        sequential=Transformer,
        distributed=distributed,
        step=step,
        mesh={"dp": 2},
        inputs={"ids": tokens, "labels": tokens},
        outputs={"loss": gg.Partial("avg"), **dict.fromkeys(names, gg.Replicate())},
    )


@gg.check
def data_parallel():
    return verify(step_of())


@gg.check(expect="refuted")
def gradients_are_not_synchronised():
    return verify(step_of(synchronised=False))


def summed(model, ids, labels):
    return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), reduction="sum") / (2 * BATCH * SEQUENCE)


@gg.check(expect="refuted")
def loss_is_divided_twice():
    """The loss is already divided by the tokens of all ranks, and DDP takes the mean of the gradients."""
    return verify(step_of(summed))


@gg.check(expect="refuted")
def one_parameter_is_left_out():
    return verify(step_of(), left_out=["mlp.up.weight"])
