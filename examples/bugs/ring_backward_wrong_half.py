"""NVIDIA/Megatron-LM #1464, NVIDIA/TransformerEngine #1557: a ring backward takes the normaliser of the wrong queries.

Each rank has an early and a late piece of the sequence. Keys of a later rank are seen by the late queries only, so that
step of the backward works on half of the queries, and needs the log-sum-exp of that half. The forward is exact.
"""

import torch
import torch.distributed as dist

import graphguard as gg

PIECE, HEAD = 2, 2
BUG_LINE = "return lse[: len(lse) - first]"


def scores(q, k, causal):
    s = q @ k.T / HEAD**0.5
    return s.masked_fill(torch.ones(s.shape, dtype=torch.bool).triu(1), float("-inf")) if causal else s


def passed_on(*tensors):
    """To the other rank, and its tensors in return."""
    received = [torch.empty_like(t) for t in tensors]
    ops = [dist.P2POp(dist.isend, t.contiguous(), 1 - dist.get_rank()) for t in tensors]
    ops += [dist.P2POp(dist.irecv, t, 1 - dist.get_rank()) for t in received]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return received


def seen():
    """Step by step: the first query that sees keys, the end of the keys that are seen, and whether a mask is due."""
    return [(0, 2 * PIECE, True), (0, PIECE, False) if dist.get_rank() else (PIECE, 2 * PIECE, False)]


def of_late_queries(lse, first):
    return lse[first:]


def of_early_queries(lse, first):
    return lse[: len(lse) - first]


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, half):
        total, out, keys, values = q.new_zeros(len(q), 1), torch.zeros_like(q), k, v
        for first, end, causal in seen():
            weights = scores(q[first:], keys[:end], causal).exp()
            total[first:] += weights.sum(-1, keepdim=True)
            out[first:] += weights @ values[:end]
            keys, values = passed_on(keys, values)
        ctx.save_for_backward(q, k, v, out / total, total.log())
        ctx.half = half
        return out / total

    @staticmethod
    def backward(ctx, dy):
        q, keys, values, out, lse = ctx.saved_tensors
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(keys), torch.zeros_like(values)
        for first, end, causal in seen():
            probs = (scores(q[first:], keys[:end], causal) - ctx.half(lse, first)).exp()
            dv[:end] += probs.T @ dy[first:]
            ds = probs * (dy[first:] @ values[:end].T - (dy * out)[first:].sum(-1, keepdim=True)) / HEAD**0.5
            dq[first:] += ds @ keys[:end]
            dk[:end] += ds.T @ q[first:]
            keys, values, dk, dv = passed_on(keys, values, dk, dv)
        return dq, dk, dv, None


def sequential(q, k, v, dy):
    y = scores(q.requires_grad_(), k.requires_grad_(), causal=True).softmax(-1) @ v.requires_grad_()
    return dict(zip("qkv", torch.autograd.grad(y, (q, k, v), dy), strict=True))


def zigzag(full, coord):
    pieces = full.chunk(4)
    return torch.cat([pieces[coord["cp"]], pieces[3 - coord["cp"]]])


def verify(half):
    def cp_step(q, k, v, dy):
        y = RingAttention.apply(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), half)
        return dict(zip("qkv", torch.autograd.grad(y, (q, k, v), dy), strict=True))

    inputs = {name: gg.Input((4 * PIECE, HEAD), local=zigzag) for name in ("q", "k", "v", "dy")}
    return gg.verify(sequential, cp_step, mesh={"cp": 2}, inputs=inputs, outputs=dict.fromkeys("qkv", zigzag))


fixed = gg.check(lambda: verify(of_late_queries))
buggy = gg.check(lambda: verify(of_early_queries), expect="refuted")
