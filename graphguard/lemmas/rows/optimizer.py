"""Fused steps of optimizers. Their outputs are the lists that they write, in the order of the schema."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from graphguard.engine.tensors.ops import fraction
from graphguard.engine.terms.term import Undescribed, Value
from graphguard.lemmas.registry import Call, row
from graphguard.lemmas.rows.arithmetic import pow_tensor

HALF = Fraction(1, 2)
Lists = Sequence[Sequence[Value]]


def _columns(lists: Lists, step: Callable[..., tuple[Value, ...]]) -> tuple[Value, ...]:
    """A step for each parameter; its results, list by list."""
    columns = [step(*each) for each in zip(*lists, strict=True)]
    return tuple(column[number] for number in range(len(columns[0]) if columns else 0) for column in columns)


def _require_plain(grad_scale: Any, found_inf: Any, rate: Any) -> None:
    if grad_scale is not None or found_inf is not None:
        raise Undescribed("an optimizer step with scaled gradients")
    if isinstance(rate, Value):
        raise Undescribed("a learning rate that is a tensor")


def _mixed(c: Call, old: Value, new: Value, keep: Fraction) -> Value:
    return c.add(c.scale(old, keep), c.scale(new, 1 - keep))


@row(
    "aten._fused_adam_.default",
    "aten._fused_adamw_.default",
    means="one step of Adam, or of AdamW",
    needs="gradients as they are",
)
def adam(
    c: Call, xs: Any, grads: Any, means: Any, squares: Any, largest: Any, steps: Any, *, lr: Any, beta1: Any, beta2: Any,
    weight_decay: Any, eps: Any, amsgrad: bool, maximize: bool, grad_scale: Any = None, found_inf: Any = None,
) -> tuple[Value, ...]:  # fmt: skip
    _require_plain(grad_scale, found_inf, lr)
    first, second, rate, decay = (fraction(number) for number in (beta1, beta2, lr, weight_decay))

    def corrected(beta: Fraction, step: Value) -> Value:
        return c.sub(c.ones(()), pow_tensor(c, beta, step))

    def update(x: Value, grad: Value, mean: Value, square: Value, step: Value, *rest: Value) -> tuple[Value, ...]:
        g = c.neg(grad) if maximize else grad
        if decay and "adamw" in c.node.op:
            x = c.scale(x, 1 - rate * decay)
        elif decay:
            g = c.add(g, c.scale(x, decay))
        g = c.atomic(g)
        mean, square = _mixed(c, mean, g, first), _mixed(c, square, c.power(g, 2), second)
        peaks = [c.fn("maximum", rest[0], square)] if amsgrad else []
        root = c.power(peaks[0] if amsgrad else square, HALF)
        below = c.add(c.div(root, c.power(corrected(second, step), HALF)), c.full((), eps))
        moved = c.div(c.div(mean, corrected(first, step)), below)
        return c.sub(x, c.scale(moved, rate)), grad, mean, square, *peaks

    lists: list[Any] = [xs, grads, means, squares, steps]
    return _columns([*lists, largest] if amsgrad else lists, update) + (() if amsgrad else tuple(largest))


@row("aten._fused_sgd_.default", means="one step of SGD", needs="gradients as they are")
def sgd(
    c: Call, xs: Any, grads: Any, buffers: Any, *, weight_decay: Any, momentum: Any, lr: Any, dampening: Any, nesterov: bool,
    maximize: bool, is_first_step: bool, grad_scale: Any = None, found_inf: Any = None,
) -> tuple[Value, ...]:  # fmt: skip
    _require_plain(grad_scale, found_inf, lr)
    decay, keep, damping = fraction(weight_decay), fraction(momentum), fraction(dampening)

    def update(x: Value, grad: Value, *rest: Value) -> tuple[Value, ...]:
        g = c.neg(grad) if maximize else grad
        g = c.add(g, c.scale(x, decay)) if decay else g
        if not rest:
            return c.sub(x, c.scale(g, lr)), grad
        buffer = g if is_first_step else c.add(c.scale(rest[0], keep), c.scale(g, 1 - damping))
        g = c.add(g, c.scale(buffer, keep)) if nesterov else buffer
        return c.sub(x, c.scale(g, lr)), grad, buffer

    return _columns([xs, grads, buffers] if buffers else [xs, grads], update)


@row("aten._fused_adagrad_.default", means="one step of Adagrad", needs="gradients as they are")
def adagrad(
    c: Call, xs: Any, grads: Any, sums: Any, steps: Any, *, lr: Any, lr_decay: Any, weight_decay: Any, eps: Any, maximize: bool,
    grad_scale: Any = None, found_inf: Any = None,
) -> tuple[Value, ...]:  # fmt: skip
    _require_plain(grad_scale, found_inf, lr)
    decay = fraction(weight_decay)

    def update(x: Value, grad: Value, total: Value, step: Value) -> tuple[Value, ...]:
        g = c.neg(grad) if maximize else grad
        g = c.atomic(c.add(g, c.scale(x, decay)) if decay else g)
        total = c.add(total, c.power(g, 2))
        moved = c.scale(c.div(g, c.add(c.power(total, HALF), c.full((), eps))), lr)
        slower = c.add(c.ones(()), c.scale(c.sub(step, c.ones(())), lr_decay))
        return c.sub(x, c.div(moved, slower)), grad, total, step

    return _columns([xs, grads, sums, steps], update)
