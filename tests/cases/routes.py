"""Ways of tokens to their experts: places in buffers, orders by expert, parts of unequal size."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from cases.case import Case, faulty
from cases.expert import from_experts, mlp, summed, to_experts
from cases.leaves import gradients, leaves
from cases.regions import copy_to, reduce_from
from graphguard import Input, Shard

TOKENS, HIDDEN, INNER, EXPERTS, CAPACITY = 16, 5, 4, 4, 3
SPLIT = {"ep": Shard(0)}


def case_of(name, sequential, distributed, ep, *, router=True, tokens=TOKENS, extra=None, data=SPLIT):
    inputs = {
        "x": Input((tokens, HIDDEN), data),
        "up": Input((EXPERTS, HIDDEN, INNER), SPLIT),
        "down": Input((EXPERTS, INNER, HIDDEN), SPLIT),
        "dy": Input((tokens, HIDDEN), data),
    }
    inputs |= {"router": Input((HIDDEN, EXPERTS))} if router else {}
    relation = {"y": data, "grads.x": data, "grads.up": SPLIT, "grads.down": SPLIT}
    relation |= {"grads.router": {}} if router else {}
    return Case(f"routes-{name}-ep{ep}", sequential, distributed, {"ep": ep}, inputs | (extra or {}), relation)


# ---------------------------------------------------------------------- capacity of each source
def slots_of(logits):
    """logits: [source, token, expert]; each source has its own places at each expert."""
    mask = F.one_hot(logits.argmax(-1), logits.size(-1)).to(logits.dtype)
    place = (mask.cumsum(1) - 1) * mask
    kept = mask * (place < CAPACITY)
    slots = F.one_hot(place.sum(-1).long().clamp(max=CAPACITY - 1), CAPACITY).to(logits.dtype)
    return kept.unsqueeze(-1) * slots.unsqueeze(2)


def by_source(sources):
    def program(x, router, up, down, dy):
        p = leaves({"x": x, "router": router, "up": up, "down": down})
        tokens = p["x"].unflatten(0, (sources, -1))
        logits = tokens @ p["router"]
        slots, gates = slots_of(logits), torch.softmax(logits, -1)
        rows = torch.einsum("stec,sth->esch", slots, tokens).flatten(1, 2)
        rows = mlp(rows, p["up"], p["down"]).unflatten(1, (sources, -1))
        y = torch.einsum("stec,ste,esch->sth", slots, gates, rows).flatten(0, 1)
        return {"y": y.detach(), "grads": gradients(y, p, dy)}

    return program


def by_source_ep(x, router, up, down, dy):
    p = leaves({"x": x, "router": router, "up": up, "down": down})
    logits = (p["x"] @ p["router"]).unsqueeze(0)
    slots, gates = slots_of(logits).squeeze(0), torch.softmax(logits, -1).squeeze(0)
    rows = to_experts(torch.einsum("tec,th->ech", slots, p["x"]), None)
    rows = from_experts(mlp(rows, p["up"], p["down"]), None)
    y = torch.einsum("tec,te,ech->th", slots, gates, rows)
    return {"y": y.detach(), "grads": summed(gradients(y, p, dy), ("router",))}


def dropped_tokens_weighed(x, router, up, down, dy):
    """The reference drops tokens; here what is left of the gates is scaled up for it."""
    p = leaves({"x": x, "router": router, "up": up, "down": down})
    logits = (p["x"] @ p["router"]).unsqueeze(0)
    slots, gates = slots_of(logits).squeeze(0), torch.softmax(logits, -1).squeeze(0)
    rows = to_experts(torch.einsum("tec,th->ech", slots, p["x"]), None)
    rows = from_experts(mlp(rows, p["up"], p["down"]), None)
    share = slots.sum() / slots.size(0)
    y = torch.einsum("tec,te,ech->th", slots, gates, rows) / share  # fault: scaled by the share that was kept
    return {"y": y.detach(), "grads": summed(gradients(y, p, dy), ("router",))}


# ---------------------------------------------------------------------- every expert picks its tokens
def picked_by_experts(x, router, up, down, dy):
    """Expert choice: each expert takes the tokens that fit it best."""
    p = leaves({"x": x, "router": router, "up": up, "down": down})
    scores = torch.softmax(p["x"] @ p["router"], -1).t()
    values, tokens = scores.topk(CAPACITY, -1)
    rows = mlp(p["x"][tokens], p["up"], p["down"]) * values.unsqueeze(-1)
    y = torch.zeros_like(x).index_add(0, tokens.flatten(), rows.flatten(0, 1))
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def picked_by_experts_ep(x, router, up, down, dy):
    """All tokens on each rank, which has its experts' choice alone."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    p = leaves({"x": x, "router": router, "up": up, "down": down})
    scores = torch.softmax(p["x"] @ p["router"], -1).t().chunk(ranks)[rank]
    values, tokens = scores.topk(CAPACITY, -1)
    rows = mlp(p["x"][tokens], p["up"], p["down"]) * values.unsqueeze(-1)
    y = torch.zeros_like(x).index_add(0, tokens.flatten(), rows.flatten(0, 1))
    grads = gradients(y, p, dy)
    y = y.detach()
    dist.all_reduce(y)
    return {"y": y, "grads": summed(grads, ("x", "router"))}


def picked_from_own_tokens(x, router, up, down, dy):
    """The experts choose among the tokens of one rank, with a share of the capacity."""
    p = leaves({"x": x, "router": router, "up": up, "down": down})
    scores = torch.softmax(p["x"] @ p["router"], -1).t()
    values, tokens = scores.topk(1, -1)  # fault: the best of each rank, not the best of all
    rows = torch.einsum("ec,ech->ech", values, p["x"][tokens])
    rows = from_experts(mlp(to_experts(rows, None), p["up"], p["down"]), None)
    y = torch.zeros_like(x).index_add(0, tokens.flatten(), rows.flatten(0, 1))
    return {"y": y.detach(), "grads": summed(gradients(y, p, dy), ("router",))}


# ---------------------------------------------------------------------- experts that are filled up to their capacity
def places_of(gates, capacity):
    """[expert, place]: the tokens that an expert takes, in their order."""
    chosen = gates.topk(capacity, 0, sorted=False).indices  # fault: half of each rank's tokens, not half of all
    taken = torch.zeros_like(gates).scatter(0, chosen, 1.0)
    return taken.t().argsort(dim=-1, descending=True, stable=True)[:, :capacity]


def filled_up(exchange, send_back, share=1):
    """Two experts for each token. Where an expert has a place for every token it has them all, and a gate of 0 for most."""

    def program(x, router, up, down, dy):
        p = leaves({"x": x, "router": router, "up": up, "down": down})
        best, experts = torch.softmax(p["x"] @ p["router"], -1).topk(2, -1)
        gates = torch.zeros(x.size(0), EXPERTS, dtype=x.dtype).scatter(1, experts, best)
        tokens = places_of(gates.detach(), x.size(0) // share)
        rows = send_back(mlp(exchange(p["x"][tokens]), p["up"], p["down"]))
        rows = rows * gates.t().gather(1, tokens).unsqueeze(-1)
        y = torch.zeros_like(x).index_add(0, tokens.flatten(), rows.flatten(0, 1))
        grads = gradients(y, p, dy)
        return {"y": y.detach(), "grads": summed(grads, ("router",)) if dist.is_initialized() else grads}

    return program


def all_here(rows):
    return rows


def filled_up_ep(share=1):
    return filled_up(lambda rows: to_experts(rows, None), lambda rows: from_experts(rows, None), share)


# ---------------------------------------------------------------------- orders by expert
def round_robin(x, up, down, dy):
    """Token t goes to expert t % EXPERTS."""
    p = leaves({"x": x, "up": up, "down": down})
    rows = p["x"].unflatten(0, (-1, EXPERTS)).transpose(0, 1)
    y = mlp(rows, p["up"], p["down"]).transpose(0, 1).flatten(0, 1)
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def round_robin_ep(x, up, down, dy):
    p = leaves({"x": x, "up": up, "down": down})
    rows = to_experts(p["x"].unflatten(0, (-1, EXPERTS)).transpose(0, 1), None)
    y = from_experts(mlp(rows, p["up"], p["down"]), None).transpose(0, 1).flatten(0, 1)
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def round_robin_sorted_ep(x, up, down, dy):
    """By indices: sorted by expert, and put back by the inverse of that order."""
    p = leaves({"x": x, "up": up, "down": down})
    order = torch.arange(x.size(0)).view(-1, EXPERTS).t().flatten()
    back = torch.arange(x.size(0)).view(EXPERTS, -1).t().flatten()
    rows = to_experts(p["x"][order].unflatten(0, (EXPERTS, -1)), None)
    y = from_experts(mlp(rows, p["up"], p["down"]), None).flatten(0, 1)[back]
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def put_back_by_same_order(x, up, down, dy):
    p = leaves({"x": x, "up": up, "down": down})
    order = torch.arange(x.size(0)).view(-1, EXPERTS).t().flatten()
    rows = to_experts(p["x"][order].unflatten(0, (EXPERTS, -1)), None)
    y = from_experts(mlp(rows, p["up"], p["down"]), None).flatten(0, 1)[order]  # fault: the order itself, not its inverse
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def experts_rotated(x, up, down, dy):
    p = leaves({"x": x, "up": up, "down": down})
    rows = to_experts(p["x"].unflatten(0, (-1, EXPERTS)).transpose(0, 1).roll(1, 0), None)  # fault: each to the next expert
    y = from_experts(mlp(rows, p["up"], p["down"]), None).roll(-1, 0).transpose(0, 1).flatten(0, 1)
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


# ---------------------------------------------------------------------- parts of unequal size
COUNTS = (1, 4, 2, 1)  # how many of each 8 tokens go to each expert


class Exchange(torch.autograd.Function):
    """Parts of given sizes; the gradients go back with the sizes swapped."""

    @staticmethod
    def forward(ctx, x, sent, received):
        ctx.sizes = sent, received
        out = x.new_empty(sum(received), x.size(1))
        dist.all_to_all_single(out, x.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(ctx, grad):
        sent, received = ctx.sizes
        out = grad.new_empty(sum(sent), grad.size(1))
        dist.all_to_all_single(out, grad.contiguous(), sent, received)
        return out, None, None


def experts_in_turn(rows, counts, up, down):
    parts = [F.silu(part @ u) @ d for part, u, d in zip(rows.split(counts), up, down, strict=True)]
    return torch.cat(parts)


def unequal(x, up, down, dy):
    """Tokens come in blocks of 8, of each of which the first are of expert 0, and so on."""
    p = leaves({"x": x, "up": up, "down": down})
    outs = [experts_in_turn(block, COUNTS, p["up"], p["down"]) for block in p["x"].split(8)]
    y = torch.cat(outs)
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def unequal_ep_with(regroups):
    def program(x, up, down, dy):
        """One block on each rank."""
        rank, ranks, own = dist.get_rank(), dist.get_world_size(), up.size(0)
        p = leaves({"x": x, "up": up, "down": down})
        sent = [sum(COUNTS[r * own : (r + 1) * own]) for r in range(ranks)]
        mine = COUNTS[rank * own : (rank + 1) * own]
        rows = Exchange.apply(p["x"], sent, [sum(mine)] * ranks)
        rows = regroups(rows, mine, ranks, p)
        y = Exchange.apply(rows, [sum(mine)] * ranks, sent)
        return {"y": y.detach(), "grads": gradients(y, p, dy)}

    return program


def by_expert_and_back(rows, mine, ranks, p):
    """From an order by source to one by expert, and back."""
    blocks = [block.split(mine) for block in rows.split(sum(mine))]
    outs = []
    for expert, (up, down) in enumerate(zip(p["up"], p["down"], strict=True)):
        together = torch.cat([block[expert] for block in blocks])
        outs.append((F.silu(together @ up) @ down).chunk(ranks))
    return torch.cat([outs[expert][source] for source in range(ranks) for expert in range(len(mine))])


def as_if_by_expert(rows, mine, ranks, p):
    counts = [count * ranks for count in mine]
    return experts_in_turn(rows, counts, p["up"], p["down"])  # fault: rows come by source, then by expert


# ---------------------------------------------------------------------- every expert split by columns, then by rows
def blended_with(weigh, copy=lambda x: x, copy_weights=lambda x: x, reduce=lambda x: x):
    """All experts of a token, by weights that come from the same norm; a norm behind them, so that gradients depend on sums."""

    def program(x, router, up, down, dy):
        p = leaves({"x": x, "router": router, "up": up, "down": down})
        h = p["x"] * torch.rsqrt(p["x"].square().mean(-1, keepdim=True) + 1e-6)
        weights = copy_weights(weigh(h @ p["router"]))  # fault: each rank has its part of the gradient
        inner = F.silu(torch.einsum("th,ehi->tei", copy(h), p["up"]))
        outs = torch.einsum("tei,eih->teh", inner, p["down"])
        y = reduce((outs * weights.unsqueeze(-1)).sum(1))
        y = F.rms_norm(p["x"] + y, (HIDDEN,))
        return {"y": y.detach(), "grads": gradients(y, p, dy)}

    return program


def blended_tp_with(weigh, copy_weights):
    return blended_with(weigh, lambda x: copy_to(x, None), copy_weights, lambda x: reduce_from(x, None))


def of_all(logits):
    return torch.softmax(logits, -1)


def of_their_sum(logits):
    weights, _ = torch.softmax(logits, -1).topk(EXPERTS)
    return weights / weights.sum(-1, keepdim=True)


def summed_weights(weights):
    return copy_to(weights, None)


def own_weights(weights):
    return weights


def blended_case(name, weigh, tp, copy_weights=summed_weights):
    inputs = {
        "x": Input((TOKENS, HIDDEN)), "router": Input((HIDDEN, EXPERTS)), "up": Input((EXPERTS, HIDDEN, INNER), Shard(2)),
        "down": Input((EXPERTS, INNER, HIDDEN), Shard(1)), "dy": Input((TOKENS, HIDDEN)),
    }  # fmt: skip
    relation = {"y": {}, "grads.x": {}, "grads.router": {}, "grads.up": {"tp": Shard(2)}, "grads.down": {"tp": Shard(1)}}
    distributed = blended_tp_with(weigh, copy_weights)
    return Case(f"routes-blended-{name}-tp{tp}", blended_with(weigh), distributed, {"tp": tp}, inputs, relation)


def correct():
    for tp in (2, 4):
        yield blended_case("softmax", of_all, tp)
        yield blended_case("renormalised", of_their_sum, tp)
    for ep in (2, 4):
        yield case_of("sources", by_source(ep), by_source_ep, ep)
        yield case_of("experts-choice", picked_by_experts, picked_by_experts_ep, ep, data={})
        yield case_of("filled-up", filled_up(all_here, all_here), filled_up_ep(), ep)
        yield case_of("round-robin", round_robin, round_robin_ep, ep, router=False)
        yield case_of("round-robin-sorted", round_robin, round_robin_sorted_ep, ep, router=False)
        yield case_of("unequal", unequal, unequal_ep_with(by_expert_and_back), ep, router=False, tokens=8 * ep)


def faults():
    base = blended_case("", of_all, 2)
    yield faulty(base, "routes-fault-weights", blended_tp_with(of_all, own_weights), "each rank has its part of the gradient")
    base = case_of("", by_source(2), None, 2)
    yield faulty(base, "routes-fault-share", dropped_tokens_weighed, "scaled by the share that was kept")
    base = case_of("", filled_up(all_here, all_here, share=2), None, 2)
    yield faulty(base, "routes-fault-capacity", filled_up_ep(share=2), "half of each rank's tokens, not half of all")
    base = case_of("", picked_by_experts, None, 2)
    yield faulty(base, "routes-fault-choice", picked_from_own_tokens, "the best of each rank, not the best of all")
    base = case_of("", round_robin, None, 2, router=False)
    yield faulty(base, "routes-fault-inverse", put_back_by_same_order, "the order itself, not its inverse")
    yield faulty(base, "routes-fault-next", experts_rotated, "each to the next expert")
    base = case_of("", unequal, None, 2, router=False)
    yield faulty(base, "routes-fault-grouping", unequal_ep_with(as_if_by_expert), "rows come by source, then by expert")


CASES = [*correct(), *faults()]
