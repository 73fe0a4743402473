"""megatron-core 0.16.1: the sum over tp is lost where the tensor is not contiguous.

`_reduce` in tensor_parallel/mappings.py sums `input_.contiguous()` and returns `input_`. They are one tensor only if it is
contiguous; else a copy is summed and dropped. It is the backward of copy_to_tensor_model_parallel_region and the forward of
reduce_from_tensor_model_parallel_region. Here the gradient is a part of a wider one.

In training: a layer that uses these functions, and whose gradient is cut or transposed on its way, trains with its own
rank's part of the gradient, without an error. GraphGuard refuted our repair of megatron_mla_shared_key.py for this reason.
The same mistake was reported for another library as NovaSky-AI/SkyRL #1886.
"""

import real_ranks
import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, mappings

import graphguard as gg


def gradient(x, y, weight, copied=lambda y: y):
    """Of features that are joined to others before a projection, which is split by columns."""
    y.requires_grad_()
    loss = (torch.cat([x, copied(y)], dim=-1) @ weight).square().sum()
    return {"grad": torch.autograd.grad(loss, y)[0]}


def on_ranks(x, y, weight, mesh):
    return gradient(x, y, weight, lambda y: copy_to_tensor_model_parallel_region(y, group=mesh.get_group("tp")))


def on_repaired_ranks(x, y, weight, mesh):
    reduce = mappings._reduce
    mappings._reduce = lambda tensor, group: reduce(tensor.contiguous(), group)
    return on_ranks(x, y, weight, mesh)


def case(distributed=on_ranks):
    return {
        "sequential": gradient,
        "distributed": distributed,
        "mesh": {"tp": 2},
        "inputs": {"x": gg.Input((3, 4)), "y": gg.Input((3, 4)), "weight": gg.Input((8, 8), gg.Shard(1))},
        "outputs": {"grad": gg.Replicate()},
    }


@gg.check(expect="refuted")
def shipped():
    return gg.verify(**case())


@gg.check
def repaired():
    return gg.verify(**case(on_repaired_ranks))


if __name__ == "__main__":
    real_ranks.show(**case())
