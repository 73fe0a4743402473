"""Executing one node: what a kernel of torch would do to memory that is not its own is refused."""

import pytest
import torch

from graphguard.aten.kernels import Kernels
from graphguard.errors import ReplayError
from graphguard.graph.ir import Node, Value

IGNORED = -100


def run(op, *args):
    """A node of that operator, on these arguments, of which the tensors are values."""
    values = {
        place: Value(place, tuple(arg.shape), str(arg.dtype)[6:]) for place, arg in enumerate(args) if torch.is_tensor(arg)
    }
    held = {values[place]: args[place] for place in values}
    result = Value(99, (1,), "float32")
    return Kernels().run(Node(op, tuple(values.get(p, arg) for p, arg in enumerate(args)), {}, (result,)), held.__getitem__)[0]


def of_labels(labels):
    return run("aten.nll_loss_backward.default", torch.ones(3), torch.zeros(3, 5), labels, None, 0, IGNORED, torch.tensor(0.0))


def of_pixels(labels):
    picture = torch.zeros(1, 5, 3, 1)
    labels = labels.reshape(1, 3, 1)
    return run("aten.nll_loss2d_backward.default", torch.ones(1, 3, 1), picture, labels, None, 0, IGNORED, torch.tensor(0.0))


def of_rows(indices, padding=-1):
    return run("aten.embedding_dense_backward.default", torch.ones(3, 2), indices, 5, padding, False)


@pytest.mark.parametrize("kernel", [of_labels, of_pixels, of_rows])
@pytest.mark.parametrize("outside", [5, 700_000, -2])
def test_an_index_outside_is_not_followed(kernel, outside):
    with pytest.raises(ReplayError, match=f"index {outside} is out of bounds for size 5"):
        kernel(torch.tensor([0, outside, 4]))


@pytest.mark.parametrize("kernel", [of_labels, of_pixels])
def test_a_label_that_is_ignored_is_not_outside(kernel):
    gradient = kernel(torch.tensor([0, IGNORED, 4]))
    assert gradient.count_nonzero() == 2


def test_a_row_of_padding_has_no_gradient():
    assert of_rows(torch.tensor([0, 2, 2]), padding=2).sum(1).tolist() == [2, 0, 0, 0, 0]
