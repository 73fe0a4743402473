"""A sliding window in a ring: a query sees the end of one block and the beginning of another, and nothing of most."""

import torch
import torch.distributed as dist

from cases.case import faulty
from cases.context import (
    RINGS,
    SCALE,
    WINDOW,
    forward,
    leaves,
    own_positions,
    rotated,
    stepped,
    window_mask,
    window_step,
    windowed_forward,
    with_gradients,
)


def block_mask(source, length):
    return window_mask(own_positions(length), source * length + torch.arange(length))


def is_near(source, length):
    """Whether a block has keys in the window of some query."""
    behind = dist.get_rank() - source
    return behind >= 0 and (behind - 1) * length + 1 < WINDOW


def windowed_ring(near=is_near, mask_of=block_mask):
    """A block may have rows that see nothing of it, so the weights are masked and not the scores."""

    def forward(q, k, v):
        largest, total, out = None, 0, 0
        for source, key, value in RINGS["p2p"](k, v):
            if not near(source, k.size(2)):
                continue
            scores = q @ key.transpose(-1, -2) * SCALE
            highest = scores.amax(-1, keepdim=True)
            highest = highest if largest is None else torch.maximum(largest, highest)
            weights = (scores - highest).exp().masked_fill(~mask_of(source, k.size(2)), 0.0)
            scale = 1.0 if largest is None else (largest - highest).exp()
            total, out = total * scale + weights.sum(-1, keepdim=True), out * scale + weights @ value
            largest = highest
        return out / total

    return forward


class WindowedRing(torch.autograd.Function):
    """With its own backward; all blocks go around, and masks say what is seen of each."""

    @staticmethod
    def forward(ctx, q, k, v):
        total = out = 0
        for source, key, value in RINGS["p2p"](k, v):
            weights = (q @ key.transpose(-1, -2) * SCALE).exp().masked_fill(~block_mask(source, k.size(2)), 0.0)
            total, out = total + weights.sum(-1, keepdim=True), out + weights @ value
        ctx.save_for_backward(q, k, v, out / total, total)
        return out / total

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, total = ctx.saved_tensors
        size = dist.get_world_size()
        delta = (dout * out).sum(-1, keepdim=True)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for step in range(size):
            seen = block_mask((dist.get_rank() - step) % size, k.size(2))
            p = (q @ k.transpose(-1, -2) * SCALE).exp().masked_fill(~seen, 0.0) / total
            dscores = p * (dout @ v.transpose(-1, -2) - delta) * SCALE
            dq = dq + dscores @ k
            dk = dk + dscores.transpose(-1, -2) @ q
            dv = dv + p.transpose(-1, -2) @ dout
            k, v, dk, dv = (rotated(each) for each in (k, v, dk, dv))
        return dq, dk, dv


def windowed_ring_step(attention=WindowedRing):
    def step(q, k, v, dy):
        q, k, v = leaves(q, k, v)
        return with_gradients(attention.apply(q, k, v), dy, q, k, v)

    return step


class GradientsThroughAllBlocks(WindowedRing):
    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, total = ctx.saved_tensors
        delta = (dout * out).sum(-1, keepdim=True)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for _ in range(dist.get_world_size()):
            p = (q @ k.transpose(-1, -2) * SCALE).exp() / total  # fault: the backward has no mask
            dscores = p * (dout @ v.transpose(-1, -2) - delta) * SCALE
            dq = dq + dscores @ k
            dk = dk + dscores.transpose(-1, -2) @ q
            dv = dv + p.transpose(-1, -2) @ dout
            k, v, dk, dv = (rotated(each) for each in (k, v, dk, dv))
        return dq, dk, dv


def later_mask(source, length):
    return window_mask(own_positions(length) + 1, source * length + torch.arange(length))  # fault: one position further


# ---------------------------------------------------------------------- faults
def is_own(source, length):
    return source == dist.get_rank()  # fault: a window that begins in the block before is cut off


def local_window(source, length):
    return window_mask(torch.arange(length), torch.arange(length))  # fault: the window of every block is that of the own one


# ---------------------------------------------------------------------- cases
def correct(size):
    return [
        forward(f"window-ring-{size}", windowed_ring(), size, windowed_forward, WINDOW + 1),
        forward(f"window-ring-over-blocks-{size}", windowed_ring(), size, windowed_forward, WINDOW - 1),
        stepped(f"window-ring-step-{size}", window_step, windowed_ring_step(), size),
    ]


def faults():
    window, step = forward("", None, 2, windowed_forward), stepped("", window_step, None, 2)
    seeded = [
        (window, "own-window", windowed_ring(is_own), "a window that begins in the block before is cut off"),
        (window, "local-window", windowed_ring(mask_of=local_window), "the window of every block is that of the own one"),
        (window, "later-window", windowed_ring(mask_of=later_mask), "one position further"),
        (step, "no-window-backward", windowed_ring_step(GradientsThroughAllBlocks), "the backward has no mask"),
    ]
    return [faulty(case, f"context-fault-{name}", program, fault, stated=("*",)) for case, name, program, fault in seeded]


CASES = [*[case for size in (2, 4, 8) for case in correct(size)], *faults()]
