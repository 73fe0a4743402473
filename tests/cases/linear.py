"""Tensor-parallel linear layers beyond the usual: biases, low-rank adapters, matrices cut both ways, products in chunks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from cases.case import Case, faulty
from cases.leaves import gradients, leaves
from cases.regions import copy_to, gather_first, reduce_from, reduce_scatter_first
from graphguard import Input, Shard

COLUMN, ROW = Shard(0), Shard(1)  # of weights as F.linear has them: [out, in]


def tp_case(name, sequential, distributed, tp, shapes, split, outputs, local_inputs=None):
    """`split` has the inputs that are sharded; gradients are returned for all inputs but dy, sharded as these are."""
    relation = dict(outputs) | {
        f"grads.{key}": {"tp": split[key]} if key in split else {} for key in shapes if key not in ("dy", "cos", "sin")
    }
    inputs = {
        key: Input(shape, {} if local_inputs else {"tp": split[key]} if key in split else {}) for key, shape in shapes.items()
    }
    programs = sequential, distributed
    return Case(f"tensor-{name}-tp{tp}", *programs, {"tp": tp}, inputs, relation, local_inputs=local_inputs)


def summed(grads, names, group):
    for name in names:
        dist.all_reduce(grads[name], group=group)
    return grads


# ---------------------------------------------------------------------- the bias of a row-parallel layer
def biased(x, w, b, dy):
    p = leaves({"x": x, "w": w, "b": b})
    y = F.linear(p["x"], p["w"], p["b"])
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def bias_after(x, w, b, dy):
    p = leaves({"x": x, "w": w, "b": b})
    y = reduce_from(F.linear(p["x"], p["w"]), None) + p["b"]
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def bias_on_first(x, w, b, dy):
    p = leaves({"x": x, "w": w, "b": b})
    bias = p["b"] if dist.get_rank() == 0 else p["b"] * 0
    y = reduce_from(F.linear(p["x"], p["w"], bias), None)
    return {"y": y.detach(), "grads": summed(gradients(y, p, dy), ("b",), None)}


def bias_divided(x, w, b, dy):
    p = leaves({"x": x, "w": w, "b": b})
    y = reduce_from(F.linear(p["x"], p["w"], p["b"] / dist.get_world_size()), None)
    return {"y": y.detach(), "grads": summed(gradients(y, p, dy), ("b",), None)}


def bias_on_all(x, w, b, dy):
    p = leaves({"x": x, "w": w, "b": b})
    y = reduce_from(F.linear(p["x"], p["w"], p["b"]), None)  # fault: the bias is added by every rank
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def bias_divided_gradient_too(x, w, b, dy):
    p = leaves({"x": x, "w": w, "b": b})
    y = reduce_from(F.linear(p["x"], p["w"], p["b"] / dist.get_world_size()), None)  # fault: its gradient is one share
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def bias_on_last_and_first(x, w, b, dy):
    p = leaves({"x": x, "w": w, "b": b})
    y = F.linear(p["x"], p["w"], p["b"] if dist.get_rank() == 0 else None)
    y = reduce_from(y, None)
    y = y + p["b"] if dist.get_rank() == dist.get_world_size() - 1 else y  # fault: the last rank adds the bias again
    return {"y": y.detach(), "grads": summed(gradients(y, p, dy), ("w",), None)}


def bias_case(name, distributed, tp):
    shapes = {"x": (3, 8), "w": (5, 8), "b": (5,), "dy": (3, 5)}
    return tp_case(f"row-bias-{name}", biased, distributed, tp, shapes, {"x": Shard(1), "w": ROW}, {"y": {}})


def bias_cases():
    for tp in (2, 4, 8):
        yield bias_case("after", bias_after, tp)
        yield bias_case("on-first", bias_on_first, tp)
        yield bias_case("divided", bias_divided, tp)


def bias_faults():
    base = bias_case("", bias_after, 2)
    yield faulty(base, "tensor-fault-bias-on-all", bias_on_all, "the bias is added by every rank")
    yield faulty(base, "tensor-fault-bias-share", bias_divided_gradient_too, "its gradient is one share", stated=("*",))
    yield faulty(base, "tensor-fault-bias-twice", bias_on_last_and_first, "the last rank adds the bias again")


# ---------------------------------------------------------------------- low-rank adapters
SCALE = 0.5


def adapted(x, w, a, b, dy):
    p = leaves({"x": x, "w": w, "a": a, "b": b})
    y = F.linear(p["x"], p["w"]) + SCALE * F.linear(F.linear(p["x"], p["a"]), p["b"])
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def adapted_column(x, w, a, b, dy):
    """The narrow product is whole on every rank; a meets only this rank's part of its gradient."""
    p = leaves({"x": x, "w": w, "a": a, "b": b})
    x = copy_to(p["x"], None)
    y = F.linear(x, p["w"]) + SCALE * F.linear(F.linear(x, p["a"]), p["b"])
    return {"y": y.detach(), "grads": summed(gradients(y, p, dy), ("a",), None)}


def adapted_column_copied(x, w, a, b, dy):
    """As above, with the sum of the narrow gradient, which is smaller."""
    p = leaves({"x": x, "w": w, "a": a, "b": b})
    narrow = copy_to(F.linear(p["x"], p["a"]), None)
    y = F.linear(copy_to(p["x"], None), p["w"]) + SCALE * F.linear(narrow, p["b"])
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def adapted_row(x, w, a, b, dy):
    """One sum, of the layer and of the adapter; b meets only this rank's part of the narrow product."""
    p = leaves({"x": x, "w": w, "a": a, "b": b})
    y = F.linear(p["x"], p["w"]) + SCALE * F.linear(F.linear(p["x"], p["a"]), p["b"])
    y = reduce_from(y, None)
    return {"y": y.detach(), "grads": summed(gradients(y, p, dy), ("b",), None)}


def adapted_row_reduced(x, w, a, b, dy):
    """The narrow product is summed first."""
    p = leaves({"x": x, "w": w, "a": a, "b": b})
    narrow = reduce_from(F.linear(p["x"], p["a"]), None)
    y = reduce_from(F.linear(p["x"], p["w"]), None) + SCALE * F.linear(narrow, p["b"])
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def adapted_row_merged(x, w, a, b, dy):
    """The weight with the adapter added to it."""
    p = leaves({"x": x, "w": w, "a": a, "b": b})
    y = reduce_from(F.linear(p["x"], p["w"] + SCALE * (p["b"] @ p["a"])), None)
    return {"y": y.detach(), "grads": summed(gradients(y, p, dy), ("b",), None)}


def adapter_without_sum(x, w, a, b, dy):
    p = leaves({"x": x, "w": w, "a": a, "b": b})
    x = copy_to(p["x"], None)
    narrow = F.linear(x, p["a"])  # fault: the gradient of a is not summed
    y = F.linear(x, p["w"]) + SCALE * F.linear(narrow, p["b"])
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def adapter_before_reduction(x, w, a, b, dy):
    p = leaves({"x": x, "w": w, "a": a, "b": b})
    narrow = F.linear(p["x"], p["a"])
    y = reduce_from(F.linear(p["x"], p["w"]), None) + SCALE * F.linear(narrow, p["b"])  # fault: the adapter is not summed
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def adapter_reduced_twice(x, w, a, b, dy):
    p = leaves({"x": x, "w": w, "a": a, "b": b})
    narrow = reduce_from(F.linear(p["x"], p["a"]), None)
    y = F.linear(p["x"], p["w"]) + SCALE * F.linear(narrow, p["b"])
    y = reduce_from(y, None)  # fault: the narrow product was summed before
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def adapter_scaled_by_rank(x, w, a, b, dy):
    """The scale of an adapter is alpha / r, with r the narrow width; here it is read from a shard."""
    p = leaves({"x": x, "w": w, "a": a, "b": b})
    scale = SCALE * w.size(1) / (w.size(1) * dist.get_world_size())
    narrow = reduce_from(F.linear(p["x"], p["a"]), None)
    y = reduce_from(F.linear(p["x"], p["w"]), None) + scale * F.linear(narrow, p["b"])  # fault: scaled by the shard's width
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def adapter_case(name, distributed, tp, kind):
    shapes = {"x": (3, 8), "w": (16, 8), "a": (3, 8), "b": (16, 3), "dy": (3, 16)}
    split = {"w": COLUMN, "b": COLUMN, "dy": Shard(1)} if kind == "column" else {"x": Shard(1), "w": ROW, "a": ROW}
    out = {"y": {"tp": Shard(1)} if kind == "column" else {}}
    return tp_case(f"lora-{name}", adapted, distributed, tp, shapes, split, out)


def adapter_cases():
    for tp in (2, 4):
        yield adapter_case("column", adapted_column, tp, "column")
        yield adapter_case("column-copied", adapted_column_copied, tp, "column")
        yield adapter_case("row", adapted_row, tp, "row")
        yield adapter_case("row-reduced", adapted_row_reduced, tp, "row")
        yield adapter_case("row-merged", adapted_row_merged, tp, "row")


def adapter_faults():
    column, row = adapter_case("", adapted_column, 2, "column"), adapter_case("", adapted_row, 2, "row")
    yield faulty(column, "tensor-fault-adapter-gradient", adapter_without_sum, "the gradient of a is not summed", stated=("*",))
    yield faulty(row, "tensor-fault-adapter-partial", adapter_before_reduction, "the adapter is not summed")
    yield faulty(row, "tensor-fault-adapter-twice", adapter_reduced_twice, "the narrow product was summed before")
    yield faulty(row, "tensor-fault-adapter-scale", adapter_scaled_by_rank, "scaled by the shard's width")


# ---------------------------------------------------------------------- matrices cut both ways
def product(a, b, dy):
    p = leaves({"a": a, "b": b})
    y = p["a"] @ p["b"]
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


class Gathered(torch.autograd.Function):
    """Blocks of a dim, gathered; the gradients are summed and scattered."""

    @staticmethod
    def forward(ctx, block, dim, group):
        ctx.dim, ctx.group = dim, group
        return gather_first(block.transpose(0, dim).contiguous(), group).transpose(0, dim)

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter_first(grad.transpose(0, ctx.dim).contiguous(), ctx.group).transpose(0, ctx.dim), None, None


def product_2d(a, b, dy, mesh):
    """Every matrix in blocks; a rank gathers its row of a and its column of b."""
    p = leaves({"a": a, "b": b})
    y = Gathered.apply(p["a"], 1, mesh.get_group("col")) @ Gathered.apply(p["b"], 0, mesh.get_group("row"))
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def product_summa(a, b, dy, mesh):
    """Without gathers: in step k, column k of a and row k of b are broadcast, and the products accumulate."""
    rows, cols = mesh.get_group("row"), mesh.get_group("col")
    y = torch.zeros(a.size(0), b.size(1))
    for k in range(dist.get_world_size(cols)):
        left, right = a.clone(), b.clone()
        dist.broadcast(left, group_src=k, group=cols)
        dist.broadcast(right, group_src=k, group=rows)
        y = y + left @ right
    whole_dy_row = gather_first(dy.t().contiguous(), cols).t()
    whole_b_row = gather_first(b.t().contiguous(), cols)
    grad_a = None
    for k in range(dist.get_world_size(cols)):
        other = whole_b_row.clone()
        dist.broadcast(other, group_src=k, group=rows)
        mine = whole_dy_row @ other
        grad_a = mine if dist.get_rank(cols) == k else grad_a
    whole_dy_col = gather_first(dy.contiguous(), rows)
    whole_a_col = gather_first(a.contiguous(), rows)
    grad_b = None
    for k in range(dist.get_world_size(rows)):
        other = whole_a_col.clone()
        dist.broadcast(other, group_src=k, group=cols)
        mine = other.t() @ whole_dy_col
        grad_b = mine if dist.get_rank(rows) == k else grad_b
    return {"y": y, "grads": {"a": grad_a, "b": grad_b}}


def product_25d(a, b, dy, mesh):
    """Layers of the mesh share the steps: each layer has its part of the inner dim, and the products are summed."""
    p = leaves({"a": a, "b": b})
    row, col, layer = (mesh.get_group(name) for name in ("row", "col", "layer"))
    y = Gathered.apply(p["a"], 1, col) @ Gathered.apply(p["b"], 0, row)
    y = reduce_from(y, layer)
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def product_2d_groups_swapped(a, b, dy, mesh):
    p = leaves({"a": a, "b": b})
    left = Gathered.apply(p["a"], 1, mesh.get_group("row"))  # fault: gathered over the other axis
    y = left @ Gathered.apply(p["b"], 0, mesh.get_group("row"))
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def product_25d_without_layers(a, b, dy, mesh):
    p = leaves({"a": a, "b": b})
    y = Gathered.apply(p["a"], 1, mesh.get_group("col")) @ Gathered.apply(p["b"], 0, mesh.get_group("row"))
    return {"y": y.detach(), "grads": gradients(y, p, dy)}  # fault: the layers' products are not summed


def product_summa_first_block(a, b, dy, mesh):
    rows, cols = mesh.get_group("row"), mesh.get_group("col")
    y = torch.zeros(a.size(0), b.size(1))
    for k in range(dist.get_world_size(cols)):
        left, right = a.clone(), b.clone()
        dist.broadcast(left, group_src=k, group=cols)
        dist.broadcast(right, group_src=0, group=rows)  # fault: always the first row of blocks
        y = y + left @ right
    return {"y": y, "grads": {"a": dy @ b.t(), "b": a.t() @ dy}}


def product_case(name, distributed, row, col):
    block = {"row": Shard(0), "col": Shard(1)}
    inputs = {"a": Input((8, 8), block), "b": Input((8, 12), block), "dy": Input((8, 12), block)}
    relation = {"y": block, "grads.a": block, "grads.b": block}
    return Case(f"tensor-{name}-{row}x{col}", product, distributed, {"row": row, "col": col}, inputs, relation)


def layered_case(name, distributed, row, col, layer):
    """The inner dim is cut by layers first, then by columns of a and rows of b."""
    a, b = {"layer": Shard(1), "row": Shard(0), "col": Shard(1)}, {"layer": Shard(0), "row": Shard(0), "col": Shard(1)}
    y = {"row": Shard(0), "col": Shard(1)}
    inputs = {"a": Input((8, 16), a), "b": Input((16, 12), b), "dy": Input((8, 12), y)}
    mesh = {"layer": layer, "row": row, "col": col}
    relation = {"y": y, "grads.a": a, "grads.b": b}
    return Case(f"tensor-{name}-{layer}x{row}x{col}", product, distributed, mesh, inputs, relation)


def product_cases():
    for row, col in ((2, 2), (1, 2), (2, 1), (2, 4)):
        yield product_case("product-2d", product_2d, row, col)
    yield product_case("summa", product_summa, 2, 2)
    yield layered_case("product-25d", product_25d, 1, 1, 2)
    yield layered_case("product-25d", product_25d, 2, 2, 2)


def product_faults():
    base = product_case("", product_2d, 2, 2)
    yield faulty(base, "tensor-fault-product-axis", product_2d_groups_swapped, "gathered over the other axis")
    yield faulty(base, "tensor-fault-product-block", product_summa_first_block, "always the first row of blocks")
    layered = layered_case("", product_25d, 1, 2, 2)
    yield faulty(
        layered, "tensor-fault-product-layers", product_25d_without_layers, "the layers' products are not summed", stated=("y",)
    )


# ---------------------------------------------------------------------- gathers and products in chunks
def column_layer(x, w, dy):
    p = leaves({"x": x, "w": w})
    y = F.linear(p["x"], p["w"])
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


class GatheredProduct(torch.autograd.Function):
    """All tokens times this rank's columns; while one chunk is multiplied, the next is gathered."""

    @staticmethod
    def forward(ctx, x, w, chunks):
        ctx.save_for_backward(x, w)
        ranks, parts = dist.get_world_size(), x.chunk(chunks)
        buffers = [part.new_empty(ranks, *part.shape) for part in parts]
        works = [dist.all_gather_into_tensor(b, p.contiguous(), async_op=True) for b, p in zip(buffers, parts, strict=True)]
        outs = []
        for work, buffer in zip(works, buffers, strict=True):
            work.wait()
            outs.append(F.linear(buffer, w))
        return torch.cat(outs, 1).flatten(0, 1)

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return reduce_scatter_first(grad @ w, None), grad.t() @ gather_first(x, None), None


class RingProduct(torch.autograd.Function):
    """Blocks of tokens go round a ring; each is multiplied when it comes by."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        rank, ranks = dist.get_rank(), dist.get_world_size()
        outs, block = [None] * ranks, x.contiguous()
        for step in range(ranks):
            if step + 1 < ranks:
                following = torch.empty_like(block)
                sending = dist.P2POp(dist.isend, block, (rank + 1) % ranks)
                receiving = dist.P2POp(dist.irecv, following, (rank - 1) % ranks)
                works = dist.batch_isend_irecv([sending, receiving])
            outs[(rank - step) % ranks] = F.linear(block, w)
            if step + 1 < ranks:
                for work in works:
                    work.wait()
                block = following
        return torch.cat(outs)

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return reduce_scatter_first(grad @ w, None), grad.t() @ gather_first(x, None)


class RingProductInOrderOfArrival(RingProduct):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        rank, ranks = dist.get_rank(), dist.get_world_size()
        outs, block = [], x.contiguous()
        for _ in range(ranks):
            outs.append(F.linear(block, w))
            following = torch.empty_like(block)
            works = [dist.isend(block, (rank + 1) % ranks), dist.irecv(following, (rank - 1) % ranks)]
            for work in works:
                work.wait()
            block = following
        return torch.cat(outs)  # fault: in the order in which the blocks came


class ChunksBesideEachOther(GatheredProduct):
    @staticmethod
    def forward(ctx, x, w, chunks):
        ctx.save_for_backward(x, w)
        outs = [F.linear(gather_first(part, None), w) for part in x.chunk(chunks)]
        return torch.cat(outs)  # fault: all ranks' first chunks come before their second


class GatheredProductSliced(GatheredProduct):
    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        grad_x = (grad @ w).chunk(dist.get_world_size())[dist.get_rank()]  # fault: only this rank's columns are in it
        return grad_x, grad.t() @ gather_first(x, None), None


def by(multiply):
    def program(x, w, dy):
        p = leaves({"x": x, "w": w})
        y = multiply(p["x"], p["w"])
        return {"y": y.detach(), "grads": gradients(y, p, dy)}

    return program


class ScatteredProduct(torch.autograd.Function):
    """The rows' products are reduced to their ranks chunk by chunk."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        outs = []
        for rank, rows in enumerate(x.chunk(dist.get_world_size())):
            out = F.linear(rows, w)
            outs.append((out, dist.reduce(out, dst=rank, async_op=True)))
        for _, work in outs:
            work.wait()
        return outs[dist.get_rank()][0]

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        grad = gather_first(grad, None)
        return grad @ w, grad.t() @ x


def chunk_case(name, distributed, tp):
    shapes = {"x": (16, 5), "w": (8, 5), "dy": (16, 8)}
    split = {"x": Shard(0), "w": COLUMN, "dy": Shard(1)}
    return tp_case(name, column_layer, distributed, tp, shapes, split, {"y": {"tp": Shard(1)}})


def scattered_case(tp):
    shapes = {"x": (16, 8), "w": (5, 8), "dy": (16, 5)}
    split = {"x": Shard(1), "w": ROW, "dy": Shard(0)}
    return tp_case("product-reduced", column_layer, by(ScatteredProduct.apply), tp, shapes, split, {"y": {"tp": Shard(0)}})


def chunk_cases():
    for tp in (2, 4):
        yield chunk_case("gather-chunks", by(lambda x, w: GatheredProduct.apply(x, w, 2)), tp)
        yield chunk_case("gather-ring", by(RingProduct.apply), tp)
        yield scattered_case(tp)


def chunk_faults():
    base = chunk_case("", by(RingProduct.apply), 2)
    beside = by(lambda x, w: ChunksBesideEachOther.apply(x, w, 2))
    sliced = by(lambda x, w: GatheredProductSliced.apply(x, w, 2))
    yield faulty(
        base, "tensor-fault-ring-order", by(RingProductInOrderOfArrival.apply), "in the order in which the blocks came"
    )
    yield faulty(base, "tensor-fault-chunk-order", beside, "all ranks' first chunks come before their second")
    yield faulty(base, "tensor-fault-chunk-gradient", sliced, "only this rank's columns are in it")


CASES = [
    *bias_cases(), *bias_faults(), *adapter_cases(), *adapter_faults(), *product_cases(), *product_faults(),
    *chunk_cases(), *chunk_faults(),
]  # fmt: skip
