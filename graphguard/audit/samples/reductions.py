"""Samples of rows that reduce, order or index."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from graphguard.audit.samples.sample import INF, B, C, N, P, X, aten, both, f32, f64, i64, sample, u8

# reductions
sample(
    "sums",
    lambda x, i, m: (
        x.sum(),
        x.sum(1),
        x.sum((0, -1), keepdim=True),
        i.sum(),
        m.sum(0),
        x.sum(dtype=i64),
        x.sum(1, dtype=i64),
        m.sum(dtype=f32),
        x.sum((), keepdim=True),
        x[0, 0].sum(0),
    ),
    x=X(6, 4, 2),
    i=N(6),
    m=B(6, 4),
)
sample(  # more than eight bits count
    "sums_of_many",
    lambda x: (x.sum(), x.sum(0), x.sum(dtype=u8), x.sum(0, dtype=u8), x.cumsum(0, dtype=u8), x.sum(dtype=torch.bool)),
    (),
    x=X(300),
)
sample(
    "means",
    lambda x, i: (x.mean(), x.mean(-1), x.mean((0, 1), keepdim=True), i.mean(dtype=f32), i.float().mean(0), x[0, 0, 0].mean()),
    x=X(6, 4, 2),
    i=N(6, 4),
)
sample(
    "extremes",
    lambda x, i: (
        x.amax(1),
        x.amin((0, 1)),
        x.amax(),
        x.max(),
        x.min(),
        x.amax(-1, keepdim=True),
        i.amin(0),
        i.max(),
        x[0, 0].amax(0),
    ),
    x=X(6, 4),
    i=N(6, 4),
)
sample(
    "both_extremes",
    lambda x, i: (
        *torch.aminmax(x),
        *torch.aminmax(x, dim=1),
        *torch.aminmax(x, dim=0, keepdim=True),
        *torch.aminmax(i),
        *torch.aminmax(x[0, 0]),
    ),
    x=X(6, 4),
    i=N(6, 4),
)
sample(
    "extremes_and_places",
    lambda x: (
        *x.max(1),
        *x.min(0, keepdim=True),
        x.argmax(),
        x.argmin(1, keepdim=True),
        x.argmax(-1),
        x.argmax(None, keepdim=True),
        *x[0, 0].max(0),
    ),
    x=X(6, 4),
)
sample(
    "some_and_all",
    lambda m, x, i: (
        m.any(),
        m.all(1),
        m.any(0, keepdim=True),
        m.all(),
        i.any(1),
        (x > 1).any((0, 1)),
        m.all((0, 1)),
        x.any(),
        x.all(0),
    ),
    m=B(6, 2),
    x=X(6, 4),
    i=N(6, 4, high=2),
)
sample(
    "norms",
    lambda x: (
        x.norm(),
        x.norm(dim=1),
        x.norm(1, dim=0),
        torch.linalg.vector_norm(x, INF, 1, keepdim=True),
        torch.linalg.vector_norm(x),
        torch.linalg.vector_norm(x, 0),
        aten.norm.Scalar(x, 2),
        aten.norm.ScalarOpt_dim(x, 2, [1]),
        aten.norm.ScalarOpt_dim(x, None, [0], True),
        x.norm(2, dtype=f64),
    ),
    x=X(6, 4),
)
sample(
    "variances",
    lambda x: (
        x.var(),
        x.var(1),
        x.std(0, correction=0),
        x.var((0, 1), keepdim=True, correction=2),
        *torch.var_mean(x, 1),
        *torch.std_mean(x, 0),
        x.var(1, unbiased=False),
        x.var(0, correction=0.5),
    ),
    x=X(6, 4),
)
sample(
    "cumulative",
    lambda x, i: (
        x.cumsum(0),
        x.cumsum(-1),
        i.cumsum(0),
        x.cumsum(0, dtype=i64),
        x.cumprod(1),
        x.logcumsumexp(0),
        *x.cummax(1),
        *x.cummin(0),
        x[0, 0].cumsum(0),
        x.cumprod(0, dtype=f64),
    ),
    x=X(6, 4),
    i=N(6),
)
sample("logsumexp", lambda x: (x.logsumexp(1), x.logsumexp((0, 1)), x.logsumexp(-1, keepdim=True), x.logsumexp(0)), x=X(6, 4))
sample(
    "products",
    lambda x, i: (x.prod(), x.prod(1), x.prod(0, keepdim=True), i.prod(0), x.prod(1, dtype=f64)),
    x=X(6, 4),
    i=N(6, 4),
)
sample(
    "orders",
    lambda x: (
        *x.sort(),
        *x.sort(0, descending=True),
        x.argsort(1),
        *x.sort(stable=True, dim=0),
        *x[:, :1].expand(6, 4).sort(stable=True, descending=True),
        *x[:1].expand(6, 4).sort(stable=True, dim=0),
        *x.topk(2),
        *x.topk(3, 0, largest=False),
        *x.kthvalue(2),
        *x.kthvalue(3, 0, True),
        *x.median(1),
        x.median(),
        *x.mode(1),
        x[0, 0].sort()[0],
    ),
    x=X(6, 4),
)
sample("renorm", lambda x: x.renorm(2, 0, 1.0), x=X(6, 4))
# indices
sample(
    "embedding",
    lambda w, i: (F.embedding(i, w), F.embedding(i[0, 0], w), F.embedding(i, w, padding_idx=2)),
    w=X(6, 4),
    i=N(2, 6),
)
sample("embedding_inferred", lambda w, i: F.embedding(i, w), w=X(6, 4), i=N(2, 6, declared=False))
both("embedding_gradient", lambda w, i: F.embedding(i, w), w=X(6, 4), i=N(2, 6))
both("embedding_padding", lambda w, i: F.embedding(i, w, padding_idx=-2), w=X(6, 4), i=N(2, 6))
both("gather", lambda x, i: x.gather(1, i), x=X(6, 6), i=N(6, 2))
sample("gather_complex", lambda z, i: (z.gather(0, i), z.gather(-1, i[:4])), z=C(6, 6), i=N(4, 6))
sample(
    "gather_more",
    lambda x, i: (x.gather(0, i), x.gather(-1, i[:2]), torch.take_along_dim(x[:, :4, :2], i, 0)),
    x=X(6, 6, 3),
    i=N(6, 4, 2, high=3),
)
sample(
    "scatter_add",
    lambda x, i, y: (x.scatter_add(1, i, y), x.scatter_add_(-1, i, y), x.scatter_reduce(1, i, y, "sum")),
    x=X(6, 6),
    i=N(6, 2),
    y=X(6, 3),
)
sample(
    "scatter",
    lambda x, i, y: (x.scatter(1, i, y), x.scatter(1, i, 2.5), x.scatter_(1, i, y[:, 1:])),
    x=X(6, 6),
    i=N(6, 1),
    y=X(6, 6),
)
sample(
    "scatter_several",
    lambda x, i, y: (
        x.scatter(1, i, y),
        x.scatter(1, i, 2.5),
        x.scatter(1, x.topk(2)[1], y),
        x.scatter(1, x.topk(2)[1], 3.0),
        x.scatter(-1, x.argsort(1)[:, :2], y),
        x.scatter(1, x.topk(6)[1], 3.0),
        x.scatter(0, x.argsort(0), y[:1, :1].expand(6, 6)),
        x.scatter(1, x.argsort(1), x.flip(1)),
    ),
    x=X(6, 6),
    i=N(6, 2),
    y=X(6, 2),
)
sample("one_hot", lambda i: (F.one_hot(i, 7), F.one_hot(i[0], 6)), i=N(4, 6))
sample(
    "index_select",
    lambda x, i: (x.index_select(0, i), x.index_select(-1, i[:2]), x.index_add(0, i, x[:3], alpha=2)),
    x=X(6, 6),
    i=N(3),
)
sample(
    "index",
    lambda x, i, j: (
        x[i],
        x[:, j],
        x[i, j],
        x[i][:, 0],
        x[torch.arange(6), torch.arange(6)],
        x[torch.tensor([1, 3])],
        x[:, torch.tensor([-1, -2])],
    ),
    x=X(6, 6),
    i=N(3),
    j=N(3),
)
both("index_gradient", lambda x, i, j: x[i, j] + x[i].sum(1), x=X(6, 6), i=N(3), j=N(3))
sample(
    "index_put",
    lambda x, m, i, y: (
        x.index_put((m,), torch.tensor(2.0)),
        x.index_put((i,), y, accumulate=True),
        x.index_put((torch.arange(3),), y),
        x.index_put((i, i), y[:, 0], accumulate=True),
        aten._unsafe_index(x, [i]),
        aten._unsafe_index_put(x, [i], y, True),
        x.index_put((i[:1],), y[:1]),
    ),
    x=X(6, 4),
    m=B(6, 4),
    i=N(3, high=4),
    y=X(3, 4),
)
sample(
    "index_copy",
    lambda x, y: (x.index_copy(0, torch.arange(1, 4), y), x.index_copy(1, torch.tensor([2]), x[:, :1])),
    x=X(6, 4),
    y=X(3, 4),
)
sample(
    "buckets",
    lambda x, e: (torch.bucketize(x, e.cumsum(0)), torch.searchsorted(e.cumsum(0), x, right=True)),
    x=X(6, 4),
    e=P(3, low=0.1, high=0.5),
)
sample(
    "numbers_in_order",
    lambda x: (
        x[torch.tensor([2, 0, 3, 1]).argsort()],
        x[torch.tensor([2, 0, 2, 1]).sort(stable=True, descending=True).indices],
        x[torch.bucketize(torch.arange(6), torch.tensor([1, 3]).cumsum(0), right=True)],
        x[torch.repeat_interleave(torch.tensor([1, 0, 3]), output_size=4)],
    ),
    only=(1,),
    x=X(4, 6),
)
sample(
    "indices_from_data",
    lambda x, w: (w[x.argmax(1)], x.gather(1, x.topk(2)[1]), F.one_hot(x.argmax(-1), 4), x[x[:, 0].argsort()]),
    x=X(6, 4),
    w=X(4, 6),
)
