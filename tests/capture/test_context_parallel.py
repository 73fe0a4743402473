"""torch's context_parallel: the captured rings are those of the library on real ranks, and they are proved."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import assert_replays_as_eager, assert_replays_as_gloo
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method

import graphguard as gg
from graphguard import Input
from graphguard.errors import CaptureError

aten = torch.ops.aten
F64 = torch.float64
HEADS, LENGTH, HEAD = 2, 8, 4


def kernels_for_the_cpu():
    """The kernel of GPUs that the library's rings go around, on the CPU, and attention that chooses it. The rings stay as
    they are."""
    state = torch.zeros((), dtype=torch.int64)

    def forward(q, k, v, dropout=0.0, causal=False, debug=False, *, scale=None):
        found = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout, causal, scale=scale)
        return *found, state, state, q.size(2), k.size(2), state, state, state

    def backward(g, q, k, v, out, log, _a, _b, _c, _d, dropout, causal, *unused, scale=None):
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(g, q, k, v, out, log, dropout, causal, scale=scale)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_flash_attention", forward, "CPU")
    library.impl("_scaled_dot_product_flash_attention_backward", backward, "CPU")

    def scaled_dot_product_attention(q, k, v, is_causal=False):
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]

    F.scaled_dot_product_attention = scaled_dot_product_attention
    return library


@pytest.mark.gloo
@pytest.mark.parametrize("method", ["allgather", "alltoall"])
def test_context_parallel_replays_as_gloo(method):
    def program(q, k, v, g, mesh):
        kept = kernels_for_the_cpu() if dist.get_backend() == "gloo" else None
        set_rotate_method(method)
        with context_parallel(mesh, buffers=[q, k, v, g], buffer_seq_dims=[2] * 4):
            inputs = [each.clone().requires_grad_() for each in (q, k, v)]
            out = F.scaled_dot_product_attention(*inputs, is_causal=True)
            outputs = {"out": out.detach(), "grads": torch.autograd.grad(out, inputs, g.clone())}
        del kept
        return {**outputs, "restored": q}

    inputs = {name: Input((1, HEADS, LENGTH, HEAD), dtype=F64) for name in "qkvg"}
    assert_replays_as_gloo(program, 2, inputs, tolerance=1e-5)  # blocks are merged in float32


@pytest.mark.parametrize(("heads", "masked"), [(HEADS, True), (1, False)])
def test_what_rings_are_not_captured_with_is_refused(heads, masked):
    def ranks(q, k, mesh):
        with context_parallel(mesh, buffers=[q, k], buffer_seq_dims=[2, 2]):
            mask = torch.ones(1, 1, q.size(2), k.size(2), dtype=torch.bool) if masked else None
            return F.scaled_dot_product_attention(q.clone(), k.clone(), k.clone(), mask, enable_gqa=not masked)

    inputs = {"q": Input((1, HEADS, LENGTH, HEAD)), "k": Input((1, heads, LENGTH, HEAD))}
    with pytest.raises(CaptureError, match="the rings of context_parallel are captured without attn_mask"):
        gg.capture_function(lambda q, k: q, ranks, mesh={"cp": 2}, inputs=inputs)


# ---------------------------------------------------------------------- tensors of another size in the same memory
def smaller_and_larger_again(x, y):
    part = x[1:, ::2].clone()
    x.resize_(part.shape)
    x.copy_(part)
    seen = x * 2
    x.resize_(4, 6)
    return seen, x


def in_a_window(x, y):
    row = x[1]
    row.resize_(2, 3)
    row.add_(1)
    return row, x


@pytest.mark.parametrize("program", [smaller_and_larger_again, in_a_window])
def test_a_tensor_resized_in_its_memory_replays_as_eager(program):
    assert_replays_as_eager(program, {"x": Input((4, 6)), "y": Input((4, 6))})
