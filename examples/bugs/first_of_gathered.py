"""sgl-project/sglang #28216: of the list that a gather of unequal parts returns, only the first part is used.

With data-parallel attention each rank has its own requests, as many as it got. The head is split by words and needs the
hidden states of all of them. The equal gather returns a tensor, the unequal one a list: `[0]` is rank 0's requests.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from graphguard import Shard

REQUESTS, HIDDEN, WORDS, EPS = 5, 4, 6, 1e-6  # 3 requests on one rank, 2 on the other
BUG_LINE = "hidden = all_gatherv(hidden, sizes)[0]"


def normalised(x, weight):
    return F.rms_norm(x, (HIDDEN,), weight, EPS)


def sequential(x, weight, head):
    return normalised(x, weight) @ head


def all_gatherv(x, sizes):
    """What each rank holds: as many rows as it has."""
    parts = [x.new_empty(size, x.size(1)) for size in sizes]
    dist.all_gather(parts, x)
    return parts


def requests_by_rank():
    size = -(-REQUESTS // dist.get_world_size())
    return [min(size, REQUESTS - rank * size) for rank in range(dist.get_world_size())]


def dp_fixed(x, weight, head):
    sizes = requests_by_rank()
    hidden = normalised(x, weight)
    hidden = torch.cat(all_gatherv(hidden, sizes))
    return hidden @ head


def dp_buggy(x, weight, head):
    sizes = requests_by_rank()
    hidden = normalised(x, weight)
    hidden = all_gatherv(hidden, sizes)[0]
    return hidden @ head


ARGS = {
    "mesh": {"dp": 2},
    "inputs": {
        "x": gg.Input((REQUESTS, HIDDEN), Shard(0)),
        "weight": gg.Input((HIDDEN,)),
        "head": gg.Input((HIDDEN, WORDS), Shard(1)),
    },
}


@gg.check
def fixed():
    return gg.verify(sequential, dp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, dp_buggy, **ARGS)
