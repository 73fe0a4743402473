"""A gradient that stays a sum over ranks: each rank has its part of the hidden state's, all the way down."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from cases.case import Case, faulty
from cases.leaves import gradients, leaves
from cases.regions import gather_first, reduce_from, reduce_scatter_first
from graphguard import Input, Partial, Shard


class RowsOfParts(torch.autograd.Function):
    """x @ w with w split by rows, summed. Gradients that arrive are parts of a sum, and reach x and w as their shards."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        y = x @ w
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx, part):
        x, w = ctx.saved_tensors
        whole = gather_first(w, None)
        by_rank = (part @ whole.t()).unflatten(-1, (dist.get_world_size(), -1)).movedim(-2, 0)
        total = part.clone()
        dist.all_reduce(total)
        return reduce_scatter_first(by_rank.flatten(0, 1), None), x.t() @ total


def rows(x, w):
    return RowsOfParts.apply(x, w) if dist.is_initialized() else x @ w


def rows_of_own_part(x, w):
    return reduce_from(x @ w, None) if dist.is_initialized() else x @ w  # fault: the gradient that arrives is a part


def decoder_with(product):
    """Two gated layers and a head. No gradient of the hidden state is reduced: each rank has its part of all of them."""

    def program(x, head, dy, **params):
        p = leaves({"x": x, "head": head, **params})
        h = p["x"]
        for layer in "ab":
            normed = F.rms_norm(h, h.shape[-1:], p[f"{layer}.norm"])
            h = h + product(F.silu(normed @ p[f"{layer}.gate"]) * (normed @ p[f"{layer}.up"]), p[f"{layer}.down"])
        return {"grads": gradients(F.rms_norm(h, h.shape[-1:]) @ p["head"], p, dy)}

    return program


def part_case(tp):
    columns, inputs = {"tp": Shard(1)}, {"x": Input((6, 5)), "head": Input((5, 16), Shard(1)), "dy": Input((6, 16), Shard(1))}
    relation = {"grads.x": {"tp": Partial()}, "grads.head": columns}
    for layer in "ab":
        inputs |= {f"{layer}.norm": Input((5,)), f"{layer}.down": Input((8, 5), Shard(0))}
        inputs |= {f"{layer}.{name}": Input((5, 8), Shard(1)) for name in ("gate", "up")}
        relation |= {f"grads.{layer}.norm": {"tp": Partial()}, f"grads.{layer}.down": {"tp": Shard(0)}}
        relation |= {f"grads.{layer}.{name}": columns for name in ("gate", "up")}
    return Case(f"parts-decoder-tp{tp}", decoder_with(rows), decoder_with(rows), {"tp": tp}, inputs, relation)


OWN = decoder_with(rows_of_own_part)
CASES = [part_case(2), part_case(4), faulty(part_case(2), "parts-fault-row", OWN, "the gradient that arrives is a part")]
