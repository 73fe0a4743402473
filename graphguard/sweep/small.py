"""transformers: a small configuration of a family, and what its model is called with.

Sizes follow from the names of the fields that the configuration class has. What they must have to do with each other is not
written down anywhere, so a few choices are tried: the first is taken whose model runs a train step on one process.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from graphguard.api import Input

VOCABULARY, BATCH, SEQUENCE, _HEADS = 32, 2, 8, 4
_MOST = 10_000_000  # parameters of a model that is run to see whether it runs
# By the name of a field, where it has a number that is not 0, or None: 0 says that there is no such part.
_SIZES: dict[str, Any] = {
    "intermediate_size": 24, "num_hidden_layers": 1, "max_position_embeddings": 64,
    "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "moe_shared_expert_intermediate_size": 8,
    "num_experts": 2, "n_routed_experts": 2, "num_local_experts": 2, "moe_num_experts": 2,
    "num_experts_per_tok": 2, "moe_k": 2, "top_k": 2, "moe_topk": 2, "n_shared_experts": 1, "num_shared_experts": 1,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "decoder_sparse_step": 1, "use_cache": False,
}  # fmt: skip
# The same, where it is not None either: None says that there is no such part, or that it follows from others.
_SIZES_IF_ANY: dict[str, Any] = {
    "pad_token_id": 0, "attention_dropout": 0.0, "hidden_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "mamba_chunk_size": SEQUENCE, "mamba_d_state": 8, "ssm_state_size": 8, "hidden_size_per_layer_input": 8,
    "attn_pdrop": 0.0, "image_size": 8, "patch_size": 2, "num_kv_shared_layers": 0, "dropout_rate": 0.0,
    "n_groups": 1, "mamba_n_groups": 1,
}  # fmt: skip
# What None is replaced by, where a model cannot do without.
_INSTEAD_OF_NONE: dict[str, Any] = {"sliding_window": SEQUENCE // 2, "top_k_experts": 2}
_KINDS_OF_LAYERS = {"layer_types": "full_attention", "mlp_layer_types": "sparse"}


@dataclass(frozen=True)
class Choice:
    """heads, keys: how many; head: how large each is. every_kind: one layer of each kind, not the first alone. filled: nothing
    is left to be None. embedded: the model is called with hidden states, and not with tokens."""

    heads: int
    keys: int
    head: int
    every_kind: bool
    filled: bool
    embedded: bool


def choices(tp: int) -> Iterator[Choice]:
    """Fewer keys than heads first; the usual choices first."""
    heads = max(_HEADS, tp)
    for embedded, filled, every_kind, head in product((False, True), (False, True), (False, True), (8, 16)):
        for keys in (max(_HEADS // 2, tp), heads):
            yield Choice(heads, keys, head, every_kind, filled, embedded)


def configure(config: Any, choice: Choice, options: Mapping[str, Any]) -> Any:
    """The configuration of this choice, if its class allows it."""
    fields = _fields(config)
    sizes = {name: value for name, value in _SIZES.items() if name in fields and fields[name] != 0}
    sizes |= {name: value for name, value in _SIZES_IF_ANY.items() if fields.get(name) not in (None, 0)}
    sizes |= {name: value for name in fields if (value := _size(name, fields[name], choice)) is not None}
    if choice.filled:
        sizes |= {name: value for name, value in _INSTEAD_OF_NONE.items() if name in fields}
    parts = {name: part for name, part in config.sub_configs.items() if getattr(part, "model_type", "")}
    for name, part in parts.items():
        with suppress(Exception):  # it stays as large as it is
            sizes[name] = configure(part, choice, {})
    usual = {"hidden_size": choice.head * choice.heads, "num_attention_heads": choice.heads, "num_key_value_heads": choice.keys}
    sizes |= {name: size for name, size in usual.items() if name in fields or not parts}
    sizes |= _layers(fields, choice)
    sizes |= _rotary(config, fields, choice)
    for name, size in sizes.items():
        if isinstance(fields.get(name), list) and not isinstance(size, list):
            each_layer = len(fields[name]) == fields.get("num_hidden_layers")
            sizes[name] = [size] * (sizes["num_hidden_layers"] if each_layer else len(fields[name]))
    made = config(**{**sizes, **options})
    made._experts_implementation = "batched_mm"  # each token by its experts, without counting tokens
    return made


def _fields(config: Any) -> dict[str, Any]:
    """What the class can be given, with its defaults: its fields, under the names that it declares, and what it takes from
    further keywords. What follows from other fields is left out."""
    shown, declared = config().to_dict(), getattr(config, "__dataclass_fields__", {})
    aliases = {shown_as: name for name, shown_as in config.attribute_map.items() if name in declared}
    fields = {aliases.get(name, name): value for name, value in shown.items()}
    taken = re.findall(r'kwargs\.(?:pop|get)\("(\w+)", *\d+\)', inspect.getsource(config))
    return {name: value for name, value in fields.items() if not declared or name in declared} | dict.fromkeys(taken, -1)


def _size(name: str, value: Any, choice: Choice) -> int | None:
    """A number of this field, by the end of its name. `head_dim` alone may be None, and be made nevertheless."""
    if name == "head_dim" and value is None:
        return choice.head
    if not isinstance(value, int) or isinstance(value, bool) or value == 0:
        return None
    if name.endswith("key_value_heads"):
        return choice.keys
    for pattern, size in (
        (r"(.*_)?(num|n)_(.*_)?heads", choice.heads),
        (r"qk_head_dim|mamba_d_head", 2 * choice.head),
        (r".*head_dim", choice.head),
        (r".*_lora_rank|laurel_rank|embedding_rank", 8),
        (r"vocab_size(_.*)?", VOCABULARY),
        (r"(shared|dense)_(.*_)?intermediate_size|expert_ffn_hidden_size|ffn_hidden_size|share_expert_dim", 8),
    ):
        if re.fullmatch(pattern, name):
            return size
    return None


def _layers(fields: Mapping[str, Any], choice: Choice) -> dict[str, Any]:
    """One layer, or the first of each kind. Lists that have an entry for each layer have one for each of these."""
    lists = {
        name: value
        for name, value in fields.items()
        if isinstance(value, list) and len(value) == fields.get("num_hidden_layers")
    }
    kinds = {name: value for name, value in lists.items() if name in _KINDS_OF_LAYERS}
    if choice.every_kind and kinds:
        firsts = sorted({kind.index(value) for kind in kinds.values() for value in kind})
        return {
            "num_hidden_layers": len(firsts),
            **{name: [value[at] for at in firsts] for name, value in lists.items() if isinstance(value[0], str)},
        }
    if choice.filled:
        return {name: [kind] for name, kind in _KINDS_OF_LAYERS.items() if name in fields and fields[name] is None}
    return {}


def _rotary(config: Any, fields: Mapping[str, Any], choice: Choice) -> dict[str, Any]:
    """Parts of rotary positions, for models that turn them by several coordinates; and the positions of each kind of layer."""
    rotary = fields.get("rope_parameters")
    if not isinstance(rotary, dict) or "mrope_section" not in inspect.getsource(modeling(config)):
        return {}
    rotary = dict(rotary) if rotary or not choice.filled else {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    layered = {name: value for name, value in rotary.items() if isinstance(value, dict)}
    if layered:
        return {"rope_parameters": {**rotary, **{name: _sectioned(value, choice) for name, value in layered.items()}}}
    return {"rope_parameters": _sectioned(rotary, choice)} if rotary else {}


def _sectioned(rotary: dict[str, Any], choice: Choice) -> dict[str, Any]:
    turned = int(choice.head * (rotary.get("partial_rotary_factor") or 1)) // 2
    if turned < 4:  # too few for three coordinates
        return rotary
    return {**rotary, "mrope_section": [turned // 4, turned // 4, turned - 2 * (turned // 4)]}


# ---------------------------------------------------------------------- models
def modeling(config: type) -> Any:
    return importlib.import_module(config.__module__.replace(".configuration_", ".modeling_"))


def model_of(config: type) -> type:
    """The model with a language head, or else the one without, of this configuration."""
    module = modeling(config)
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and _takes(kind, config)]
    for ending in ("ForCausalLM", "TextModel", "Model", "ForConditionalGeneration", "Encoder", "Decoder"):
        for kind in kinds:
            if kind.__name__.endswith(ending) and not kind.__name__.endswith("PreTrainedModel"):
                return kind
    raise LookupError(f"{module.__name__} has no model of {config.__name__} alone")


def _takes(kind: type, config: type) -> bool:
    """A model is made of this configuration: its class says so, or its constructor."""
    if not hasattr(kind, "config_class"):
        return False
    return kind.config_class is config or _annotated(kind) == config.__name__


def _annotated(kind: type) -> str:
    given = inspect.signature(kind.__init__).parameters.get("config")  # type: ignore[misc]
    return getattr(given.annotation, "__name__", str(given.annotation)) if given else ""


# ---------------------------------------------------------------------- calls
def inputs_of(model: Any, choice: Choice) -> dict[str, Input]:
    """Tokens, or hidden states and pixels by the names of what the model takes."""
    ids = Input((BATCH, SEQUENCE), dtype=torch.int64, low=0, high=VOCABULARY)
    if not choice.embedded:
        return {"ids": ids}
    config, taken = model.config, inspect.signature(model.forward).parameters
    hidden, image = config.hidden_size, getattr(config, "image_size", 8)
    shapes = {
        "inputs_embeds": (SEQUENCE, hidden),
        "noise_embeds": (SEQUENCE, hidden),
        "encoder_hidden_states": (SEQUENCE, hidden),
        "t_cond": (1, hidden),
        "context_hidden_states": (SEQUENCE, hidden * len(getattr(config, "target_layer_ids", None) or [0])),
        "pixel_values": (getattr(config, "num_channels", 3), image, image),
    }
    return {name: Input((BATCH, *shape)) for name, shape in shapes.items() if name in taken}


def loss_of(model: Any, **given: torch.Tensor) -> torch.Tensor:
    ids = given.pop("ids", None)
    if ids is None:
        return _squared(model(**given))
    if type(model).__name__.endswith("ForCausalLM"):
        loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
        return loss
    return _squared(model(input_ids=ids))


def _squared(output: Any) -> torch.Tensor:
    first = output.last_hidden_state if getattr(output, "last_hidden_state", None) is not None else output.logits
    squared: torch.Tensor = first.square().mean()
    return squared


def first_that_runs(config: type, tp: int, options: Mapping[str, Any]) -> tuple[Any, Choice]:
    """The small configuration, and the choice that led to it. What the first choice raises is told if no choice runs."""
    kind: Any = model_of(config)
    told: Exception | None = None
    for choice in choices(tp):
        try:
            return _tried(kind, config, choice, options), choice
        except Exception as error:  # whatever a library raises
            told = told or error
    assert told is not None
    raise told


def _tried(kind: Any, config: type, choice: Choice, options: Mapping[str, Any]) -> Any:
    """The configuration, if a train step runs with it. What the model asks for and its class lacks is added."""
    made = configure(config, choice, options)
    try:
        _try(kind, made, choice)
    except AttributeError as error:
        known = {**_SIZES, **_SIZES_IF_ANY}
        if error.name not in known or error.name in options:
            raise
        return _tried(kind, config, choice, {**options, error.name: known[error.name]})
    return made


def _try(kind: Any, config: Any, choice: Choice) -> None:
    """Build it, and run a train step unless it is large."""
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in kind(deepcopy(config)).parameters())
    if size > _MOST:
        return  # it is captured without data, as any model
    model = kind(deepcopy(config))
    given = {
        name: torch.randint(0, VOCABULARY, each.shape) if each.dtype == torch.int64 else torch.randn(each.shape)
        for name, each in inputs_of(model, choice).items()
    }
    loss_of(model, **given).backward()
