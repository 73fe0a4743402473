"""Ring attention: keys and values go around the ranks, and each block is attended as it comes by.

A block is attended by itself, which gives its output and the log-sum-exp of its scores; blocks are merged by the share that
each has of the weight. The backward goes around once more, from the final log-sum-exp, and the gradients of keys and values
travel with them until they are home.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from graphguard import Shard

HEADS, HEAD = 2, 4


def attended(q, k, v, causal):
    scores = q @ k.mT / HEAD**0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    log = scores.logsumexp(-1, keepdim=True)
    return (scores - log).exp() @ v, log


def gradients_of_block(dout, q, k, v, delta, log, causal):
    scores = q @ k.mT / HEAD**0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    p = (scores - log).exp()
    dscores = p * (dout @ v.mT - delta) / HEAD**0.5
    return dscores @ k, dscores.mT @ q, p.mT @ dout


def merged(out, log, block, block_log):
    return out - torch.sigmoid(block_log - log) * (out - block), log - F.logsigmoid(log - block_log)


def passed_on(*tensors):
    """To the next rank, from the one before, in one batch."""
    rank, size = dist.get_rank(), dist.get_world_size()
    received = [torch.empty_like(tensor) for tensor in tensors]
    operations = [dist.P2POp(dist.isend, tensor.contiguous(), (rank + 1) % size) for tensor in tensors]
    operations += [dist.P2POp(dist.irecv, tensor, (rank - 1) % size) for tensor in received]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


# ---------------------------------------------------------------------- which queries see which keys of the block at hand
def one_after_another(step, length):
    if step > dist.get_rank():
        return None  # a later rank's keys
    return 0, length, step == 0


def front_and_back(step, length):
    """Each rank has a part from the front and its mirror image from the back, so that all have as much to do."""
    if step == 0:
        return 0, length, True
    return (0, length // 2, False) if step <= dist.get_rank() else (length // 2, length, False)


def front_of_all(step, length):
    """As `front_and_back`, but of later ranks, too, the front alone is seen."""
    if step == 0:
        return 0, length, True
    return (0, length // 2, False) if step <= dist.get_rank() else (length // 2, length // 2, False)


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, seen):
        ctx.saved, ctx.seen = (q, k, v), seen
        out = log = None
        for step in range(dist.get_world_size()):
            part = seen(step, q.size(1))
            if part is not None:
                first, end, causal = part
                block = attended(q[:, first:], k[:, :end], v[:, :end], causal)
                if out is None:
                    out, log = block
                else:
                    out[:, first:], log[:, first:] = merged(out[:, first:], log[:, first:], *block)
            if step < dist.get_world_size() - 1:
                k, v = passed_on(k, v)
        ctx.result = out, log
        return out

    @staticmethod
    def backward(ctx, dout):
        (q, k, v), (out, log) = ctx.saved, ctx.result
        delta = (dout * out).sum(-1, keepdim=True)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for step in range(dist.get_world_size()):
            part = ctx.seen(step, q.size(1))
            if part is not None:
                first, end, causal = part
                rows = [x[:, first:] for x in (dout, q)] + [x[:, :end] for x in (k, v)] + [x[:, first:] for x in (delta, log)]
                grads = gradients_of_block(*rows, causal)
                dq[:, first:] += grads[0]
                dk[:, :end] += grads[1]
                dv[:, :end] += grads[2]
            k, v, dk, dv = passed_on(k, v, dk, dv)
        return dq, dk, dv, None


class WithoutTheLastStep(RingAttention):
    @staticmethod
    def backward(ctx, dout):
        dq, dk, dv, _ = RingAttention.backward(ctx, dout)
        for _ in range(dist.get_world_size() - 1):
            # fault: gradients_that_do_not_come_home
            dk, dv = passed_on(dk, dv)
        return dq, dk, dv, None


def step(attention):
    def run(q, k, v, dy):
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        out = attention(q, k, v)
        return {"out": out.detach()} | dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, (q, k, v), dy), strict=True))

    return run


def sequential(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def ring(seen, attention=RingAttention):
    return step(lambda q, k, v: attention.apply(q, k, v, seen))


def two_ends(x, coord):
    parts = x.chunk(4, 1)
    return torch.cat([parts[coord["cp"]], parts[3 - coord["cp"]]], 1)


OUTPUTS = ("out", "dq", "dk", "dv")


@gg.check
def causal_ring():
    inputs = {name: gg.Input((HEADS, 8, HEAD), Shard(1)) for name in ("q", "k", "v", "dy")}
    outputs = dict.fromkeys(OUTPUTS, Shard(1))
    return gg.verify(step(sequential), ring(one_after_another), mesh={"cp": 4}, inputs=inputs, outputs=outputs)


@gg.check
def balanced_ring():
    inputs = {name: gg.Input((HEADS, 8, HEAD), local=two_ends) for name in ("q", "k", "v", "dy")}
    outputs = dict.fromkeys(OUTPUTS, two_ends)
    return gg.verify(step(sequential), ring(front_and_back), mesh={"cp": 2}, inputs=inputs, outputs=outputs)


@gg.check(expect="refuted")
def gradients_that_do_not_come_home():
    inputs = {name: gg.Input((HEADS, 8, HEAD), Shard(1)) for name in ("q", "k", "v", "dy")}
    wrong = ring(one_after_another, WithoutTheLastStep)
    return gg.verify(step(sequential), wrong, mesh={"cp": 2}, inputs=inputs, outputs=dict.fromkeys(OUTPUTS, Shard(1)))


@gg.check(expect="refuted")
def back_halves_that_nobody_sees():
    inputs = {name: gg.Input((HEADS, 8, HEAD), local=two_ends) for name in ("q", "k", "v", "dy")}
    outputs = dict.fromkeys(OUTPUTS, two_ends)
    return gg.verify(step(sequential), ring(front_of_all), mesh={"cp": 2}, inputs=inputs, outputs=outputs)
