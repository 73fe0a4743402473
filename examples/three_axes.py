"""A mesh of three axes: samples over `dp`, the sequence over `cp`, heads over `tp`, and one step of SGD on 8 ranks.

Each axis has its own law. Keys and values are gathered over `cp`, and their gradients are summed and scattered there. The
output projection is a sum over `tp`, where gradients of the input meet again. A gradient of a weight is a mean over all tokens,
so it is averaged over `dp` and `cp` together, never over `tp`.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from graphguard import Shard

BATCH, TOKENS, HIDDEN, HEADS, HEAD, LR = 2, 4, 4, 2, 2, 0.1


class GatherTokens(torch.autograd.Function):
    """[batch, head, token, ...] of all of a group; the gradients are summed and scattered."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx, grad):
        parts = [part.contiguous() for part in grad.chunk(dist.get_world_size(ctx.group), 2)]
        own = torch.empty_like(parts[0])
        dist.reduce_scatter(own, parts, group=ctx.group)
        return own, None


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def heads(x, qkv):
    """[3, batch, head, token, width]; a rank has its heads of all three."""
    return torch.einsum("bth,hcnd->cbntd", x, qkv)


def attention(q, k, v, first):
    """Causal; `first` is the position of the first query."""
    scores = q @ k.mT / HEAD**0.5
    later = torch.arange(k.size(2)) > first + torch.arange(q.size(2))[:, None]
    return scores.masked_fill(later, float("-inf")).softmax(-1) @ v


def loss_of(x, target, qkv, out):
    y = torch.einsum("bntd,ndh->bth", attention(*heads(x, qkv), 0), out)
    return F.mse_loss(y, target)


def loss_on_mesh(x, target, qkv, out, mesh):
    cp, tp = mesh.get_group("cp"), mesh.get_group("tp")
    q, k, v = heads(x, qkv)
    k, v = GatherTokens.apply(k, cp), GatherTokens.apply(v, cp)
    y = torch.einsum("bntd,ndh->bth", attention(q, k, v, dist.get_rank(cp) * x.size(1)), out)
    return F.mse_loss(Sum.apply(y, tp), target)


def positions_of_all_ranks(x, target, qkv, out, mesh):
    cp, tp = mesh.get_group("cp"), mesh.get_group("tp")
    q, k, v = heads(x, qkv)
    k, v = GatherTokens.apply(k, cp), GatherTokens.apply(v, cp)
    first = dist.get_rank() * x.size(1)
    # fault: position_from_the_global_rank
    y = torch.einsum("bntd,ndh->bth", attention(q, k, v, first), out)
    return F.mse_loss(Sum.apply(y, tp), target)


def summed_over_context(x, target, qkv, out, mesh):
    cp = mesh.get_group("cp")
    q, k, v = heads(x, qkv)
    k, v = GatherTokens.apply(k, cp), GatherTokens.apply(v, cp)
    y = torch.einsum("bntd,ndh->bth", attention(q, k, v, dist.get_rank(cp) * x.size(1)), out)
    # fault: heads_summed_over_another_axis
    return F.mse_loss(Sum.apply(y, cp), target)


def step(x, target, qkv, out):
    qkv.requires_grad_(), out.requires_grad_()
    loss = loss_of(x, target, qkv, out)
    loss.backward()
    return {"loss": loss.detach(), "qkv": qkv.detach() - LR * qkv.grad, "out": out.detach() - LR * out.grad}


def step_on_mesh(axes, loss_on_mesh):
    """Gradients are averaged over these axes."""

    def program(x, target, qkv, out, mesh):
        qkv.requires_grad_(), out.requires_grad_()
        loss = loss_on_mesh(x, target, qkv, out, mesh)
        loss.backward()
        mean = loss.detach().clone()
        for each in (mean, qkv.grad, out.grad):
            for axis in axes:
                # fault: averaged_over_data_alone, averaged_over_heads_too
                dist.all_reduce(each, op=dist.ReduceOp.AVG, group=mesh.get_group(axis))
        return {"loss": mean, "qkv": qkv.detach() - LR * qkv.grad, "out": out.detach() - LR * out.grad}

    return program


def check(axes=("dp", "cp"), loss=loss_on_mesh, dp=2, cp=2, tp=2):
    tokens = gg.Input((BATCH, TOKENS, HIDDEN), {"dp": Shard(0), "cp": Shard(1)})
    qkv, out = {"tp": Shard(2)}, {"tp": Shard(0)}
    return gg.verify(
        step,
        step_on_mesh(axes, loss),
        mesh={"dp": dp, "cp": cp, "tp": tp},
        inputs={
            "x": tokens,
            "target": tokens,
            "qkv": gg.Input((HIDDEN, 3, HEADS, HEAD), qkv),
            "out": gg.Input((HEADS, HEAD, HIDDEN), out),
        },
        outputs={"loss": {}, "qkv": qkv, "out": out},
    )


@gg.check
def sgd_on_three_axes():
    return check()


@gg.check(expect="refuted")
def averaged_over_data_alone():
    return check(axes=("dp",), dp=1, tp=1)


@gg.check(expect="refuted")
def averaged_over_heads_too():
    return check(axes=("dp", "cp", "tp"), dp=1, cp=1)


@gg.check(expect="refuted")
def position_from_the_global_rank():
    return check(loss=positions_of_all_ranks, dp=2, cp=1, tp=1)


@gg.check(expect="refuted")
def heads_summed_over_another_axis():
    return check(loss=summed_over_context, dp=1, cp=1)
