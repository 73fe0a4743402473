"""Dropless experts along a fixed routing: which experts a token goes to is a list in the program. Rows are sorted by expert,
exchanged in parts of unequal size, sorted again, and go all the way back."""

from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F

from cases.case import Case, faulty
from cases.leaves import gradients, leaves
from cases.regions import copy_to, reduce_from
from graphguard import Input, Shard

TOKENS, CHOSEN, HIDDEN, INNER, EXPERTS = 8, 2, 4, 6, 4
UNEVEN = [[3, 0], [1, 3], [0, 3], [3, 2], [1, 0], [3, 1], [0, 2], [3, 1]]  # all experts have other numbers of tokens
ONE = [[0, 1]] * TOKENS  # half of the experts have none
TURNS = [[token % EXPERTS, (token + 1) % EXPERTS] for token in range(TOKENS)]


class Exchange(torch.autograd.Function):
    """Parts of these sizes to the ranks of a group; the gradients go back the same way."""

    @staticmethod
    def forward(ctx, x, sent, received, group):
        ctx.sizes = sent, received, group
        return parts_exchanged(x, sent, received, group)

    @staticmethod
    def backward(ctx, grad):
        sent, received, group = ctx.sizes
        return parts_exchanged(grad, received, sent, group), None, None, None


def parts_exchanged(x, sent, received, group):
    out = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out


def expert(x, up, down):
    return F.silu(x @ up) @ down


def as_they_are(gates):
    return gates


def of_their_sum(gates):
    return gates / gates.sum(-1, keepdim=True)


def ended(y, p, dy):
    """The rows and the gradients of an upstream one; without it, a number that all rows are in."""
    if dy is not None:
        return {"y": y.detach(), "grads": gradients(y, p, dy)}
    loss = y.square().sum()
    return {"loss": loss.detach(), "grads": gradients(loss, p)}


# ---------------------------------------------------------------------- on one device
def by_loop(routing, weigh):
    """Each expert takes its tokens, and adds to them."""
    experts = torch.tensor(routing)

    def program(x, router, up, down, dy=None):
        p = leaves({"x": x, "router": router, "up": up, "down": down})
        gates = weigh(torch.softmax(p["x"] @ p["router"], -1).gather(1, experts))
        y = torch.zeros_like(x)
        for number in range(EXPERTS):
            token, slot = torch.where(experts == number)
            rows = expert(p["x"][token], p["up"][number], p["down"][number])
            y = y.index_add(0, token, rows * gates[token, slot].unsqueeze(-1))
        return ended(y, p, dy)

    return program


def by_mask(routing, weigh):
    """Every expert on every token, most of them with weight 0."""
    experts = torch.tensor(routing)

    def program(x, router, up, down, dy=None):
        p = leaves({"x": x, "router": router, "up": up, "down": down})
        probs = torch.softmax(p["x"] @ p["router"], -1)
        gates = weigh(probs * torch.zeros_like(probs).scatter(1, experts, 1.0))
        rows = torch.stack([expert(p["x"], *each) for each in zip(p["up"], p["down"], strict=True)], 1)
        y = torch.einsum("te,teh->th", gates, rows)
        return ended(y, p, dy)

    return program


# ---------------------------------------------------------------------- on ranks
class Way:
    """The way of one rank's rows to the experts of its group, and back."""

    def __init__(self, routing, mesh, local):
        names, ep = mesh.mesh_dim_names, mesh["ep"].size()
        self.group, place = mesh["ep"].get_group(), mesh.get_local_rank("ep")
        copies = mesh.get_local_rank("dp") if "dp" in names else 0
        blocks = torch.tensor(routing).chunk(ep * (mesh["dp"].size() if "dp" in names else 1))
        self.experts = blocks[copies * ep + place]
        counts = [torch.bincount(block.flatten(), minlength=local * ep) for block in blocks[copies * ep :][:ep]]
        mine = torch.stack([each.view(ep, local)[place] for each in counts])  # [source, own expert]
        self.order = self.experts.flatten().argsort(stable=True)
        self.sent, self.received = counts[place].view(ep, local).sum(1).tolist(), mine.sum(1).tolist()
        self.sizes = mine.sum(0).tolist()
        of_source = torch.arange(local).repeat(ep).repeat_interleave(mine.flatten())
        self.by_expert = of_source.argsort(stable=True)

    def there(self, rows):
        return Exchange.apply(rows[self.order // CHOSEN], self.sent, self.received, self.group)[self.by_expert]

    def back(self, rows):
        return Exchange.apply(rows[self.by_expert.argsort()], self.received, self.sent, self.group)

    def weights(self, gates):
        return gates.flatten()[self.order].unsqueeze(-1)


class PutInTheirOrder(Way):
    def back(self, rows):
        rows = rows[self.by_expert]  # fault: the order itself, not its inverse
        return Exchange.apply(rows, self.received, self.sent, self.group)


class WeighedAsTheyCame(Way):
    def weights(self, gates):
        return gates.flatten().unsqueeze(-1)  # fault: rows are sorted by expert, gates are not


class Swapped(Way):
    def there(self, rows):
        rows = rows[self.order // CHOSEN].flip(0)  # fault: rows for the last expert are sent first
        return Exchange.apply(rows, self.sent, self.received, self.group)[self.by_expert]


def summed_over(mesh, found):
    grads = {name: grad.contiguous() for name, grad in found["grads"].items()}
    numbers = [grads["router"]] + ([found["loss"]] if "loss" in found else [])
    for axis in mesh.mesh_dim_names:
        for number in numbers if axis != "tp" else ():
            dist.all_reduce(number, group=mesh[axis].get_group())
    for name in ("up", "down") if "dp" in mesh.mesh_dim_names else ():
        dist.all_reduce(grads[name], group=mesh["dp"].get_group())
    return {**found, "grads": grads}


def dropless(routing, weigh, way=Way, finish=summed_over):
    def program(x, router, up, down, mesh, dy=None):
        tp = mesh["tp"].get_group() if "tp" in mesh.mesh_dim_names else None
        path = way(routing, mesh, up.size(0))
        p = leaves({"x": x, "router": router, "up": up, "down": down})
        gates = weigh(torch.softmax(p["x"] @ p["router"], -1).gather(1, path.experts))
        parts = path.there(p["x"] if tp is None else copy_to(p["x"], tp)).split(path.sizes)
        out = torch.cat([expert(part, p["up"][n], p["down"][n]) for n, part in enumerate(parts)])
        rows = path.back(out if tp is None else reduce_from(out, tp)) * path.weights(gates)
        y = torch.zeros_like(x).index_add(0, path.order // CHOSEN, rows)
        return finish(mesh, ended(y, p, dy))

    return program


# ---------------------------------------------------------------------- cases
def case_of(name, reference, routing, mesh, weigh=as_they_are):
    tokens = {axis: Shard(0) for axis in mesh if axis != "tp"}
    up = {"ep": Shard(0)} | ({"tp": Shard(2)} if "tp" in mesh else {})
    down = {"ep": Shard(0)} | ({"tp": Shard(1)} if "tp" in mesh else {})
    inputs = {
        "x": Input((TOKENS, HIDDEN), tokens), "router": Input((HIDDEN, EXPERTS)), "up": Input((EXPERTS, HIDDEN, INNER), up),
        "down": Input((EXPERTS, INNER, HIDDEN), down), "dy": Input((TOKENS, HIDDEN), tokens),
    }  # fmt: skip
    relation = {"y": tokens, "grads.x": tokens, "grads.router": {}, "grads.up": up, "grads.down": down}
    axes = "-".join(f"{axis}{size}" for axis, size in mesh.items())
    distributed = dropless(routing, weigh)
    return Case(f"fixed-routes-{name}-{axes}", reference(routing, weigh), distributed, mesh, inputs, relation)


def case_with_loss(mesh):
    case = case_of("loss", by_loop, UNEVEN, mesh)
    inputs = {name: spec for name, spec in case.inputs.items() if name != "dy"}
    relation = {"loss": {}, **{path: each for path, each in case.relation.items() if path != "y"}}
    return replace(case, inputs=inputs, relation=relation)


MESHES = ({"ep": 2}, {"ep": 4}, {"ep": 2, "tp": 2}, {"dp": 2, "ep": 2})


def correct():
    for mesh in MESHES:
        yield case_with_loss(mesh)
        yield case_of("loop-uneven", by_loop, UNEVEN, mesh)
        yield case_of("loop-turns", by_loop, TURNS, mesh)
        yield case_of("mask-uneven", by_mask, UNEVEN, mesh)
        yield case_of("mask-one", by_mask, ONE, mesh)
        yield case_of("normalised-uneven", by_loop, UNEVEN, mesh, of_their_sum)
        yield case_of("normalised-mask", by_mask, UNEVEN, mesh, of_their_sum)


def faults():
    base = case_of("", by_loop, UNEVEN, {"ep": 2})
    for name, way, fault in (
        ("inverse", PutInTheirOrder, "the order itself, not its inverse"),
        ("weights", WeighedAsTheyCame, "rows are sorted by expert, gates are not"),
        ("swapped", Swapped, "rows for the last expert are sent first"),
    ):
        yield faulty(base, f"fixed-routes-fault-{name}", dropless(UNEVEN, as_they_are, way), fault)


CASES = [*correct(), *faults()]
