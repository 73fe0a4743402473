"""megatron-core 0.16.1: under context parallelism a masked loss is divided by the tokens of one rank.

A loss function returns the sum over its tokens and their number, as pretrain_gpt.py does. The schedule divides by this
number, which is that of the rank's part of the sequence, and the gradients are averaged over the ranks: a mean of means. It
is the mean over the sequence only if every rank has as many tokens that are kept.

In training: with cp > 1 and without calculate_per_token_loss, tokens weigh more where the rank's part of the sequence has
more padding or prompt that is masked, without an error. Reported in NVIDIA/Megatron-LM #7452.
"""

import real_ranks
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from small_megatron import BATCH, HIDDEN, SEQUENCE, Scheduled, Whole, alone, build

import graphguard as gg


class Model(Whole):
    def __init__(self, config):
        super().__init__(config)
        self.linear = torch.nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x, kept):
        return self.linear(x).square().sum(-1)


def loss(losses, x, kept):
    return (losses * kept).sum(), kept.sum().int(), {}


def loss_of_all_ranks(losses, x, kept):
    total, tokens, log = loss(losses, x, kept)
    group = parallel_state.get_context_parallel_group()
    dist.all_reduce(tokens, group=group)
    return total * group.size(), tokens, log


def case(loss_fn=loss):
    return {
        "sequential": lambda: alone(Model),
        "distributed": lambda mesh: build(Model, cp=2),
        "step": Scheduled(loss_fn),
        "mesh": {"cp": 2},
        "inputs": {
            "x": gg.Input((SEQUENCE, BATCH, HIDDEN), gg.Shard(0)),
            "kept": gg.Input((SEQUENCE, BATCH), gg.Shard(0), torch.bool),
        },
    }


@gg.check(expect="refuted")
def shipped():
    return gg.verify_model(**case())


@gg.check
def repaired():
    return gg.verify_model(**case(loss_of_all_ranks))


if __name__ == "__main__":
    real_ranks.show(**case())
