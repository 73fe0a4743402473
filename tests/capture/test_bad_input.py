"""Programs that have no exact graph: one sentence that names the user's line, and nothing left behind."""

from __future__ import annotations

import inspect
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import capture_both, capture_one

from graphguard import Input, verify
from graphguard.errors import CaptureError, GraphGuardError, ProgramError, ReadsValuesError, UsageError

I64 = torch.int64
X = {"x": Input((4, 6)), "i": Input((3,), dtype=I64)}
FILE = os.path.relpath(__file__)
HERE = os.path.abspath(__file__)

READS = ("the program reads the value of a tensor that depends on {}; what it does next would hold for that value only, so "
         "keep values in tensors (torch.where, masks) or pass it as a Python number")  # fmt: skip
SHAPES = ("the shape of {}'s result depends on {}; shapes must not depend on values: use a mask (torch.where) instead of "
          "selecting elements")  # fmt: skip
RENAMES = "{} changes a tensor's shape in place, which is not modelled; use the form that returns a new tensor"


def line_of(function):
    """The line of a one-line lambda, or of the line that a function marks with `# here`."""
    lines, first = inspect.getsourcelines(function)
    marked = [number for number, text in enumerate(lines, first) if text.rstrip().endswith("# here")]
    return marked[0] if marked else first


def failure(function, inputs=X):
    with pytest.raises(GraphGuardError) as caught:
        capture_one(function, inputs)
    return caught.value


def assert_one_sentence(error):
    text = str(error)
    assert "\n" not in text and "Traceback" not in text and "graphguard/" not in text, text


# ---------------------------------------------------------------------- values and shapes
VALUES = [
    (lambda x, i: x * x.sum().item(), READS.format("the input 'x'")),
    (lambda x, i: x * float(x[0, 0]), READS.format("the input 'x'")),
    (lambda x, i: x[: int(i[0])], READS.format("the input 'i'")),
    (lambda x, i: x if x.sum() > 0 else -x, READS.format("the input 'x'")),
    (lambda x, i: x * x[0].tolist()[0], READS.format("the input 'x'")),
    (lambda x, i: x + torch.from_numpy(x.detach().numpy()), READS.format("the input 'x'")),
    (lambda x, i: x if torch.equal(x, x + 1) else -x, READS.format("the input 'x'")),
    (lambda x, i: x if torch.allclose(x, x) else -x, READS.format("the input 'x'")),
    (lambda x, i: x[0] if 3 in i else x, READS.format("the input 'i'")),
    (lambda x, i: x[next(n for n in i)], READS.format("the input 'i'")),
    (lambda x, i: x * (torch.arange(3) + i).max().item(), READS.format("the input 'i'")),
    (lambda x, i: x * torch.rand(()).item(), READS.format("random numbers (aten.rand.default at {here})")),
    (lambda x, i: x * torch.empty(2)[0].item(), READS.format("memory that was never written")),
    (lambda x, i: x.nonzero(), SHAPES.format("aten.nonzero.default", "the input 'x'")),
    (lambda x, i: torch.where(x > 0)[0], SHAPES.format("aten.nonzero.default", "the input 'x'")),
    (lambda x, i: x[x > 0], SHAPES.format("aten.index.Tensor", "the input 'x'")),
    (lambda x, i: x.masked_select(x > 0), SHAPES.format("aten.masked_select.default", "the input 'x'")),
    (lambda x, i: i.unique(), SHAPES.format("aten._unique2.default", "the input 'i'")),
    (lambda x, i: i.unique_consecutive(), SHAPES.format("aten.unique_consecutive.default", "the input 'i'")),
    (lambda x, i: x[:3].repeat_interleave(i, 0), SHAPES.format("aten.repeat_interleave.Tensor", "the input 'i'")),
    (lambda x, i: i.bincount(), SHAPES.format("aten.bincount.default", "the input 'i'")),
    (lambda x, i: x.resize_(5, 6), RENAMES.format("aten.resize_.default")),
    (lambda x, i: x.resize_(1, 2, 2, 2, memory_format=torch.channels_last), RENAMES.format("aten.resize_.default")),
    (lambda x, i: x.set_(i.float().untyped_storage()), RENAMES.format("aten.set_.source_Storage")),
    (lambda x, i: x.as_strided_((2, 2), (1, 1)), RENAMES.format("aten.as_strided_.default")),
    (
        lambda x, i: x.apply_(lambda v: v + 1),
        "apply_ and map_ run Python on every element, which is not modelled; use operators",
    ),
    (
        lambda x, i: x.map_(x, lambda v, w: v + w),
        "apply_ and map_ run Python on every element, which is not modelled; use operators",
    ),
    (
        lambda x, i: x.to_sparse() @ x.T,
        "the operator aten._to_sparse.default has no meta kernel, so its output shape is not known without running it; use "
        "another operator",
    ),
    (
        lambda x, i: torch.ops.higher_order.strict_mode(torch.sin, (x,)),
        "the higher-order operator strict_mode is not modelled; write it with plain operators",
    ),
]


@pytest.mark.parametrize("case", range(len(VALUES)))
def test_reading_values_and_data_dependent_shapes_are_refused_at_the_users_line(case):
    function, text = VALUES[case]
    where = f"{FILE}:{line_of(function)}"
    error = failure(function)
    assert type(error) in (CaptureError, ReadsValuesError)
    assert str(error) == f"the sequential program: {where}: {text.format(here=where)}"


def test_the_same_operations_on_constants_are_fine():
    graph = capture_one(lambda x, i: x[torch.arange(4) > 1] * torch.arange(3).max().item(), X)
    assert graph.outputs["out"].shape == (2, 6)


def test_addresses_tell_shared_memory_from_other_memory():
    def function(x, i):
        other, view = x.clone(), x[1:]
        same = x.data_ptr() == x.view(-1).data_ptr() and x.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()
        apart = x.data_ptr() != other.data_ptr() and view.data_ptr() - x.data_ptr() == 6 * 4
        return x * 2 if same and apart else x

    assert [node.op for node in capture_one(function, X).nodes] == ["aten.mul.Tensor"]


def test_autocast_is_assumed_to_round_only():
    def function(x, i):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return x @ x.T

    (assumption,) = [text for text in capture_one(function, X).assumptions if "autocast" in text]
    assert assumption == "torch.autocast changes the precision of operations, not their meaning: its casts are not recorded"


@pytest.mark.parametrize("move", [lambda t: t.cuda(), lambda t: t.to("cuda"), lambda t: t.to(device=torch.device("cuda", 1))])
def test_programs_may_name_devices_that_are_not_there(move):
    graph = capture_one(lambda x, i: move(x) + torch.ones(6, device="cuda"), X)
    assert [node.op for node in graph.nodes] == ["aten._to_copy.default", "aten.ones.default", "aten.add.Tensor"]


def test_a_sparse_tensor_from_outside_is_refused():
    table = torch.eye(4).to_sparse()
    error = failure(lambda x, i: table @ x)
    assert type(error) is CaptureError
    assert str(error) == (
        f"the sequential program: {FILE}:{line_of(test_a_sparse_tensor_from_outside_is_refused) + 2}: tensors of layout "
        "sparse_coo are not modelled; use a dense tensor (`.to_dense()`)"
    )


def test_a_tensor_without_data_from_outside_is_refused():
    table = torch.empty(4, 6, device="meta")
    error = failure(lambda x, i: x + table)
    assert str(error).endswith(
        ": the program reads a tensor of shape (4, 6) that is neither an input nor has data; pass it as an input, or create it "
        "inside the program"
    )
    assert_one_sentence(error)


# ---------------------------------------------------------------------- operators of the user's own
@pytest.fixture(scope="module")
def library():
    library = torch.library.Library("ggtest", "FRAGMENT")
    library.define("no_meta(Tensor x) -> Tensor")
    library.impl("no_meta", lambda x: torch.from_numpy(x.numpy() + 1), "CPU")  # a body that cannot be recorded
    library.define("same(Tensor x) -> Tensor")
    library.impl("same", lambda x: x, "CPU")
    library.impl("same", lambda x: x, "Meta")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: torch.from_numpy(x.numpy() * 2), "CPU")
    library.impl("twice", torch.empty_like, "Meta")
    yield torch.ops.ggtest
    library._destroy()


def test_an_operator_without_a_meta_kernel_is_refused(library):
    error = failure(lambda x, i: library.no_meta(x))
    assert str(error).endswith(
        ": the operator ggtest.no_meta.default has no meta kernel, so its output shape is not known without running it; "
        "register one with torch.library.register_fake"
    )
    assert_one_sentence(error)


def test_an_operator_that_returns_its_argument_is_refused(library):
    error = failure(lambda x, i: library.same(x))
    assert str(error).endswith(
        ": ggtest.same.default returns memory of an argument, which its schema does not say; return a copy"
    )


def test_an_operator_of_the_users_own_is_a_node(library):
    graph = capture_one(lambda x, i: library.twice(x), X)
    assert [node.op for node in graph.nodes] == ["ggtest.twice.default"]


# ---------------------------------------------------------------------- programs that fail
def inner_helper(x):
    raise ValueError("the weights are\nnot sorted")  # here


def broken(x, i):
    torch.nn.Sequential(Calling())(x)


class Calling(torch.nn.Module):
    def forward(self, x):
        inner_helper(x)


def test_an_exception_of_the_program_shows_its_own_frames_only():
    error = failure(broken)
    assert type(error) is ProgramError
    where = f"{FILE}:{line_of(inner_helper)}"
    assert str(error) == f"the sequential program raised ValueError at {where} in inner_helper: the weights are"
    assert [function for _, _, function in error.frames] == ["broken", "forward", "inner_helper"]
    assert {file for file, _, _ in error.frames} == {HERE}


def test_a_gradient_of_a_module_from_outside_is_refused_in_our_words():
    module = torch.nn.Linear(6, 3)
    with pytest.raises(ProgramError, match=r"a gradient is taken of a tensor from outside the program, which is a constant"):
        capture_one(lambda x: module(x).sum().backward(), {"x": Input((4, 6))})


def test_an_exception_of_one_rank_names_the_rank():
    def fails_on_rank_one(x):
        if dist.get_rank() == 1:
            x.view(5)  # here
        return x

    with pytest.raises(ProgramError) as caught:
        capture_both(lambda x: x, fails_on_rank_one, 2, {"x": Input((4, 6))})
    where = f"{FILE}:{line_of(fails_on_rank_one)}"
    assert str(caught.value).startswith(f"rank 1 raised RuntimeError at {where} in fails_on_rank_one: shape '[5]' is invalid")


def test_reading_an_input_on_one_rank_names_the_rank():
    def reads(x):
        return x * x[0, 0].item() if dist.get_rank() == 1 else x  # here

    with pytest.raises(CaptureError) as caught:
        capture_both(lambda x: x, reads, 2, {"x": Input((4, 6))})
    assert str(caught.value) == f"rank 1: {FILE}:{line_of(reads)}: " + READS.format("the input 'x'")


class Stop(BaseException):
    """As the outcomes of test runners are: not an Exception."""


def raises(error):
    raise error


def killed(x, i):
    os.kill(os.getpid(), signal.SIGKILL)


ENDS = {
    f"the sequential program called sys.exit() at {FILE}:": lambda x, i: sys.exit(0),
    "the program ended its process (signal SIGKILL) before it returned": killed,
    "the program ended its process (signal SIGTERM) before it returned": lambda x, i: os.kill(os.getpid(), signal.SIGTERM),
    "the program ended its process (exit code 0) before it returned": lambda x, i: os._exit(0),
    "the program ended its process (exit code 3) before it returned": lambda x, i: os._exit(3),
    f"the sequential program raised Stop at {FILE}:{line_of(raises) + 1} in raises: now": lambda x, i: raises(Stop("now")),
    f"the sequential program raised RecursionError at {FILE}:": lambda x, i: endless(x),
}


def endless(x):
    return endless(x)


@pytest.mark.parametrize("text", ENDS)
def test_a_program_that_ends_its_process_is_an_error(text):
    error = failure(ENDS[text])
    assert type(error) is ProgramError and str(error).startswith(text)
    assert_one_sentence(error)


@pytest.mark.parametrize("number", [7, -1])
def test_a_rank_that_the_group_does_not_have_is_an_error(number):
    def sends(x):
        dist.reduce(x, dst=number)
        return x

    with pytest.raises(ProgramError) as caught:
        capture_both(lambda x: x, sends, 2, {"x": Input((4, 6))})
    assert str(caught.value).endswith(f"the group of ranks [0, 1] has no rank {number} to send to or receive from")


def test_inputs_that_are_no_dict_are_an_error():
    with pytest.raises(UsageError) as caught:
        verify(lambda x: x, lambda x: x, mesh=2, inputs=[Input((4, 6))])
    assert str(caught.value) == "inputs= is list; write {name: gg.Input(shape, placement)}"


def test_a_program_that_catches_our_error_still_fails():
    def function(x, i):
        try:
            scale = int(x.sum().item())  # here
        except Exception:
            scale = 1.0
        return x * scale

    assert str(failure(function)) == f"the sequential program: {FILE}:{line_of(function)}: " + READS.format("the input 'x'")


def test_a_program_that_catches_its_own_errors_does_not_fail():
    def function(x, i):
        try:
            return x.view(7)
        except RuntimeError:
            return x * 2

    assert [node.op for node in capture_one(function, X).nodes] == ["aten.mul.Tensor"]


def test_a_program_that_changes_from_run_to_run_is_refused():
    def function(x):
        return x * (time.time_ns() % 1_000_003)  # here

    with pytest.raises(CaptureError) as caught:
        capture_both(function, lambda x: x, 1, {"x": Input((4, 6))})
    assert str(caught.value) == (
        f"the sequential program is not deterministic: two captures of it differ at {FILE}:{line_of(function)} "
        "(aten.mul.Tensor against aten.mul.Tensor); remove what changes between runs and between ranks "
        f"(the time at {FILE}:{line_of(function)})"
    )


def test_a_rank_that_changes_from_run_to_run_is_refused():
    with pytest.raises(CaptureError, match=r"^rank 0 is not deterministic"):
        capture_both(lambda x: x, lambda x: x + torch.tensor(time.time_ns()), 1, {"x": Input((4, 6))})


@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        ("words", "output 'out' is of type str; programs return tensors, or dicts and lists of tensors"),
        ({"a": [object()]}, "output 'a.0' is of type object; programs return tensors, or dicts and lists of tensors"),
        (torch.eye(2).to_sparse(), "output 'out' is a tensor of layout sparse_coo; return a dense one (`.to_dense()`)"),
    ],
)
def test_outputs_that_are_not_tensors_are_refused(outputs, text):
    assert str(failure(lambda x, i: outputs)) == text


def test_numbers_and_none_are_outputs():
    graph = capture_one(lambda x, i: {"a": 2, "b": None, "c": 0.5}, X)
    assert list(graph.outputs) == ["a", "b", "c"] and graph.outputs["b"] is None
    assert [constant.dtype for constant in graph.constants.values()] == ["int64", "float64"]


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda x: x, "the sequential program <lambda> takes no input 'i'; it takes ['x']"),
        (lambda x, i, z: x, "the sequential program <lambda> needs 'z', which is not among its inputs ['x', 'i']"),
        (3, "the sequential program is int, not a function"),
    ],
)
def test_inputs_that_do_not_fit_the_program_are_refused(function, text):
    with pytest.raises(UsageError) as caught:
        capture_one(function, X)
    assert str(caught.value) == text


# ---------------------------------------------------------------------- what is left behind
def test_the_calling_process_is_unharmed():
    watched = {
        "tensor": torch.tensor, "as_tensor": torch.as_tensor, "tolist": torch.Tensor.tolist, "numpy": torch.Tensor.numpy,
        "apply": torch.autograd.Function.apply.__func__, "lazy_init": torch.cuda._lazy_init, "mesh": dist.init_device_mesh,
        "gather": dist.all_gather_object, "new_tensor": torch.Tensor.new_tensor,
    }  # fmt: skip
    environment = dict(os.environ)

    def leaves_traces(x):
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(77)
        os.environ["GG_TRACE"] = "1"
        globals()["TRACE"] = x
        dist.all_reduce(x) if dist.is_initialized() else None
        return x

    state = torch.get_rng_state()
    capture_both(leaves_traces, leaves_traces, 2, {"x": Input((4, 6))})
    failure(lambda x, i: x.sum().item())
    assert not dist.is_initialized() and torch.get_default_dtype() == torch.float32
    assert torch.equal(torch.get_rng_state(), state) and dict(os.environ) == environment and "TRACE" not in globals()
    assert watched == {
        "tensor": torch.tensor, "as_tensor": torch.as_tensor, "tolist": torch.Tensor.tolist, "numpy": torch.Tensor.numpy,
        "apply": torch.autograd.Function.apply.__func__, "lazy_init": torch.cuda._lazy_init, "mesh": dist.init_device_mesh,
        "gather": dist.all_gather_object, "new_tensor": torch.Tensor.new_tensor,
    }  # fmt: skip
    assert torch._C._len_torch_dispatch_stack() == 0


def test_what_the_program_prints_does_not_reach_stdout(capfd):
    def function(x, i):
        print("a line of the program")
        return x

    capture_one(function, X)
    out, err = capfd.readouterr()
    assert out == "" and "a line of the program" in err


def test_no_process_is_left_behind():
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = children.read_text()
    failure(killed)
    assert children.read_text() == before
