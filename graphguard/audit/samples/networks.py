"""Samples of rows of networks: activations, normalisation, attention, losses, optimizers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from graphguard.audit.samples.sample import INF, B, N, P, X, aten, both, sample

# activations
for _name in [
    "relu",
    "sigmoid",
    "tanh",
    "silu",
    "mish",
    "hardswish",
    "hardsigmoid",
    "softplus",
    "elu",
    "selu",
    "celu",
    "leaky_relu",
    "relu6",
    "hardtanh",
    "hardshrink",
    "softshrink",
    "logsigmoid",
    "softsign",
]:
    both(_name, lambda x, _n=_name: getattr(F, _n)(3 * x), x=X(6, 4))
for _mode in ("none", "tanh"):
    both(f"gelu_{_mode}", lambda x, _m=_mode: F.gelu(x, approximate=_m), x=X(6, 4))
both("softplus_more", lambda x: F.softplus(x, beta=2.5, threshold=1), x=X(6, 4))
both("elu_more", lambda x: F.elu(x, alpha=0.3), x=X(6, 4))
both("leaky_relu_more", lambda x: F.leaky_relu(x, 0.3), x=X(6, 4))
both("leaky_relu_in_place", lambda x: F.leaky_relu(x * 1, 0.3, inplace=True), x=X(6, 4))
both("elu_in_place", lambda x: F.elu(x * 1, 0.3, inplace=True), x=X(6, 4))
both("threshold", lambda x: F.threshold(x, 0.5, -3.0), x=X(6, 4))
both("glu", lambda x: F.glu(x, 1), x=X(6, 4))
both("prelu", lambda x, w: F.prelu(x, w), x=X(6, 4), w=X(4))
# normalisation
for _shape in ((4,), (6, 4)):
    both(
        f"layer_norm_{len(_shape)}",
        lambda x, w, b, _s=_shape: F.layer_norm(x, _s, w, b, eps=1e-3),
        x=X(2, 6, 4),
        w=X(*_shape),
        b=X(*_shape),
    )
both("layer_norm_bare", lambda x: F.layer_norm(x, (4,)), x=X(6, 4))
both("rms_norm_parts", lambda x, w: F.rms_norm(x, (4,), w), x=X(6, 4), w=X(4))
both("group_norm", lambda x, w, b: F.group_norm(x, 2, w, b), x=X(2, 4, 6), w=X(4), b=X(4))
both("group_norm_bare", lambda x: F.group_norm(x, 2), x=X(2, 4, 6))
both("batch_norm", lambda x, w, b: F.batch_norm(x, None, None, w, b, True), x=X(6, 4, 2), w=X(4), b=X(4))
both(
    "batch_norm_evaluated",
    lambda x, w, b, m, v: F.batch_norm(x, m.detach(), v.detach(), w, b) + 0 * (m + v).sum(),
    x=X(6, 4),
    w=X(4),
    b=X(4),
    m=X(4),
    v=P(4),
)
sample("batch_norm_running", lambda x, m, v: (F.batch_norm(x, m, v, None, None, True, 0.3), m, v), x=X(6, 4), m=X(4), v=P(4))
sample(
    "batch_norm_legit",
    lambda x, m, v: (
        aten._native_batch_norm_legit.no_stats(x, None, None, True, 0.1, 1e-5)[0],
        aten._native_batch_norm_legit_no_training(x, None, None, m, v, 0.1, 1e-5)[0],
    ),
    x=X(6, 4),
    m=X(4),
    v=P(4),
)
# softmax and attention
both("softmax", lambda x: x.softmax(1), x=X(6, 4))
both("log_softmax", lambda x: x.log_softmax(0), x=X(6, 4))
sample("softmax_of_points", lambda x: (x.softmax(0), x.log_softmax(-1)), x=X())
sample(
    "safe_softmax",
    lambda x, m: (
        torch._safe_softmax(x, 1),
        torch._safe_softmax(x.masked_fill(m, -INF), 1),
        torch._safe_softmax(torch.where(torch.ones(6, 4).tril().bool(), x, -INF), -1),
    ),
    x=X(6, 4),
    m=B(6, 1),
)
for _name, _more in {"plain": {}, "causal": {"is_causal": True}, "scaled": {"scale": 0.3}}.items():
    both(
        f"attention_{_name}",
        lambda q, k, v, _m=_more: F.scaled_dot_product_attention(q, k, v, **_m),
        (0, 1),
        q=X(2, 2, 6, 4),
        k=X(2, 2, 6, 4),
        v=X(2, 2, 6, 4),
    )
sample(
    "attention_masked",
    lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
    (0, 1),
    q=X(2, 2, 6, 4),
    k=X(2, 2, 6, 4),
    v=X(2, 2, 6, 4),
    m=B(2, 2, 6, 6),
)
sample(
    "attention_grouped",
    lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
    (0, 1),
    q=X(2, 4, 6, 4),
    k=X(2, 2, 6, 4),
    v=X(2, 2, 6, 4),
)
_flash = aten._scaled_dot_product_flash_attention_for_cpu
for _name, _more in {"plain": {}, "causal": {"is_causal": True}, "scaled": {"scale": 0.3}}.items():
    sample(
        f"flash_{_name}",
        lambda q, k, v, _m=_more: _flash(q, k, v, **_m),
        (0, 1),
        q=X(2, 2, 6, 4),
        k=X(2, 2, 6, 4),
        v=X(2, 2, 6, 4),
    )
    sample(
        f"flash_{_name}_backward",
        lambda q, k, v, g, _m=_more: aten._scaled_dot_product_flash_attention_for_cpu_backward(
            g, q, k, v, *_flash(q, k, v, **_m), 0.0, _m.get("is_causal", False), scale=_m.get("scale")
        ),
        (0, 1),
        q=X(2, 2, 6, 4),
        k=X(2, 2, 6, 4),
        v=X(2, 2, 6, 4),
        g=X(2, 2, 6, 4),
    )
sample(
    "flash_masked",
    lambda q, k, v, m: _flash(q, k, v, attn_mask=m),
    (0, 1),
    q=X(2, 2, 6, 4),
    k=X(2, 2, 6, 4),
    v=X(2, 2, 6, 4),
    m=X(2, 2, 6, 6),
)
# losses
for _reduction in ("none", "mean", "sum"):
    for _loss in ("mse_loss", "smooth_l1_loss", "huber_loss", "l1_loss"):
        both(
            f"{_loss}_{_reduction}",
            lambda x, y, _n=_loss, _r=_reduction: getattr(F, _n)(x, y, reduction=_r),
            x=X(6, 4),
            y=X(6, 4),
        )
    both(
        f"bce_{_reduction}",
        lambda x, y, w, _r=_reduction: F.binary_cross_entropy(x, y.detach(), w.detach(), reduction=_r) + 0 * (w + y).sum(),
        x=P(6, 4, low=0.1, high=0.9),
        y=P(6, 4, low=0.1, high=0.9),
        w=P(4),
    )
    sample(
        f"bce_with_logits_{_reduction}",
        lambda x, y, w, p, _r=_reduction: (
            F.binary_cross_entropy_with_logits(x, y, w, reduction=_r, pos_weight=p),
            F.binary_cross_entropy_with_logits(x, y, reduction=_r),
        ),
        x=X(6, 4),
        y=P(6, 4),
        w=P(4),
        p=P(4),
    )
    for _ignored in (-100, 2):
        both(
            f"nll_{_reduction}_{_ignored}",
            lambda x, t, _r=_reduction, _i=_ignored: F.cross_entropy(x, t, reduction=_r, ignore_index=_i),
            x=X(6, 4),
            t=N(6, high=4),
        )
        both(
            f"nll_pixels_{_reduction}_{_ignored}",
            lambda x, t, _r=_reduction, _i=_ignored: F.cross_entropy(x, t, reduction=_r, ignore_index=_i),
            x=X(6, 4, 2),
            t=N(6, 2, high=4),
        )
    both(
        f"nll_ignored_range_{_reduction}",
        lambda x, t, _r=_reduction: F.nll_loss(x, t, reduction=_r, ignore_index=-1),
        x=X(6, 4),
        t=N(6, low=-1, high=4),
    )
    both(
        f"nll_weighted_{_reduction}",
        lambda x, t, w, _r=_reduction: F.nll_loss(x, t, w.detach(), reduction=_r, ignore_index=1) + 0 * w.sum(),
        x=X(6, 4),
        t=N(6, high=4),
        w=P(4),
    )
both("nll_of_one", lambda x, t: F.nll_loss(x, t), x=X(4), t=N(high=4))
both("smooth_l1_width", lambda x, y: F.smooth_l1_loss(x, y, beta=0.3) + F.huber_loss(x, y, delta=0.3), x=X(6, 4), y=X(6, 4))
sample(
    "other_losses",
    lambda x, y, p: (F.kl_div(x, p), F.cosine_similarity(x, y), F.normalize(x), F.poisson_nll_loss(x, p)),
    x=X(6, 4),
    y=X(6, 4),
    p=P(6, 4),
)
sample("smooth_labels", lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), x=X(6, 4), t=N(6, high=4))


# optimizers
def _lists(a: torch.Tensor, b: torch.Tensor, p: torch.Tensor) -> Any:
    xs, ys, ps, s = [a, b], [a + 1, b * 2], [p, p + 1], torch.tensor([0.5, 2.0])
    return (
        torch._foreach_add(xs, 2),
        torch._foreach_add(xs, ys, alpha=3),
        torch._foreach_add(xs, [1.0, 2.0]),
        torch._foreach_mul(xs, s[1]),
        torch._foreach_div(xs, ps),
        torch._foreach_sub(xs, ys),
        torch._foreach_addcmul(xs, ys, ps, value=2),
        torch._foreach_addcmul(xs, ys, ps, [1.0, 2.0]),
        torch._foreach_addcdiv(xs, ys, ps, [0.5, 2.0]),
        torch._foreach_addcdiv(xs, ys, ps, value=-1),
        torch._foreach_lerp(xs, ys, 0.3),
        torch._foreach_lerp(xs, ys, ps),
        torch._foreach_lerp(xs, ys, [0.1, 0.2]),
        torch._foreach_sqrt(ps),
        torch._foreach_norm(xs),
        torch._foreach_norm(xs, 1),
        torch._foreach_max(xs),
        torch._foreach_pow(ps, 2),
        torch._foreach_pow(ps, [2.0, 3.0]),
        torch._foreach_pow(ps, xs),
        torch._foreach_pow(2.0, xs),
        torch._foreach_clamp_min(xs, 0.1),
        torch._foreach_clamp_max(xs, ys),
        torch._foreach_maximum(xs, ys),
        torch._foreach_minimum(xs, 0.2),
        torch._foreach_neg(xs),
        torch._foreach_exp(xs),
        torch._foreach_reciprocal(ps),
        torch._foreach_abs(xs),
        torch._foreach_sigmoid(xs),
        torch._foreach_sign(xs),
        torch._foreach_clamp_min(xs, [0.1, 0.2]),
    )


def _lists_in_place(a: torch.Tensor, b: torch.Tensor, p: torch.Tensor) -> Any:
    xs = [a, b]
    torch._foreach_mul_(xs, 0.9)
    torch._foreach_add_(xs, [p, p], alpha=2)
    torch._foreach_addcdiv_(xs, [a + 1, b], [p, p + 1], value=-0.1)
    torch._foreach_copy_([p], [a])
    torch._foreach_zero_([b])
    torch._foreach_div_(xs, 3)
    torch._foreach_lerp_(xs, [p, p], 0.25)
    return a, b, p


sample("lists", _lists, a=X(6, 4), b=X(6, 4), p=P(6, 4))
sample("lists_in_place", _lists_in_place, a=X(6, 4), b=X(6, 4), p=P(6, 4))


def _adam(fused: Any, **more: Any) -> Callable[..., Any]:
    def step(x: Any, g: Any, m: Any, v: Any, top: Any, s: Any) -> Any:
        options = {
            "lr": 0.1,
            "beta1": 0.9,
            "beta2": 0.99,
            "weight_decay": 0.2,
            "eps": 1e-6,
            "amsgrad": False,
            "maximize": False,
        } | more
        fused(
            [x, x * 2],
            [g, g + 1],
            [m, m * 1],
            [v, v * 1],
            [top, top * 1] if options["amsgrad"] else [],
            [s[0], s[0]],
            **options,
        )
        return x, g, m, v, top

    return step


_state = {"x": X(6, 4), "g": X(6, 4), "m": X(6, 4), "v": P(6, 4), "top": P(6, 4), "s": P(1, low=2.0, high=3.0)}
sample("adam", _adam(torch._fused_adam_), (0, 1), **_state)
sample("adam_amsgrad", _adam(torch._fused_adam_, amsgrad=True, maximize=True), (0, 1), **_state)
sample("adamw", _adam(torch._fused_adamw_), (0, 1), **_state)


def _sgd(x: Any, g: Any, m: Any, s: Any, *, buffers: bool = True, **more: Any) -> Any:
    options = {
        "weight_decay": 0.1,
        "momentum": 0.9,
        "lr": 0.1,
        "dampening": 0.2,
        "nesterov": False,
        "maximize": False,
        "is_first_step": False,
    } | more
    torch._fused_sgd_([x], [g], [m] if buffers else [], **options)
    return x, m


_state = {"x": X(6, 4), "g": X(6, 4), "m": P(6, 4), "s": P(1, low=2.0, high=3.0)}
sample("sgd", _sgd, (0, 1), **_state)
sample("sgd_nesterov", functools.partial(_sgd, nesterov=True, dampening=0.0, maximize=True), (0, 1), **_state)
sample("sgd_first", functools.partial(_sgd, is_first_step=True), (0, 1), **_state)
sample("sgd_bare", functools.partial(_sgd, buffers=False, momentum=0.0), (0, 1), **_state)
sample(
    "adagrad",
    lambda x, g, m, s: (
        torch._fused_adagrad_([x], [g], [m], [s[0]], lr=0.1, lr_decay=0.2, weight_decay=0.1, eps=1e-6, maximize=False),
        x,
        m,
    )[1:],
    (0, 1),
    **_state,
)
sample(
    "no_dropout",
    lambda x: (F.dropout(x, 0.0), F.dropout(x, 0.5, training=False), aten.native_dropout_backward(x, x > 0, 2.0)),
    x=X(6, 4),
)
