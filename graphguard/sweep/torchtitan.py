"""torchtitan: its small models (`debugmodel`), a layer of each kind, under its own plans: tp with sp, fully_shard, cp and ep.

Its attention backends for language models are compiled kernels. Here it is the one that it has for images, which is torch's
scaled_dot_product_attention.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.parallel import loss_parallel

from graphguard.api import Input, train_step, verify_model
from graphguard.report.report import Report
from graphguard.sweep.candidate import Candidate

_BATCH, _SEQUENCE, _BACKEND = 4, 8, "partial_dtensor"
_AXES = ("tp", "dp", "cp", "ep")


def candidates(sizes: tuple[int, ...], options: bool) -> Iterator[Candidate]:
    """Each model under each kind of parallelism; if so asked, under tp without sp, and under tp and fully_shard at once."""
    for family in families():
        try:
            flavors = small_models(family)
        except ImportError as error:  # a compiled library that a family needs
            yield Candidate(family, {"tp": sizes[0]}, partial(_cannot_be_imported, error))
            continue
        for flavor in flavors:
            title = f"{family}: {flavor}"
            has_experts = any(getattr(layer, "moe", None) is not None for layer in configuration(family, flavor).layers)
            for size in sizes:
                for axis in _AXES if has_experts else _AXES[:-1]:
                    words = f"{title}, sequence parallel" if axis == "tp" else title
                    yield Candidate(words, {axis: size}, partial(_verify, family, flavor, {axis: size}, True))
                if options:
                    yield Candidate(title, {"tp": size}, partial(_verify, family, flavor, {"tp": size}, False))
                    both = {"dp": 2, "tp": size}
                    yield Candidate(f"{title}, sequence parallel", both, partial(_verify, family, flavor, both, True))


def families() -> list[str]:
    path = import_module("torchtitan.models").__path__
    return sorted(each.name for each in pkgutil.iter_modules(path) if each.ispkg and each.name != "common")


def small_models(family: str) -> list[str]:
    module = import_module(f"torchtitan.models.{family}")
    tables = [value for name, value in vars(module).items() if name.endswith("_configs") and isinstance(value, dict)]
    return [name for table in tables for name in table if name.startswith("debugmodel")]


def _cannot_be_imported(error: ImportError) -> Report:
    raise error


def configuration(family: str, flavor: str) -> Any:
    """The first of its layers that are dense, and that have experts."""
    from torchtitan.models.common.attention import ScaledDotProductAttention

    config = import_module(f"torchtitan.models.{family}").model_registry(flavor).model
    kinds: dict[Any, Any] = {}
    for layer in config.layers:
        kinds.setdefault((type(getattr(layer, "attention", None)), getattr(layer, "moe", None) is None), layer)
    config.layers = list(kinds.values())
    for layer in config.layers:
        if hasattr(getattr(layer, "attention", None), "inner_attention"):
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return config


def _plan(family: str, config: Any, split: bool, experts: bool) -> None:
    """The library's own plan, by its function for it."""
    module = import_module(f"torchtitan.models.{family}.sharding")
    (found,) = (
        each for name, each in vars(module).items()
        if name.startswith("set_") and name.endswith("_sharding_config") and "vision" not in name
        and getattr(each, "__module__", "") == module.__name__
    )  # fmt: skip
    given = {"enable_sp": split, "enable_ep": experts}
    taken = inspect.signature(found).parameters
    found(config, **{name: value for name, value in given.items() if name in taken})


def _ranks(family: str, flavor: str, axes: Mapping[str, int], split: bool) -> Any:
    """The model as the library's trainer makes it. Ranks that have experts each are replicas, too."""
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.utils import set_spmd_backend

    set_spmd_backend(_BACKEND)
    tp, cp, ep = (axes.get(name, 1) for name in ("tp", "cp", "ep"))
    dp = axes.get("dp", 1) * ep
    config, spec = configuration(family, flavor), import_module(f"torchtitan.models.{family}").model_registry(flavor)
    if tp > 1 or ep > 1:
        _plan(family, config, split, ep > 1)
    model = config.build()
    sizes = {"dp_replicate": 1, "dp_shard": dp, "cp": cp, "tp": tp, "pp": 1, "ep": ep, "world_size": dp * cp * tp}
    dims = ParallelDims(**sizes, spmd_backend=_BACKEND)
    if dp * cp > 1:
        spec.parallelize_fn(
            model, parallel_dims=dims, parallelism=ParallelismConfig(spmd_backend=_BACKEND), compile_config=CompileConfig(),
            training=TrainingConfig(mixed_precision_param="float32", mixed_precision_reduce="float32"), ac_config=None,
            dump_folder="",
        )  # fmt: skip
    else:
        model.parallelize(dims)
    model.init_states()
    model.dims = dims
    return model


def _alone(family: str, flavor: str) -> Any:
    model = configuration(family, flavor).build()
    model.init_states()
    return model


def _loss(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The sum over a rank's own tokens, divided by the tokens of all ranks, as the library's trainer has it."""
    from torchtitan.distributed.context_parallel import prepare_context_parallel_input

    more: dict[str, Any] = {}
    dims = getattr(model, "dims", None)
    if dims is not None and dims.cp > 1:
        more = {"positions": torch.arange(_SEQUENCE).expand(_BATCH, _SEQUENCE)}
        dealt = prepare_context_parallel_input(ids, labels, more, dims.get_mesh("cp"), torch.device("cpu"), None)
        ids, labels, more = dealt
    logits = model(ids, **more)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (_BATCH * _SEQUENCE)


def _verify(family: str, flavor: str, axes: Mapping[str, int], split: bool) -> Report:
    shared = [name for name in axes if name in ("dp", "ep")]
    vocabulary = configuration(family, flavor).vocab_size
    tokens = Input((_BATCH, _SEQUENCE), {name: Shard(0) for name in shared}, torch.int64, low=0, high=vocabulary)

    def step(model: Any, **given: Any) -> Any:
        with loss_parallel() if "tp" in axes else nullcontext():
            return train_step(_loss)(model, **given)

    return verify_model(
        sequential=lambda: _alone(family, flavor),
        distributed=lambda mesh: _ranks(family, flavor, axes, split),
        step=step,
        mesh=axes,
        inputs={"ids": tokens, "labels": tokens},
        outputs={"loss": {name: Partial() for name in axes if name != "tp"}},
    )
