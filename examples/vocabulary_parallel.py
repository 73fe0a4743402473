"""The vocabulary split over the ranks: embedding and cross entropy, neither of which ever has all rows on one rank."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from graphguard import Replicate, Shard

TOKENS, HIDDEN, VOCAB = 6, 5, 16
IDS = gg.Input((TOKENS,), dtype=torch.int64, low=0, high=VOCAB)
ROWS = gg.Input((VOCAB, HIDDEN), Shard(0))


def own_rows(ids, rows):
    """Which of the ids are rows of other ranks, and the place of each id among this rank's rows."""
    first = dist.get_rank() * rows
    foreign = (ids < first) | (ids >= first + rows)
    return foreign, (ids - first).masked_fill(foreign, 0)


def tp_embedding(ids, weight):
    foreign, row = own_rows(ids, weight.size(0))
    y = F.embedding(row, weight).masked_fill(foreign[:, None], 0.0)
    dist.all_reduce(y)
    return y


class CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target):
        largest = logits.amax(-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        logits = logits - largest[:, None]
        foreign, column = own_rows(target, logits.size(-1))
        sums = torch.stack([logits.exp().sum(-1), logits.gather(-1, column[:, None])[:, 0].masked_fill(foreign, 0.0)])
        dist.all_reduce(sums)
        total, chosen = sums
        ctx.save_for_backward(logits.exp() / total[:, None], foreign, column)
        return total.log() - chosen

    @staticmethod
    def backward(ctx, grad):
        softmax, foreign, column = ctx.saved_tensors
        own = (~foreign).to(softmax.dtype)[:, None]
        return softmax.scatter_add(-1, column[:, None], -own) * grad[:, None], None


def head(h, weight, target):
    loss = F.cross_entropy(F.linear(h, weight.requires_grad_()), target)
    loss.backward()
    return {"loss": loss.detach(), "weight": weight.grad}


def tp_head(h, weight, target):
    loss = CrossEntropy.apply(F.linear(h, weight.requires_grad_()), target).mean()
    loss.backward()
    return {"loss": loss.detach(), "weight": weight.grad}


@gg.check
def embedding():
    inputs = {"ids": IDS, "weight": ROWS}
    return gg.verify(lambda ids, weight: F.embedding(ids, weight), tp_embedding, mesh={"tp": 4}, inputs=inputs)


@gg.check
def cross_entropy():
    inputs = {"h": gg.Input((TOKENS, HIDDEN)), "weight": ROWS, "target": IDS}
    expected = {"loss": Replicate(), "weight": Shard(0)}
    return gg.verify(head, tp_head, mesh={"tp": 4}, inputs=inputs, outputs=expected)
