"""What counts as a relation: code that only moves elements and leaves none out, sums of true parts, one output for a path."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import graphguard as gg
from graphguard import Partial, Replicate, Shard

BOTH = {"x": gg.Input((4, 3)), "z": gg.Input((4, 3))}
ROWS = {"x": gg.Input((4, 3), Shard(0))}
BIASED = {"x": gg.Input((4, 3), Shard(0)), "b": gg.Input((3,))}


def double(x):
    return x * 2


def first(x, z):
    return x.clone()


def verify(sequential, distributed, inputs, mesh=2, **options):
    return gg.verify(sequential, distributed, mesh=mesh, inputs=inputs, **options)


def found(report):
    return report.verdict, *(finding.kind for finding in report.findings[:1])


# ---------------------------------------------------------------------- gradients
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return self.b(self.a(x))


def test_every_rank_that_holds_a_parameter_has_its_gradient():
    def build(mesh):
        model = Net()
        model.b.weight.requires_grad_(dist.get_rank() != 1)
        return model

    def stated(**options):
        step = gg.train_step(lambda model, x: model(x).sum())
        return gg.verify_model(Net, build, step=step, mesh={"dp": 2}, inputs={"x": gg.Input((3, 4))}, **options)

    report = stated()
    assert found(report) == ("refuted", "missing-output") and report.counterexample is None
    assert report.findings[0].message == "grads.b.weight: rank 1 holds the parameter, and has no gradient of it"
    assert report.findings[0].ranks == (1,) and report.findings[0].output == "grads.b.weight"
    assert found(stated(outputs={"grads.b.weight": Replicate()})) == ("refuted", "missing-output")


def test_a_parameter_in_code_that_leaves_rows_out_has_no_whole_gradient():
    class Wide(nn.Module):
        def __init__(self, rows=4):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(rows, 4))

        def forward(self, x):
            return x @ self.w[:2].t()

    def rows(full, coord):
        return full[:2]

    with pytest.raises(gg.UsageError, match=re.escape("params=: 'grads.w': by the layout of rows, no rank has the elements "
                                                      "[2, 0] to [3, 3] of (4, 4)")):  # fmt: skip
        gg.verify_model(
            Wide, lambda mesh: Wide(2), step=gg.train_step(lambda model, x: model(x).sum()), mesh=2,
            inputs={"x": gg.Input((3, 4))}, params={"w": rows},
        )  # fmt: skip


# ---------------------------------------------------------------------- layouts in code
NOT_CLEAN = "is not clean: for rank 0 it gives at [{}] what is no element of the output; it may slice, join, transpose, reshape"
LEFT_OUT = "no rank has the elements [{}] to [3, 2] of (4, 3)"


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (lambda full, coord: full[:1], LEFT_OUT.format("1, 0")),
        (lambda full, coord: full * 0, LEFT_OUT.format("0, 0")),
        (lambda full, coord: torch.zeros(4, 3), LEFT_OUT.format("0, 0")),
        (lambda full, coord: full.relu(), NOT_CLEAN.format("0, 0")),
        (lambda full, coord: full.abs(), NOT_CLEAN.format("0, 0")),
        (lambda full, coord: full.round(), NOT_CLEAN.format("0, 0")),
        (lambda full, coord: full.clamp(-1e6, 1e6), NOT_CLEAN.format("0, 0")),
        (lambda full, coord: full.sort(0)[0], NOT_CLEAN.format("0, 0")),
        (lambda full, coord: full.sum(0), NOT_CLEAN.format("0")),
        (lambda full, coord: full / 2, NOT_CLEAN.format("0, 0")),
        (lambda full, coord: full[:, ::2], "no rank has 4 elements between [0, 1] and [3, 1] of (4, 3)"),
    ],
)
def test_code_that_computes_or_leaves_something_out_is_an_error(layout, words):
    with pytest.raises(gg.UsageError, match=re.escape(words)) as error:
        verify(double, lambda x: layout(x * 2, {}), {"x": gg.Input((4, 3))}, outputs={"out": layout})
    assert str(error.value).startswith("outputs=: 'out': ")


@pytest.mark.parametrize(
    "layout",
    [
        lambda full, coord: torch.cat([full, full]),
        lambda full, coord: full.reshape(6, 2).t() * 1,
        lambda full, coord: torch.nn.functional.pad(full.flatten(), (0, 2)).chunk(2)[coord["world"]],
        lambda full, coord: full.flip(0)[[1, 0, 3, 2]],
        lambda full, coord: full if coord["world"] == 0 else torch.zeros_like(full),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.uint8, torch.int64])
def test_code_that_moves_elements_is_clean(layout, dtype):
    def distributed(x):
        return layout(x.clone(), {"world": dist.get_rank()})

    report = verify(lambda x: x.clone(), distributed, {"x": gg.Input((4, 3), dtype=dtype)}, outputs={"out": layout}, trials=0)
    assert report.verdict != "refuted"  # no error: what is proved of each dtype is another matter
    assert dtype != torch.float32 or report.verified


def test_booleans_that_are_turned_over_are_no_layout():
    with pytest.raises(gg.UsageError, match="is not clean"):
        verify(lambda x: x > 0, lambda x: x <= 0, ROWS, outputs={"out": lambda full, coord: ~full.chunk(2)[coord["world"]]})


def test_a_piece_that_its_rank_does_not_return_is_refuted():
    def half(full, coord):
        return full.chunk(2)[coord["world"]]

    report = verify(double, lambda x: x * 2 if dist.get_rank() == 0 else None, ROWS, outputs={"out": half})
    assert found(report) == ("refuted", "missing-output")
    assert report.findings[0].message == (
        "out: by the layout of half, the elements [2, 0] to [3, 2] of (4, 3) should be on rank 1 alone, and it returns nothing"
    )


# ---------------------------------------------------------------------- DTensors
def test_a_part_of_a_dtensor_that_is_not_returned_is_refuted():
    def distributed(x, mesh):
        part = DTensor.from_local(x * 2, mesh, [Shard(0)])
        return part if dist.get_rank() == 0 else None

    report = verify(double, distributed, ROWS)
    assert found(report) == ("refuted", "missing-output")
    assert report.findings[0].message == "out: rank 1 has a part of this DTensor alone, and does not return it"


def test_a_dtensor_that_stands_for_another_shape_is_refuted():
    def distributed(x, mesh):
        return DTensor.from_local(x * 2, mesh, [Shard(0)], shape=torch.Size((6, 3)), stride=(3, 1), run_check=False)

    report = verify(double, distributed, ROWS)
    assert found(report) == ("refuted", "unexplained-output")
    assert report.findings[0].message == (
        "out: it is a DTensor that stands for a tensor of shape (6, 3), and the sequential output has shape (4, 3)"
    )


def test_a_parameter_that_stands_for_another_shape_is_an_error():
    class Rows(nn.Module):
        def __init__(self, mesh=None):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(4, 4))
            if mesh is not None:
                shape = {"shape": torch.Size((6, 4)), "stride": (4, 1), "run_check": False}
                self.w = nn.Parameter(DTensor.from_local(torch.zeros(2, 4), mesh, [Shard(0)], **shape))

        def forward(self, x):
            return x

    words = "it is a DTensor that stands for a tensor of shape (6, 4), and the sequential one has (4, 4)"
    with pytest.raises(gg.UsageError, match=re.escape(words)):
        gg.verify_model(Rows, Rows, mesh=2, inputs={"x": gg.Input((3, 4))})


# ---------------------------------------------------------------------- sums
def taken_back(x, z):
    return x + z if dist.get_rank() == 0 else -z


def own_square(x, z):
    return x + x * x if dist.get_rank() == 0 else -x * x


@pytest.mark.parametrize("outputs", [None, {"out": Partial()}, {"out": Replicate()}], ids=["free", "stated", "whole"])
@pytest.mark.parametrize("distributed", [taken_back, own_square])
def test_what_one_rank_adds_and_another_takes_away_is_no_part(distributed, outputs):
    report = verify(first, distributed, BOTH, outputs=outputs)
    assert found(report) == ("refuted", "unexplained-output") and report.counterexample is not None
    assert report.findings[0].message == (
        "out: the ranks hold no parts of it: what they hold adds up to it, as some take away what others add"
    )


def test_a_mean_in_which_something_cancels_is_none_of_parts():
    def moved(x, z):
        return x + z if dist.get_rank() == 0 else x - z

    stated = {"out": Partial("avg")}
    assert found(verify(first, moved, BOTH, outputs=stated)) == ("refuted", "unexplained-output")
    assert verify(first, lambda x, z: x * 1, BOTH, outputs=stated).verified


def alone(x):
    return x.clone() if dist.get_rank() == 0 else torch.zeros_like(x)


@pytest.mark.parametrize("outputs", [None, {"out": Partial()}], ids=["free", "stated"])
def test_one_rank_that_has_all_or_each_a_term_of_its_own_hold_parts(outputs):
    assert verify(lambda x: x.clone(), alone, {"x": gg.Input((4,))}, outputs=outputs).verified
    each = verify(lambda x, z: x - z, lambda x, z: x.clone() if dist.get_rank() == 0 else -z, BOTH, outputs=outputs)
    assert each.verified


def test_copies_are_parts_if_they_are_stated_and_each_is_whole():
    def three(x, z):
        return 3 * x * z

    def one(x, z):
        return x * z

    stated = {"out": Partial()}
    assert verify(three, one, BOTH, mesh=3, outputs=stated).verified
    assert found(verify(three, one, BOTH, mesh=3)) == ("refuted", "scaled-copies")
    assert found(verify(one, lambda x, z: x * z / 2, BOTH, outputs=stated)) == ("refuted", "scaled-copies")

    def unequal(x, z):
        return x * z * (0.25 if dist.get_rank() == 0 else 0.75)

    assert found(verify(one, unequal, BOTH, outputs=stated)) == ("refuted", "scaled-copies")


def gradient(x, b):
    b = b.detach().requires_grad_()
    return torch.autograd.grad((x + b).sum() / 12, b)[0]


def test_numbers_that_depend_on_no_input_are_parts_where_that_is_stated():
    assert verify(gradient, gradient, BIASED, outputs={"out": Partial()}).verified
    assert found(verify(gradient, gradient, BIASED)) == ("refuted", "scaled-copies")

    def labelled(x, b, mesh):
        return DTensor.from_local(gradient(x, b), mesh, [Partial()])

    assert verify(gradient, labelled, BIASED).verified
    count = verify(
        lambda x: torch.ones(x.shape[0]).sum(), lambda x: torch.ones(x.shape[0]).sum(), ROWS, outputs={"out": Partial()}
    )
    assert count.verified
    wrong = verify(gradient, lambda x, b: gradient(x, b) * 2, BIASED, outputs={"out": Partial()})
    assert wrong.verdict == "refuted"


def test_a_bias_may_be_added_once_or_in_shares_beside_true_parts():
    def linear(x, w, b):
        return x @ w + b

    def on_first(x, w, b):
        return x @ w + (b if dist.get_rank() == 0 else torch.zeros_like(b))

    inputs = {"x": gg.Input((4, 6), Shard(1)), "w": gg.Input((6, 5), Shard(0)), "b": gg.Input((5,))}
    assert verify(linear, on_first, inputs, outputs={"out": Partial()}).verified
    assert verify(linear, lambda x, w, b: x @ w + b / 2, inputs, outputs={"out": Partial()}).verified
    assert verify(linear, lambda x, w, b: x @ w + b, inputs, outputs={"out": Partial()}).verdict == "refuted"


def test_a_list_of_unequal_tensors_is_reduced_and_scattered():
    sizes = [3, 2, 2]

    def pieces(full, coord):
        return full.split(sizes)[coord["world"]]

    def scattered(x):
        parts = list(x.split(sizes))
        kept = torch.empty_like(parts[dist.get_rank()])
        dist.reduce_scatter(kept, parts)
        return kept

    inputs = {"x": gg.Input((7,), Partial())}
    assert verify(lambda x: x.clone(), scattered, inputs, mesh=3, outputs={"out": pieces}).verified
    wrong = verify(lambda x: x.clone(), lambda x: scattered(x.flip(0)), inputs, mesh=3, outputs={"out": pieces})
    assert wrong.verdict == "refuted"


# ---------------------------------------------------------------------- paths
@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        (
            lambda x: {"a.b": x, "a": {"b": x * 2}},
            "two outputs have the path 'a.b': ['a.b'] and ['a']['b']; rename one of them",
        ),
        (lambda x: {0: x, "0": x * 2}, "two outputs have the path '0': [0] and ['0']; rename one of them"),
        (lambda x: {"a": [x], "a.0": None}, "two outputs have the path 'a.0': ['a'][0] and ['a.0']; rename one of them"),
    ],
)
def test_two_outputs_of_one_path_are_an_error(outputs, words):
    with pytest.raises(gg.UsageError, match=re.escape(words)):
        verify(outputs, lambda x: {"a": x}, ROWS)
    with pytest.raises(gg.UsageError, match=re.escape(words)):
        verify(lambda x: {"a": x}, outputs, ROWS)


def test_two_inputs_of_one_path_are_an_error():
    def local(full, coord):
        return {"a.b": full["x"], "a": {"b": full["x"]}}

    with pytest.raises(gg.UsageError, match=r"two inputs of a rank have the path 'a\.b'"):
        verify(double, lambda **given: given["a.b"] * 2, {"x": gg.Input((4, 3))}, local_inputs=local)


# ---------------------------------------------------------------------- padding
def test_what_lies_beyond_the_end_is_not_claimed_and_what_lies_before_it_is():
    def local(full, coord):
        return {"x": torch.nn.functional.pad(full["x"], (0, 0, 0, 1)).chunk(2)[coord["world"]]}

    def after(place):
        def distributed(x):
            y = x * 2
            y[place] += dist.get_rank()
            return y

        return verify(double, distributed, {"x": gg.Input((5, 2))}, local_inputs=local)

    assert after(2).verified and after(2).relation["out"].text == "out = concat(rank0.out, rank1.out[:2], dim=0)"
    assert found(after(1)) == ("refuted", "unexplained-output")


def test_a_rank_that_would_hold_nothing_but_padding_is_not_explained_by_it():
    longer = verify(lambda x: x.clone(), lambda x: torch.cat([x, x]), {"x": gg.Input((4,))})
    assert found(longer) == ("refuted", "unexplained-output")
