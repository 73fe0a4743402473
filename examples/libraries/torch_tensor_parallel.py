"""torch.distributed.tensor.parallel on a transformer: a train step with every gradient, for each ParallelStyle."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import graphguard as gg

BATCH, SEQUENCE, HIDDEN, HEADS, VOCABULARY = 2, 8, 16, 4, 32


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (w(x).unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2) for w in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN),
        )  # fmt: skip

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.norm1, self.norm2, self.norm3 = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attention, self.mlp = Attention(), FeedForward()
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.embedding(ids)
        x = x + self.attention(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return self.head(self.norm3(x))


COLUMNS = {name: ColwiseParallel() for name in ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")}
TENSOR = COLUMNS | {
    "embedding": RowwiseParallel(input_layouts=Replicate()),
    "attention.o": RowwiseParallel(),
    "mlp.down": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}
WHOLE = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
SEQUENCE_TOO = COLUMNS | {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm1": SequenceParallel(), "norm2": SequenceParallel(), "norm3": SequenceParallel(),
    "attention": WHOLE, "attention.o": RowwiseParallel(output_layouts=Shard(1)),
    "mlp": WHOLE, "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}  # fmt: skip
PREPARED = TENSOR | {  # the partial sums leave the module as they are, and are added at its border
    "mlp.down": RowwiseParallel(output_layouts=Partial()),
    "mlp": PrepareModuleOutput(output_layouts=(Partial(),), desired_output_layouts=(Replicate(),)),
}
BORDERED = SEQUENCE_TOO | {  # both borders of a module in one style
    "mlp.down": RowwiseParallel(output_layouts=Partial(), use_local_output=False),
    "mlp": PrepareModuleInputOutput(
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), output_layouts=(Partial(),),
        desired_output_layouts=(Shard(1),),
    ),
}  # fmt: skip
SPLIT_LOSS = SEQUENCE_TOO | {
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
}


def loss(model, ids, labels):
    return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())


def split_loss_step(model, ids, labels):
    with loss_parallel():
        return gg.train_step(loss)(model, ids=ids, labels=labels)


def verify(plan, tp=2, step=None):
    tokens = gg.Input((BATCH, SEQUENCE), dtype=torch.int64, low=0, high=VOCABULARY)
    return gg.verify_model(
        sequential=Transformer,
        distributed=lambda mesh: parallelize_module(Transformer(), mesh["tp"], plan),
        step=step or gg.train_step(loss),
        mesh={"tp": tp},
        inputs={"ids": tokens, "labels": tokens},
    )


@gg.check
def tensor_parallel():
    return verify(TENSOR)


@gg.check
def tensor_and_sequence_parallel():
    return verify(SEQUENCE_TOO)


@gg.check
def sums_at_the_border_of_a_module():
    return verify(PREPARED)


@gg.check
def both_borders_of_a_module():
    return verify(BORDERED)


@gg.check
def with_loss_parallel():
    return verify(SPLIT_LOSS, step=split_loss_step)


def clipped_step(model, ids, labels):
    outputs = gg.train_step(loss)(model, ids=ids, labels=labels)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return {"norm": norm.full_tensor() if isinstance(norm, DTensor) else norm, **outputs}


@gg.check
def with_clipped_gradients():
    return verify(SEQUENCE_TOO, step=clipped_step)


# ---------------------------------------------------------------------- faults in a copy of the plan
@gg.check(expect="refuted")
def row_parallel_without_a_reduction():
    return verify(TENSOR | {"mlp.down": RowwiseParallel(output_layouts=Partial())})


@gg.check(expect="refuted")
def norm_that_is_not_in_the_plan():
    """Each rank normalises its part of the sequence with its own copy of the weight: its gradient is a part, too."""
    return verify(SEQUENCE_TOO | {"norm2": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Shard(1),),
                                                              use_local_output=True)})  # fmt: skip


@gg.check(expect="refuted")
def loss_is_divided_by_the_ranks():
    """All ranks have all tokens."""

    def divided(model, ids, labels):
        return loss(model, ids, labels) / (dist.get_world_size() if dist.is_initialized() else 1)

    return verify(TENSOR, step=gg.train_step(divided))
