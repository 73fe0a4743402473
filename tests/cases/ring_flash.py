"""Rings as published code writes them: blocks attended by themselves, with their log-sum-exps, and merged by sigmoids.

The sequence is split in parts one after another, in zigzag, or in stripes. Gradients are computed block by block from the
final log-sum-exp, and those of keys and values go around with them.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from cases.case import Case, faulty
from cases.context import SCALE, SEQUENCE, attention_inputs, causal_step, full_step, leaves, with_gradients
from cases.zigzag import zigzag
from graphguard import Shard


def passed_on(*tensors):
    """To the next rank, all in one batch."""
    rank, size = dist.get_rank(), dist.get_world_size()
    received = [torch.empty_like(tensor) for tensor in tensors]
    operations = [dist.P2POp(dist.isend, tensor.contiguous(), (rank + 1) % size) for tensor in tensors]
    operations += [dist.P2POp(dist.irecv, tensor, (rank - 1) % size) for tensor in received]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


def masked(scores, diagonal):
    """Keys up to the query's own position and so many more; None for all of them."""
    if diagonal is None:
        return scores
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + diagonal)
    return scores.masked_fill(hidden, float("-inf"))


# ---------------------------------------------------------------------- one block
def attended(q, k, v, diagonal=None):
    scores = masked(q @ k.transpose(-1, -2) * SCALE, diagonal)
    log = scores.logsumexp(-1, keepdim=True)
    return (scores - log).exp() @ v, log


def block_gradients(dout, q, k, v, delta, log, diagonal=None):
    p = (masked(q @ k.transpose(-1, -2) * SCALE, diagonal) - log).exp()
    dscores = p * (dout @ v.transpose(-1, -2) - delta) * SCALE
    return dscores @ k, dscores.transpose(-1, -2) @ q, p.transpose(-1, -2) @ dout


def merged(out, log, block, block_log):
    if out is None:
        return block, block_log
    return out - torch.sigmoid(block_log - log) * (out - block), log - F.logsigmoid(log - block_log)


def merged_by_addition(out, log, block, block_log):
    if out is None:
        return block, block_log
    both = torch.logaddexp(log, block_log)
    return (log - both).exp() * out + (block_log - both).exp() * block, both


# ---------------------------------------------------------------------- what is seen of a block, by layout
def all_seen(step, q, k):
    return slice(0, q), slice(0, k), None


def earlier_seen(step, q, k):
    """Parts one after another: blocks of later ranks are not seen, the own one up to the diagonal."""
    if step > dist.get_rank():
        return None
    return slice(0, q), slice(0, k), 0 if step == 0 else None


def zigzag_seen(step, q, k):
    """Of earlier ranks the front half is seen by all queries, of later ones all by the back half."""
    if step == 0:
        return slice(0, q), slice(0, k), 0
    if step <= dist.get_rank():
        return slice(0, q), slice(0, k // 2), None
    return slice(q // 2, q), slice(0, k), None


def stripes_seen(step, q, k):
    """Each rank has one of so many positions: of a later rank's keys, those of the row before are the last that are seen."""
    if step <= dist.get_rank():
        return slice(0, q), slice(0, k), 0
    return slice(1, q), slice(0, k - 1), 0


# ---------------------------------------------------------------------- the ring
class Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, seen, merge, gradients):
        out, log, key, value = None, None, k, v
        for step in range(dist.get_world_size()):
            part = seen(step, q.size(2), k.size(2))
            if part is not None:
                queries, keys, diagonal = part
                block = attended(q[:, :, queries], key[:, :, keys], value[:, :, keys], diagonal)
                if out is None or queries.start == 0:
                    out, log = merge(out, log, *block)
                else:
                    late = merge(out[:, :, queries], log[:, :, queries], *block)
                    out, log = (torch.cat([a[:, :, : queries.start], b], 2) for a, b in zip((out, log), late, strict=True))
            if step < dist.get_world_size() - 1:
                key, value = passed_on(key, value)
        ctx.save_for_backward(q, k, v, out, log)
        ctx.seen, ctx.gradients = seen, gradients
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, log = ctx.saved_tensors
        delta = (dout * out).sum(-1, keepdim=True)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for step in range(dist.get_world_size()):
            part = ctx.seen(step, q.size(2), k.size(2))
            if part is not None:
                a, b, diagonal = part
                rows = (dout[:, :, a], q[:, :, a], k[:, :, b], v[:, :, b], delta[:, :, a], log[:, :, a])
                grads = ctx.gradients(*rows, diagonal)
                dq[:, :, a] += grads[0]
                dk[:, :, b] += grads[1]
                dv[:, :, b] += grads[2]
            k, v, dk, dv = passed_on(k, v, dk, dv)
        return dq, dk, dv, None, None, None


def ring_step(seen, merge=merged, gradients=block_gradients):
    def step(q, k, v, dy):
        q, k, v = leaves(q, k, v)
        return with_gradients(Ring.apply(q, k, v, seen, merge, gradients), dy, q, k, v)

    return step


# ---------------------------------------------------------------------- faults
def merged_the_other_way(out, log, block, block_log):
    if out is None:
        return block, block_log
    share = torch.sigmoid(log - block_log)  # fault: the share of what was there, not of the block
    return out - share * (out - block), log - F.logsigmoid(log - block_log)


def merged_with_old_log(out, log, block, block_log):
    if out is None:
        return block, block_log
    return out - torch.sigmoid(block_log - log) * (out - block), log  # fault: the log-sum-exp stays that of the first block


def gradients_of_one_block(dout, q, k, v, delta, log, diagonal=None):
    scores = masked(q @ k.transpose(-1, -2) * SCALE, diagonal)
    p = scores.softmax(-1)  # fault: the weights of this block alone
    dscores = p * (dout @ v.transpose(-1, -2) - delta) * SCALE
    return dscores @ k, dscores.transpose(-1, -2) @ q, p.transpose(-1, -2) @ dout


def own_diagonal_everywhere(step, q, k):
    return slice(0, q), slice(0, k), 0  # fault: later ranks' keys of the same row are seen


def front_half_of_later(step, q, k):
    if step == 0:
        return slice(0, q), slice(0, k), 0
    if step <= dist.get_rank():
        return slice(0, q), slice(0, k // 2), None
    return slice(q // 2, q), slice(0, k // 2), None  # fault: the back half of a later rank's keys is not seen


# ---------------------------------------------------------------------- cases
def stripes(size):
    def layout(full, coord):
        return full[:, :, coord["cp"] :: size]

    return layout


def laid_out(name, sequential, distributed, size, layout):
    paths = dict.fromkeys(("out", "dq", "dk", "dv"), layout)
    inputs = attention_inputs({"local": layout}, sequence=4 * size)
    return Case(f"ring-flash-{name}", sequential, distributed, {"cp": size}, inputs, paths, paths)


def in_order(name, sequential, distributed, size):
    split = {"cp": Shard(2)}
    inputs = attention_inputs({"placement": Shard(2)}, sequence=max(SEQUENCE, 2 * size))
    return Case(
        f"ring-flash-{name}", sequential, distributed, {"cp": size}, inputs, dict.fromkeys(("out", "dq", "dk", "dv"), split)
    )


def correct(size):
    return [
        in_order(f"full-{size}", full_step, ring_step(all_seen), size),
        in_order(f"causal-{size}", causal_step, ring_step(earlier_seen), size),
        in_order(f"causal-added-{size}", causal_step, ring_step(earlier_seen, merged_by_addition), size),
        laid_out(f"zigzag-{size}", causal_step, ring_step(zigzag_seen), size, zigzag(size)),
        laid_out(f"zigzag-added-{size}", causal_step, ring_step(zigzag_seen, merged_by_addition), size, zigzag(size)),
        laid_out(f"stripes-{size}", causal_step, ring_step(stripes_seen), size, stripes(size)),
    ]


def faults():
    full = in_order("", full_step, None, 2)
    turned = laid_out("", causal_step, None, 2, zigzag(2))
    striped = laid_out("", causal_step, None, 2, stripes(2))
    seeded = [
        (full, "other-share", ring_step(all_seen, merged_the_other_way), "the share of what was there, not of the block"),
        (full, "old-log", ring_step(all_seen, merged_with_old_log), "the log-sum-exp stays that of the first block"),
        (full, "one-block", ring_step(all_seen, gradients=gradients_of_one_block), "the weights of this block alone"),
        (turned, "half", ring_step(front_half_of_later), "the back half of a later rank's keys is not seen"),
        (striped, "diagonal", ring_step(own_diagonal_everywhere), "later ranks' keys of the same row are seen"),
    ]
    return [faulty(case, f"ring-flash-fault-{name}", program, fault, stated=("*",)) for case, name, program, fault in seeded]


CASES = [*[case for size in (2, 4, 8) for case in correct(size)], *faults()]
