"""Embedding and cross entropy with the vocabulary split over the ranks, as Megatron writes them."""

from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F

from cases.case import Case, faulty
from cases.leaves import gradients, leaves
from cases.regions import copy_to, gather_from, gather_sequence, reduce_from, reduce_scatter_sequence
from graphguard import Input, Shard

TP = (2, 4, 8)
VOCAB, HIDDEN, BATCH, SEQUENCE = 24, 5, 2, 8


def first_row(vocab, group):
    """Where a rank's rows begin; the last ranks may have fewer than the others."""
    return dist.get_rank(group) * -(-vocab // dist.get_world_size(group))


# ---------------------------------------------------------------------- embedding
def embedding(tokens, weight, dy):
    p = leaves({"weight": weight})
    y = F.embedding(tokens, p["weight"])
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def embedded_by_index_put(tokens, weight, start):
    """Rows of this rank, zeros for the tokens of others; ids and rows are written in place."""
    foreign = (tokens < start) | (tokens >= start + weight.size(0))
    ids = tokens.clone() - start
    ids[foreign] = 0
    rows = weight[ids]
    rows[foreign, :] = 0.0
    return rows


def embedded_by_masked_fill(tokens, weight, start):
    foreign = (tokens < start) | (tokens >= start + weight.size(0))
    ids = (tokens - start).masked_fill(foreign, 0)
    return F.embedding(ids, weight).masked_fill(foreign.unsqueeze(-1), 0.0)


def embedded_by_product(tokens, weight, start):
    own = (tokens >= start) & (tokens < start + weight.size(0))
    return F.embedding(torch.where(own, tokens - start, 0), weight) * own.unsqueeze(-1)


def embedded_by_clamp(tokens, weight, start):
    own = (tokens >= start) & (tokens < start + weight.size(0))
    return F.embedding((tokens - start).clamp(0, weight.size(0) - 1), weight) * own.unsqueeze(-1)


def embedded_by_the_second_row(tokens, weight, start):
    """It does not matter which row a foreign token reads."""
    foreign = (tokens < start) | (tokens >= start + weight.size(0))
    ids = (tokens - start).masked_fill(foreign, 1)
    return F.embedding(ids, weight).masked_fill(foreign.unsqueeze(-1), 0.0)


def embedding_clamped_without_mask(tokens, weight, dy, mesh):
    group = mesh.get_group("tp")
    p = leaves({"weight": weight})
    start = first_row(VOCAB, group)
    rows = F.embedding((tokens - start).clamp(0, weight.size(0) - 1), p["weight"])  # fault: rows of clamped tokens stay
    y = reduce_from(rows, group)
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def embedding_tp_with(embedded, vocab=VOCAB):
    def embedding_tp(tokens, weight, dy, mesh):
        group = mesh.get_group("tp")
        p = leaves({"weight": weight})
        y = reduce_from(embedded(tokens, p["weight"], first_row(vocab, group)), group)
        return {"y": y.detach(), "grads": gradients(y, p, dy)}

    return embedding_tp


def embedding_sp(tokens, weight, dy, mesh):
    """The sum over the ranks leaves each with its part of the sequence."""
    group = mesh.get_group("tp")
    p = leaves({"weight": weight})
    rows = embedded_by_masked_fill(tokens, p["weight"], first_row(VOCAB, group)).transpose(0, 1)
    y = reduce_scatter_sequence(rows, group).transpose(0, 1)
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def embedding_without_zeros(tokens, weight, dy, mesh):
    group = mesh.get_group("tp")
    p = leaves({"weight": weight})
    start = first_row(VOCAB, group)
    foreign = (tokens < start) | (tokens >= start + weight.size(0))
    ids = (tokens - start).masked_fill(foreign, 0)
    y = reduce_from(F.embedding(ids, p["weight"]), group)  # fault: rows of foreign tokens are not zero
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def embedding_first_token_lost(tokens, weight, dy, mesh):
    group = mesh.get_group("tp")
    p = leaves({"weight": weight})
    start = first_row(VOCAB, group)
    foreign = (tokens <= start) | (tokens >= start + weight.size(0))
    rows = F.embedding((tokens - start).masked_fill(foreign, 0), p["weight"])
    rows = rows.masked_fill(foreign.unsqueeze(-1), 0.0)  # fault: the first row of each rank is lost
    y = reduce_from(rows, group)
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def embedding_wrong_offset(tokens, weight, dy, mesh):
    """Right where the vocabulary divides evenly."""
    group = mesh.get_group("tp")
    p = leaves({"weight": weight})
    start = dist.get_rank(group) * weight.size(0)
    foreign = (tokens < start) | (tokens >= start + weight.size(0))
    rows = F.embedding((tokens - start).masked_fill(foreign, 0), p["weight"])
    rows = rows.masked_fill(foreign.unsqueeze(-1), 0.0)  # fault: offset by this rank's size, not by that of the ranks before
    y = reduce_from(rows, group)
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def embedding_without_reduction(tokens, weight, dy, mesh):
    group = mesh.get_group("tp")
    p = leaves({"weight": weight})
    start = first_row(VOCAB, group)
    foreign = (tokens < start) | (tokens >= start + weight.size(0))
    rows = F.embedding((tokens - start).masked_fill(foreign, 0), p["weight"])
    y = rows.masked_fill(foreign.unsqueeze(-1), 0.0)  # fault: the rows are not summed
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def embedding_case(name, distributed, tp, vocab=VOCAB, split=None):
    dy = {} if split is None else {"tp": split}
    inputs = {
        "tokens": Input((BATCH, SEQUENCE), dtype=torch.int64, low=0, high=vocab),
        "weight": Input((vocab, HIDDEN), Shard(0)),
        "dy": Input((BATCH, SEQUENCE, HIDDEN), dy),
    }
    relation = {"y": dy, "grads.weight": {"tp": Shard(0)}}
    return Case(f"embedding-{name}-tp{tp}", embedding, distributed, {"tp": tp}, inputs, relation)


def embedding_cases():
    for tp in TP:
        yield embedding_case("index-put", embedding_tp_with(embedded_by_index_put), tp)
        yield embedding_case("masked-fill", embedding_tp_with(embedded_by_masked_fill, 8), tp, vocab=8)
        yield embedding_case("product", embedding_tp_with(embedded_by_product), tp)
        yield embedding_case("clamp", embedding_tp_with(embedded_by_clamp), tp)
    yield embedding_case("second-row", embedding_tp_with(embedded_by_the_second_row), 2)
    yield embedding_case("uneven", embedding_tp_with(embedded_by_masked_fill, 10), 4, vocab=10)


def embedding_faults():
    base = embedding_case("", embedding_tp_with(embedded_by_masked_fill), 4)
    yield faulty(base, "embedding-clamped", embedding_clamped_without_mask, "rows of clamped tokens stay")
    yield faulty(base, "embedding-without-zeros", embedding_without_zeros, "rows of foreign tokens are not zero")
    yield faulty(base, "embedding-first-token-lost", embedding_first_token_lost, "the first row of each rank is lost")
    yield faulty(
        base, "embedding-missing-reduction", embedding_without_reduction, "the rows are not summed", stated=("y",)
    )  # fmt: skip
    base = embedding_case("", embedding_wrong_offset, 4, vocab=10)
    yield faulty(
        base, "embedding-wrong-offset", embedding_wrong_offset,
        "offset by this rank's size, not by that of the ranks before",
    )  # fmt: skip


# ---------------------------------------------------------------------- cross entropy
def head(h, weight, target, smoothing=0.0):
    p = leaves({"h": h, "weight": weight})
    logits = F.linear(p["h"], p["weight"])
    losses = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none", label_smoothing=smoothing)
    loss = losses.mean()
    return {"losses": losses.detach().view_as(target), "loss": loss.detach(), "grads": gradients(loss, p)}


def smoothed_head(h, weight, target):
    return head(h, weight, target, SMOOTHING)


SMOOTHING = 0.125


class CrossEntropyInPlace(torch.autograd.Function):
    """Rows and columns are indexed, buffers are reused; the softmax is kept for the backward."""

    @staticmethod
    def forward(ctx, logits, target, start, group):
        largest = logits.max(-1)[0]
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        logits = logits - largest.unsqueeze(-1)
        foreign = (target < start) | (target >= start + logits.size(-1))
        column = target.clone() - start
        column[foreign] = 0
        flat, column = logits.view(-1, logits.size(-1)), column.view(-1)
        row = torch.arange(flat.size(0), device=flat.device)
        chosen = flat[row, column].clone().contiguous().view_as(target)
        chosen[foreign] = 0.0
        dist.all_reduce(chosen, group=group)
        weights = logits
        torch.exp(logits, out=weights)
        total = weights.sum(-1)
        dist.all_reduce(total, group=group)
        loss = torch.log(total) - chosen
        weights.div_(total.unsqueeze(-1))
        ctx.save_for_backward(weights, foreign, column)
        return loss

    @staticmethod
    def backward(ctx, grad):
        softmax, foreign, column = ctx.saved_tensors
        flat = softmax.clone().view(-1, softmax.size(-1))
        row = torch.arange(flat.size(0), device=flat.device)
        flat[row, column] -= 1.0 - foreign.view(-1).float()
        return flat.view_as(softmax).mul_(grad.unsqueeze(-1)), None, None, None


class CrossEntropy(torch.autograd.Function):
    """By gather and scatter, with label smoothing."""

    @staticmethod
    def forward(ctx, logits, target, start, group, smoothing=0.0, vocab=VOCAB):
        largest = logits.amax(-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        logits = logits - largest.unsqueeze(-1)
        foreign = (target < start) | (target >= start + logits.size(-1))
        column = (target - start).masked_fill(foreign, 0).unsqueeze(-1)
        chosen = logits.gather(-1, column).squeeze(-1).masked_fill(foreign, 0.0)
        sums = torch.stack((chosen, logits.exp().sum(-1), logits.sum(-1)))
        dist.all_reduce(sums, group=group)
        chosen, total, every = sums.unbind()
        ctx.save_for_backward(logits.exp() / total.unsqueeze(-1), foreign, column)
        ctx.smoothing, ctx.vocab = smoothing, vocab
        return total.log() - (1 - smoothing) * chosen - smoothing * every / vocab

    @staticmethod
    def backward(ctx, grad):
        softmax, foreign, column = ctx.saved_tensors
        own = (~foreign).to(softmax.dtype).unsqueeze(-1) * (1 - ctx.smoothing)
        grad_logits = (softmax - ctx.smoothing / ctx.vocab).scatter_add(-1, column, -own)
        return grad_logits * grad.unsqueeze(-1), None, None, None, None, None


def head_tp_with(cross_entropy, *options, vocab=VOCAB):
    def head_tp(h, weight, target, mesh):
        group = mesh.get_group("tp")
        p = leaves({"h": h, "weight": weight})
        logits = F.linear(copy_to(p["h"], group), p["weight"])
        losses = cross_entropy.apply(logits, target, first_row(vocab, group), group, *options)
        loss = losses.mean()
        return {"losses": losses.detach(), "loss": loss.detach(), "grads": gradients(loss, p)}

    return head_tp


def blocks(h, up, down, sum_up=lambda x: x, copied=lambda x: x):
    for _ in range(2):
        h = h + sum_up(torch.tanh(copied(h) @ up) @ down)
    return h


def deep_head(h, weight, target, up, down):
    """The gradient of the loss flows back through two blocks: its terms must not multiply on the way."""
    p = leaves({"h": h, "weight": weight, "up": up, "down": down})
    logits = F.linear(blocks(p["h"], p["up"], p["down"]), p["weight"])
    losses = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view_as(target)
    loss = losses.mean()
    return {"losses": losses.detach(), "loss": loss.detach(), "grads": gradients(loss, p)}


def deep_head_tp(h, weight, target, up, down, mesh):
    group = mesh.get_group("tp")
    p = leaves({"h": h, "weight": weight, "up": up, "down": down})
    h = blocks(p["h"], p["up"], p["down"], lambda x: reduce_from(x, group), lambda x: copy_to(x, group))
    logits = F.linear(copy_to(h, group), p["weight"])
    losses = CrossEntropyInPlace.apply(logits, target, first_row(VOCAB, group), group)
    loss = losses.mean()
    return {"losses": losses.detach(), "loss": loss.detach(), "grads": gradients(loss, p)}


def deep_head_case(tp):
    base = head_case("deep", deep_head, deep_head_tp, tp)
    inputs = {**base.inputs, "up": Input((HIDDEN, 8), Shard(1)), "down": Input((8, HIDDEN), Shard(0))}
    relation = {**base.relation, "grads.up": {"tp": Shard(1)}, "grads.down": {"tp": Shard(0)}}
    return replace(base, inputs=inputs, relation=relation)


def head_gathered(h, weight, target, mesh):
    """All logits on all ranks."""
    group = mesh.get_group("tp")
    p = leaves({"h": h, "weight": weight})
    logits = gather_from(F.linear(copy_to(p["h"], group), p["weight"]), group)
    losses = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view_as(target)
    loss = losses.mean()
    return {"losses": losses.detach(), "loss": loss.detach(), "grads": gradients(loss, p)}


class OwnMaximum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, start, group):
        logits = logits - logits.amax(-1, keepdim=True)
        foreign = (target < start) | (target >= start + logits.size(-1))
        column = (target - start).masked_fill(foreign, 0).unsqueeze(-1)
        chosen = logits.gather(-1, column).squeeze(-1).masked_fill(foreign, 0.0)
        total = logits.exp().sum(-1)
        dist.all_reduce(total, group=group)  # fault: every rank has shifted by its own maximum
        dist.all_reduce(chosen, group=group)
        ctx.save_for_backward(logits.exp() / total.unsqueeze(-1), foreign, column)
        return total.log() - chosen

    @staticmethod
    def backward(ctx, grad):
        softmax, foreign, column = ctx.saved_tensors
        own = (~foreign).to(softmax.dtype).unsqueeze(-1)
        return softmax.scatter_add(-1, column, -own) * grad.unsqueeze(-1), None, None, None


class OwnSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, start, group):
        foreign = (target < start) | (target >= start + logits.size(-1))
        column = (target - start).masked_fill(foreign, 0).unsqueeze(-1)
        chosen = logits.gather(-1, column).squeeze(-1).masked_fill(foreign, 0.0)
        dist.all_reduce(chosen, group=group)
        total = logits.exp().sum(-1)
        ctx.save_for_backward(logits.exp() / total.unsqueeze(-1), foreign, column)  # fault: the sum of this rank's columns
        return total.log() - chosen

    @staticmethod
    def backward(ctx, grad):
        softmax, foreign, column = ctx.saved_tensors
        own = (~foreign).to(softmax.dtype).unsqueeze(-1)
        return softmax.scatter_add(-1, column, -own) * grad.unsqueeze(-1), None, None, None


class UnmaskedBackward(CrossEntropyInPlace):
    @staticmethod
    def backward(ctx, grad):
        softmax, _, column = ctx.saved_tensors
        flat = softmax.clone().view(-1, softmax.size(-1))
        row = torch.arange(flat.size(0), device=flat.device)
        flat[row, column] -= 1.0  # fault: ranks without the target subtract it too
        return flat.view_as(softmax).mul_(grad.unsqueeze(-1)), None, None, None


class SmoothedOverOwnColumns(CrossEntropy):
    @staticmethod
    def forward(ctx, logits, target, start, group, smoothing):
        losses = CrossEntropy.forward(ctx, logits, target, start, group)
        total = logits.exp().sum(-1, keepdim=True)
        dist.all_reduce(total, group=group)
        ctx.smoothing = smoothing
        return (1 - smoothing) * losses - smoothing * (logits - total.log()).mean(-1)  # fault: the mean of this rank's columns


def head_case(name, sequential, distributed, tp, vocab=VOCAB):
    inputs = {
        "h": Input((SEQUENCE, BATCH, HIDDEN)),
        "weight": Input((vocab, HIDDEN), Shard(0)),
        "target": Input((SEQUENCE, BATCH), dtype=torch.int64, low=0, high=vocab),
    }
    relation = {"losses": {}, "loss": {}, "grads.h": {}, "grads.weight": {"tp": Shard(0)}}
    return Case(f"cross-entropy-{name}-tp{tp}", sequential, distributed, {"tp": tp}, inputs, relation)


def head_cases():
    for tp in TP:
        yield head_case("in-place", head, head_tp_with(CrossEntropyInPlace), tp)
        yield head_case("gather", head, head_tp_with(CrossEntropy, vocab=8), tp, vocab=8)
        yield head_case("smoothed", smoothed_head, head_tp_with(CrossEntropy, SMOOTHING), tp)
        yield head_case("gathered-logits", head, head_gathered, tp)
        yield deep_head_case(tp)
    yield head_case("uneven", head, head_tp_with(CrossEntropy, vocab=10), 4, vocab=10)


def head_faults():
    base = head_case("", head, head_gathered, 4)
    for name, function, text in (
        ("own-maximum", OwnMaximum, "every rank has shifted by its own maximum"),
        ("own-sum", OwnSum, "the sum of this rank's columns"),
        ("unmasked-backward", UnmaskedBackward, "ranks without the target subtract it too"),
    ):
        yield faulty(base, f"cross-entropy-{name}", head_tp_with(function), text)
    base = head_case("", smoothed_head, head_gathered, 2)
    own = head_tp_with(SmoothedOverOwnColumns, SMOOTHING)
    yield faulty(base, "cross-entropy-smoothed-over-own", own, "the mean of this rank's columns")


# ---------------------------------------------------------------------- one matrix for both
def tied(tokens, target, emb, w):
    p = leaves({"emb": emb, "w": w})
    h = torch.tanh(F.linear(F.embedding(tokens, p["emb"]), p["w"]))
    loss = F.cross_entropy(F.linear(h, p["emb"]).flatten(0, 1), target.flatten())
    return {"loss": loss.detach(), "grads": gradients(loss, p)}


def tied_tp(tokens, target, emb, w, mesh):
    group = mesh.get_group("tp")
    start = first_row(VOCAB, group)
    p = leaves({"emb": emb, "w": w})
    h = reduce_from(embedded_by_masked_fill(tokens, p["emb"], start), group)
    h = torch.tanh(F.linear(h, p["w"]))
    loss = CrossEntropyInPlace.apply(F.linear(copy_to(h, group), p["emb"]), target, start, group).mean()
    return {"loss": loss.detach(), "grads": gradients(loss, p)}


def tied_sp(tokens, target, emb, w, mesh):
    """Between embedding and head each rank has its part of the sequence."""
    group = mesh.get_group("tp")
    start = first_row(VOCAB, group)
    p = leaves({"emb": emb, "w": w})
    h = reduce_scatter_sequence(embedded_by_masked_fill(tokens, p["emb"], start), group)
    h = torch.tanh(F.linear(h, p["w"]))
    logits = F.linear(gather_sequence(h, group), p["emb"])
    loss = CrossEntropyInPlace.apply(logits, target, start, group).mean()
    grads = gradients(loss, p)
    dist.all_reduce(grads["w"], group=group)
    return {"loss": loss.detach(), "grads": grads}


def tied_in_one_direction(tokens, target, emb, w, mesh):
    group = mesh.get_group("tp")
    start = first_row(VOCAB, group)
    p = leaves({"emb": emb, "w": w})
    h = reduce_from(embedded_by_masked_fill(tokens, p["emb"], start), group)
    h = torch.tanh(F.linear(h, p["w"]))
    logits = F.linear(copy_to(h, group), p["emb"].detach())  # fault: the head's share of the gradient is dropped
    loss = CrossEntropyInPlace.apply(logits, target, start, group).mean()
    return {"loss": loss.detach(), "grads": gradients(loss, p)}


def tied_without_copy(tokens, target, emb, w, mesh):
    group = mesh.get_group("tp")
    start = first_row(VOCAB, group)
    p = leaves({"emb": emb, "w": w})
    h = reduce_from(embedded_by_masked_fill(tokens, p["emb"], start), group)
    h = torch.tanh(F.linear(h, p["w"]))
    logits = F.linear(h, p["emb"])  # fault: the gradient of h is of this rank's columns alone
    loss = CrossEntropyInPlace.apply(logits, target, start, group).mean()
    return {"loss": loss.detach(), "grads": gradients(loss, p)}


def tied_case(name, distributed, tp):
    """Tokens first by sequence; their range is left to be inferred."""
    inputs = {
        "tokens": Input((SEQUENCE, BATCH), dtype=torch.int64),
        "target": Input((SEQUENCE, BATCH), dtype=torch.int64, low=0, high=VOCAB),  # none is ignored
        "emb": Input((VOCAB, HIDDEN), Shard(0)),
        "w": Input((HIDDEN, HIDDEN)),
    }
    relation = {"loss": {}, "grads.emb": {"tp": Shard(0)}, "grads.w": {}}
    return Case(f"tied-{name}-tp{tp}", tied, distributed, {"tp": tp}, inputs, relation)


def tied_cases():
    for tp in TP:
        yield tied_case("tensor-parallel", tied_tp, tp)
        yield tied_case("sequence-parallel", tied_sp, tp)


def tied_faults():
    base = tied_case("", tied_tp, 2)
    yield faulty(base, "tied-in-one-direction", tied_in_one_direction, "the head's share of the gradient is dropped")
    yield faulty(base, "tied-without-copy", tied_without_copy, "the gradient of h is of this rank's columns alone")


CASES = [
    *embedding_cases(), *(embedding_case("sequence-parallel", embedding_sp, tp, split=Shard(1)) for tp in TP),
    *head_cases(), *tied_cases(), *embedding_faults(), *head_faults(), *tied_faults(),
]  # fmt: skip
