"""Gradients of microbatches, added up on both sides, clipped in other words, and stepped by AdamW."""

import torch
import torch.distributed as dist

from cases.case import Case, faulty
from graphguard import Input

ROWS, WIDTH, LARGEST, RATE, MICROBATCHES = 16, 3, 0.5, 0.1, 2


def accumulated(x, t, w):
    """A leaf with the gradients of all microbatches."""
    w = torch.nn.Parameter(w)
    for part, target in zip(x.chunk(MICROBATCHES), t.chunk(MICROBATCHES), strict=True):
        ((part @ w - target).square().mean() / MICROBATCHES).backward()
    return w


def stepped(w):
    torch.optim.AdamW([w], lr=RATE).step()
    return w.detach()


def adamw(x, t, w):
    return stepped(accumulated(x, t, w))


def adamw_on_ranks(x, t, w):
    w = accumulated(x, t, w)
    dist.all_reduce(w.grad)
    w.grad /= dist.get_world_size()
    return stepped(w)


def adamw_reduced_too_early(x, t, w):
    w = torch.nn.Parameter(w)
    for part, target in zip(x.chunk(MICROBATCHES), t.chunk(MICROBATCHES), strict=True):
        ((part @ w - target).square().mean() / MICROBATCHES).backward()
        dist.all_reduce(w.grad)  # fault: what was reduced before is reduced again
    w.grad /= dist.get_world_size()
    return stepped(w)


# ---------------------------------------------------------------------- clipping
def clipped(x, t, w):
    grad = accumulated(x, t, w).grad
    return grad * torch.clamp(LARGEST / (grad.norm() + 1e-6), max=1.0)


def averaged(x, t, w):
    grad = accumulated(x, t, w).grad
    dist.all_reduce(grad)
    return grad / dist.get_world_size()


def clipped_by_a_divisor(x, t, w):
    """As DeepSpeed does: divided by how many times the norm is too large, if it is."""
    grad = averaged(x, t, w)
    return grad / torch.clamp((grad.norm() + 1e-6) / LARGEST, min=1.0)


def never_clipped(x, t, w):
    grad = averaged(x, t, w)
    return grad / torch.clamp((grad.norm() + 1e-6) / LARGEST, max=1.0)  # fault: small gradients are made large


# ---------------------------------------------------------------------- cases
def dealt(size):
    """Each rank has its part of every microbatch."""
    return lambda full, coord: torch.cat([part.chunk(size)[coord["dp"]] for part in full.chunk(MICROBATCHES)])


def case(name, sequential, program, size):
    local = dealt(size)
    inputs = {"x": Input((ROWS, WIDTH), local=local), "t": Input((ROWS,), local=local), "w": Input((WIDTH,))}
    return Case(f"accumulated-{name}-{size}", sequential, program, {"dp": size}, inputs, {"out": {}})


STEP, CLIP = case("", adamw, None, 2), case("", clipped, None, 2)
CASES = [
    *(case("adamw", adamw, adamw_on_ranks, size) for size in (2, 4, 8)),
    *(case("clipped", clipped, clipped_by_a_divisor, size) for size in (2, 4)),
    faulty(STEP, "accumulated-fault-early", adamw_reduced_too_early, "what was reduced before is reduced again"),
    faulty(CLIP, "accumulated-fault-clip", never_clipped, "small gradients are made large"),
]
