"""torch: data that a program writes down, draws or reads, where its tensors have none."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import init
from torch.utils._python_dispatch import _disable_current_modes

from graphguard.capture.torch.adapters.holders import Holders
from graphguard.capture.torch.escapes.device import is_meta

if TYPE_CHECKING:
    from graphguard.capture.torch.record.recorder import Recorder


def keep_literal_data(recorder: Recorder, holders: Holders) -> None:
    """`torch.tensor(data, device=x.device)` would drop the data, as x is on the meta device."""
    as_tensor = torch.as_tensor
    for function, builtin in ((torch.tensor, "aten::tensor"), (torch.as_tensor, "aten::as_tensor")):

        @functools.wraps(function)
        def keeping(data: Any, *args: Any, _function: Any = function, device: Any = None, **kwargs: Any) -> Any:
            if isinstance(data, torch.Tensor):
                if _function is as_tensor and device is not None:
                    return data.to(device, *args, **kwargs)  # as it is, if it is there
                return _function(data, *args, device=device, **kwargs)
            if _function is as_tensor and isinstance(data, np.ndarray):
                with _disable_current_modes():  # it shares the array's memory, of which a recorder would make a copy
                    return _function(data, *args, **kwargs)
            return _function(data, *args, **kwargs)

        torch.jit._builtins._register_builtin(keeping, builtin)  # code compiled from now on finds it as before
        holders.replace(function, keeping)

    def new_tensor(self: torch.Tensor, data: Any, *, dtype: Any = None, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return torch.tensor(data, dtype=dtype or self.dtype, **kwargs)

    torch.Tensor.new_tensor = new_tensor


def initialise_without_data(recorder: Recorder, holders: Holders) -> None:
    """Some initialisers leave tensors without data as they are."""

    def drawing(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(function)
        def drawn(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            function(tensor, *args, **kwargs)
            if is_meta(tensor):
                recorder.assume(f"{function.__name__} draws any random numbers: their distribution is not recorded")
                with torch.no_grad():
                    tensor.normal_(generator=kwargs.get("generator"))
            return tensor

        return drawn

    @functools.wraps(init.dirac_)
    def dirac_(tensor: torch.Tensor, groups: int = 1, _function: Any = init.dirac_) -> torch.Tensor:
        with _disable_current_modes():
            data = _function(torch.empty(tensor.shape, dtype=tensor.dtype), groups)
        with torch.no_grad():
            return tensor.copy_(data)

    holders.replace(init.dirac_, dirac_)
    for function in (init.trunc_normal_, init.orthogonal_, init.sparse_):
        holders.replace(function, drawing(function))
