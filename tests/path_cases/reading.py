"""Programs that read values: proof cases along paths, which `python -m graphguard.mutate.campaign --cases tests/path_cases`
changes. They are verified as they are."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases.case import Case
from cases.fixed_routes import Exchange, expert
from cases.regions import copy_to, reduce_from

from graphguard import Input, Shard

TOKENS, CHOSEN, HIDDEN, WIDTH, EXPERTS = 8, 2, 3, 4, 4


# ---------------------------------------------------------------------- dropless experts
def gradients(y, parameters, dy):
    return dict(zip(parameters, torch.autograd.grad(y, list(parameters.values()), dy), strict=True))


def leaves(**tensors):
    return {name: tensor.requires_grad_() for name, tensor in tensors.items()}


def routed(x, router):
    return torch.softmax(x @ router, -1).topk(CHOSEN, -1)


def by_loop(x, router, up, down, dy):
    parameters = leaves(x=x, router=router, up=up, down=down)
    gates, chosen = routed(x, router)
    y = torch.zeros_like(x)
    for e in range(EXPERTS):
        token, slot = torch.where(chosen == e)
        y = y.index_add(0, token, expert(x[token], up[e], down[e]) * gates[token, slot].unsqueeze(-1))
    return {"y": y.detach(), "grads": gradients(y, parameters, dy)}


def exchanged(x, router, up, down, dy, mesh):
    """Rows go to the ranks of their experts. The experts' weights may be split over `tp`, and the tokens over `dp`, too."""
    group, axes = mesh["ep"].get_group(), mesh.mesh_dim_names
    tp = mesh["tp"].get_group() if "tp" in axes else None
    ranks, local = dist.get_world_size(group), up.size(0)
    parameters = leaves(x=x, router=router, up=up, down=down)
    gates, chosen = routed(x, router)
    order = torch.argsort(chosen.flatten(), stable=True)
    counts = F.one_hot(chosen.flatten(), EXPERTS).sum(0)
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts, group=group)
    mine = theirs.view(ranks, local)
    sent, received = counts.view(ranks, local).sum(1).tolist(), mine.sum(1).tolist()
    rows = (x if tp is None else copy_to(x, tp))[order // CHOSEN]
    rows = Exchange.apply(rows, sent, received, group)
    regroup = torch.argsort(torch.arange(local).repeat(ranks).repeat_interleave(mine.flatten()), stable=True)
    parts = rows[regroup].split(mine.sum(0).tolist())
    out = torch.cat([expert(part, up[e], down[e]) for e, part in enumerate(parts)])
    out = out if tp is None else reduce_from(out, tp)
    out = Exchange.apply(out[torch.argsort(regroup)], received, sent, group)
    weights = gates.flatten()[order].unsqueeze(-1)
    y = torch.zeros_like(x).index_add(0, order // CHOSEN, out * weights)
    return {"y": y.detach(), "grads": summed_over(mesh, gradients(y, parameters, dy))}


def summed_over(mesh, grads):
    grads = {name: grad.contiguous() for name, grad in grads.items()}
    for axis in mesh.mesh_dim_names:
        for name in {"ep": ["router"], "dp": ["router", "up", "down"], "tp": []}[axis]:
            dist.all_reduce(grads[name], group=mesh[axis].get_group())
    return grads


def dropless(mesh):
    tokens = {axis: Shard(0) for axis in mesh if axis != "tp"}
    up = {"ep": Shard(0)} | ({"tp": Shard(2)} if "tp" in mesh else {})
    down = {"ep": Shard(0)} | ({"tp": Shard(1)} if "tp" in mesh else {})
    inputs = {
        "x": Input((TOKENS, HIDDEN), tokens), "router": Input((HIDDEN, EXPERTS)), "dy": Input((TOKENS, HIDDEN), tokens),
        "up": Input((EXPERTS, HIDDEN, WIDTH), up), "down": Input((EXPERTS, WIDTH, HIDDEN), down),
    }  # fmt: skip
    relation = {"y": tokens, "grads.x": tokens, "grads.router": {}, "grads.up": up, "grads.down": down}
    name = "-".join(["dropless", *(f"{axis}{size}" for axis, size in mesh.items())])
    return Case(name, by_loop, exchanged, mesh, inputs, relation, relation)


# ---------------------------------------------------------------------- rows that are picked
def picked(x, w):
    rows = (x.sum(-1) > 0).nonzero().flatten()
    return torch.zeros_like(x).index_add(0, rows, torch.relu(x[rows] @ w))


def picked_by_mask(x, w):
    chosen = x.sum(-1) > 0
    y = torch.zeros_like(x)
    y[chosen] = torch.relu(x[chosen] @ w)
    return y


def rows_picked():
    inputs = {"x": Input((6, 4), {"dp": Shard(0)}), "w": Input((4, 4))}
    relation = {"out": {"dp": Shard(0)}}
    return Case("rows-picked", picked, picked_by_mask, {"dp": 2}, inputs, relation, relation)


def kept(x, w):
    return (x[x.sum(-1) > 0] @ w).tanh().sum(0)


def kept_of_all(x, w):
    rows = x[x.sum(-1) > 0]
    count = torch.tensor([rows.size(0)])
    counts = [torch.empty_like(count) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, count)
    padded = torch.zeros(max(map(int, counts)), x.size(1)).index_copy(0, torch.arange(rows.size(0)), rows)
    every = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(every, padded)
    return (torch.cat([each[: int(n)] for each, n in zip(every, counts, strict=True)]) @ w).tanh().sum(0)


def rows_counted():
    inputs = {"x": Input((6, 4), {"dp": Shard(0)}), "w": Input((4, 4))}
    return Case("rows-counted", kept, kept_of_all, {"dp": 2}, inputs, {"out": {}}, {"out": {}})


# ---------------------------------------------------------------------- branches
def clipped(x, w):
    y = torch.tanh(x @ w)
    size = y.square().sum()
    return y / size if size > 4 else y


def clipped_by_all(x, w):
    y = torch.tanh(x @ w)
    size = y.square().sum()
    dist.all_reduce(size)
    return y / size if size > 4 else y


def branch():
    inputs = {"x": Input((3, 4)), "w": Input((4, 4), {"tp": Shard(1)})}
    relation = {"out": {"tp": Shard(1)}}
    return Case("branch", clipped, clipped_by_all, {"tp": 2}, inputs, relation, relation)


MESHES = ({"ep": 2}, {"ep": 4}, {"ep": 2, "tp": 2}, {"dp": 2, "ep": 2})
CASES = [*map(dropless, MESHES), rows_picked(), rows_counted(), branch()]
