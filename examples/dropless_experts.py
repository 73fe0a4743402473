"""Dropless experts: a router decides by values where each token goes, and the counts decide how much each rank sends.

The programs read values (`.tolist()`, `nonzero`), so they are verified along the paths of samples: some are random, on some all
tokens go to the same experts, and a rank gets none.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from graphguard import Replicate, Shard

TOKENS, CHOSEN, HIDDEN, WIDTH, EXPERTS = 8, 2, 4, 6, 4


def expert(x, up, down):
    return F.silu(x @ up) @ down


def gradients(y, parameters, dy):
    return dict(zip(parameters, torch.autograd.grad(y, list(parameters.values()), dy), strict=True))


def moe(x, router, up, down, dy):
    """A loop over the experts that were hit."""
    parameters = {"x": x, "router": router, "up": up, "down": down}
    for tensor in parameters.values():
        tensor.requires_grad_()
    gates, chosen = torch.softmax(x @ router, -1).topk(CHOSEN, -1)
    hit = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    y = torch.zeros_like(x)
    for e in (hit.sum((-1, -2)) > 0).nonzero().flatten().tolist():
        slot, token = torch.where(hit[e])
        y = y.index_add(0, token, expert(x[token], up[e], down[e]) * gates[token, slot].unsqueeze(-1))
    return {"y": y.detach(), "grads": gradients(y, parameters, dy)}


class Exchange(torch.autograd.Function):
    """Rows travel to the ranks whose experts they chose; their gradients travel back."""

    @staticmethod
    def forward(ctx, rows, sent, received, group):
        ctx.sizes = sent, received, group
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        sent, received, group = ctx.sizes
        out = grad.new_empty(sum(sent), *grad.shape[1:])
        dist.all_to_all_single(out, grad.contiguous(), sent, received, group=group)
        return out, None, None, None


def dropless(fault=None):
    def program(x, router, up, down, dy, mesh):
        group = mesh.get_group("ep")
        ranks, local = dist.get_world_size(group), up.size(0)
        parameters = {"x": x, "router": router, "up": up, "down": down}
        for tensor in parameters.values():
            tensor.requires_grad_()
        gates, chosen = torch.softmax(x @ router, -1).topk(CHOSEN, -1)
        order = torch.argsort(chosen.flatten(), stable=True)  # rows by expert
        counts = F.one_hot(chosen.flatten(), EXPERTS).sum(0)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=group)
        mine = theirs.view(ranks, local)
        sent, received = counts.view(ranks, local).sum(1).tolist(), mine.sum(1).tolist()
        rows = Exchange.apply(x[order // CHOSEN], sent, received, group)
        which = torch.arange(local).repeat(ranks).repeat_interleave(mine.flatten())
        regroup = torch.argsort(which, stable=True)  # by expert, whichever rank they come from
        parts = rows[regroup].split(mine.sum(0).tolist())
        out = torch.cat([expert(part, up[e], down[e]) for e, part in enumerate(parts)])
        back = regroup if fault == "not put back" else torch.argsort(regroup)
        out = Exchange.apply(out[back], received, sent, group)
        weights = gates.flatten() if fault == "gates of other rows" else gates.flatten()[order]
        y = torch.zeros_like(x).index_add(0, order // CHOSEN, out * weights.unsqueeze(-1))
        grads = gradients(y, parameters, dy)
        if fault != "router not summed":
            dist.all_reduce(grads["router"], group=group)
        return {"y": y.detach(), "grads": grads}

    return program


def verify(program, **options):
    tokens, experts = gg.Input((TOKENS, HIDDEN), Shard(0)), gg.Input((EXPERTS, HIDDEN, WIDTH), Shard(0))
    inputs = {
        "x": tokens,
        "router": gg.Input((HIDDEN, EXPERTS)),
        "up": experts,
        "down": gg.Input((EXPERTS, WIDTH, HIDDEN), Shard(0)),
        "dy": tokens,
    }
    outputs = {"y": Shard(0), "grads.x": Shard(0), "grads.router": Replicate(), "grads.up": Shard(0), "grads.down": Shard(0)}
    return gg.verify(moe, program, mesh={"ep": 2}, inputs=inputs, outputs=outputs, **options)


@gg.check
def correct():
    return verify(dropless())


@gg.check(expect="refuted")
def rows_not_put_back():
    """The order of the rows in place of its inverse. On a path where it is its own inverse, this is no fault."""
    return verify(dropless("not put back"))


@gg.check(expect="refuted")
def gates_of_other_rows():
    return verify(dropless("gates of other rows"))


@gg.check(expect="refuted")
def router_not_summed():
    return verify(dropless("router not summed"))
