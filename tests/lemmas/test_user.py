"""Lemmas of the user's own: what they prove, what they do not, and which are refused."""

import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import capture_one

import graphguard as gg
from graphguard import Shard, scope
from graphguard.aten.custom import call_wide
from graphguard.engine.interpret import Interpreter
from graphguard.engine.store.table import Table
from graphguard.errors import UsageError
from graphguard.lemmas import user
from graphguard.lemmas.known import all_lemmas
from graphguard.lemmas.rule import parse

RULE = "... h, h -> ... h"
TWO = {"tp": 2}


@torch.library.custom_op("gg_test::rms_norm", mutates_args=())
def rms_norm(x: torch.Tensor, w: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * w).to(x.dtype)


@rms_norm.register_fake
def _(x, w, eps=1e-6):
    return torch.empty_like(x)


@torch.library.custom_op("gg_test::swiglu", mutates_args=())
def swiglu(g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    return F.silu(g) * u


@swiglu.register_fake
def _(g, u):
    return torch.empty_like(g)


@torch.library.custom_op("gg_test::swiglu_backward", mutates_args=())
def swiglu_backward(d: torch.Tensor, g: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    s = torch.sigmoid(g)
    return d * u * s * (1 + g * (1 - s)), d * F.silu(g)


@swiglu_backward.register_fake
def _(d, g, u):
    return torch.empty_like(d), torch.empty_like(d)


swiglu.register_autograd(
    lambda ctx, d: swiglu_backward(d, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@torch.library.custom_op("gg_test::lookup", mutates_args=())
def lookup(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return table[ids]


@torch.library.custom_op("gg_test::turned_lookup", mutates_args=())
def turned_lookup(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return table[ids.flip(0)]


lookup.register_fake(lambda table, ids: table.new_empty(*ids.shape, table.shape[1]))
turned_lookup.register_fake(lambda table, ids: table.new_empty(*ids.shape, table.shape[1]))


@torch.library.custom_op("gg_test::shift", mutates_args=())
def shift(x: torch.Tensor) -> torch.Tensor:
    return x + torch.arange(x.shape[0]).reshape(-1, *[1] * (x.dim() - 1))


@torch.library.custom_op("gg_test::noise", mutates_args=())
def noise(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand_like(x)


@torch.library.custom_op("gg_test::heads", mutates_args=())
def heads(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """A norm of each head: the last dim of x is heads times scale's size."""
    rows = x.reshape(*x.shape[:-1], -1, scale.shape[0])
    return (F.normalize(rows, dim=-1) * scale).reshape(x.shape)


@torch.library.custom_op("gg_test::scale", mutates_args=())
def scale(x: torch.Tensor) -> torch.Tensor:
    return x * 1


@torch.library.custom_op("gg_test::for_gpus", mutates_args=(), device_types="cuda")
def for_gpus(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@torch.library.custom_op("gg_test::pick", mutates_args=())
def pick(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return table[ids]


@torch.library.custom_op("gg_test::double_", mutates_args=("x",))
def double_(x: torch.Tensor) -> None:
    x.mul_(2)


@torch.library.custom_op("gg_test::demanding", mutates_args=())
def demanding(x: torch.Tensor) -> torch.Tensor:
    return x * 1


@demanding.register_fake
def _(x):
    if x.shape[-1] % 100:
        raise ValueError("a multiple of 100, please")
    return torch.empty_like(x)


for _like in (shift, noise, heads, scale, for_gpus):
    _like.register_fake(lambda x, *_: torch.empty_like(x))
pick.register_fake(lambda table, ids: table.new_empty((*ids.shape, table.shape[1])))


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(scope, "_OF_PROCESS", {})
    return scope._OF_PROCESS


def verify(sequential, distributed=None, lemmas=(), **inputs):
    return gg.verify(sequential, distributed or sequential, mesh=TWO, inputs=inputs, lemmas=lemmas)


# ---------------------------------------------------------------------- what they prove
def mlp(x, n, a, b, c):
    x = rms_norm(x, n)
    return swiglu(x @ a, x @ b) @ c


def tp_mlp(x, n, a, b, c):
    y = mlp(x, n, a, b, c)
    dist.all_reduce(y)
    return y


MLP = {
    "x": gg.Input((4, 8)),
    "n": gg.Input((8,)),
    "a": gg.Input((8, 16), Shard(1)),
    "b": gg.Input((8, 16), Shard(1)),
    "c": gg.Input((16, 8), Shard(0)),
}


def test_a_tensor_parallel_mlp_with_both_kinds_of_lemmas_is_verified():
    gg.lemma("gg_test::rms_norm", RULE, whole="h")
    gg.lemma("gg_test::swiglu", lambda g, u: F.silu(g) * u)
    report = verify(mlp, tp_mlp, **MLP)
    assert report.verdict == "verified"
    assert str(report.relation) == "out = rank0.out   (equal on all 2 ranks)"
    mine = [text for text in report.assumptions if "lemma of yours" in text]
    assert len(mine) == 2
    assert mine[0] == "gg_test::rms_norm is ... h, h -> ... h, whole h, a lemma of yours that held in 40 random cases"
    assert mine[1].startswith("gg_test::swiglu is what the lambda at test_user.py:")


def test_without_lemmas_the_bodies_say_what_the_operators_do():
    report = verify(mlp, tp_mlp, **MLP)
    assert report.verdict == "verified" and not report.opaque


def test_an_operator_without_a_lemma_or_a_body_for_the_cpu_is_named_with_what_is_assumed_of_it():
    graph = capture_one(lambda x: for_gpus(x), {"x": gg.Input((4, 8))})
    assert graph.assumptions == (
        "gg_test::for_gpus is taken to be a function of its operands alone; it is not looked into: "
        "it has no kernel for the CPU that is written in Python",
    )


def test_what_lemmas_prove_and_what_they_do_not():
    """A program with an output for each: those that are wrong are refuted, and are all that is not proved."""
    gg.lemma("gg_test::rms_norm", RULE, whole="h")
    gg.lemma("gg_test::heads", "... (h d), d -> ... (h d)", whole="d")
    gg.lemma("gg_test::swiglu", lambda g, u: F.silu(g) * u)

    def sequential(rows, middle, columns, w, part, s):
        return {
            "rows": rms_norm(rows, w),
            "middle": rms_norm(middle, w),
            "flat": rms_norm(middle, w),
            "heads": heads(columns, s),
            "fused": F.silu(rows) * rows,
            "cut": rms_norm(columns, part),
            "epsilon": rms_norm(rows, w, 0.5),
        }

    def distributed(rows, middle, columns, w, part, s):
        return {
            "rows": rms_norm(rows, w),
            "middle": rms_norm(middle, w),
            "flat": rms_norm(middle.reshape(-1, 12), w).reshape(middle.shape),
            "heads": heads(columns, s),
            "fused": swiglu(rows, rows),
            "cut": rms_norm(columns, part),
            "epsilon": rms_norm(rows, w, 0.25),
        }

    report = verify(
        sequential,
        distributed,
        rows=gg.Input((4, 6, 12), Shard(0)),
        middle=gg.Input((4, 6, 12), Shard(1)),
        columns=gg.Input((4, 12), Shard(1)),
        w=gg.Input((12,)),
        part=gg.Input((12,), Shard(0)),
        s=gg.Input((3,)),
    )
    assert report.verdict == "refuted"
    assert list(report.relation) == ["rows", "middle", "flat", "heads", "fused"]
    assert report.relation["heads"].text == "heads = concat(rank0.heads, rank1.heads, dim=1)"


def test_gradients_by_lemmas_of_the_operators_that_the_backward_calls():
    def step(x, a, b):
        leaves = [a.requires_grad_(), b.requires_grad_()]
        return torch.autograd.grad(swiglu(x @ a, x @ b).square().sum(), leaves)

    def gradients(d, g, u):
        s = torch.sigmoid(g)
        return d * u * s * (1 + g * (1 - s)), d * F.silu(g)

    lemmas = [gg.lemma("gg_test::swiglu", lambda g, u: F.silu(g) * u), gg.lemma("gg_test::swiglu_backward", gradients)]
    report = verify(
        step, lemmas=lemmas, x=gg.Input((4, 8)), a=gg.Input((8, 6), Shard(1)), b=gg.Input((8, 6), Shard(1))
    )  # fmt: skip
    assert report.verdict == "verified"
    assert "0 = concat(rank0.0, rank1.0, dim=1)" in str(report.relation)


def test_lemmas_given_to_a_check_come_before_those_of_the_process():
    first = gg.lemma("gg_test::rms_norm", "b h, h -> b h", whole="h")
    second = gg.lemma("gg_test::rms_norm", "b h, h -> b h", whole="b h")
    other = gg.lemma("gg_test::scale", "... -> ...")
    assert user.by_operator() == {second.operator: second, other.operator: other}
    assert user.by_operator([first]) == {first.operator: first, other.operator: other}


# ---------------------------------------------------------------------- what is refused
def refused(name, meaning, **more):
    with pytest.raises(UsageError) as error:
        gg.lemma(name, meaning, **more)
    assert not user.registered()
    return str(error.value)


def test_an_axis_that_is_not_parallel_is_shown_by_numbers():
    text = refused("gg_test::rms_norm", RULE)
    assert re.fullmatch(
        r"the lemma of gg_test::rms_norm is refused: '... h, h -> ... h' is not parallel along h: on operands of shape "
        r"\(\d, \d, \d\) and \(\d,\), position \d:\d of it alone gives \S+ at \[\d, \d, \d\], where the whole gives \S+",
        text,
    )


def test_an_operator_that_knows_its_position_is_not_parallel():
    assert "is not parallel along b" in refused("gg_test::shift", "b h -> b h", whole="h")


def test_an_operator_that_draws_numbers_is_no_function():
    assert "the operator is not a function: two calls with the same operands" in refused("gg_test::noise", "... -> ...")


def test_a_definition_that_gives_something_else_is_shown_by_numbers():
    text = refused("gg_test::swiglu", lambda g, u: F.gelu(g) * u)
    assert text.startswith("the lemma of gg_test::swiglu is refused: on operands of shape ")
    assert " its definition gives " in text and ", where the operator gives " in text


def test_another_epsilon_is_noticed():
    assert "its definition gives" in refused("gg_test::rms_norm", lambda x, w: F.rms_norm(x, w.shape, w, eps=1e-5))


def described(program, lemma, **shapes):
    """The first output of a program, and the lemmas that it took to describe it."""
    graph = capture_one(program, {name: gg.Input(shape) for name, shape in shapes.items()})
    interpreter = Interpreter(Table(), all_lemmas({lemma.operator: lemma}))
    inputs = {name: interpreter.input(name, shape) for name, shape in shapes.items()}
    environment = interpreter.run_sequential(graph, inputs)
    return environment[next(iter(graph.outputs.values()))], list(interpreter.relied_on.values())


def test_a_definition_for_some_numbers_of_dims_is_used_for_those_alone():
    lemma = gg.lemma("gg_test::rms_norm", lambda x, w: F.rms_norm(x, w.shape, w, eps=1e-6))
    assert described(lambda x, w: rms_norm(x, w), lemma, x=(4, 8), w=(8,))[1] == [lemma]
    with pytest.raises(UsageError, match=r"does not hold for the call at .*test_user.py:.* on operands of shape"):
        described(lambda x, w: rms_norm(x, w), lemma, x=(4, 8), w=(4, 8))


def test_a_call_with_arguments_that_the_definition_does_not_take_is_an_error():
    lemma = gg.lemma("gg_test::rms_norm", lambda x, w: F.rms_norm(x, (x.shape[-1],), w, eps=1e-6))
    with pytest.raises(UsageError, match=r"does not take the arguments with which .*test_user.py:"):
        described(lambda x, w: rms_norm(x, w, 0.5), lemma, x=(4, 8), w=(8,))


def test_definitions_that_do_not_fit_the_operator():
    assert refused("gg_test::swiglu", lambda g: g).endswith("its definition does not take 2 arguments, as the operator does")
    assert "its definition raises RuntimeError: no" in refused("gg_test::swiglu", _raises)
    assert "its definition gives no tensor, where the operator gives" in refused("gg_test::swiglu", lambda g, u: None)


def _raises(g, u):
    raise RuntimeError("no")


@pytest.mark.parametrize(
    "rule, whole, message",
    [
        ("... h", "", "the rule '... h' is not of the form 'operands -> results', such as '... h, h -> ... h'"),
        ("b h -> b h", "", "'b h -> b h' has 1 operand, where the operator takes 2"),
        (RULE, "k", "whole= names 'k', which is no axis of the rule '... h, h -> ... h'"),
        ("b h, h -> h", "h", "the rule 'b h, h -> h' takes b away, so an operator needs all of it: put it into whole="),
        ("b h, h -> b h k", "h", "the rule 'b h, h -> b h k' has k in a result alone, so nothing is parallel along it"),
        ("h h, h -> h h", "", "the rule 'h h, h -> h h' has h twice in one tensor"),
        ("b ?, h -> b h", "", "has '?', which is neither `...`, an axis, `[axis]`, `{axis}` nor `(a b)`"),
        ("b s+w -> b s", "", "has '+w': rules do not say halos; make the axis whole, as in `[s]`"),
        ("{v} d, t -> t {v}", "", "has {v} in a result: what is indexed does not come out as an axis"),
        ("(b h, h -> b h", "", "the parentheses of the rule '(b h, h -> b h' do not match"),
        ("(... h), h -> ... h", "", "has `...` inside of parentheses"),
        ("b h, h -> h b", "h", "sizes that contradict each other, in 'b h, h -> h b'"),
        ("b [h], [h] -> b", "", "a result of shape"),
    ],
)
def test_rules_that_say_nothing_are_refused(rule, whole, message):
    assert message in refused("gg_test::rms_norm", rule, whole=whole)


@pytest.mark.parametrize(
    "name, message",
    [
        ("gg_test::nothing", "torch knows no operator gg_test::nothing; import or define it before its lemma"),
        ("rms_norm", "'rms_norm' is not the name of an operator, such as 'mylib::rms_norm'"),
        ("gg_test::rms_norm.out", "gg_test::rms_norm has the overloads default; name one, as in 'gg_test::rms_norm.default'"),
        ("aten::mm", "aten::mm has a lemma of its own (`graphguard lemmas ls`); only operators without one take yours"),
        (
            "gg_test::double_",
            "gg_test::double_ changes its arguments in place; lemmas are for operators that return their results",
        ),
    ],
)
def test_names_that_take_no_lemma(name, message):
    assert refused(name, "a b -> a b").startswith(message)


def test_an_indexed_axis_is_whole_and_the_others_are_parallel():
    rule = "{v} d, t -> t d"
    assert parse(rule).whole == {"v"}
    gg.lemma("gg_test::lookup", rule)  # indices into v are drawn for it
    table, ids = gg.Input((6, 4)), gg.Input((8,), dtype=torch.int64, low=0, high=6)

    def looked_up(table, ids):
        return lookup(table, ids)

    columns = gg.verify(looked_up, looked_up, mesh=TWO, inputs={"table": gg.Input((6, 4), Shard(1)), "ids": ids})
    assert str(columns.relation) == "out = concat(rank0.out, rank1.out, dim=1)"
    assert columns.assumptions[1].endswith("a lemma of yours that held in 40 random cases")
    tokens = gg.Input((8,), Shard(0), dtype=torch.int64, low=0, high=6)
    rows = gg.verify(looked_up, looked_up, mesh=TWO, inputs={"table": table, "ids": tokens})
    assert str(rows.relation) == "out = concat(rank0.out, rank1.out, dim=0)"
    cut = gg.verify(looked_up, looked_up, mesh=TWO, inputs={"table": gg.Input((6, 4), Shard(0)), "ids": ids})
    assert cut.verdict == "refuted"
    assert any("raises       gg_test.lookup at " in line and "out of bounds" in line for line in cut.counterexample.lines())
    with pytest.raises(UsageError, match="is not parallel along t"):
        gg.lemma("gg_test::turned_lookup", rule)


def test_what_is_neither_a_rule_nor_a_function_is_refused():
    assert refused("gg_test::swiglu", 3) == "the lemma of gg_test::swiglu is int; write an index rule or a function in torch"
    text = refused("gg_test::swiglu", lambda g, u: g * u, whole="h")
    assert text == "whole= is for index rules; the definition of gg_test::swiglu says by itself what must be whole"


# ---------------------------------------------------------------------- what cannot be tried
def test_an_operator_without_a_cpu_kernel_is_trusted_and_listed():
    lemma = gg.lemma("gg_test::for_gpus", "... -> ...")
    assert lemma.assumption == (
        "trusted: gg_test::for_gpus is ... -> ..., a lemma of yours; it has no CPU kernel to be compared with"
    )
    assert described(lambda x: for_gpus(x), lemma, x=(4, 8))[1] == [lemma]


def test_an_operator_that_takes_no_random_tensors_is_tried_on_a_sample():
    trusted = gg.lemma("gg_test::pick", "v d, n -> n d", whole="v").assumption
    assert trusted.startswith(
        "trusted: gg_test::pick is v d, n -> n d, whole v, a lemma of yours; its CPU kernel takes no random "
    )
    assert trusted.endswith("; sample= would do")
    sample = (torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 3, 4, 1]))
    assert gg.lemma("gg_test::pick", "v d, n -> n d", whole="v", sample=sample).untested is None
    with pytest.raises(UsageError, match="is not parallel along v"):
        gg.lemma("gg_test::pick", "v d, v -> v d", whole="", sample=(sample[0][:4], sample[1] % 4))
    with pytest.raises(UsageError, match="gg_test::pick cannot be run on the sample of its lemma: "):
        gg.lemma("gg_test::pick", "v d, n -> n d", whole="v", sample=sample[:1])


def test_an_operator_that_refuses_all_shapes_that_are_tried_asks_for_a_sample():
    text = refused("gg_test::demanding", "b h -> b h")
    assert text == (
        "gg_test::demanding takes none of the small random tensors that its lemma was tried on (a multiple of 100, please); "
        "give gg.lemma arguments that it takes, sample=(...)"
    )
    gg.lemma("gg_test::demanding", "b h -> b h", sample=(torch.randn(2, 100),))


def test_a_whole_axis_that_need_not_be_is_noted():
    assert gg.lemma("gg_test::scale", "b h -> b h", whole="h").weaker == "h need not be whole"
    assert gg.lemma("gg_test::rms_norm", RULE, whole="h").weaker is None


# ---------------------------------------------------------------------- small things
def test_brackets_say_what_whole_says():
    assert parse("... [h], [h] -> ... [h]").whole == parse(RULE, "h").whole == parse(RULE, ["h"]).whole == {"h"}


def test_operators_in_python_are_replayed_in_64_bits_whatever_they_cast_to():
    x, w = torch.randn(4, 8, dtype=torch.float64), torch.ones(8, dtype=torch.float64)
    result, rounds = call_wide(torch.ops.gg_test.rms_norm.default, [x, w], {})
    torch.testing.assert_close(result, F.rms_norm(x, (8,), w, 1e-6), rtol=1e-14, atol=1e-14)
    assert not rounds
