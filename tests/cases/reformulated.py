"""The same tensor in another form on the ranks: divided counts, chained products, exchanged halves, maxima of matrices."""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F

from cases.case import Case, faulty
from cases.regions import copy_to
from graphguard import Input, Replicate, Shard

TOKENS, WIDTH, CLASSES, HEADS, HEAD = 8, 4, 5, 4, 4


# ---------------------------------------------------------------------- token counts
def loss_per_token(x, labels, w):
    w = w.detach().requires_grad_()
    loss = F.cross_entropy(x @ w, labels, ignore_index=0, reduction="sum") / (labels != 0).sum()
    return torch.autograd.grad(loss, w)[0]


def by_mean_count(x, labels, w, mesh):
    """The mean over the ranks of losses that are divided by the mean count."""
    group = mesh.get_group("dp")
    w = w.detach().requires_grad_()
    count = (labels != 0).sum()
    dist.all_reduce(count, group=group)
    loss = F.cross_entropy(x @ w, labels, ignore_index=0, reduction="sum") / (count / dist.get_world_size(group))
    (grad,) = torch.autograd.grad(loss, w)
    dist.all_reduce(grad, group=group)
    return grad / dist.get_world_size(group)


def by_own_count(x, labels, w, mesh):
    group = mesh.get_group("dp")
    w = w.detach().requires_grad_()
    count = (labels != 0).sum()
    loss = F.cross_entropy(x @ w, labels, ignore_index=0, reduction="sum") / count  # fault: divided by the rank's own count
    (grad,) = torch.autograd.grad(loss, w)
    dist.all_reduce(grad, group=group)
    return grad / dist.get_world_size(group)


def count_case(dp):
    labels = Input((TOKENS,), Shard(0), dtype=torch.int64, low=0, high=CLASSES)
    inputs = {"x": Input((TOKENS, WIDTH), Shard(0)), "labels": labels, "w": Input((WIDTH, CLASSES))}
    return Case(f"forms-mean-count-dp{dp}", loss_per_token, by_mean_count, {"dp": dp}, inputs, {"out": {}})


# ---------------------------------------------------------------------- a product of three
def routed_error(x, y, router, experts):
    router = router.detach().requires_grad_()
    out = torch.einsum("te,th,ehk->tk", (x @ router).softmax(-1), x, experts)
    return torch.autograd.grad((out - y).pow(2).sum(), router)[0]


def routed_error_cp(x, y, router, experts, mesh):
    grad = routed_error(x, y, router, experts)
    dist.all_reduce(grad, group=mesh.get_group("cp"))
    return grad


def routed_case(cp):
    inputs = {"x": Input((TOKENS, WIDTH), Shard(0)), "y": Input((TOKENS, WIDTH), Shard(0))}
    inputs |= {"router": Input((WIDTH, 3)), "experts": Input((3, WIDTH, WIDTH))}
    return Case(f"forms-product-of-three-cp{cp}", routed_error, routed_error_cp, {"cp": cp}, inputs, {"out": {}})


# ---------------------------------------------------------------------- halves of a head
def root_mean_square(x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def exchanged_halves(x, w, dy, copied=lambda x: x):
    """A norm per head, then the halves of each head exchanged, as for rotary positions: the gradient has terms that are
    split in different ways."""
    x = x.detach().requires_grad_()
    q = root_mean_square((copied(root_mean_square(x)) @ w).unflatten(-1, (-1, HEAD)))
    q = torch.cat([q[..., HEAD // 2 :], q[..., : HEAD // 2]], -1)
    return torch.autograd.grad((q * dy).sum(), x)[0]


def exchanged_halves_tp(x, w, dy, mesh):
    return exchanged_halves(x, w, dy, lambda x: copy_to(x, mesh.get_group("tp")))


def halves_case(tp):
    inputs = {"x": Input((TOKENS, WIDTH)), "w": Input((WIDTH, HEADS * HEAD), Shard(1))}
    inputs["dy"] = Input((TOKENS, HEADS, HEAD), Shard(1))
    return Case(f"forms-exchanged-halves-tp{tp}", exchanged_halves, exchanged_halves_tp, {"tp": tp}, inputs, {"out": {}})


# ---------------------------------------------------------------------- the largest element
def scaled_by_largest(w):
    return w / w.abs().max()


def largest_of_all(w, mesh):
    largest = w.abs().max()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=mesh.get_group("tp"))
    return w / largest


def largest_of_gathered(w, mesh):
    """The largest of what each rank found."""
    largest = torch.empty(mesh["tp"].size())
    dist.all_gather_into_tensor(largest, w.abs().max().reshape(1), group=mesh.get_group("tp"))
    return w / largest.max()


def largest_of_shuffled(w, mesh):
    """In an order that no rank has."""
    largest = torch.empty(mesh["tp"].size())
    dist.all_gather_into_tensor(largest, w.abs().max().reshape(1), group=mesh.get_group("tp"))
    return w / largest[[2, 0, 3, 1]].max()


def largest_of_three(w, mesh):
    largest = torch.empty(mesh["tp"].size())
    dist.all_gather_into_tensor(largest, w.abs().max().reshape(1), group=mesh.get_group("tp"))
    return w / largest[[2, 0, 3, 2]].max()  # fault: one rank's twice, and another's never


def largest_of_first(w, mesh):
    largest = torch.empty(mesh["tp"].size())
    dist.all_gather_into_tensor(largest, w.abs().max().reshape(1), group=mesh.get_group("tp"))
    return w / largest[0]  # fault: one rank's maximum


def largest_case(tp, dim, distributed=largest_of_all, name="largest"):
    inputs = {"w": Input((WIDTH, 8), Shard(dim))}
    relation = {"out": {"tp": Shard(dim)}}
    return Case(f"forms-{name}-of-dim-{dim}-tp{tp}", scaled_by_largest, distributed, {"tp": tp}, inputs, relation)


# ---------------------------------------------------------------------- signs that do not matter
def energy(x):
    return (3 * (x - x.mean(0))) ** 2


def energy_of_distances(x, mesh, power=2):
    mean = x.sum(0)
    dist.all_reduce(mean, group=mesh.get_group("dp"))
    return 9 * (x - mean / TOKENS).abs() ** power


def energy_of_third_powers(x, mesh):
    return energy_of_distances(x, mesh, 3)  # fault: the power is odd


def energy_case(dp):
    return Case(
        f"forms-distances-dp{dp}", energy, energy_of_distances, {"dp": dp}, {"x": Input((TOKENS, 4), Shard(0))},
        {"out": {"dp": Shard(0)}},
    )  # fmt: skip


# ---------------------------------------------------------------------- a positive input
def clipped(grad, scale):
    return grad / scale / (grad / scale).norm()


def clipped_by_scaled_norm(grad, scale, mesh):
    """The norm is taken before the loss scale is undone, which is right because the scale is positive."""
    squares = grad.norm() ** 2
    dist.all_reduce(squares, group=mesh.get_group("dp"))
    return grad / scale / (squares.sqrt() / scale)


def scale_case(dp):
    inputs = {"grad": Input((TOKENS,), Shard(0)), "scale": Input((), Replicate(), low=1.0, high=65536.0)}
    relation = {"out": {"dp": Shard(0)}}
    return Case(f"forms-positive-scale-dp{dp}", clipped, clipped_by_scaled_norm, {"dp": dp}, inputs, relation)


# ---------------------------------------------------------------------- the root of the size of a head
def attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def by_root(q, k, v):
    return (q @ k.mT / math.sqrt(q.size(-1))).softmax(-1) @ v


def by_power(q, k, v):
    return ((q * q.size(-1) ** -0.5) @ k.mT).softmax(-1) @ v


def by_truncated_root(q, k, v):
    return (q @ k.mT / 1.4142).softmax(-1) @ v  # fault: the root is cut off after four digits


def root_case(name, distributed):
    inputs = dict.fromkeys(("q", "k", "v"), Input((4, 3, 2), Shard(0)))
    return Case(f"forms-root-by-{name}-tp2", attention, distributed, {"tp": 2}, inputs, {"out": {"tp": Shard(0)}})


# ---------------------------------------------------------------------- several experts on a rank
def experts_of(x, w):
    out = torch.zeros_like(x)
    for each in w:
        out = out + torch.relu(x @ each)
    return out


def mixed(x, w):
    return torch.tanh(experts_of(x, w))


def mixed_ep(x, w, mesh):
    """A rank adds its experts up first, so the sum is bracketed in another way under the function."""
    out = experts_of(x, w)
    dist.all_reduce(out, group=mesh.get_group("ep"))
    return torch.tanh(out)


def mixed_too_early(x, w, mesh):
    out = torch.tanh(experts_of(x, w))  # fault: the function of a part of the sum
    dist.all_reduce(out, group=mesh.get_group("ep"))
    return out


def mixed_case(ep, experts):
    inputs = {"x": Input((TOKENS, WIDTH)), "w": Input((experts, WIDTH, WIDTH), Shard(0))}
    return Case(f"forms-{experts}-experts-ep{ep}", mixed, mixed_ep, {"ep": ep}, inputs, {"out": {}})


# ---------------------------------------------------------------------- chunks by their numbers, turned back
def turned(x, angle):
    return torch.stack([x * angle.cos(), -x * angle.sin()])


def chunks_turned_back(x, angle, mesh):
    """A rank picks its two chunks by a constant index; the angle has the other sign."""
    rank, size = mesh.get_local_rank("cp"), mesh["cp"].size()
    own = torch.tensor([rank, 2 * size - 1 - rank])
    x, angle = (t.view(2 * size, -1).index_select(0, own).flatten() for t in (x, -angle))
    return torch.stack([x * angle.cos(), x * angle.sin()])


def own_chunks(full, coord):
    pieces = full.chunk(4, -1)
    return torch.cat([pieces[coord["cp"]], pieces[3 - coord["cp"]]], -1)


def chunks_case():
    inputs = {"x": Input((TOKENS,)), "angle": Input((TOKENS,))}
    outputs = {"out": own_chunks}
    return Case("forms-chunks-cp2", turned, chunks_turned_back, {"cp": 2}, inputs, {"out": own_chunks}, outputs)


# ---------------------------------------------------------------------- a product over ranks
def chained(x):
    total = x[0]
    for row in x[1:]:
        total = total * row
    return total


def chained_over_ranks(x, mesh, op=dist.ReduceOp.PRODUCT):
    total = chained(x)
    dist.all_reduce(total, op=op, group=mesh.get_group("tp"))
    return total


def summed_over_ranks(x, mesh):
    return chained_over_ranks(x, mesh, dist.ReduceOp.SUM)  # fault: factors are multiplied, not added


def chained_case(tp):
    return Case(
        f"forms-product-tp{tp}", chained, chained_over_ranks, {"tp": tp}, {"x": Input((8, WIDTH), Shard(0))}, {"out": {}}
    )


CASES = [
    *(chained_case(tp) for tp in (2, 4)),
    faulty(chained_case(2), "forms-fault-product", summed_over_ranks, "factors are multiplied, not added"),
    *(mixed_case(ep, experts) for ep, experts in ((2, 4), (2, 6), (4, 8))),
    faulty(mixed_case(2, 4), "forms-fault-too-early", mixed_too_early, "the function of a part of the sum"),
    chunks_case(),
    root_case("root", by_root),
    root_case("power", by_power),
    faulty(root_case("", by_root), "forms-fault-truncated-root", by_truncated_root, "the root is cut off after four digits"),
    *(make(size) for size in (2, 4) for make in (count_case, routed_case, halves_case, scale_case)),
    *(largest_case(tp, dim) for tp in (2, 4) for dim in (0, 1)),
    *(largest_case(4, dim, largest_of_gathered, "gathered-largest") for dim in (0, 1)),
    largest_case(4, 0, largest_of_shuffled, "shuffled-largest"),
    energy_case(2),
    faulty(energy_case(2), "forms-fault-third-power", energy_of_third_powers, "the power is odd"),
    faulty(largest_case(4, 0), "forms-fault-three-maxima", largest_of_three, "one rank's twice, and another's never"),
    faulty(largest_case(2, 0), "forms-fault-first-maximum", largest_of_first, "one rank's maximum"),
    faulty(count_case(2), "forms-fault-own-count", by_own_count, "divided by the rank's own count"),
]
