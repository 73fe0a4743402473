"""Experts in a whole step: losses that balance them, a shared expert, groups of experts, meshes with data and tensor axes."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from cases.case import Case, faulty
from cases.expert import from_experts, mlp, summed, switch_gates, to_experts, top1_mask, total
from cases.leaves import gradients, leaves
from cases.regions import copy_to, reduce_from
from graphguard import Input, Shard

TOKENS, HIDDEN, INNER = 8, 5, 4
BALANCE, CALM = 0.01, 0.001


# ---------------------------------------------------------------------- losses of the router
def balance(fractions, probabilities):
    """Switch: the number of experts, times how often each is chosen, times how likely it is."""
    return fractions.numel() * (fractions * probabilities).sum()


def routed(p, x):
    gates = switch_gates(x @ p["router"])
    rows = torch.einsum("te,th->eth", (gates > 0).to(x.dtype), x)
    return torch.einsum("te,eth->th", gates, mlp(rows, p["up"], p["down"]))


def routed_ep(p, x, group=None):
    gates = switch_gates(x @ p["router"])
    rows = to_experts(torch.einsum("te,th->eth", (gates > 0).to(x.dtype), x), group)
    return torch.einsum("te,eth->th", gates, from_experts(mlp(rows, p["up"], p["down"]), group))


def balanced(x, t, **params):
    p = leaves(params)
    logits = x @ p["router"]
    loss = (routed(p, x) - t).square().mean()
    auxiliary = balance(top1_mask(logits).mean(0), torch.softmax(logits, -1).mean(0))
    calm = torch.logsumexp(logits, -1).square().mean()
    loss = loss + BALANCE * auxiliary + CALM * calm
    return {"loss": loss.detach(), "auxiliary": auxiliary.detach(), "calm": calm.detach(), "grads": gradients(loss, p)}


def balanced_ep_with(auxiliary_of, calm_of=lambda logits: torch.logsumexp(logits, -1).square().mean()):
    """Means over this rank's tokens, which are averaged; experts see the tokens of all ranks, so theirs are complete."""

    def program(x, t, **params):
        p, ranks = leaves(params), dist.get_world_size()
        logits = x @ p["router"]
        auxiliary, calm = auxiliary_of(logits), calm_of(logits)
        loss = ((routed_ep(p, x) - t).square().mean() + BALANCE * auxiliary + CALM * calm) / ranks
        return {
            "loss": total(loss), "auxiliary": total(auxiliary) / ranks, "calm": total(calm) / ranks,
            "grads": summed(gradients(loss, p), ("router",)),
        }  # fmt: skip

    return program


def with_global_fractions(logits):
    """How often an expert is chosen is counted over all ranks; the probabilities are averaged with the loss."""
    fractions = total(top1_mask(logits).sum(0)) / (logits.size(0) * dist.get_world_size())
    return balance(fractions, torch.softmax(logits, -1).mean(0))


def with_averaged_fractions(logits):
    fractions = top1_mask(logits).mean(0)
    dist.all_reduce(fractions, op=dist.ReduceOp.AVG)
    return balance(fractions, torch.softmax(logits, -1).mean(0))


def with_global_probabilities(logits):
    """Both are means over all tokens; the gradient of a mean over the ranks passes to each."""
    ranks = dist.get_world_size()
    fractions = total(top1_mask(logits).mean(0)) / ranks
    probabilities = torch.softmax(logits, -1).mean(0)
    return balance(fractions, probabilities + (total(probabilities) / ranks - probabilities).detach())


def with_local_fractions(logits):
    return balance(top1_mask(logits).mean(0), torch.softmax(logits, -1).mean(0))  # fault: a product of this rank's means


def with_summed_fractions(logits):
    fractions = total(top1_mask(logits).mean(0))
    return balance(fractions, torch.softmax(logits, -1).mean(0))  # fault: the fractions add up to the number of ranks


def with_counts_of_one_rank(logits):
    fractions = total(top1_mask(logits).sum(0)) / logits.size(0)  # fault: counts of all over the tokens of one
    return balance(fractions, torch.softmax(logits, -1).mean(0))


def calm_by_local_experts(logits):
    own = logits.chunk(dist.get_world_size(), -1)[dist.get_rank()]
    return torch.logsumexp(own, -1).square().mean()  # fault: over the experts of this rank


def calm_of_probabilities(logits):
    return torch.logsumexp(torch.log_softmax(logits, -1) + logits.mean(), -1).square().mean()  # fault: of shifted logits


def balanced_case(name, distributed, ep, experts=4):
    data, owned = {"ep": Shard(0)}, {"ep": Shard(0)}
    inputs = {
        "x": Input((TOKENS, HIDDEN), data),
        "t": Input((TOKENS, HIDDEN), data),
        "router": Input((HIDDEN, experts)),
        "up": Input((experts, HIDDEN, INNER), owned),
        "down": Input((experts, INNER, HIDDEN), owned),
    }
    relation = {"loss": {}, "auxiliary": {}, "calm": {}, "grads.router": {}, "grads.up": owned, "grads.down": owned}
    return Case(f"expert-{name}-ep{ep}", balanced, distributed, {"ep": ep}, inputs, relation)


# ---------------------------------------------------------------------- balance in each sequence
def sequence_balance(logits):
    """logits: [sample, place, expert]; a product of means for each sample."""
    chosen = F.one_hot(logits.argmax(-1), logits.size(-1)).to(logits.dtype).mean(1)
    return logits.size(-1) * (chosen * torch.softmax(logits, -1).mean(1)).sum(-1).mean()


def sequences_balanced(x, router):
    p = leaves({"router": router})
    loss = sequence_balance(x @ p["router"])
    return {"loss": loss.detach(), "grads": gradients(loss, p)}


def sequences_balanced_dp(x, router):
    """Whole sequences on each rank, so that nothing has to be counted together."""
    p = leaves({"router": router})
    loss = sequence_balance(x @ p["router"]) / dist.get_world_size()
    return {"loss": total(loss), "grads": summed(gradients(loss, p), ("router",))}


def sequences_cut(x, router):
    p = leaves({"router": router})
    loss = sequence_balance(x @ p["router"]) / dist.get_world_size()  # fault: a rank has a part of each sequence
    return {"loss": total(loss), "grads": summed(gradients(loss, p), ("router",))}


def sequence_case(name, distributed, dp, dim=0):
    inputs = {"x": Input((4, 8, HIDDEN), {"dp": Shard(dim)}), "router": Input((HIDDEN, 4))}
    return Case(f"expert-{name}-dp{dp}", sequences_balanced, distributed, {"dp": dp}, inputs, {"loss": {}, "grads.router": {}})


# ---------------------------------------------------------------------- ways to choose
def by_threshold(logits, k=2):
    """Whatever is at least the k-th largest."""
    kept = (logits >= logits.topk(k, -1).values[..., -1:]).to(logits.dtype)
    gates = torch.softmax(logits, -1) * kept
    return gates / gates.sum(-1, keepdim=True)


def by_one_hot(logits, k=2):
    """The mask is a sum of one-hot rows, one for each choice."""
    chosen = F.one_hot(logits.topk(k, -1).indices, logits.size(-1)).sum(-2).to(logits.dtype)
    gates = torch.sigmoid(logits) * chosen
    return gates / gates.sum(-1, keepdim=True)


def by_two_arguments(logits):
    """The largest, then the largest of the rest."""
    first = top1_mask(logits)
    second = top1_mask(logits.masked_fill(first > 0, float("-inf")))
    gates = torch.softmax(logits, -1)
    one, two = (gates * first).sum(-1, keepdim=True), (gates * second).sum(-1, keepdim=True)
    return (one * first + two * second) / (one + two)


def by_group(logits, groups=2):
    """Only the experts of the best group may be chosen."""
    scores = torch.softmax(logits, -1).unflatten(-1, (groups, -1))
    best = F.one_hot(scores.amax(-1).argmax(-1), groups).unsqueeze(-1)
    return (scores * best).flatten(-2) * top1_mask((scores * best).flatten(-2))


def with_correction(logits):
    """The choice is corrected by a bias that takes no part in the weights."""
    scores = torch.sigmoid(logits)
    chosen = top1_mask((scores + torch.arange(logits.size(-1)) / 100).detach())
    return scores * chosen


CHOICES = {
    "threshold": by_threshold, "one-hot": by_one_hot, "two-arguments": by_two_arguments, "group": by_group,
    "correction": with_correction,
}  # fmt: skip


def chosen_with(choose):
    def program(x, router, up, down, dy):
        p = leaves({"x": x, "router": router, "up": up, "down": down})
        gates = choose(p["x"] @ p["router"])
        rows = p["x"].expand(up.size(0), -1, -1)
        y = torch.einsum("te,eth->th", gates, mlp(rows, p["up"], p["down"]))
        return {"y": y.detach(), "grads": gradients(y, p, dy)}

    return program


def chosen_ep_with(choose):
    """All tokens go to all experts; the gates keep what was chosen."""

    def program(x, router, up, down, dy):
        p = leaves({"x": x, "router": router, "up": up, "down": down})
        gates = choose(p["x"] @ p["router"])
        rows = to_experts(p["x"].expand(gates.size(-1), -1, -1), None)
        y = torch.einsum("te,eth->th", gates, from_experts(mlp(rows, p["up"], p["down"]), None))
        return {"y": y.detach(), "grads": summed(gradients(y, p, dy), ("router",))}

    return program


def choice_case(name, choose, ep, experts=4):
    data, owned = {"ep": Shard(0)}, {"ep": Shard(0)}
    inputs = {
        "x": Input((TOKENS, HIDDEN), data),
        "router": Input((HIDDEN, experts)),
        "up": Input((experts, HIDDEN, INNER), owned),
        "down": Input((experts, INNER, HIDDEN), owned),
        "dy": Input((TOKENS, HIDDEN), data),
    }
    relation = {"y": data, "grads.x": data, "grads.router": {}, "grads.up": owned, "grads.down": owned}
    programs = chosen_with(choose), chosen_ep_with(choose)
    return Case(f"expert-by-{name}-ep{ep}", *programs, {"ep": ep}, inputs, relation)


# ---------------------------------------------------------------------- a shared expert, and replicas of experts
def shared_of(p, x):
    return F.linear(F.silu(F.linear(x, p["s_up"])), p["s_down"])


def with_shared(x, t, **params):
    p = leaves(params)
    loss = (routed(p, x) + shared_of(p, x) - t).square().mean()
    return {"loss": loss.detach(), "grads": gradients(loss, p)}


DENSE = ("router", "s_up", "s_down")


def with_shared_edp(x, t, mesh, **params):
    """Tokens over both axes; an expert's gradient has the tokens of its ep group, and lacks those of the other groups."""
    p, ep, edp = leaves(params), mesh.get_group("ep"), mesh.get_group("edp")
    loss = (routed_ep(p, x, ep) + shared_of(p, x) - t).square().mean() / dist.get_world_size()
    grads = gradients(loss, p)
    return {"loss": total(loss), "grads": summed(summed(grads, DENSE), ("up", "down"), edp)}


def experts_averaged_by_edp(x, t, mesh, **params):
    p, ep, edp = leaves(params), mesh.get_group("ep"), mesh.get_group("edp")
    loss = (routed_ep(p, x, ep) + shared_of(p, x) - t).square().mean()
    grads = gradients(loss, p)
    grads = {name: total(grad) / dist.get_world_size() if name in DENSE else grad for name, grad in grads.items()}
    for name in ("up", "down"):
        grads[name] = total(grads[name], edp) / dist.get_world_size(edp)  # fault: the tokens of the ep group count as one
    return {"loss": total(loss) / dist.get_world_size(), "grads": grads}


def experts_summed_over_all(x, t, mesh, **params):
    p, ep = leaves(params), mesh.get_group("ep")
    loss = (routed_ep(p, x, ep) + shared_of(p, x) - t).square().mean() / dist.get_world_size()
    grads = gradients(loss, p)
    return {"loss": total(loss), "grads": {name: total(grad) for name, grad in grads.items()}}  # fault: over other experts too


def experts_summed_over_ep(x, t, mesh, **params):
    p, ep = leaves(params), mesh.get_group("ep")
    loss = (routed_ep(p, x, ep) + shared_of(p, x) - t).square().mean() / dist.get_world_size()
    grads = summed(gradients(loss, p), DENSE)
    return {"loss": total(loss), "grads": summed(grads, ("up", "down"), ep)}  # fault: summed over the wrong axis


def shared_not_summed(x, t, mesh, **params):
    p, ep, edp = leaves(params), mesh.get_group("ep"), mesh.get_group("edp")
    shared = shared_of(p, x)  # fault: its gradients are summed over half of the ranks
    loss = (routed_ep(p, x, ep) + shared - t).square().mean() / dist.get_world_size()
    grads = summed(gradients(loss, p), ("router",))
    return {"loss": total(loss), "grads": summed(grads, ("up", "down", "s_up", "s_down"), edp)}


def shared_case(name, distributed, edp, ep, experts=4):
    data, owned = {"edp": Shard(0), "ep": Shard(0)}, {"ep": Shard(0)}
    shapes = {"router": (HIDDEN, experts), "up": (experts, HIDDEN, INNER), "down": (experts, INNER, HIDDEN)}
    shapes |= {"s_up": (INNER, HIDDEN), "s_down": (HIDDEN, INNER)}
    split = {key: owned if key in ("up", "down") else {} for key in shapes}
    inputs = {key: Input((TOKENS, HIDDEN), data) for key in ("x", "t")}
    inputs |= {key: Input(shape, split[key]) for key, shape in shapes.items()}
    relation = {"loss": {}} | {f"grads.{key}": split[key] for key in shapes}
    return Case(f"expert-{name}-{edp}x{ep}", with_shared, distributed, {"edp": edp, "ep": ep}, inputs, relation)


def clipped_shared(x, t, **params):
    grads = with_shared(x, t, **params)["grads"]
    norm = sum(grad.square().sum() for grad in grads.values()).sqrt()
    return {"norm": norm, "grads": {name: grad * torch.clamp(1.0 / (norm + 1e-6), max=1.0) for name, grad in grads.items()}}


def clipped_shared_edp(x, t, mesh, **params):
    """Squares of experts are summed over the ranks that have other experts; the rest is everywhere."""
    grads = with_shared_edp(x, t, mesh, **params)["grads"]
    experts = sum(grads[name].square().sum() for name in ("up", "down"))
    norm = (total(experts, mesh.get_group("ep")) + sum(grads[name].square().sum() for name in DENSE)).sqrt()
    return {"norm": norm, "grads": {name: grad * torch.clamp(1.0 / (norm + 1e-6), max=1.0) for name, grad in grads.items()}}


def clipped_over_all_ranks(x, t, mesh, **params):
    grads = with_shared_edp(x, t, mesh, **params)["grads"]
    experts = sum(grads[name].square().sum() for name in ("up", "down"))
    norm = (total(experts) + sum(grads[name].square().sum() for name in DENSE)).sqrt()  # fault: replicas of experts count again
    return {"norm": norm, "grads": {name: grad * torch.clamp(1.0 / (norm + 1e-6), max=1.0) for name, grad in grads.items()}}


def clip_case(name, distributed, edp, ep):
    base = shared_case("", distributed, edp, ep)
    relation = {"norm": {}} | {path: placed for path, placed in base.relation.items() if path != "loss"}
    return Case(f"expert-{name}-{edp}x{ep}", clipped_shared, distributed, base.mesh, base.inputs, relation)


# ---------------------------------------------------------------------- experts whose weights are split too
def routed_step(x, t, **params):
    p = leaves(params)
    loss = (routed(p, x) - t).square().mean()
    return {"loss": loss.detach(), "grads": gradients(loss, p)}


def routed_step_tp(x, t, mesh, **params):
    """The inner dim of each expert is split; the tokens are the same along tp."""
    p, ep, tp = leaves(params), mesh.get_group("ep"), mesh.get_group("tp")
    gates = switch_gates(x @ p["router"])
    rows = to_experts(torch.einsum("te,th->eth", (gates > 0).to(x.dtype), x), ep)
    rows = reduce_from(mlp(copy_to(rows, tp), p["up"], p["down"]), tp)
    y = torch.einsum("te,eth->th", gates, from_experts(rows, ep))
    loss = (y - t).square().mean() / dist.get_world_size(ep)
    return {"loss": total(loss, ep), "grads": summed(gradients(loss, p), ("router",), ep)}


def routed_step_tp_reduced_late(x, t, mesh, **params):
    """The sum over tp comes after the way back: it is linear in between."""
    p, ep, tp = leaves(params), mesh.get_group("ep"), mesh.get_group("tp")
    gates = switch_gates(x @ p["router"])
    rows = to_experts(torch.einsum("te,th->eth", (gates > 0).to(x.dtype), copy_to(x, tp)), ep)
    rows = from_experts(mlp(rows, p["up"], p["down"]), ep)
    y = reduce_from(torch.einsum("te,eth->th", copy_to(gates, tp), rows), tp)
    loss = (y - t).square().mean() / dist.get_world_size(ep)
    return {"loss": total(loss, ep), "grads": summed(gradients(loss, p), ("router",), ep)}


def reduced_over_experts(x, t, mesh, **params):
    p, ep, tp = leaves(params), mesh.get_group("ep"), mesh.get_group("tp")
    gates = switch_gates(x @ p["router"])
    rows = to_experts(torch.einsum("te,th->eth", (gates > 0).to(x.dtype), x), ep)
    rows = reduce_from(mlp(copy_to(rows, tp), p["up"], p["down"]), ep)  # fault: summed over the ranks of other experts
    y = torch.einsum("te,eth->th", gates, from_experts(rows, ep))
    loss = (y - t).square().mean() / dist.get_world_size(ep)
    return {"loss": total(loss, ep), "grads": summed(gradients(loss, p), ("router",), ep)}


def router_summed_over_tp(x, t, mesh, **params):
    p, ep, tp = leaves(params), mesh.get_group("ep"), mesh.get_group("tp")
    gates = switch_gates(x @ p["router"])
    rows = to_experts(torch.einsum("te,th->eth", (gates > 0).to(x.dtype), x), ep)
    rows = reduce_from(mlp(copy_to(rows, tp), p["up"], p["down"]), tp)
    y = torch.einsum("te,eth->th", gates, from_experts(rows, ep))
    loss = (y - t).square().mean() / dist.get_world_size(ep)
    return {"loss": total(loss, ep), "grads": summed(gradients(loss, p), ("router",))}  # fault: also over equal copies


def gates_not_copied(x, t, mesh, **params):
    p, ep, tp = leaves(params), mesh.get_group("ep"), mesh.get_group("tp")
    gates = switch_gates(x @ p["router"])
    rows = to_experts(torch.einsum("te,th->eth", (gates > 0).to(x.dtype), copy_to(x, tp)), ep)
    rows = from_experts(mlp(rows, p["up"], p["down"]), ep)
    y = reduce_from(torch.einsum("te,eth->th", gates, rows), tp)  # fault: the gates' gradients lack the other ranks' columns
    loss = (y - t).square().mean() / dist.get_world_size(ep)
    return {"loss": total(loss, ep), "grads": summed(gradients(loss, p), ("router",), ep)}


def split_case(name, distributed, ep, tp, experts=4):
    data = {"ep": Shard(0)}
    split = {"router": {}, "up": {"ep": Shard(0), "tp": Shard(2)}, "down": {"ep": Shard(0), "tp": Shard(1)}}
    shapes = {"router": (HIDDEN, experts), "up": (experts, HIDDEN, INNER), "down": (experts, INNER, HIDDEN)}
    inputs = {key: Input((TOKENS, HIDDEN), data) for key in ("x", "t")}
    inputs |= {key: Input(shape, split[key]) for key, shape in shapes.items()}
    relation = {"loss": {}} | {f"grads.{key}": split[key] for key in shapes}
    return Case(f"expert-{name}-{ep}x{tp}", routed_step, distributed, {"ep": ep, "tp": tp}, inputs, relation)


# ---------------------------------------------------------------------- rows picked by given indices
def picked(x, slots, up, down, dy):
    """slots: [expert, slot], the token of each slot, the same for both sides; a token may be in many."""
    p = leaves({"x": x, "up": up, "down": down})
    rows = mlp(p["x"][slots], p["up"], p["down"])
    y = torch.zeros_like(x).index_add(0, slots.flatten(), rows.flatten(0, 1))
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def picked_ep(x, slots, up, down, dy):
    """Tokens are everywhere; a rank picks those of its experts, and the sum puts all in place."""
    p = leaves({"x": x, "up": up, "down": down})
    rows = mlp(copy_to(p["x"], None)[slots], p["up"], p["down"])
    y = reduce_from(torch.zeros_like(x).index_add(0, slots.flatten(), rows.flatten(0, 1)), None)
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def picked_by_first(x, slots, up, down, dy):
    p = leaves({"x": x, "up": up, "down": down})
    dist.broadcast(slots, 0)  # fault: the first rank's slots for all experts
    rows = mlp(copy_to(p["x"], None)[slots], p["up"], p["down"])
    y = reduce_from(torch.zeros_like(x).index_add(0, slots.flatten(), rows.flatten(0, 1)), None)
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def picked_case(name, distributed, ep, experts=4, slots=3):
    owned = {"ep": Shard(0)}
    inputs = {
        "x": Input((TOKENS, HIDDEN)),
        "slots": Input((experts, slots), owned, torch.int64, low=0, high=TOKENS),
        "up": Input((experts, HIDDEN, INNER), owned),
        "down": Input((experts, INNER, HIDDEN), owned),
        "dy": Input((TOKENS, HIDDEN)),
    }
    relation = {"y": {}, "grads.x": {}, "grads.up": owned, "grads.down": owned}
    return Case(f"expert-{name}-ep{ep}", picked, distributed, {"ep": ep}, inputs, relation)


# ---------------------------------------------------------------------- cases
def correct():
    for ep in (2, 4):
        yield balanced_case("global-fractions", balanced_ep_with(with_global_fractions), ep)
        yield balanced_case("averaged-fractions", balanced_ep_with(with_averaged_fractions), ep)
        yield balanced_case("global-probabilities", balanced_ep_with(with_global_probabilities), ep)
        yield sequence_case("balance-of-sequences", sequences_balanced_dp, ep)
        yield picked_case("picked", picked_ep, ep)
        for name, choose in CHOICES.items():
            yield choice_case(name, choose, ep)
    for edp, ep in ((1, 2), (2, 1), (2, 2), (2, 4)):
        yield shared_case("shared", with_shared_edp, edp, ep)
        yield clip_case("clip", clipped_shared_edp, edp, ep)
    for ep, tp in ((1, 2), (2, 2), (4, 2)):
        yield split_case("split", routed_step_tp, ep, tp)
        yield split_case("split-late", routed_step_tp_reduced_late, ep, tp)


def loss_faults():
    base = balanced_case("", None, 2)
    for name, auxiliary, fault in (
        ("fractions", with_local_fractions, "a product of this rank's means"),
        ("summed-fractions", with_summed_fractions, "the fractions add up to the number of ranks"),
        ("counts", with_counts_of_one_rank, "counts of all over the tokens of one"),
    ):
        yield faulty(base, f"expert-fault-{name}", balanced_ep_with(auxiliary), fault)
    for name, calm, fault in (
        ("calm", calm_by_local_experts, "over the experts of this rank"),
        ("shifted-calm", calm_of_probabilities, "of shifted logits"),
    ):
        yield faulty(base, f"expert-fault-{name}", balanced_ep_with(with_global_fractions, calm), fault)
    base = sequence_case("", sequences_balanced_dp, 2, dim=1)
    yield faulty(base, "expert-fault-cut-sequences", sequences_cut, "a rank has a part of each sequence")


def mesh_faults():
    base = shared_case("", None, 2, 2)
    yield faulty(base, "expert-fault-divisor", experts_averaged_by_edp, "the tokens of the ep group count as one")
    yield faulty(base, "expert-fault-all", experts_summed_over_all, "over other experts too")
    yield faulty(base, "expert-fault-axis", experts_summed_over_ep, "summed over the wrong axis", stated=("*",))
    yield faulty(
        base, "expert-fault-shared", shared_not_summed, "its gradients are summed over half of the ranks", stated=("*",)
    )
    norm = clip_case("", None, 2, 2)
    yield faulty(norm, "expert-fault-norm", clipped_over_all_ranks, "replicas of experts count again")
    base = split_case("", None, 2, 2)
    yield faulty(base, "expert-fault-reduced", reduced_over_experts, "summed over the ranks of other experts")
    yield faulty(base, "expert-fault-router-copies", router_summed_over_tp, "also over equal copies")
    yield faulty(
        base, "expert-fault-gates", gates_not_copied, "the gates' gradients lack the other ranks' columns", stated=("*",)
    )
    base = picked_case("", None, 2)
    yield faulty(base, "expert-fault-first-slots", picked_by_first, "the first rank's slots for all experts")


CASES = [*correct(), *loss_faults(), *mesh_faults()]
