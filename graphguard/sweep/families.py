"""transformers: every model family that ships a tensor-parallel plan, as a small model with that plan."""

from __future__ import annotations

import importlib.util
import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from graphguard.api import Input, train_step, verify_model
from graphguard.report.report import Report
from graphguard.sweep.candidate import Candidate

_VOCABULARY, _BATCH, _SEQUENCE, _HEADS, _HEAD = 32, 2, 8, 4, 8
# What a configuration has of these is made small.
_SMALL: dict[str, Any] = {
    "vocab_size": _VOCABULARY, "intermediate_size": 24, "num_hidden_layers": 1, "head_dim": _HEAD,
    "max_position_embeddings": 64, "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8, "moe_shared_expert_intermediate_size": 8,
    "num_experts": 2, "n_routed_experts": 2, "num_local_experts": 2, "moe_num_experts": 2,
    "num_experts_per_tok": 2, "moe_k": 2, "top_k": 2, "moe_topk": 2, "n_shared_experts": 1, "num_shared_experts": 1,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "decoder_sparse_step": 1,
    "qk_rope_head_dim": _HEAD, "qk_nope_head_dim": 4, "v_head_dim": _HEAD, "use_cache": False,
}  # fmt: skip
# The same, where a configuration has them and they are not None: None says that there is no such part.
_SMALL_IF_ANY: dict[str, Any] = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "pad_token_id": 0, "attention_dropout": 0.0, "hidden_dropout": 0.0, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
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


def model_of(config: type) -> type:
    """The model with a language head, or else the one without, of this configuration."""
    name = config.__module__.replace(".configuration_", ".modeling_")
    module = importlib.import_module(name)
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and getattr(kind, "config_class", None) is config]
    for ending in ("ForCausalLM", "TextModel", "Model"):
        for kind in kinds:
            if kind.__name__.endswith(ending) and not kind.__name__.endswith("PreTrainedModel"):
                return kind
    raise LookupError(f"{module.__name__} has no model of {config.__name__} alone")


def small(config: Any, tp: int, options: Mapping[str, Any]) -> Any:
    """A small configuration, with as many heads as ranks need, and fewer keys than heads where the family allows it."""
    heads, fields = max(_HEADS, tp), config().to_dict()
    sizes = {name: value for name, value in _SMALL.items() if name in fields}
    sizes |= {name: value for name, value in _SMALL_IF_ANY.items() if fields.get(name) is not None}
    sizes = {
        name: [value] * len(fields[name]) if isinstance(fields.get(name), list) else value for name, value in sizes.items()
    }
    sizes |= {"hidden_size": _HEAD * heads, "num_attention_heads": heads}
    rotary = fields.get("rope_parameters")
    if isinstance(rotary, dict) and "mrope_section" in rotary:
        sizes["rope_parameters"] = {**rotary, "mrope_section": [_HEAD // 4, _HEAD // 8, _HEAD // 8]}
    keys = [max(_HEADS // 2, tp), heads] if "kv_lora_rank" not in fields else [heads]
    made = _first_that_is_valid(config, [{**sizes, "num_key_value_heads": each, **options} for each in keys])
    made._experts_implementation = "batched_mm"  # each token by its experts, without counting tokens
    return made


def _first_that_is_valid(config: Any, attempts: list[dict[str, Any]]) -> Any:
    for number, given in enumerate(attempts, 1):
        try:
            return config(**given)
        except Exception:
            if number == len(attempts):
                raise
    return None


def _loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    if type(model).__name__.endswith("ForCausalLM"):
        loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
        return loss
    hidden: torch.Tensor = model(input_ids=ids).last_hidden_state
    return hidden.square().mean()


def given(config: type, tp: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """What `verify_model` takes for this configuration."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    kind: Any = model_of(config)
    small(config, tp, options)  # what it raises is told before anything is captured

    def build() -> Any:
        return kind(small(config, tp, options))

    def distributed(mesh: Any) -> Any:
        model = apply_tensor_parallelism(built := build(), mesh["tp"], dict(built.tp_plan))
        model.tie_weights()  # as the library does once weights are loaded
        return model

    ids = Input((_BATCH, _SEQUENCE), dtype=torch.int64, low=0, high=_VOCABULARY)
    return {
        "sequential": build, "distributed": distributed, "step": train_step(_loss), "mesh": {"tp": tp}, "inputs": {"ids": ids},
    }  # fmt: skip


def _verify(config: type, tp: int, options: Mapping[str, Any]) -> Report:
    return verify_model(**given(config, tp, options))
