"""Words, heads and widths that do not divide by the ranks: weights are padded to equal shares."""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F

from cases.case import Case, faulty
from cases.leaves import gradients, leaves
from cases.regions import copy_to, reduce_from
from graphguard import Input, Shard

HIDDEN, HEAD, SEQUENCE = 5, 2, 3


def share(size, ranks):
    return -(-size // ranks)


def padded_share(full, rank, ranks, dim=0):
    """A rank's rows of the padded weight."""
    each = share(full.size(dim), ranks)
    pad = [0, 0] * full.dim()
    pad[2 * (full.dim() - 1 - dim) + 1] = each * ranks - full.size(dim)
    return F.pad(full, pad).narrow(dim, rank * each, each)


def real_rows(size):
    """How many of a rank's rows are in the weight, and not behind its end."""
    each = share(size, dist.get_world_size())
    return min(max(size - dist.get_rank() * each, 0), each)


def cut(grads, sizes, dims=None):
    """Gradients without those of padding."""
    for name, size in sizes.items():
        grads[name] = grads[name].narrow((dims or {}).get(name, 0), 0, real_rows(size))
    return grads


# ---------------------------------------------------------------------- words
def tied(tokens, target, table):
    """The embedding and the head have one weight."""
    p = leaves({"table": table})
    h = torch.tanh(F.embedding(tokens, p["table"]))
    loss = F.cross_entropy(F.linear(h, p["table"]), target)
    return {"loss": loss.detach(), "grads": gradients(loss, p)}


def embedded(tokens, rows):
    first = dist.get_rank() * rows.size(0)
    foreign = (tokens < first) | (tokens >= first + rows.size(0))
    found = F.embedding((tokens - first).masked_fill(foreign, 0), rows)
    return reduce_from(found.masked_fill(foreign.unsqueeze(-1), 0.0), None)


class SplitCrossEntropy(torch.autograd.Function):
    """Of logits whose words are split, by largest, sum and target, each over the ranks; `hidden` words have no share."""

    @staticmethod
    def forward(ctx, logits, target, hidden, shifts):
        shown = logits.masked_fill(hidden, float("-inf"))
        largest = shown.amax(-1) if shifts else torch.zeros(logits.size(0))
        if shifts:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        powers = (shown - largest.unsqueeze(-1)).exp()
        total = powers.sum(-1)
        dist.all_reduce(total)
        first = dist.get_rank() * logits.size(-1)
        foreign = (target < first) | (target >= first + logits.size(-1))
        local = (target - first).masked_fill(foreign, 0)
        wanted = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(foreign, 0.0)
        dist.all_reduce(wanted)
        ctx.save_for_backward(powers / total.unsqueeze(-1), local, foreign)
        return (total.log() + largest - wanted).mean()

    @staticmethod
    def backward(ctx, grad):
        softmax, local, foreign = ctx.saved_tensors
        softmax = softmax.clone()
        softmax[torch.arange(softmax.size(0)), local] -= (~foreign).to(softmax.dtype)
        return grad * softmax / softmax.size(0), None, None, None


def tied_padded_with(hides, words, early=False, shifts=True):
    """`early`: the logits themselves are hidden, and not only their powers."""

    def program(tokens, target, table):
        p = leaves({"table": table})
        h = torch.tanh(embedded(tokens, p["table"]))
        logits = F.linear(copy_to(h, None), p["table"])
        hidden = hides(dist.get_rank() * logits.size(-1) + torch.arange(logits.size(-1)), logits.size(-1), words)
        logits = logits.masked_fill(hidden, float("-inf")) if early else logits
        loss = SplitCrossEntropy.apply(logits, target, hidden, shifts)
        return {"loss": loss.detach(), "grads": cut(gradients(loss, p), {"table": words})}

    return program


def behind_the_end(places, each, words):
    return places >= words


def nothing(places, each, words):
    return places < 0  # fault: padding has logits of 0, which count in the sum


def from_local_end(places, each, words):
    return torch.arange(each) >= words - each  # fault: counted from each rank's first word


def last_word(places, each, words):
    return places >= words - 1  # fault: the last word is hidden too


def words_case(name, hides, tp, words, **options):
    inputs = {
        "tokens": Input((4,), dtype=torch.int64, low=0, high=words),
        "target": Input((4,), dtype=torch.int64, low=0, high=words),
        "table": Input((words, HIDDEN)),
    }

    def mine(full, coord):
        return full | {"table": padded_share(full["table"], coord["tp"], tp)}

    relation = {"loss": {}, "grads.table": {"tp": Shard(0)}}
    program = tied_padded_with(hides, words, **options)
    return Case(f"padding-{name}-{words}-on-{tp}", tied, program, {"tp": tp}, inputs, relation, local_inputs=mine)


# ---------------------------------------------------------------------- heads
def attention(p, x):
    """Weights by head: [head, row, hidden], and [head, hidden, row] for the last."""
    q, k, v = (torch.einsum("sh,nrh->nsr", x, p[name]) for name in ("wq", "wk", "wv"))
    weights = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(HEAD), -1)
    return torch.einsum("nsr,nhr->sh", weights @ v, p["wo"])


def whole_attention(x, dy, **params):
    p = leaves({"x": x, **params})
    y = attention(p, p["x"])
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def padded_attention(heads):
    def program(x, dy, **params):
        p = leaves({"x": x, **params})
        y = reduce_from(attention(p, copy_to(p["x"], None)), None)
        return {"y": y.detach(), "grads": cut(gradients(y, p, dy), dict.fromkeys(("wq", "wk", "wv", "wo"), heads))}

    return program


def averaged_over_padding(heads):
    """The reference is a mean over heads."""

    def program(x, dy, **params):
        p = leaves({"x": x, **params})
        count = p["wq"].size(0) * dist.get_world_size()
        y = reduce_from(attention(p, copy_to(p["x"], None)) / count, None)  # fault: heads of padding are counted
        return {"y": y.detach(), "grads": cut(gradients(y, p, dy), dict.fromkeys(("wq", "wk", "wv", "wo"), heads))}

    return program


def averaged_attention(x, dy, **params):
    p = leaves({"x": x, **params})
    y = attention(p, p["x"]) / p["wq"].size(0)
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def padded_with_copies(heads):
    def program(x, dy, **params):
        p = leaves({"x": x, **params})
        y = attention(p, copy_to(p["x"], None))  # fault: heads of padding are copies of real ones
        y = reduce_from(y, None)
        return {"y": y.detach(), "grads": cut(gradients(y, p, dy), dict.fromkeys(("wq", "wk", "wv", "wo"), heads))}

    return program


def heads_case(name, sequential, distributed, tp, heads, copies=False):
    inputs = {"x": Input((SEQUENCE, HIDDEN)), "dy": Input((SEQUENCE, HIDDEN)), "wo": Input((heads, HIDDEN, HEAD))}
    inputs |= dict.fromkeys(("wq", "wk", "wv"), Input((heads, HEAD, HIDDEN)))

    def mine(full, coord):
        if copies:
            each = share(heads, tp)
            own = [min(coord["tp"] * each + n, heads - 1) for n in range(each)]
            return full | {key: torch.stack([full[key][n] for n in own]) for key in ("wq", "wk", "wv", "wo")}
        return full | {key: padded_share(full[key], coord["tp"], tp) for key in ("wq", "wk", "wv", "wo")}

    relation = {"y": {}, "grads.x": {}} | {f"grads.{key}": {"tp": Shard(0)} for key in ("wq", "wk", "wv", "wo")}
    program = distributed(heads)
    return Case(f"padding-{name}-{heads}-on-{tp}", sequential, program, {"tp": tp}, inputs, relation, local_inputs=mine)


# ---------------------------------------------------------------------- widths
def gated(x, dy, gate, up, down):
    p = leaves({"x": x, "gate": gate, "up": up, "down": down})
    y = F.linear(F.silu(F.linear(p["x"], p["gate"])) * F.linear(p["x"], p["up"]), p["down"])
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def gated_padded(width):
    def program(x, dy, gate, up, down):
        p = leaves({"x": x, "gate": gate, "up": up, "down": down})
        h = copy_to(p["x"], None)
        y = reduce_from(F.linear(F.silu(F.linear(h, p["gate"])) * F.linear(h, p["up"]), p["down"]), None)
        grads = cut(gradients(y, p, dy), {"gate": width, "up": width, "down": width}, {"down": 1})
        return {"y": y.detach(), "grads": grads}

    return program


def exponential(x, dy, up, down):
    """An activation that is not 0 at 0."""
    p = leaves({"x": x, "up": up, "down": down})
    h = F.linear(p["x"], p["up"]).exp()
    y = F.linear(h / h.sum(-1, keepdim=True), p["down"])
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


class SumOfAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


def exponential_padded(width):
    """The padding is taken out of the sum."""

    def program(x, dy, up, down):
        p = leaves({"x": x, "up": up, "down": down})
        h = F.linear(copy_to(p["x"], None), p["up"]).exp()
        h = h * (torch.arange(h.size(-1)) < real_rows(width))
        y = reduce_from(F.linear(h / SumOfAll.apply(h.sum(-1, keepdim=True)), p["down"]), None)
        return {"y": y.detach(), "grads": cut(gradients(y, p, dy), {"up": width, "down": width}, {"down": 1})}

    return program


def padding_in_sum(width):
    def program(x, dy, up, down):
        p = leaves({"x": x, "up": up, "down": down})
        h = F.linear(copy_to(p["x"], None), p["up"]).exp()
        total = SumOfAll.apply(h.sum(-1, keepdim=True))  # fault: exp(0) of the padding is in the sum
        y = reduce_from(F.linear(h / total, p["down"]), None)
        return {"y": y.detach(), "grads": cut(gradients(y, p, dy), {"up": width, "down": width}, {"down": 1})}

    return program


def width_case(name, sequential, distributed, tp, width, names):
    inputs = {"x": Input((SEQUENCE, HIDDEN)), "dy": Input((SEQUENCE, HIDDEN)), "down": Input((HIDDEN, width))}
    inputs |= {key: Input((width, HIDDEN)) for key in names}

    def mine(full, coord):
        rows = {key: padded_share(full[key], coord["tp"], tp) for key in names}
        return full | rows | {"down": padded_share(full["down"], coord["tp"], tp, dim=1)}

    relation = {"y": {}, "grads.x": {}, "grads.down": {"tp": Shard(1)}} | {f"grads.{key}": {"tp": Shard(0)} for key in names}
    program = distributed(width)
    return Case(f"padding-{name}-{width}-on-{tp}", sequential, program, {"tp": tp}, inputs, relation, local_inputs=mine)


# ---------------------------------------------------------------------- cases
def correct():
    for tp, size in ((2, 5), (4, 10), (4, 6)):
        yield words_case("words", behind_the_end, tp, size)
        yield words_case("words-early", behind_the_end, tp, size, early=True)
        yield words_case("words-unshifted", behind_the_end, tp, size, shifts=False)
        yield heads_case("heads", whole_attention, padded_attention, tp, size)
        yield width_case("width", gated, gated_padded, tp, size, ("gate", "up"))
        yield width_case("width-exponential", exponential, exponential_padded, tp, size, ("up",))


def faults():
    for name, hides, fault in (
        ("shown", nothing, "padding has logits of 0, which count in the sum"),
        ("local-end", from_local_end, "counted from each rank's first word"),
        ("last-word", last_word, "the last word is hidden too"),
    ):
        case = words_case("", hides, 2, 5)
        yield faulty(case, f"padding-fault-{name}", case.distributed, fault)
    case = heads_case("", averaged_attention, averaged_over_padding, 2, 5)
    yield faulty(case, "padding-fault-mean", case.distributed, "heads of padding are counted")
    case = heads_case("", whole_attention, padded_with_copies, 2, 5, copies=True)
    yield faulty(case, "padding-fault-copies", case.distributed, "heads of padding are copies of real ones")
    case = width_case("", exponential, padding_in_sum, 2, 5, ("up",))
    yield faulty(case, "padding-fault-sum", case.distributed, "exp(0) of the padding is in the sum")


# ---------------------------------------------------------------------- rows that do not divide, gathered as they are
class GatherUnequal(torch.autograd.Function):
    """All rows; the gradient, which each rank has a part of, is summed, and a rank keeps its rows."""

    @staticmethod
    def forward(ctx, x, sizes):
        ctx.sizes = sizes
        parts = [x.new_empty(size, *x.shape[1:]) for size in sizes]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad.split(ctx.sizes)[dist.get_rank()], None


class GatherInReverse(GatherUnequal):
    @staticmethod
    def forward(ctx, x, sizes):
        ctx.sizes = sizes
        parts = [x.new_empty(size, *x.shape[1:]) for size in sizes]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts[::-1])  # fault: the last rank's rows come first


def scored(x, head, dy):
    live = leaves({"x": x, "head": head})
    y = F.rms_norm(live["x"], (HIDDEN,)) @ live["head"]
    return {"y": y.detach(), **gradients(y, live, dy)}


def scored_of(rows, gather):
    def program(x, head, dy):
        ranks = dist.get_world_size()
        sizes = [len(part) for part in torch.arange(rows).chunk(ranks)]
        live = leaves({"x": x, "head": head})
        y = gather(F.rms_norm(live["x"], (HIDDEN,)), sizes) @ live["head"]
        return {"y": y.detach(), **gradients(y, live, dy)}

    return program


def unequal_case(rows, tp, gather=GatherUnequal.apply):
    columns = {"tp": Shard(1)}
    split = {"x": {"tp": Shard(0)}, "head": columns, "dy": columns}
    shapes = {"x": (rows, HIDDEN), "head": (HIDDEN, 8), "dy": (rows, 8)}
    inputs = {key: Input(shape, split[key]) for key, shape in shapes.items()}
    relation = {"y": columns, "x": split["x"], "head": columns}
    return Case(f"padding-unequal-rows-tp{tp}", scored, scored_of(rows, gather), {"tp": tp}, inputs, relation)


UNEQUAL = [
    unequal_case(5, 2),
    unequal_case(7, 4),
    faulty(
        unequal_case(5, 2), "padding-fault-reversed", scored_of(5, GatherInReverse.apply), "the last rank's rows come first"
    ),
]
CASES = [*correct(), *faults(), *UNEQUAL]
