"""What is treated otherwise than its like is named: the same parameter of other layers, or those that are named like it."""

import torch
import torch.distributed as dist
from torch import nn

import graphguard as gg
from graphguard.verdict.siblings import odd_ones

LAYERS = 4


def test_one_layer_that_is_treated_otherwise_is_named():
    treated = {f"layers.{n}.k_proj.weight": "whole" if n == 2 else "Shard(0) on tp" for n in range(6)}
    assert odd_ones(treated) == ["layers.2.k_proj.weight is whole, and the others of layers.*.k_proj.weight are Shard(0) on tp"]
    assert odd_ones({f"layers.{n}.k_proj.weight": "Shard(0) on tp" for n in range(6)}) == []
    assert odd_ones({f"layers.{n}.w": "whole" if n % 2 else "Shard(0) on tp" for n in range(6)}) == []  # which is odd?


def test_one_of_several_that_are_named_alike_is_named():
    how = {"q_proj": "Shard(0) on tp", "k_proj": "whole", "v_proj": "Shard(0) on tp", "o_proj": "Shard(1) on tp"}
    treated = {f"layers.{n}.{name}.weight": how[name] for n in range(2) for name in how}
    assert odd_ones(treated) == [
        "layers.*.k_proj.weight is whole, and layers.*.{q_proj,v_proj,o_proj}.weight are Shard(0) on tp or Shard(1) on tp"
    ]
    both = treated | {f"layers.{n}.v_proj.weight": "whole" for n in range(2)}  # fewer heads of keys and values than ranks
    assert odd_ones(both) == []


class Summed(torch.autograd.Function):
    """The gradient of a weight that all ranks have."""

    @staticmethod
    def forward(ctx, weight):
        return weight.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Scale(nn.Module):
    def __init__(self, summed=None):
        super().__init__()
        self.weight, self.summed = nn.Parameter(torch.ones(6)), summed

    def forward(self, x):
        return x * (Summed.apply(self.weight) if self.summed else self.weight)


class Scales(nn.Module):
    def __init__(self, unsummed=None, summed=False):
        super().__init__()
        self.k_norm = nn.ModuleList(Scale(summed and n != unsummed) for n in range(LAYERS))

    def forward(self, x):
        for norm in self.k_norm:
            x = norm(x)
        return x


def check_of_norms(unsummed):
    def loss(model, x):
        return model(x).square().sum()

    inputs = {"x": gg.Input((4, 6), gg.Shard(0))}
    step = gg.train_step(loss, loss=gg.Partial())
    return gg.verify_model(Scales, lambda mesh: Scales(unsummed, True), mesh={"tp": 2}, inputs=inputs, step=step)


def test_a_gradient_that_is_not_summed_is_named_among_its_like():
    assert check_of_norms(None).verified
    report = check_of_norms(1)
    (finding,) = report.findings
    assert finding.odd == (
        "grads.k_norm.1.weight is a sum over tp that nothing adds up, "
        "and the others of grads.k_norm.*.weight are whole on every rank",
    )
    assert f"unlike the others: {finding.odd[0]}" in str(report)


class Mlp(nn.Module):
    def __init__(self, size=1, sums=False):
        super().__init__()
        self.up, self.down, self.sums = nn.Linear(6, 8 // size, bias=False), nn.Linear(8 // size, 6, bias=False), sums

    def forward(self, x):
        y = self.down(torch.relu(self.up(x)))
        if self.sums:
            dist.all_reduce(y)
        return y


def test_a_layer_that_a_table_of_sizes_forgets_is_named():
    def parallel(mesh):
        sizes = {n: mesh.size() for n in range(LAYERS) if n != 2}
        return nn.Sequential(*(Mlp(sizes.get(n, 1), True) for n in range(LAYERS)))

    sequential = lambda: nn.Sequential(*(Mlp() for _ in range(LAYERS)))
    report = gg.verify_model(sequential, parallel, mesh={"tp": 2}, inputs={"input": gg.Input((4, 6))})
    assert report.verdict == "refuted"
    assert report.findings[0].odd == (
        "2.up.weight is whole, and the others of *.up.weight are Shard(0) on tp",
        "2.down.weight is whole, and the others of *.down.weight are Shard(1) on tp",
    )
