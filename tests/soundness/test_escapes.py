"""Every way to read, write or share the memory of a tensor, times where the tensor comes from: a capture replays as the program
runs, or it is refused."""

import array
import copy
import ctypes
import io
import pickle
import re
import struct

import numpy as np
import pytest
import torch
from harness import capture_one, flat, random_inputs

from graphguard.capture.torch.relation.inputs import Input
from graphguard.errors import GraphGuardError
from graphguard.oracle.replay import replay

X = {"x": Input((6,))}


# ---------------------------------------------------------------------- reading
def numpy(t):
    return float(t.numpy()[2])


def asarray(t):
    return float(np.asarray(t)[2])


def cpu_numpy(t):
    return float(t.detach().cpu().numpy()[2])


def forced_numpy(t):
    return float(t.numpy(force=True)[2])


def array_method(t):
    return float(t.__array__(np.float64)[2])


def numpy_function(t):
    return float(np.sin(t)[1]) + float(np.add(np.ones(6), t)[1]) + float(np.stack([t, t])[1, 1])


def buffer_of_array(t):
    return float(memoryview(t.numpy())[2])


def bytes_of_array(t):
    return float(t.numpy().tobytes()[3])


def to_list(t):
    return t.tolist()[2]


def python_numbers(t):
    return sum(float(each) for each in t) + array.array("f", t)[1] + struct.unpack("f", struct.pack("f", t[1]))[0]


def membership(t):
    return float(3.0 in t)


def text(t):
    return float(len(str(t).split("3")))


def text_of_a_list(t):
    return float(len(repr([t]).split("3")))


def formatted(t):
    return float(f"{t[2]:.2f}") + len(f"{t} and {t}".split("3"))


def text_of_a_parameter(t):
    return float(len(repr(torch.nn.Parameter(t)).split("3")))


def dlpack_to_numpy(t):
    return float(np.from_dlpack(t)[2])


def dlpack_capsule(t):
    return torch.from_dlpack(torch.utils.dlpack.to_dlpack(t)) * 2


def dlpack_to_torch(t):
    return torch.from_dlpack(t) * 2


def untyped_storage(t):
    return float(t.untyped_storage()[11])


def typed_storage(t):
    return float(t.storage()[2])


def storage_as_list(t):
    return float(sum(t.untyped_storage().tolist()))


def storage_clone(t):
    return torch.empty(0).set_(t.untyped_storage().clone()) * 2


def address(t):
    return float(ctypes.cast(t.data_ptr(), ctypes.POINTER(ctypes.c_float))[2])


def address_of_storage(t):
    return float(ctypes.cast(t.untyped_storage().data_ptr(), ctypes.POINTER(ctypes.c_float))[2])


def pickled(t):
    return pickle.loads(pickle.dumps(t)) * 2


def saved(t):
    file = io.BytesIO()
    torch.save(t, file)
    file.seek(0)
    return torch.load(file) * 2


def copied(t):
    return copy.copy(t) * 2 + copy.deepcopy(t)


# ---------------------------------------------------------------------- writing and sharing
def through_array(t):
    t.numpy()[0] = 5
    return t * 2


def through_array_and_back(t):
    shown = t.numpy()
    shown[0] += 5
    between = t * 2
    shown[0] -= 5
    return between + t


def through_two_arrays(t):
    t.numpy()[0] = 5
    return float(t.numpy()[0])


def array_after_a_write(t):
    shown = t.numpy()
    t.add_(1)
    return float(shown[0])


def array_that_is_gone(t):
    before = float(t.numpy()[0])
    t.add_(1)
    return before * t


def array_after_a_write_through_a_view(t):
    shown, part = t.numpy(), t[:3]
    part.mul_(7)
    return float(shown[0])


def data_through_array(t):
    t.data.numpy()[1] = 5
    return t * 2


def back_to_torch(t):
    torch.from_numpy(t.numpy()).add_(1)
    return t * 2


def numpy_out(t):
    np.multiply(t.numpy(), 3, out=t.numpy())
    return t * 2


def through_buffer(t):
    memoryview(t.numpy())[0] = 5.0
    return t * 2


def through_storage(t):
    t.untyped_storage().fill_(0)
    return t * 2


def through_storage_item(t):
    t.untyped_storage()[3] = 64
    return t * 2


def through_typed_storage(t):
    t.storage().fill_(0)
    return t * 2


def storage_copied(t):
    t.untyped_storage().copy_(torch.ones(6).untyped_storage())
    return t * 2


def storage_resized(t):
    memory = t.untyped_storage()
    size = memory.nbytes()
    memory.resize_(0)
    memory.resize_(size)
    return t.zero_() + 1


def storage_grown(t):
    t.untyped_storage().resize_(48)
    return t * 2


def written_at_address(t):
    ctypes.cast(t.data_ptr(), ctypes.POINTER(ctypes.c_float))[2] = 5.0
    return t * 2


def shared_with_processes(t):
    return t.share_memory_() * 2


def python_on_elements(t):
    return t.apply_(lambda each: each + 1) * 2


def moved_and_written(t):
    t.cpu().add_(1)
    t.to("cpu").mul_(2)
    torch.as_tensor(t, device="cpu").add_(3)
    return t * 1


def copied_and_written(t):
    t.to("cpu", copy=True).add_(1)
    t.to(torch.float64).add_(1)
    return t * 1


# ---------------------------------------------------------------------- memory of numpy's
def from_numpy_written_by_torch(t):
    held = np.ones(6, dtype=np.float32)
    torch.from_numpy(held).add_(t)
    return float(held[0])


def from_numpy_written_by_numpy(t):
    held = np.ones(6, dtype=np.float32)
    shared = torch.from_numpy(held)
    before = shared * t
    held[0] = 5
    return before + shared


def from_numpy_before_it_is_used(t):
    held = np.ones(6, dtype=np.float32)
    shared = torch.as_tensor(held)
    held[0] = 5
    return shared * t


def as_tensor_written_by_torch(t):
    held = np.ones(6, dtype=np.float32)
    torch.as_tensor(held).mul_(3)
    return t * float(held[0])


def as_tensor_changed_and_back(t):
    held = np.ones(6, dtype=np.float32)
    shared = torch.as_tensor(held, dtype=torch.float32)
    before, held[0] = shared * t, 5
    between, held[0] = shared * t, 1
    return before + between


def asarray_written_by_torch(t):
    held = np.ones(6, dtype=np.float32)
    torch.asarray(held).mul_(3)
    return t * float(held[0])


def frombuffer_written_by_torch(t):
    held = bytearray(24)
    torch.frombuffer(held, dtype=torch.float32).fill_(1)
    return t * held[3]


def from_dlpack_written_by_torch(t):
    held = np.ones(6, dtype=np.float32)
    torch.from_dlpack(held).mul_(3)
    return t * float(held[0])


def two_tensors_over_one_array(t):
    held = np.ones(6, dtype=np.float32)
    one, other = torch.from_numpy(held), torch.from_numpy(held)
    one.mul_(3)
    return t * other


def copy_of_an_array(t):
    held = np.ones(6, dtype=np.float32)
    own = torch.tensor(held).mul_(3)
    return t * own * float(held[0])


READS = [numpy, asarray, cpu_numpy, forced_numpy, array_method, numpy_function, buffer_of_array, bytes_of_array, to_list,
         python_numbers, membership, text, text_of_a_list, formatted, text_of_a_parameter]  # fmt: skip
RAW = [dlpack_to_numpy, dlpack_capsule, dlpack_to_torch, untyped_storage, typed_storage, storage_as_list, storage_clone,
       address, address_of_storage, pickled, saved, copied]  # fmt: skip
WRITES = [through_array, through_array_and_back, through_two_arrays, array_after_a_write, array_that_is_gone,
          array_after_a_write_through_a_view, data_through_array, back_to_torch, numpy_out, through_buffer, through_storage,
          through_storage_item, through_typed_storage, storage_copied, storage_resized, storage_grown, written_at_address,
          shared_with_processes, python_on_elements, moved_and_written, copied_and_written]  # fmt: skip
SHARED = [from_numpy_written_by_torch, from_numpy_written_by_numpy, from_numpy_before_it_is_used, as_tensor_written_by_torch,
          as_tensor_changed_and_back, asarray_written_by_torch,
          frombuffer_written_by_torch, from_dlpack_written_by_torch, two_tensors_over_one_array, copy_of_an_array]  # fmt: skip
ORIGINS = ["input", "outside", "inside"]


def outcome(way, origin):
    """`right`, or why it is refused; a capture that replays otherwise than the program runs fails here."""
    outside = torch.arange(1.0, 7.0)

    def program(x):
        tensor = {"input": lambda: x, "outside": lambda: outside, "inside": lambda: torch.arange(1.0, 7.0)}[origin]()
        return {"result": way(tensor), "x": x * 1, "outside": outside * 1}

    given = random_inputs(X)
    try:
        graph = capture_one(program, X)
    except GraphGuardError as error:
        return str(error)
    got = replay(graph, given)
    want = flat(program(**given))
    for path, value in want.items():
        torch.testing.assert_close(got[path], value, check_dtype=False, equal_nan=True, msg=f"{way.__name__}: {path}")
    return "right"


@pytest.mark.parametrize("origin", ORIGINS)
@pytest.mark.parametrize("way", READS + RAW + WRITES + SHARED, ids=lambda way: way.__name__)
def test_a_capture_replays_as_the_program_runs_or_is_refused(way, origin):
    said = outcome(way, origin)
    if way in READS:  # constants have values
        assert (said == "right") == (origin != "input"), said
    if way in (array_that_is_gone, from_numpy_before_it_is_used, copy_of_an_array, copied_and_written) and origin != "input":
        assert said == "right"
    if way in (moved_and_written, copied_and_written):
        assert said == "right"


@pytest.mark.parametrize(
    "way, origin, sentence",
    [
        (numpy, "input", "the program reads the value of a tensor that depends on the input 'x'"),
        (through_array, "outside", "is changed through numpy or another tensor that torch does not know to share it"),
        (array_after_a_write, "inside", "is written by torch, which the array that shares it would show"),
        (from_numpy_written_by_torch, "inside", "is written by torch, which the array that shares it would show"),
        (dlpack_to_numpy, "outside", r"the program hands a tensor's memory to another library \(dlpack\)"),
        (storage_as_list, "inside", r"the program reads or writes the storage of a tensor \(`tolist`\)"),
        (storage_resized, "outside", "the program changes the size of memory from outside"),
        (text, "input", "the program makes text of a tensor whose values are not known"),
        (address, "input", "the program ended its process .* before it returned"),
    ],
)
def test_refusals_are_sentences(way, origin, sentence):
    assert re.search(sentence, outcome(way, origin))
