"""huggingface/transformers #36607, #48570, NVIDIA-BioNeMo/bionemo-recipes #1449: labels are shifted after the split.

Token i predicts token i + 1. A rank that shifts the labels of its own part has none for its last token, whose label is
the first one of the next rank: one prediction per boundary is lost.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from graphguard import Shard

SEQUENCE, HIDDEN, VOCAB, IGNORED = 8, 4, 5, -100
BUG_LINE = 'loss = F.cross_entropy(logits[:-1], labels[1:], reduction="sum")'


def sequential(h, head, labels):
    logits = h @ head
    return F.cross_entropy(logits[:-1], labels[1:])


def cp_fixed(h, head, labels):
    """All ranks' labels are gathered; this rank's are those one further on, where the sequence has one."""
    parts = [torch.empty_like(labels) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, labels)
    first = dist.get_rank() * labels.size(0) + 1
    labels = torch.cat(parts)[first : first + labels.size(0)]
    logits = (h @ head)[: labels.size(0)]
    loss = F.cross_entropy(logits, labels, reduction="sum")
    dist.all_reduce(loss)
    return loss / (SEQUENCE - 1)


def cp_ignoring(h, head, labels):
    """The labels were shifted before the split; cross_entropy ignores the last one."""
    loss = F.cross_entropy(h @ head, labels, reduction="sum", ignore_index=IGNORED)
    dist.all_reduce(loss)
    return loss / (SEQUENCE - 1)


def cp_buggy(h, head, labels):
    logits = h @ head
    loss = F.cross_entropy(logits[:-1], labels[1:], reduction="sum")
    dist.all_reduce(loss)
    return loss / (SEQUENCE - dist.get_world_size())


def verify(program, **labels):
    h, head = gg.Input((SEQUENCE, HIDDEN), Shard(0)), gg.Input((HIDDEN, VOCAB))
    inputs = {"h": h, "head": head, "labels": gg.Input((SEQUENCE,), dtype=torch.int64, low=0, high=VOCAB, **labels)}
    return gg.verify(sequential, program, mesh={"cp": 2}, inputs=inputs)


@gg.check
def fixed():
    return verify(cp_fixed, placement=Shard(0))


@gg.check
def by_ignoring():
    return verify(cp_ignoring, local=lambda labels, coord: F.pad(labels[1:], (0, 1), value=IGNORED).chunk(2)[coord["cp"]])


@gg.check(expect="refuted")
def buggy():
    return verify(cp_buggy, placement=Shard(0))
