"""The kernels of `GradScaler` as plain torch: compared with torch's own, and captured in their place."""

import pytest
import torch
from harness import assert_same, capture_one, copies, random_inputs

from graphguard import Input
from graphguard.capture.torch.record.scaling import unscaled, with_scale_updated
from graphguard.oracle.replay import replay

GRADIENTS = {
    "finite": [torch.tensor([1.5, -2.0]), torch.tensor(3.0), torch.zeros(0)],
    "infinite": [torch.tensor([1.5, -2.0]), torch.tensor([float("-inf"), 1.0])],
    "no number": [torch.tensor(float("nan")), torch.tensor([1.0])],
    "of half precision": [torch.tensor([1.5, -2.0], dtype=torch.float16)],
}


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("before", [0.0, 1.0])
def test_gradients_are_unscaled_as_torch_does_it(name, before):
    mine, its = ([each.clone() for each in GRADIENTS[name]] for _ in range(2))
    found, known = torch.tensor(before), torch.tensor(before)
    inverse = torch.tensor([0.125])
    unscaled(mine, found, inverse)
    torch._amp_foreach_non_finite_check_and_unscale_(its, known, inverse)
    for one, other in zip(mine, its, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True, rtol=0, atol=0)
    assert found == known


@pytest.mark.parametrize("found", [0.0, 1.0])
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_the_scale_is_updated_as_torch_does_it(found, steps):
    numbers = []
    for update in (with_scale_updated, torch._amp_update_scale_):
        scale, tracker = torch.tensor(8.0), torch.tensor(steps, dtype=torch.int32)
        assert update(scale, tracker, torch.tensor(found), 2.0, 0.5, 2) is scale
        numbers.append((float(scale), int(tracker), tracker.dtype))
    assert numbers[0] == numbers[1]


def test_both_are_recorded_as_plain_torch():
    def program(g, found, inverse, scale, tracker):
        torch._amp_foreach_non_finite_check_and_unscale_([g], found, inverse)
        torch._amp_update_scale_(scale, tracker, found, 2.0, 0.5, 2)
        return {"g": g, "found": found, "scale": scale, "tracker": tracker}

    inputs = {"g": Input((3,)), "found": Input(()), "inverse": Input((1,)), "scale": Input(())}
    inputs |= {"tracker": Input((), dtype=torch.int32)}
    graph = capture_one(program, inputs)
    assert not any("_amp_" in node.op for node in graph.nodes)
    given = random_inputs(inputs)
    assert_same(replay(graph, given), program(**copies(given)))
