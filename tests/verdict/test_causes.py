"""One finding for each cause: what it spoils is folded, its places are distinct, and its repair is proved."""

import json

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import line_of

import graphguard as gg
from graphguard import Replicate, Shard
from graphguard.checks.check import Check, Outcome
from graphguard.graph.paths import folded, in_words
from graphguard.render.github import github
from graphguard.render.sarif import sarif

LAYERS, WRONG = 6, 3
NAMES = [f"{kind}{layer}" for layer in range(LAYERS) for kind in "ab"]


class Copied(torch.autograd.Function):
    """To every rank as it is; the gradients of all are summed."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


def trained(block, x, weights):
    weights = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    for layer in range(LAYERS):
        x = x + block(layer, x, weights[f"a{layer}"], weights[f"b{layer}"])
    loss = x.square().sum()
    loss.backward()
    grads = {str(n): {kind: weights[f"{kind}{n}"].grad for kind in "ab"} for n in range(LAYERS)}
    return {"loss": loss.detach(), "grads": grads}


def sequential(x, **weights):
    return trained(lambda layer, h, a, b: torch.tanh(h @ a) @ b, x, weights)


def parallel(layer, h, a, b):
    return Summed.apply(torch.tanh(Copied.apply(h) @ a) @ b)


def ranks(x, **weights):
    return trained(parallel, x, weights)


def of_wrong_block(layer, h, a, b):
    if layer == WRONG:
        return torch.tanh(Copied.apply(h) @ a) @ b  # never summed
    return parallel(layer, h, a, b)


def wrong_ranks(x, **weights):
    return trained(of_wrong_block, x, weights)


INPUTS = {"x": gg.Input((2, 4))} | {
    name: gg.Input((4, 6), Shard(1)) if name[0] == "a" else gg.Input((6, 4), Shard(0)) for name in NAMES
}


def verified(distributed):
    return gg.verify(sequential, distributed, mesh={"tp": 2}, inputs=INPUTS, outputs={"loss": Replicate()})


def test_many_layers_without_a_fault_verify():
    assert verified(ranks).verdict == "verified"


def test_many_layers_with_one_fault_have_one_finding():
    report = verified(wrong_ranks)
    assert report.verdict == "refuted"
    (finding,) = report.findings
    assert line_of(__file__, "# never summed") in [line.line for line in finding.lines[:2]]
    assert len({line.place for line in finding.lines}) == len(finding.lines)
    assert finding.spoils and finding.output not in finding.spoils
    assert f"{len(finding.spoils)} more outputs are wrong because of it: " in str(report)

    outcome = Outcome(Check("wrong", "model.py", None, "verified"), report, None)
    plain = json.loads(json.dumps({"version": 1, "checks": [outcome.to_plain()]}))
    (run,) = sarif(plain)["runs"]
    assert len(run["results"]) == 1 and len(run["results"][0]["relatedLocations"]) >= len(finding.places)
    assert len(github(plain).splitlines()) == 1


def test_paths_are_folded():
    many = [f"grads.h.{layer}.ln_{n}.{kind}" for layer in range(12) for n in (1, 2) for kind in ("weight", "bias")]
    assert folded(many) == ["grads.h.*.ln_{1,2}.{weight,bias}"]
    assert folded(["loss", "out"]) == ["loss", "out"]
    assert in_words(["a.b", "c", "d", "e", "f"]) == "a.b, c, d and 2 more"


def test_an_exception_that_only_ranks_raise_is_said_first():
    def lookup(ids, table):
        return F.embedding(ids, table)

    def unmasked(ids, table):
        rows = F.embedding(ids - dist.get_rank() * table.shape[0], table)  # outside
        dist.all_reduce(rows)
        return rows

    inputs = {"ids": gg.Input((5,), dtype=torch.int64, low=0, high=8), "table": gg.Input((8, 3), Shard(0))}
    finding = gg.verify(lookup, unmasked, mesh={"tp": 2}, inputs=inputs).findings[0]
    assert finding.distributed.line == line_of(__file__, "# outside")
    assert finding.message.startswith("out: a rank would raise here: index out of range")


def test_what_is_open_does_not_read_like_a_fault():
    def bessel(x):
        return {"y": torch.special.bessel_j0(x), "z": 2 * torch.special.bessel_j0(x)}

    report = gg.verify(bessel, lambda x: bessel(x), mesh={"tp": 2}, inputs={"x": gg.Input((4, 2), Shard(0))})
    assert report.verdict == "unproven"
    (finding,) = report.findings
    assert finding.message.startswith("y: its numbers agree with the sequential program's, and this is not proved")
    assert finding.spoils == ("z",) and "1 more output is open for the same reason: z" in str(report)


def test_only_proved_repairs_are_told():
    def product(x, w):
        return x @ w

    def unsummed(x, w):
        y = x @ w  # a summand
        return y.clone()

    inputs = {"x": gg.Input((4, 6), Shard(1)), "w": gg.Input((6, 3), Shard(0))}
    report = gg.verify(product, unsummed, mesh={"tp": 2}, inputs=inputs, outputs={"out": Replicate()})
    (finding,) = report.findings
    where = f"{finding.distributed.short_file}:{line_of(__file__, '# a summand')}"
    assert finding.repair == f"insert `dist.all_reduce(y)` after {where}"
