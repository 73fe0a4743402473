"""A transformer block as Megatron distributes it: tensor and sequence parallelism, forward and all gradients.

Heads and the width of the MLP are split over the ranks; norms, dropout-free residuals and everything between the regions
run on each rank's part of the sequence. The two regions are autograd functions whose backwards are each other's forward.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from graphguard import Replicate, Shard

SEQUENCE, BATCH, HIDDEN, HEADS, HEAD = 4, 2, 8, 4, 2
SPLIT = {"qkv": Shard(0), "out": Shard(1), "up": Shard(0), "down": Shard(1)}
SHAPES = {
    "norm1": (HIDDEN,), "qkv": (HEADS * 3 * HEAD, HIDDEN), "out": (HIDDEN, HEADS * HEAD),
    "norm2": (HIDDEN,), "up": (4 * HIDDEN, HIDDEN), "down": (HIDDEN, 4 * HIDDEN),
}  # fmt: skip


def gather(x):
    out = x.new_empty(x.size(0) * dist.get_world_size(), *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous())
    return out


def sum_and_scatter(x):
    out = x.new_empty(x.size(0) // dist.get_world_size(), *x.shape[1:])
    dist.reduce_scatter_tensor(out, x.contiguous())
    return out


class Gather(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: gather(x))
    backward = staticmethod(lambda ctx, grad: sum_and_scatter(grad))


class SumAndScatter(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: sum_and_scatter(x))
    backward = staticmethod(lambda ctx, grad: gather(grad))


def attention(x, p):
    """x: [sequence, batch, hidden]; query, key and value of a head lie side by side in the fused weight."""
    q, k, v = F.linear(x, p["qkv"]).unflatten(-1, (-1, 3 * HEAD)).permute(1, 2, 0, 3).chunk(3, -1)
    h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return F.linear(h.permute(2, 0, 1, 3).flatten(2), p["out"])


def block(x, dy, enter=lambda x: x, leave=lambda x: x, **weights):
    p = {name: weight.requires_grad_() for name, weight in weights.items()}
    h = x + leave(attention(enter(F.layer_norm(x, (HIDDEN,), p["norm1"])), p))
    m = F.gelu(F.linear(enter(F.layer_norm(h, (HIDDEN,), p["norm2"])), p["up"]))
    y = h + leave(F.linear(m, p["down"]))
    y.backward(dy)
    return {"y": y.detach(), "grads": {name: weight.grad for name, weight in p.items()}}


def megatron_block(x, dy, **weights):
    out = block(x, dy, Gather.apply, SumAndScatter.apply, **weights)
    for name in ("norm1", "norm2"):
        dist.all_reduce(out["grads"][name])
    return out


@gg.check
def tensor_and_sequence_parallel():
    tokens = gg.Input((SEQUENCE, BATCH, HIDDEN), Shard(0))
    weights = {name: gg.Input(shape, SPLIT.get(name, Replicate())) for name, shape in SHAPES.items()}
    expected = {f"grads.{name}": weight.placement for name, weight in weights.items()}
    inputs = {"x": tokens, "dy": tokens, **weights}
    return gg.verify(block, megatron_block, mesh={"tp": 2}, inputs=inputs, outputs={"y": Shard(0), **expected})
