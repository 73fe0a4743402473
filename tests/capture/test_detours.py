"""What programs do with tensors past the dispatcher is recorded, or refused: never missed."""

import copy
import io
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from harness import assert_replays_as_eager, capture_one, named

from graphguard.capture.torch.relation.inputs import Input
from graphguard.errors import CaptureError

X = {"x": Input((4, 6))}
KNOWN = torch.arange(6.0)


def written_in_a_thread(x):
    thread = threading.Thread(target=x.mul_, args=(2,))
    thread.start()
    thread.join()
    return x


def computed_in_a_pool(x):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.add, x, 1).result()


class Doubler(threading.Thread):
    def __init__(self, x):
        super().__init__()
        self.x = x

    def run(self):
        self.x.mul_(2)


def written_in_a_thread_with_a_run_of_its_own(x):
    thread = Doubler(x)
    thread.start()
    thread.join()
    return x


@named(written_in_a_thread, computed_in_a_pool, written_in_a_thread_with_a_run_of_its_own)
def test_work_in_other_threads_is_refused(program, capfd):
    with pytest.raises(CaptureError, match=r"test_detours.py:\d+: aten.* runs in a thread that is started here"):
        capture_one(program, X)
    assert "Traceback" not in capfd.readouterr().err


def test_threads_that_leave_tensors_alone_are_fine():
    def function(x):
        seen = []
        thread = threading.Thread(target=seen.append, args=(3,))
        thread.start()
        thread.join()
        return x * seen[0]

    assert_replays_as_eager(function, X)


def saved_and_loaded(x):
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    return torch.load(buffer)


def pickled(x):
    return pickle.loads(pickle.dumps(x))


def pickled_after_a_write(x):
    KNOWN.mul_(2)
    return x + pickle.loads(pickle.dumps(KNOWN))


@named(saved_and_loaded, pickled, pickled_after_a_write, copy.copy)
def test_pickling_a_tensor_is_refused(program):
    with pytest.raises(CaptureError, match=r"the program pickles a tensor \(torch\.save, copy\.copy\)"):
        capture_one(lambda x: program(x), X)


def test_deep_copies_replay_as_eager():
    def function(x):
        known = torch.arange(6.0)
        doubled = known.mul_(2)
        copied, same = copy.deepcopy([doubled, known])
        copied.add_(1)
        part = copy.deepcopy(x[1:])
        x.mul_(3)
        return x, doubled, copied, same, part.add_(1)

    assert_replays_as_eager(function, X)


def test_a_deep_copy_of_a_tensor_from_outside_has_what_the_program_wrote():
    outside = torch.ones(6)

    def function(x):
        outside.mul_(2)
        return x * copy.deepcopy(outside), outside.div_(2)

    assert_replays_as_eager(function, X)


def test_a_deep_copy_of_tensors_that_share_memory_is_refused():
    def function(x):
        whole, part = copy.deepcopy([x, x[1]])
        part.zero_()
        return whole

    with pytest.raises(
        CaptureError, match=r"test_detours.py:\d+: a deep copy of two tensors that share memory is not modelled"
    ):
        capture_one(function, X)


def indexed_by_lists(x):
    return x[[0, 2]], x[[0, 2], [1, 3]], x[:, [1]], x[[True, False, True, False]], x[[]], x[[[0], [1]], [1, 3]], x[..., [-1, 0]]


def written_by_lists(x):
    x[[0, 2]] = 1.0
    x[[1, 3], [1, 3]] += 5
    x[:, [0, 5]] *= 2
    return x


def by_lists_of_a_constant(x):
    return x * KNOWN[[5, 4, 3, 2, 1, 0]]


@named(indexed_by_lists, written_by_lists, by_lists_of_a_constant)
def test_lists_of_indices_replay_as_eager(program):
    assert_replays_as_eager(program, X)


def test_linearize_is_refused():
    with pytest.raises(CaptureError, match=r"torch\.func\.linearize is not modelled; use torch\.func\.jvp"):
        capture_one(lambda x: torch.func.linearize(torch.sum, x)[1](x), X)


def test_an_initialiser_that_leaves_tensors_without_data_alone_is_recorded():
    def function(x):
        layer = torch.nn.Conv1d(4, 6, 3)
        return torch.nn.init.dirac_(layer.weight, 2) + x[0, 0]

    assert_replays_as_eager(function, X)


@pytest.mark.parametrize("name", ["trunc_normal_", "orthogonal_", "sparse_"])
def test_initialisers_that_look_at_values_draw_random_numbers(name):
    def function(x):
        options = {"sparsity": 0.5} if name == "sparse_" else {}
        return getattr(torch.nn.init, name)(torch.empty(4, 6), **options) * 0 + x

    graph = assert_replays_as_eager(function, X)
    assert graph.assumptions == (f"{name} draws any random numbers: their distribution is not recorded",)
