"""Sizes that do not divide by the ranks: 10 words on 4 ranks become 12 rows, of which the last 2 must never count.

Rows of padding are harmless as long as nothing sees them: no label names them, but a softmax over all columns does. So their
logits are minus infinity before anything is summed. Heads that do not divide are padded the same way, and there zeros in the
output projection are enough, because nothing mixes heads before it.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from graphguard import Replicate

TOKENS, HIDDEN, WORDS, RANKS = 5, 4, 10, 4
ROWS = -(-WORDS // RANKS)  # of each rank: 3


def loss(h, weight, target):
    weight.requires_grad_()
    loss = F.cross_entropy(h @ weight.t(), target)
    loss.backward()
    return {"loss": loss.detach(), "weight": weight.grad}


def padded(full, coord):
    """A rank's rows of the padded table."""
    return F.pad(full, (0, 0, 0, RANKS * ROWS - WORDS)).chunk(RANKS)[coord["tp"]]


def summed(x):
    dist.all_reduce(x)
    return x


def own_labels(logits, column, foreign):
    """The logits of the labels, each from the rank that has its word."""
    return summed(logits.gather(-1, column[:, None])[:, 0].masked_fill(foreign, 0.0))


class CrossEntropy(torch.autograd.Function):
    """Of logits whose columns are split."""

    @staticmethod
    def forward(ctx, logits, target, pick):
        largest = logits.amax(-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        weights = (logits - largest[:, None]).exp()
        total = summed(weights.sum(-1))
        column = target - dist.get_rank() * ROWS
        foreign = (column < 0) | (column >= ROWS)
        column = column.masked_fill(foreign, 0)
        chosen = pick(logits, column, foreign)
        ctx.save_for_backward(weights / total[:, None], column, foreign)
        return (total.log() + largest - chosen).mean()

    @staticmethod
    def backward(ctx, grad):
        softmax, column, foreign = ctx.saved_tensors
        own = (~foreign).to(softmax.dtype)[:, None]
        return softmax.scatter_add(-1, column[:, None], -own) * grad / softmax.size(0), None, None


def words_here():
    return min(ROWS, max(0, WORDS - dist.get_rank() * ROWS))


def head(logits_of, entropy=CrossEntropy, pick=own_labels):
    def program(h, weight, target):
        weight.requires_grad_()
        loss = entropy.apply(logits_of(h, weight), target, pick)
        loss.backward()
        return {"loss": loss.detach(), "weight": weight.grad}

    return program


def without_padding(h, weight):
    return (h @ weight.t()).masked_fill(torch.arange(ROWS) >= words_here(), float("-inf"))


def as_zeros(h, weight):
    """A row of zeros gives a logit of 0, and exp(0) is 1."""
    # fault: padding_counts_in_the_softmax
    return h @ weight.t()


def on_every_rank(h, weight):
    """As if each rank had padding, not the last one alone."""
    # fault: words_are_taken_for_padding
    return (h @ weight.t()).masked_fill(torch.arange(ROWS) >= WORDS // RANKS, float("-inf"))


def as_zero_logits(h, weight):
    """What is hidden must not count, and a logit of 0 does."""
    # fault: padding_is_hidden_by_zeros
    return (h @ weight.t()).masked_fill(torch.arange(ROWS) >= words_here(), 0.0)


def all_labels(logits, column, foreign):
    """The labels whose words are on other ranks are taken for words here."""
    # fault: labels_of_other_ranks_count
    return summed(logits.gather(-1, column[:, None])[:, 0])


class ForeignLabels(CrossEntropy):
    @staticmethod
    def backward(ctx, grad):
        softmax, column, _ = ctx.saved_tensors
        one = torch.ones_like(softmax[:, :1])
        # fault: gradient_of_foreign_labels
        return softmax.scatter_add(-1, column[:, None], -one) * grad / softmax.size(0), None, None


def check(logits_of=without_padding, **parts):
    inputs = {
        "h": gg.Input((TOKENS, HIDDEN)),
        "weight": gg.Input((WORDS, HIDDEN), local=padded),
        "target": gg.Input((TOKENS,), dtype=torch.int64, low=0, high=WORDS),
    }
    outputs = {"loss": Replicate(), "weight": padded}
    return gg.verify(loss, head(logits_of, **parts), mesh={"tp": RANKS}, inputs=inputs, outputs=outputs)


@gg.check
def padded_vocabulary():
    return check()


@gg.check(expect="refuted")
def padding_counts_in_the_softmax():
    return check(as_zeros)


@gg.check(expect="refuted")
def words_are_taken_for_padding():
    return check(on_every_rank)


@gg.check(expect="refuted")
def padding_is_hidden_by_zeros():
    return check(as_zero_logits)


@gg.check(expect="refuted")
def labels_of_other_ranks_count():
    return check(pick=all_labels)


@gg.check(expect="refuted")
def gradient_of_foreign_labels():
    return check(entropy=ForeignLabels)
