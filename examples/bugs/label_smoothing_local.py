"""NVIDIA/Megatron-LM #737, #7464, #5522: label smoothing takes the mean over each rank's part of the vocabulary.

Smoothing spreads a part of each label over the whole vocabulary. The ranks take the mean over their own columns, and
the size of their own shard for that of the vocabulary: every rank has another loss.
"""

import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Shard

TOKENS, VOCAB, SMOOTHING = 5, 8, 0.125
BUG_LINE = "return smoothed(nll, log_probs.mean(-1), log_probs.size(-1))"


def smoothed(nll, mean_log_prob, vocab):
    share = SMOOTHING * vocab / (vocab - 1)
    return (1 - share) * nll - share * mean_log_prob


def sequential(logits, target):
    log_probs = logits.log_softmax(-1)
    nll = -log_probs.gather(-1, target[:, None])[:, 0]
    return smoothed(nll, log_probs.mean(-1), VOCAB)


def vocab_parallel(logits, target):
    """The loss of each token, and the log-probabilities of this rank's columns."""
    first, columns = dist.get_rank() * logits.size(-1), logits.size(-1)
    largest = logits.amax(-1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    total = (logits - largest[:, None]).exp().sum(-1)
    dist.all_reduce(total)
    log_probs = logits - largest[:, None] - total.log()[:, None]
    foreign = (target < first) | (target >= first + columns)
    column = (target - first).masked_fill(foreign, 0)
    nll = -log_probs.gather(-1, column[:, None])[:, 0].masked_fill(foreign, 0.0)
    dist.all_reduce(nll)
    return nll, log_probs


def tp_fixed(logits, target):
    nll, log_probs = vocab_parallel(logits, target)
    total = log_probs.sum(-1)
    dist.all_reduce(total)
    return smoothed(nll, total / VOCAB, VOCAB)


def tp_buggy(logits, target):
    nll, log_probs = vocab_parallel(logits, target)
    return smoothed(nll, log_probs.mean(-1), log_probs.size(-1))


ARGS = {
    "mesh": {"tp": 2},
    "inputs": {
        "logits": gg.Input((TOKENS, VOCAB), Shard(1)),
        "target": gg.Input((TOKENS,), dtype=torch.int64, low=0, high=VOCAB),
    },
}


@gg.check
def fixed():
    return gg.verify(sequential, tp_fixed, **ARGS)


@gg.check(expect="refuted")
def buggy():
    return gg.verify(sequential, tp_buggy, **ARGS)
