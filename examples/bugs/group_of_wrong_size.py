"""deepspeedai/DeepSpeed #7551: the number of experts is passed where the size of the expert-parallel group is asked for.

Groups are made from a size: so many ranks in a row share a set of experts. With as many experts as ranks all ranks become
one group, and the sum over it mixes the tokens of what should be two groups.
"""

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Shard

TOKENS, HIDDEN, EXPERTS = 4, 3, 4
BUG_LINE = "dist.all_reduce(y, group=expert_group(EXPERTS))"


def expert_group(size):
    """The group of this rank, of those that many ranks in a row make."""
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, dist.get_world_size(), size)]
    return groups[dist.get_rank() // size]


def sequential(x, router, experts):
    probs = (x @ router).softmax(-1)
    return torch.einsum("te,th,ehk->tk", probs, x, experts)


def own_experts(x, router, experts, mesh):
    probs = (x @ router).softmax(-1).chunk(mesh["ep"].size(), dim=-1)[mesh.get_local_rank("ep")]
    return torch.einsum("te,th,ehk->tk", probs, x, experts)


def ep_fixed(x, router, experts, mesh):
    y = own_experts(x, router, experts, mesh)
    dist.all_reduce(y, group=expert_group(mesh["ep"].size()))
    return y


def ep_buggy(x, router, experts, mesh):
    y = own_experts(x, router, experts, mesh)
    dist.all_reduce(y, group=expert_group(EXPERTS))
    return y


INPUTS = {
    "x": gg.Input((TOKENS, HIDDEN), {"dp": Shard(0)}),
    "router": gg.Input((HIDDEN, EXPERTS)),
    "experts": gg.Input((EXPERTS, HIDDEN, HIDDEN), {"ep": Shard(0)}),
}


@gg.check
def fixed():
    return gg.verify(sequential, ep_fixed, mesh={"dp": 2, "ep": 2}, inputs=INPUTS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, ep_buggy, mesh={"dp": 2, "ep": 2}, inputs=INPUTS)
