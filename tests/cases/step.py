"""Between the gradients and the update: counts of tokens, norms of gradients, accumulation, batch statistics, averages."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from cases.case import Case, faulty
from cases.leaves import gradients, leaves
from cases.regions import copy_to, gather_first, reduce_from, reduce_scatter_first
from graphguard import Input, Shard

RATE = 0.125
BATCHED = {"dp": Shard(0)}


def total(value, group=None):
    value = value.detach().clone()
    dist.all_reduce(value, group=group)
    return value


def all_totals(grads, group=None):
    return {name: total(grad, group) for name, grad in grads.items()}


# ---------------------------------------------------------------------- tokens that count
def token_losses(tokens, table, head):
    """[sample, place]: the cross entropy of the following token."""
    logits = F.embedding(tokens[:, :-1], table) @ head
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(tokens.size(0), -1)


def counted(tokens, mask, table, head):
    p = leaves({"table": table, "head": head})
    loss = (token_losses(tokens, **p) * mask).sum() / mask.sum()
    return {"loss": loss.detach(), "grads": gradients(loss, p)}


def counted_globally(tokens, mask, table, head):
    """Sums of the rank over the count of all."""
    p = leaves({"table": table, "head": head})
    loss = (token_losses(tokens, **p) * mask).sum() / total(mask.sum())
    return {"loss": total(loss), "grads": all_totals(gradients(loss, p))}


def counted_at_the_end(tokens, mask, table, head):
    """Gradients of sums; divided when all are there."""
    p = leaves({"table": table, "head": head})
    loss, count = (token_losses(tokens, **p) * mask).sum(), total(mask.sum())
    grads = all_totals(gradients(loss, p))
    return {"loss": total(loss) / count, "grads": {name: grad / count for name, grad in grads.items()}}


def counted_for_an_average(tokens, mask, table, head):
    """For a wrapper that averages gradients: the loss is scaled up by the number of ranks."""
    p = leaves({"table": table, "head": head})
    loss = (token_losses(tokens, **p) * mask).sum() * dist.get_world_size() / total(mask.sum())
    grads = gradients(loss, p)
    for grad in grads.values():
        dist.all_reduce(grad, op=dist.ReduceOp.AVG)
    return {"loss": total(loss) / dist.get_world_size(), "grads": grads}


def counted_in_microbatches(tokens, mask, table, head):
    """The count of all microbatches of all ranks comes first."""
    p = leaves({"table": table, "head": head})
    count, loss = total(mask.sum()), torch.zeros(())
    for part, kept in zip(tokens.chunk(2), mask.chunk(2), strict=True):
        each = (token_losses(part, **p) * kept).sum() / count
        each.backward()
        loss += each.detach()
    return {"loss": total(loss), "grads": all_totals({name: weight.grad for name, weight in p.items()})}


def mean_of_means(tokens, mask, table, head):
    p = leaves({"table": table, "head": head})
    loss = (token_losses(tokens, **p) * mask).sum() / mask.sum()  # fault: over this rank's count
    grads = {name: grad / dist.get_world_size() for name, grad in all_totals(gradients(loss, p)).items()}
    return {"loss": total(loss) / dist.get_world_size(), "grads": grads}


def count_of_places(tokens, mask, table, head):
    p = leaves({"table": table, "head": head})
    places = mask.numel() * dist.get_world_size()
    loss = (token_losses(tokens, **p) * mask).sum() / places  # fault: places that do not count are in the count
    return {"loss": total(loss), "grads": all_totals(gradients(loss, p))}


def count_averaged(tokens, mask, table, head):
    p = leaves({"table": table, "head": head})
    count = total(mask.sum()) / dist.get_world_size()
    loss = (token_losses(tokens, **p) * mask).sum() / count  # fault: the mean count for a sum of gradients
    return {"loss": total(loss), "grads": all_totals(gradients(loss, p))}


def microbatches_by_own_counts(tokens, mask, table, head):
    p = leaves({"table": table, "head": head})
    loss = torch.zeros(())
    for part, kept in zip(tokens.chunk(2), mask.chunk(2), strict=True):
        each = (token_losses(part, **p) * kept).sum() / total(kept.sum()) / 2  # fault: each microbatch by its own count
        each.backward()
        loss += each.detach()
    return {"loss": total(loss), "grads": all_totals({name: weight.grad for name, weight in p.items()})}


def count_case(name, distributed, dp, dtype=torch.float32):
    inputs = {
        "tokens": Input((8, 5), BATCHED, torch.int64, low=0, high=6),
        "mask": Input((8, 4), BATCHED, dtype),
        "table": Input((6, 3)),
        "head": Input((3, 6)),
    }
    relation = {"loss": {}, "grads.table": {}, "grads.head": {}}
    return Case(f"step-count-{name}-dp{dp}", counted, distributed, {"dp": dp}, inputs, relation)


def count_cases():
    for dp in (2, 4):
        yield count_case("globally", counted_globally, dp)
        yield count_case("of-booleans", counted_globally, dp, torch.bool)
        yield count_case("at-the-end", counted_at_the_end, dp)
        yield count_case("averaged", counted_for_an_average, dp)
        yield count_case("microbatches", counted_in_microbatches, dp)


def count_faults():
    base = count_case("", counted_globally, 2)
    yield faulty(base, "step-fault-mean-of-means", mean_of_means, "over this rank's count")
    yield faulty(base, "step-fault-places", count_of_places, "places that do not count are in the count")
    yield faulty(base, "step-fault-mean-count", count_averaged, "the mean count for a sum of gradients")
    yield faulty(base, "step-fault-own-counts", microbatches_by_own_counts, "each microbatch by its own count")


# ---------------------------------------------------------------------- the norm of all gradients
SHAPES = {"w1": (8, 8), "b1": (8,), "w2": (8, 4)}


def errors(x, t, w1, b1, w2):
    return (torch.tanh(x @ w1 + b1) @ w2 - t).square()


def mean_gradients(x, t, params):
    live = leaves(params)
    return gradients(errors(x, t, **live).mean(), live)


def clipped(grads, norm, most=1.0):
    scale = torch.clamp(most / (norm + 1e-6), max=1.0)
    return {name: grad * scale for name, grad in grads.items()}


def stepped(params, grads):
    return {name: weight - RATE * grads[name] for name, weight in params.items()}


def squares(grads):
    return sum(grad.square().sum() for grad in grads.values())


def clipped_step(x, t, **params):
    grads = mean_gradients(x, t, params)
    norm = squares(grads).sqrt()
    return {"norm": norm, **stepped(params, clipped(grads, norm))}


def clipped_by_torch(x, t, **params):
    weights = {name: torch.nn.Parameter(weight) for name, weight in params.items()}
    errors(x, t, **weights).mean().backward()
    norm = torch.nn.utils.clip_grad_norm_(list(weights.values()), 1.0)
    torch.optim.SGD(weights.values(), lr=RATE).step()
    return {"norm": norm, **{name: weight.detach() for name, weight in weights.items()}}


def replicas_clipped_by_torch(x, t, **params):
    weights = {name: torch.nn.Parameter(weight) for name, weight in params.items()}
    errors(x, t, **weights).mean().backward()
    for weight in weights.values():
        dist.all_reduce(weight.grad, op=dist.ReduceOp.AVG)
    norm = torch.nn.utils.clip_grad_norm_(list(weights.values()), 1.0)
    torch.optim.SGD(weights.values(), lr=RATE).step()
    return {"norm": norm, **{name: weight.detach() for name, weight in weights.items()}}


def sharded_gradients(x, t, params):
    grads = mean_gradients(x, t, {name: gather_first(rows, None) for name, rows in params.items()})
    return {name: reduce_scatter_first(grad, None) / dist.get_world_size() for name, grad in grads.items()}


def shards_clipped(x, t, **params):
    """Squares of the shards are summed before the root is taken."""
    grads = sharded_gradients(x, t, params)
    norm = total(squares(grads)).sqrt()
    return {"norm": norm, **stepped(params, clipped(grads, norm))}


def norms_of_shards(x, t, **params):
    """The norm of the ranks' norms, as code that has only norms does it."""
    grads = sharded_gradients(x, t, params)
    own = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads.values()]))
    norms = gather_first(own.view(1), None)
    norm = torch.linalg.vector_norm(norms)
    return {"norm": norm, **stepped(params, clipped(grads, norm))}


def shards_clipped_locally(x, t, **params):
    grads = sharded_gradients(x, t, params)
    norm = squares(grads).sqrt()  # fault: the norm of this rank's shards
    return {"norm": total(norm.square()).sqrt(), **stepped(params, clipped(grads, norm))}


def norms_of_shards_added(x, t, **params):
    grads = sharded_gradients(x, t, params)
    norm = total(squares(grads).sqrt())  # fault: norms are added, not their squares
    return {"norm": norm, **stepped(params, clipped(grads, norm))}


def clipped_before_reduction(x, t, **params):
    grads = mean_gradients(x, t, params)
    grads = clipped(grads, squares(grads).sqrt())  # fault: each rank clips what it has before the sum
    grads = {name: total(grad) / dist.get_world_size() for name, grad in grads.items()}
    return {"norm": squares(grads).sqrt(), **stepped(params, grads)}


def replicas_counted_again(x, t, **params):
    grads = {name: total(grad) / dist.get_world_size() for name, grad in mean_gradients(x, t, params).items()}
    norm = total(squares(grads)).sqrt()  # fault: every rank has all of them
    return {"norm": norm, **stepped(params, clipped(grads, norm))}


# under tensor parallelism: some parameters are whole on every rank
def tp_gradients(x, t, params, group):
    p = leaves(params)
    out = reduce_from(torch.tanh(copy_to(x, group) @ p["w1"] + p["b1"]) @ p["w2"], group) + p["b2"]
    return gradients((out - t).square().mean(), p)


def with_last_bias(x, t, **params):
    p = leaves(params)
    grads = gradients((torch.tanh(x @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"] - t).square().mean(), p)
    norm = squares(grads).sqrt()
    return {"norm": norm, **stepped(params, clipped(grads, norm))}


def tensor_parallel_clipped(x, t, **params):
    """What is whole on every rank counts on the first one."""
    grads = tp_gradients(x, t, params, None)
    own = {name: grad for name, grad in grads.items() if name != "b2" or dist.get_rank() == 0}
    norm = total(squares(own)).sqrt()
    return {"norm": norm, **stepped(params, clipped(grads, norm))}


def tensor_parallel_clipped_apart(x, t, **params):
    """Shards are summed over the ranks; what is whole is added after."""
    grads = tp_gradients(x, t, params, None)
    sharded = {name: grad for name, grad in grads.items() if name != "b2"}
    norm = (total(squares(sharded)) + grads["b2"].square().sum()).sqrt()
    return {"norm": norm, **stepped(params, clipped(grads, norm))}


def whole_counted_on_each(x, t, **params):
    grads = tp_gradients(x, t, params, None)
    norm = total(squares(grads)).sqrt()  # fault: the whole bias is counted once for each rank
    return {"norm": norm, **stepped(params, clipped(grads, norm))}


def clip_case(name, sequential, distributed, dp, sharded=False):
    split = BATCHED if sharded else {}
    inputs = {"x": Input((8, 8), BATCHED), "t": Input((8, 4), BATCHED)} | {k: Input(s, split) for k, s in SHAPES.items()}
    relation = {"norm": {}} | dict.fromkeys(SHAPES, split)
    return Case(f"step-clip-{name}-dp{dp}", sequential, distributed, {"dp": dp}, inputs, relation)


def tp_clip_case(name, distributed, tp):
    split = {"w1": {"tp": Shard(1)}, "b1": {"tp": Shard(0)}, "w2": {"tp": Shard(0)}, "b2": {}}
    inputs = {"x": Input((3, 8)), "t": Input((3, 4))}
    inputs |= {key: Input(shape, split[key]) for key, shape in (SHAPES | {"b2": (4,)}).items()}
    return Case(f"step-clip-{name}-tp{tp}", with_last_bias, distributed, {"tp": tp}, inputs, {"norm": {}} | split)


def clip_cases():
    for size in (2, 4):
        yield clip_case("torch", clipped_by_torch, replicas_clipped_by_torch, size)
        yield clip_case("shards", clipped_step, shards_clipped, size, sharded=True)
        yield clip_case("shards-as-torch", clipped_by_torch, shards_clipped, size, sharded=True)
        yield clip_case("norms-of-shards", clipped_step, norms_of_shards, size, sharded=True)
        yield tp_clip_case("first", tensor_parallel_clipped, size)
        yield tp_clip_case("apart", tensor_parallel_clipped_apart, size)


def clip_faults():
    replicas, shards = (clip_case("", clipped_step, shards_clipped, 2, sharded=sharded) for sharded in (False, True))
    yield faulty(shards, "step-fault-local-norm", shards_clipped_locally, "the norm of this rank's shards")
    yield faulty(shards, "step-fault-added-norms", norms_of_shards_added, "norms are added, not their squares")
    yield faulty(replicas, "step-fault-clipped-early", clipped_before_reduction, "each rank clips what it has before the sum")
    yield faulty(replicas, "step-fault-replicas-norm", replicas_counted_again, "every rank has all of them")
    whole = tp_clip_case("", tensor_parallel_clipped, 2)
    yield faulty(whole, "step-fault-whole-norm", whole_counted_on_each, "the whole bias is counted once for each rank")


# ---------------------------------------------------------------------- an average of the weights
DECAY = 0.75


def averaged_weights(x, t, w1, b1, w2, **averages):
    new = stepped({"w1": w1, "b1": b1, "w2": w2}, mean_gradients(x, t, {"w1": w1, "b1": b1, "w2": w2}))
    kept = {f"e_{name}": DECAY * averages[f"e_{name}"] + (1 - DECAY) * weight for name, weight in new.items()}
    return new | kept


def averaged_shards(x, t, w1, b1, w2, **averages):
    """Weights and averages are sharded alike."""
    params = {"w1": w1, "b1": b1, "w2": w2}
    new = stepped(params, sharded_gradients(x, t, params))
    for name, weight in new.items():
        averages[f"e_{name}"].lerp_(weight, 1 - DECAY)
    return new | averages


def average_of_old_weights(x, t, w1, b1, w2, **averages):
    params = {"w1": w1, "b1": b1, "w2": w2}
    new = stepped(params, sharded_gradients(x, t, params))
    for name, old in params.items():
        new[f"e_{name}"] = DECAY * averages[f"e_{name}"] + (1 - DECAY) * old  # fault: of before the step
    return new


def average_case(name, distributed, dp):
    inputs = {"x": Input((8, 8), BATCHED), "t": Input((8, 4), BATCHED)}
    state = SHAPES | {f"e_{key}": shape for key, shape in SHAPES.items()}
    inputs |= {key: Input(shape, BATCHED) for key, shape in state.items()}
    relation = dict.fromkeys(state, BATCHED)
    return Case(f"step-average-{name}-dp{dp}", averaged_weights, distributed, {"dp": dp}, inputs, relation)


# ---------------------------------------------------------------------- an update made orthogonal
def orthogonal(matrix, rounds=2):
    """Newton and Schulz: all singular values are driven towards 1."""
    x = matrix / (matrix.norm() + 1e-7)
    for _ in range(rounds):
        square = x @ x.t()
        x = 3.0 * x - 4.0 * square @ x + 2.0 * square @ square @ x
    return x


def loss_gradient(x, t, w):
    w = w.detach().requires_grad_()
    return torch.autograd.grad((torch.tanh(x @ w) - t).square().mean(), w)[0]


def muon(x, t, w, buffer):
    buffer = 0.9 * buffer + loss_gradient(x, t, w)
    return {"w": w - RATE * orthogonal(buffer), "buffer": buffer}


def muon_replicated(x, t, w, buffer):
    buffer = 0.9 * buffer + total(loss_gradient(x, t, w)) / dist.get_world_size()
    return {"w": w - RATE * orthogonal(buffer), "buffer": buffer}


def muon_gathered(x, t, w, buffer):
    """Rows of the weight and of its buffer are sharded; the matrix is whole while it is made orthogonal."""
    grad = reduce_scatter_first(loss_gradient(x, t, gather_first(w, None)), None) / dist.get_world_size()
    buffer = 0.9 * buffer + grad
    update = orthogonal(gather_first(buffer, None)).chunk(dist.get_world_size())[dist.get_rank()]
    return {"w": w - RATE * update, "buffer": buffer}


def muon_per_shard(x, t, w, buffer):
    grad = reduce_scatter_first(loss_gradient(x, t, gather_first(w, None)), None) / dist.get_world_size()
    buffer = 0.9 * buffer + grad
    return {"w": w - RATE * orthogonal(buffer), "buffer": buffer}  # fault: each shard by itself


def muon_next_rows(x, t, w, buffer):
    rank, size = dist.get_rank(), dist.get_world_size()
    grad = reduce_scatter_first(loss_gradient(x, t, gather_first(w, None)), None) / size
    buffer = 0.9 * buffer + grad
    update = orthogonal(gather_first(buffer, None)).chunk(size)
    return {"w": w - RATE * update[(rank + 1) % size], "buffer": buffer}  # fault: the next rank's rows of the update


def muon_case(name, distributed, dp, sharded):
    split = BATCHED if sharded else {}
    inputs = {
        "x": Input((8, 4), BATCHED),
        "t": Input((8, 6), BATCHED),
        "w": Input((4, 6), split),
        "buffer": Input((4, 6), split),
    }
    return Case(f"step-muon-{name}-dp{dp}", muon, distributed, {"dp": dp}, inputs, {"w": split, "buffer": split})


def update_cases():
    for dp in (2, 4):
        yield average_case("shards", averaged_shards, dp)
        yield muon_case("replicated", muon_replicated, dp, sharded=False)
        yield muon_case("gathered", muon_gathered, dp, sharded=True)


def update_faults():
    yield faulty(
        average_case("", averaged_shards, 2), "step-fault-average-of-old", average_of_old_weights, "of before the step"
    )
    base = muon_case("", muon_gathered, 2, sharded=True)
    yield faulty(base, "step-fault-orthogonal-shards", muon_per_shard, "each shard by itself")
    yield faulty(base, "step-fault-orthogonal-rows", muon_next_rows, "the next rank's rows of the update")


CASES = [
    *count_cases(), *count_faults(), *clip_cases(), *clip_faults(), *update_cases(), *update_faults(),
]  # fmt: skip
