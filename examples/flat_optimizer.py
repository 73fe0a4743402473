"""A distributed optimizer over one flat buffer, as Megatron's and DeepSpeed's: the shards end inside of parameters.

All gradients lie one behind the other. The buffer is padded, reduced and scattered; each rank clips its shard by the norm of
all of them and steps it, and the new parameters are gathered and cut out again.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from graphguard import Replicate, Shard

BATCH, HIDDEN, WIDTH, LARGEST = 8, 4, 5, 0.5
SHAPES = {"up": (HIDDEN, WIDTH), "bias": (WIDTH,), "down": (WIDTH, HIDDEN)}


def gradients(x, target, params):
    params = {name: p.detach().requires_grad_() for name, p in params.items()}
    loss = F.mse_loss(torch.tanh(x @ params["up"] + params["bias"]) @ params["down"], target)
    return torch.autograd.grad(loss, list(params.values()))


def step(weights, grads, norm):
    return weights - 0.1 * grads * (LARGEST / (norm + 1e-6)).clamp(max=1.0)


def train(x, target, **params):
    for _ in range(2):
        grads = gradients(x, target, params)
        norm = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
        params = {name: step(p, grad, norm) for (name, p), grad in zip(params.items(), grads, strict=True)}
    return params


def flat(tensors):
    row = torch.cat([tensor.flatten() for tensor in tensors])
    return F.pad(row, (0, -row.numel() % dist.get_world_size()))


def zero_train(x, target, **params):
    world, rank = dist.get_world_size(), dist.get_rank()
    for _ in range(2):
        grads = flat(gradients(x, target, params))
        own = grads.new_empty(grads.numel() // world)
        dist.reduce_scatter_tensor(own, grads)
        own /= world
        square = own.square().sum()
        dist.all_reduce(square)
        row = torch.empty_like(grads)
        dist.all_gather_into_tensor(row, step(flat(params.values()).chunk(world)[rank], own, square.sqrt()))
        sizes = [p.numel() for p in params.values()]
        parts = row[: sum(sizes)].split(sizes)
        params = {name: part.view(SHAPES[name]) for name, part in zip(params, parts, strict=True)}
    return params


@gg.check
def clipped_flat_step():
    rows = gg.Input((BATCH, HIDDEN), Shard(0))
    return gg.verify(
        train,
        zero_train,
        mesh={"dp": 4},
        inputs={"x": rows, "target": rows, **{name: gg.Input(shape) for name, shape in SHAPES.items()}},
        outputs=dict.fromkeys(SHAPES, Replicate()),
    )
