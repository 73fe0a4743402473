"""Expert parallelism: tokens travel to the ranks that hold their experts, and back."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from cases.case import Case, faulty
from cases.leaves import gradients, leaves
from cases.regions import copy_to, reduce_from
from graphguard import Input, Shard

TOKENS, HIDDEN, INNER, EXPERTS = 16, 5, 6, 8
EXPERT_WEIGHTS = ("up", "down")


class AllToAll(torch.autograd.Function):
    """Equal parts of the first dim, one for each rank; the gradients go back the same way."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return parts_exchanged(x, group)

    @staticmethod
    def backward(ctx, grad):
        return parts_exchanged(grad, ctx.group), None


def parts_exchanged(x, group):
    x = x.contiguous()
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out


def exchanged(x, group):
    return AllToAll.apply(x, group)


def total(value, group=None):
    value = value.detach().clone()
    dist.all_reduce(value, group=group)
    return value


def summed(grads, names, group=None):
    return {name: total(grad, group) if name in names else grad for name, grad in grads.items()}


def mlp(x, up, down):
    """x: [expert, row, hidden], a weight for each expert."""
    return torch.bmm(F.silu(torch.bmm(x, up)), down)


# ---------------------------------------------------------------------- dispatch by a dense mask
def to_experts(rows, group):
    """[expert, row, hidden] of this rank's tokens -> [own expert, row of any rank, hidden]."""
    ranks = dist.get_world_size(group)
    rows = exchanged(rows, group).unflatten(0, (ranks, -1))
    return rows.transpose(0, 1).flatten(1, 2)


def from_experts(rows, group):
    """The way back."""
    ranks = dist.get_world_size(group)
    rows = rows.unflatten(1, (ranks, -1)).transpose(0, 1).flatten(0, 1)
    return exchanged(rows, group)


def soft_moe(x, router, up, down, dy):
    """Every expert sees every token, weighted by the router: nothing is dropped."""
    p = leaves({"x": x, "router": router, "up": up, "down": down})
    gates = torch.softmax(p["x"] @ p["router"], -1)
    rows = torch.einsum("te,th->eth", gates, p["x"])
    y = mlp(rows, p["up"], p["down"]).sum(0)
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def soft_moe_ep(x, router, up, down, dy):
    p = leaves({"x": x, "router": router, "up": up, "down": down})
    gates = torch.softmax(p["x"] @ p["router"], -1)
    rows = to_experts(torch.einsum("te,th->eth", gates, p["x"]), None)
    y = from_experts(mlp(rows, p["up"], p["down"]), None).sum(0)
    return {"y": y.detach(), "grads": summed(gradients(y, p, dy), ("router",))}


def top1_mask(logits):
    """[token, expert]: 1 at the expert of each token."""
    return F.one_hot(logits.argmax(-1), logits.size(-1)).to(logits.dtype)


def top2_gates(logits):
    """[token, expert]: the two largest probabilities of each token, made to sum to 1."""
    values, experts = torch.softmax(logits, -1).topk(2, -1)
    values = values / values.sum(-1, keepdim=True)
    return torch.zeros_like(logits).scatter(-1, experts, values)


def topk_gates(logits, k):
    values, experts = logits.topk(k, -1)
    return torch.zeros_like(logits).scatter(-1, experts, torch.softmax(values, -1))


def masked_moe_with(gates_of):
    """Each expert has a row for each token, zero where the token is not its own."""

    def masked_moe(x, router, up, down, dy):
        p = leaves({"x": x, "router": router, "up": up, "down": down})
        gates = gates_of(p["x"] @ p["router"])
        rows = torch.einsum("te,th->eth", (gates > 0).to(x.dtype), p["x"])
        y = torch.einsum("te,eth->th", gates, mlp(rows, p["up"], p["down"]))
        return {"y": y.detach(), "grads": gradients(y, p, dy)}

    return masked_moe


def masked_moe_ep_with(gates_of):
    def masked_moe_ep(x, router, up, down, dy):
        p = leaves({"x": x, "router": router, "up": up, "down": down})
        gates = gates_of(p["x"] @ p["router"])
        rows = to_experts(torch.einsum("te,th->eth", (gates > 0).to(x.dtype), p["x"]), None)
        y = torch.einsum("te,eth->th", gates, from_experts(mlp(rows, p["up"], p["down"]), None))
        return {"y": y.detach(), "grads": summed(gradients(y, p, dy), ("router",))}

    return masked_moe_ep


def switch_gates(logits):
    return torch.softmax(logits, -1) * top1_mask(logits)


GATES = {"switch": switch_gates, "top2": top2_gates, "top3-then-softmax": lambda logits: topk_gates(logits, 3)}


def tokens_not_returned(x, router, up, down, dy):
    p = leaves({"x": x, "router": router, "up": up, "down": down})
    gates = switch_gates(p["x"] @ p["router"])
    rows = to_experts(torch.einsum("te,th->eth", (gates > 0).to(x.dtype), p["x"]), None)
    rows = mlp(rows, p["up"], p["down"])
    rows = rows.reshape(up.size(0) * dist.get_world_size(), -1, x.size(1))
    y = torch.einsum("te,eth->th", gates, rows)  # fault: the rows are not sent back
    return {"y": y.detach(), "grads": summed(gradients(y, p, dy), ("router",))}


def ranks_not_put_inside(x, router, up, down, dy):
    p = leaves({"x": x, "router": router, "up": up, "down": down})
    gates = switch_gates(p["x"] @ p["router"])
    rows = exchanged(torch.einsum("te,th->eth", (gates > 0).to(x.dtype), p["x"]), None)
    rows = rows.view(up.size(0), -1, x.size(1))  # fault: rows come by rank, not by expert
    rows = mlp(rows, p["up"], p["down"]).view(-1, *gates.shape[:1], x.size(1))
    y = torch.einsum("te,eth->th", gates, exchanged(rows, None))
    return {"y": y.detach(), "grads": summed(gradients(y, p, dy), ("router",))}


def expert_gradients_summed(x, router, up, down, dy):
    p = leaves({"x": x, "router": router, "up": up, "down": down})
    gates = switch_gates(p["x"] @ p["router"])
    rows = to_experts(torch.einsum("te,th->eth", (gates > 0).to(x.dtype), p["x"]), None)
    y = torch.einsum("te,eth->th", gates, from_experts(mlp(rows, p["up"], p["down"]), None))
    grads = gradients(y, p, dy)
    grads = {name: total(grad) for name, grad in grads.items() if name != "x"} | {"x": grads["x"]}  # fault: also of experts
    return {"y": y.detach(), "grads": grads}


def router_gradient_partial(x, router, up, down, dy):
    p = leaves({"x": x, "router": router, "up": up, "down": down})
    gates = switch_gates(p["x"] @ p["router"])  # fault: the gradient of the router is not summed
    rows = to_experts(torch.einsum("te,th->eth", (gates > 0).to(x.dtype), p["x"]), None)
    y = torch.einsum("te,eth->th", gates, from_experts(mlp(rows, p["up"], p["down"]), None))
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def gated_twice(x, router, up, down, dy):
    p = leaves({"x": x, "router": router, "up": up, "down": down})
    gates = switch_gates(p["x"] @ p["router"])
    rows = to_experts(torch.einsum("te,th->eth", gates, p["x"]), None)  # fault: weighted before the expert as well
    y = torch.einsum("te,eth->th", gates, from_experts(mlp(rows, p["up"], p["down"]), None))
    return {"y": y.detach(), "grads": summed(gradients(y, p, dy), ("router",))}


# ---------------------------------------------------------------------- replicated tokens: every rank runs its experts
def masked_moe_local_experts(x, router, up, down, dy):
    """No exchange: all tokens are everywhere, each rank adds what its experts make of them."""
    p = leaves({"x": x, "router": router, "up": up, "down": down})
    gates = switch_gates(p["x"] @ p["router"])
    own = copy_to(gates, None).chunk(dist.get_world_size(), -1)[dist.get_rank()]
    rows = torch.einsum("te,th->eth", (own > 0).to(x.dtype), copy_to(p["x"], None))
    y = reduce_from(torch.einsum("te,eth->th", own, mlp(rows, p["up"], p["down"])), None)
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def gates_without_copy(x, router, up, down, dy):
    p = leaves({"x": x, "router": router, "up": up, "down": down})
    gates = switch_gates(p["x"] @ p["router"])
    own = gates.chunk(dist.get_world_size(), -1)[dist.get_rank()]  # fault: the gradients of the other gates are missing
    rows = torch.einsum("te,th->eth", (own > 0).to(x.dtype), copy_to(p["x"], None))
    y = reduce_from(torch.einsum("te,eth->th", own, mlp(rows, p["up"], p["down"])), None)
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


# ---------------------------------------------------------------------- capacity
def capacity_slots(logits, capacity):
    """[token, expert, slot]: one-hot, zero for the tokens that found their expert full."""
    mask = top1_mask(logits)
    place = (mask.cumsum(0) - 1) * mask
    kept = mask * (place < capacity)
    slots = F.one_hot(place.sum(-1).long().clamp(max=capacity - 1), capacity).to(logits.dtype)
    return kept.unsqueeze(-1) * slots.unsqueeze(1)


def capacity_moe_with(parts, capacity):
    """The tokens in as many parts as there are ranks, each with its own capacity, as the ranks will have it."""

    def capacity_moe(x, router, up, down, dy):
        p = leaves({"x": x, "router": router, "up": up, "down": down})
        outs = []
        for tokens in p["x"].chunk(parts):
            logits = tokens @ p["router"]
            slots = capacity_slots(logits, capacity)
            rows = torch.einsum("tec,th->ech", slots, tokens)
            gates = torch.softmax(logits, -1)
            outs.append(torch.einsum("tec,te,ech->th", slots, gates, mlp(rows, p["up"], p["down"])))
        y = torch.cat(outs)
        return {"y": y.detach(), "grads": gradients(y, p, dy)}

    return capacity_moe


def capacity_moe_ep_with(capacity):
    def capacity_moe_ep(x, router, up, down, dy):
        p = leaves({"x": x, "router": router, "up": up, "down": down})
        logits = p["x"] @ p["router"]
        slots = capacity_slots(logits, capacity)
        rows = to_experts(torch.einsum("tec,th->ech", slots, p["x"]), None)
        gates = torch.softmax(logits, -1)
        rows = from_experts(mlp(rows, p["up"], p["down"]), None)
        y = torch.einsum("tec,te,ech->th", slots, gates, rows)
        return {"y": y.detach(), "grads": summed(gradients(y, p, dy), ("router",))}

    return capacity_moe_ep


def capacity_moe_all_experts(x, router, up, down, dy):
    """Replicated tokens, so that the routing is the same everywhere; each rank fills the slots of its own experts."""
    p = leaves({"x": x, "router": router, "up": up, "down": down})
    rank, ranks = dist.get_rank(), dist.get_world_size()
    logits = p["x"] @ p["router"]
    slots = capacity_slots(logits, CAPACITY).chunk(ranks, 1)[rank]
    gates = copy_to(torch.softmax(logits, -1), None).chunk(ranks, 1)[rank]
    rows = torch.einsum("tec,th->ech", slots, copy_to(p["x"], None))
    y = reduce_from(torch.einsum("tec,te,ech->th", slots, gates, mlp(rows, p["up"], p["down"])), None)
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


CAPACITY = 3


def slots_counted_per_rank(x, router, up, down, dy):
    """The reference counts the slots over all tokens; here each rank begins at 0."""
    p = leaves({"x": x, "router": router, "up": up, "down": down})
    logits = p["x"] @ p["router"]
    slots = capacity_slots(logits, CAPACITY)  # fault: places are counted from 0 on every rank
    rows = to_experts(torch.einsum("tec,th->ech", slots, p["x"]), None)
    gates = torch.softmax(logits, -1)
    y = torch.einsum("tec,te,ech->th", slots, gates, from_experts(mlp(rows, p["up"], p["down"]), None))
    return {"y": y.detach(), "grads": summed(gradients(y, p, dy), ("router",))}


# ---------------------------------------------------------------------- cases
def moe_case(name, sequential, distributed, ep, *, tokens=TOKENS, experts=EXPERTS, split=True):
    data, owned = ({"ep": Shard(0)} if split else {}), {"ep": Shard(0)}
    inputs = {
        "x": Input((tokens, HIDDEN), data),
        "router": Input((HIDDEN, experts)),
        "up": Input((experts, HIDDEN, INNER), owned),
        "down": Input((experts, INNER, HIDDEN), owned),
        "dy": Input((tokens, HIDDEN), data),
    }
    relation = {"y": data, "grads.x": data, "grads.router": {}, "grads.up": owned, "grads.down": owned}
    return Case(f"expert-{name}-ep{ep}", sequential, distributed, {"ep": ep}, inputs, relation)


def dense_cases():
    for ep in (2, 4):
        yield moe_case("soft", soft_moe, soft_moe_ep, ep)
        for name, gates in GATES.items():
            yield moe_case(name, masked_moe_with(gates), masked_moe_ep_with(gates), ep)
        yield moe_case("one-each", masked_moe_with(switch_gates), masked_moe_ep_with(switch_gates), ep, experts=ep)
        yield moe_case("local", masked_moe_with(switch_gates), masked_moe_local_experts, ep, split=False)
        yield moe_case("capacity", capacity_moe_with(ep, CAPACITY), capacity_moe_ep_with(CAPACITY), ep)
        yield moe_case("capacity-local", capacity_moe_with(1, CAPACITY), capacity_moe_all_experts, ep, split=False)


def dense_faults():
    base = moe_case("", masked_moe_with(switch_gates), soft_moe_ep, 2, experts=4)
    local = moe_case("", masked_moe_with(switch_gates), soft_moe_ep, 2, split=False)
    capacity = moe_case("", capacity_moe_with(1, CAPACITY), soft_moe_ep, 2)
    yield faulty(base, "expert-fault-not-returned", tokens_not_returned, "the rows are not sent back")
    yield faulty(base, "expert-fault-by-rank", ranks_not_put_inside, "rows come by rank, not by expert")
    yield faulty(base, "expert-fault-summed", expert_gradients_summed, "also of experts")
    yield faulty(
        base, "expert-fault-router", router_gradient_partial, "the gradient of the router is not summed", stated=("*",)
    )
    yield faulty(base, "expert-fault-gated-twice", gated_twice, "weighted before the expert as well")
    yield faulty(local, "expert-fault-no-copy", gates_without_copy, "the gradients of the other gates are missing")
    yield faulty(capacity, "expert-fault-slots", slots_counted_per_rank, "places are counted from 0 on every rank")


CASES = [*dense_cases(), *dense_faults()]
