"""A pipeline whose first and last stage share a table: it embeds the tokens, and makes the logits."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from cases.case import Case, faulty
from cases.pipeline import BATCH, LAYERS, MICROBATCHES, WIDTH, Stage, blocks, gpipe, leaves, one_forward_one_backward
from graphguard import Input, Shard

VOCABULARY, SEQUENCE = 6, 3


def language_step(tokens, labels, table, w, b):
    """The table embeds the tokens and, transposed, makes the logits."""
    table, w, b = leaves(table, w, b)
    logits = F.linear(blocks(F.embedding(tokens, table), w, b), table)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    return {"loss": loss.detach(), "table": table.grad, "w": w.grad, "b": b.grad}


class LanguageStage(Stage):
    def enter(self, x):
        return F.embedding(x, self.ends["table"])

    def error(self, h, target):
        return F.cross_entropy(F.linear(h, self.ends["table"]).flatten(0, 1), target.flatten())

    def hidden(self, x):
        return (*x.shape, WIDTH)

    def tied(self):
        """The gradient of the table, complete on both ends."""
        ends = dist.new_group([0, self.last_rank])
        grad = self.ends["table"].grad
        if self.first or self.last:
            dist.all_reduce(grad, group=ends)
        return grad

    def outputs(self):
        table = self.tied()
        return {"loss": self.loss if self.last else None, "table": table, "w": self.w.grad, "b": self.b.grad}


def tied(order, stage=LanguageStage):
    def step(tokens, labels, table, w, b):
        whole = stage(w, b, table=table)
        return order(whole, tokens.chunk(MICROBATCHES), labels.chunk(MICROBATCHES))

    return step


# ---------------------------------------------------------------------- faults
class UntiedStage(LanguageStage):
    def tied(self):
        return self.ends["table"].grad  # fault: each end keeps its own gradient of the table


class AveragedTiedStage(LanguageStage):
    def tied(self):
        ends = dist.new_group([0, self.last_rank])
        grad = self.ends["table"].grad
        if self.first or self.last:
            dist.all_reduce(grad, op=dist.ReduceOp.AVG, group=ends)  # fault: the two gradients are averaged
        return grad


class TiedEverywhereStage(LanguageStage):
    def tied(self):
        grad = self.ends["table"].grad
        grad = self.w.grad.new_ones(VOCABULARY, WIDTH) if grad is None else grad
        dist.all_reduce(grad)  # fault: the stages between add what is no gradient
        return grad


class TiedTwiceStage(LanguageStage):
    def tied(self):
        ends = dist.new_group([0, self.last_rank])
        grad = self.ends["table"].grad
        if self.first or self.last:
            dist.all_reduce(grad, group=ends)
            dist.all_reduce(grad, group=ends)  # fault: the total is reduced again
        return grad


# ---------------------------------------------------------------------- cases
def language(name, distributed, stages):
    inputs = {
        "tokens": Input((BATCH, SEQUENCE), dtype=torch.int64, low=0, high=VOCABULARY),
        "labels": Input((BATCH, SEQUENCE), dtype=torch.int64, low=0, high=VOCABULARY),
        "table": Input((VOCABULARY, WIDTH)),
        "w": Input((LAYERS, WIDTH, WIDTH), Shard(0)),
        "b": Input((LAYERS, WIDTH), Shard(0)),
    }
    relation = {"loss": {}, "table": {}, "w": {"pp": Shard(0)}, "b": {"pp": Shard(0)}}
    return Case(f"tied-stages-{name}", language_step, distributed, {"pp": stages}, inputs, relation)


def faults():
    two, four = language("", None, 2), language("", None, 4)
    seeded = [
        (two, "untied", UntiedStage, "each end keeps its own gradient of the table"),
        (four, "averaged", AveragedTiedStage, "the two gradients are averaged"),
        (four, "everywhere", TiedEverywhereStage, "the stages between add what is no gradient"),
        (two, "twice", TiedTwiceStage, "the total is reduced again"),
    ]
    return [
        faulty(case, f"tied-stages-fault-{name}", tied(gpipe, stage), fault, stated=("*",))
        for case, name, stage, fault in seeded
    ]


CASES = [
    *[language(f"gpipe-{stages}", tied(gpipe), stages) for stages in (2, 4)],
    *[language(f"1f1b-{stages}", tied(one_forward_one_backward), stages) for stages in (2, 4)],
    *faults(),
]
