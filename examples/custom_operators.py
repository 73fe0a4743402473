"""Fused kernels: two operators of the user's own under tensor parallelism, each with a lemma of one line."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from graphguard import Shard


@torch.library.custom_op("mylib::rms_norm", mutates_args=())
def rms_norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w


@torch.library.custom_op("mylib::swiglu", mutates_args=())
def swiglu(g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    return F.silu(g) * u


rms_norm.register_fake(lambda x, w: torch.empty_like(x))
swiglu.register_fake(lambda g, u: torch.empty_like(g))

gg.lemma("mylib::rms_norm", "... h, h -> ... h", whole="h")
gg.lemma("mylib::swiglu", lambda g, u: F.silu(g) * u)


def mlp(x, norm, gate, up, down):
    x = rms_norm(x, norm)
    return swiglu(x @ gate, x @ up) @ down


def tp_mlp(x, norm, gate, up, down):
    y = mlp(x, norm, gate, up, down)
    dist.all_reduce(y)
    return y


@gg.check
def custom_operators():
    return gg.verify(
        mlp,
        tp_mlp,
        mesh={"tp": 4},
        inputs={
            "x": gg.Input((8, 16)),
            "norm": gg.Input((16,)),
            "gate": gg.Input((16, 64), Shard(1)),
            "up": gg.Input((16, 64), Shard(1)),
            "down": gg.Input((64, 16), Shard(0)),
        },
    )
