"""transformers: every model family that ships a tensor-parallel plan, as a small model with that plan."""

from __future__ import annotations

import importlib.util
import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from functools import partial
from typing import Any

from graphguard.api import train_step, verify_model
from graphguard.report.report import Report
from graphguard.sweep.candidate import Candidate
from graphguard.sweep.small import first_that_runs, inputs_of, loss_of, model_of

# Options that change which gradients are whole, where a family has them and leaves them off.
_OPTIONS = ("use_qk_norm", "qk_layernorm", "attention_bias", "mlp_bias", "use_bias", "tie_word_embeddings")


def candidates(sizes: tuple[int, ...], options: bool) -> Iterator[Candidate]:
    """Each family at each size; if so asked, once more with each option."""
    for config in configurations():
        family = config.__module__.split(".")[2]
        title = f"{family}: {config.__name__}"
        offered = [name for name in _OPTIONS if getattr(config, name, None) is False]
        for tp in sizes:
            yield Candidate(title, {"tp": tp}, partial(_verify, config, tp, {}))
            for name in offered if options else ():
                yield Candidate(f"{title}, {name}", {"tp": tp}, partial(_verify, config, tp, {name: True}))


def configurations() -> Iterable[type]:
    """The configuration classes that have a plan of their own."""
    models = importlib.import_module("transformers.models")
    for family in sorted(module.name for module in pkgutil.iter_modules(models.__path__)):
        path = f"transformers.models.{family}.configuration_{family}"
        if importlib.util.find_spec(path) is None:
            continue  # a folder of tokenizers, or of tools
        module = importlib.import_module(path)
        for name, kind in sorted(vars(module).items()):
            if isinstance(kind, type) and kind.__module__ == module.__name__ and vars(kind).get("base_model_tp_plan"):
                assert name == kind.__name__
                yield kind


def given(config: type, tp: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """What `verify_model` takes for this configuration."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    kind: Any = model_of(config)
    made, choice = first_that_runs(config, tp, options)

    def build() -> Any:
        return kind(deepcopy(made))

    def distributed(mesh: Any) -> Any:
        model = apply_tensor_parallelism(built := build(), mesh["tp"], dict(built.tp_plan))
        model.tie_weights()  # as the library does once weights are loaded
        return model

    inputs = inputs_of(build(), choice)
    return {
        "sequential": build, "distributed": distributed, "step": train_step(loss_of), "mesh": {"tp": tp}, "inputs": inputs,
    }  # fmt: skip


def _verify(config: type, tp: int, options: Mapping[str, Any]) -> Report:
    return verify_model(**given(config, tp, options))
