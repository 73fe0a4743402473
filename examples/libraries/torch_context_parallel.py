"""torch's context_parallel: a ring of attention over the parts of a sequence; the mean loss of the ranks, and every gradient.

By default it deals each rank a part from the front of the sequence and one from the back, so that all have as much to do.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel._attention import _cp_options, set_rotate_method
from torch_tensor_parallel import BATCH, SEQUENCE, VOCABULARY, Transformer, loss

import graphguard as gg


def step_of(method="allgather", loss_fn=loss, synchronised=True, balanced=True):
    """Each rank has the mean loss of its own tokens; the mean of the gradients is taken by hand."""

    def step(model, ids, labels):
        if not dist.is_initialized():
            return gg.train_step(loss)(model, ids=ids, labels=labels)
        set_rotate_method(method)
        _cp_options.enable_load_balance = balanced
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
        with context_parallel(mesh, buffers=[ids, labels], buffer_seq_dims=[1, 1], no_restore_buffers={ids, labels}):
            outputs = gg.train_step(loss_fn)(model, ids=ids, labels=labels)
        for gradient in outputs["grads"].values() if synchronised else ():
            dist.all_reduce(gradient, op=dist.ReduceOp.AVG)
        return outputs

    return step


def verify(step, ranks=2, sequence=SEQUENCE):
    tokens = gg.Input((BATCH, sequence), dtype=torch.int64, low=0, high=VOCABULARY)
    names = [f"grads.{name}" for name, _ in Transformer().named_parameters()]
    return gg.verify_model(
        sequential=Transformer,
        distributed=lambda mesh: Transformer(),
        step=step,
        mesh={"cp": ranks},
        inputs={"ids": tokens, "labels": tokens},
        outputs={"loss": gg.Partial("avg"), **dict.fromkeys(names, gg.Replicate())},
    )


@gg.check
def gathered_keys():
    return verify(step_of())


@gg.check
def ring():
    return verify(step_of("alltoall"))


@gg.check
def ring_on_four_ranks():
    return verify(step_of("alltoall"), ranks=4, sequence=4 * 4)


@gg.check
def ring_of_parts_one_after_another():
    """torch has no public option for these."""
    return verify(step_of("alltoall", balanced=False), ranks=4)


# ---------------------------------------------------------------------- faults
@gg.check(expect="refuted")
def gradients_are_not_synchronised():
    return verify(step_of(synchronised=False))


@gg.check(expect="refuted")
def loss_is_divided_by_all_tokens():
    """The mean over the ranks divides by them once more."""

    def divided(model, ids, labels):
        return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), reduction="sum") / (BATCH * SEQUENCE)

    return verify(step_of(loss_fn=divided))


@gg.check(expect="refuted")
def labels_are_not_dealt():
    """Each rank takes the labels of its tokens as if the sequence had been cut in parts one after another."""

    def step(model, ids, labels):
        if not dist.is_initialized():
            return gg.train_step(loss)(model, ids=ids, labels=labels)
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
        mine = labels.chunk(dist.get_world_size(), 1)[dist.get_rank()]
        with context_parallel(mesh, buffers=[ids], buffer_seq_dims=[1], no_restore_buffers={ids}):
            outputs = gg.train_step(loss)(model, ids=ids, labels=mine)
        for gradient in outputs["grads"].values():
            dist.all_reduce(gradient, op=dist.ReduceOp.AVG)
        return outputs

    return verify(step)
