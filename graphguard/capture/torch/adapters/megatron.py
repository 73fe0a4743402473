"""megatron-core."""

from __future__ import annotations

import contextlib
import copy
import sys
from typing import TYPE_CHECKING, Any

import torch

from graphguard.capture.torch.adapters.versions import check_version
from graphguard.capture.torch.escapes.imports import when_imported

if TYPE_CHECKING:
    from graphguard.capture.torch.record.recorder import Recorder

_CPU = torch.device("cpu")


class _Stream:
    """Of a driver that is not there: what is put on it is done in the order of the program."""

    def wait_stream(self, other: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, event: Any = None) -> _Stream:
        return self


def adjust_megatron(recorder: Recorder) -> None:
    """megatron-core keeps random states per GPU, and asks torch for the current GPU as the device of new tensors."""

    def adjust_random(random: Any) -> None:
        check_version(recorder, "megatron-core")
        random.CudaRNGStatesTracker.add = lambda self, name, seed: self.set_states({**self.states_, name: seed})
        random.CudaRNGStatesTracker.fork = fork
        random._get_cuda_rng_state = random._set_cuda_rng_state = lambda *args, **kwargs: None
        torch.cuda.current_device = lambda: _CPU

    def fork(self: Any, name: str = "") -> contextlib.AbstractContextManager[None]:
        recorder.assume("megatron-core draws random numbers (dropout, initialisation) from one stream per rank")
        return contextlib.nullcontext()

    def adjust_norm(torch_norm: Any) -> None:
        construct = torch_norm.WrappedTorchNorm.__new__

        def norm(cls: Any, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
            alone = copy.copy(config)
            alone.sequence_parallel = False  # refused, as only the fused norms mark their parameters
            module: torch.nn.Module = construct(cls, alone, *args, **kwargs)
            if config.sequence_parallel:
                recorder.assume("megatron-core's norms under sequence parallelism are torch's, their parameters marked as such")
                for parameter in module.parameters():
                    parameter.sequence_parallel = True
            return module

        torch_norm.WrappedTorchNorm.__new__ = norm

    def adjust_router(router: Any) -> None:
        gating = router.Router.gating

        def gate(self: Any, given: torch.Tensor) -> Any:
            utilities = sys.modules[router.router_gating_linear.__module__]
            if not hasattr(utilities, "te_general_gemm"):  # a name that 0.16.1 asks for, and has only with Transformer Engine
                recorder.assume("megatron-core's router multiplies by torch, as it does where Transformer Engine does not")
                utilities.te_general_gemm = None  # type: ignore[attr-defined]
            return gating(self, given)

        router.Router.gating = gate

    def adjust_dispatcher(dispatcher: Any) -> None:
        dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = _Stream()
        dispatcher.maybe_move_tensor_to_cpu = moved_to_cpu
        torch.cuda.current_stream = lambda *args: _Stream()
        torch.cuda.stream = lambda stream: contextlib.nullcontext()

    def moved_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        """Counts that decide how much is sent are read on the host, where they are already."""
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    when_imported("megatron.core.tensor_parallel.random", adjust_random)
    when_imported("megatron.core.transformer.moe.router", adjust_router)
    when_imported("megatron.core.transformer.moe.token_dispatcher", adjust_dispatcher)
    when_imported("megatron.core.transformer.torch_norm", adjust_norm)
