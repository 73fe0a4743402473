"""megatron-core: its GPT with the local layers, and its router, under the options that change a gradient.

All is driven by the library's schedule, gradient buffers and finalize_model_grads; the sequential program is the same on one
rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import Shard

from graphguard.api import Input, train_step, verify_model
from graphguard.report.report import Report
from graphguard.sweep.candidate import Candidate

_HIDDEN, _SEQUENCE, _BATCH, _VOCABULARY = 16, 8, 4, 32
_PLAIN: dict[str, Any] = {
    "num_layers": 1, "hidden_size": _HIDDEN, "attention_dropout": 0.0, "hidden_dropout": 0.0, "bias_dropout_fusion": False,
    "masked_softmax_fusion": False, "gradient_accumulation_fusion": False, "persist_layer_norm": False,
    "apply_rope_fusion": False,
}  # fmt: skip
_GATED = {"gated_linear_unit": True, "activation_func": F.silu, "add_bias_linear": False}
# By name: options of the configuration, and of the model under "model".
GPT: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "RMSNorm": {"normalization": "RMSNorm"},
    "gated": _GATED,
    "no biases": {"add_bias_linear": False},
    "biases of queries, keys and values": {"add_qkv_bias": True, "add_bias_linear": False},
    "norms of queries and keys": {"qk_layernorm": True},
    "grouped queries": {"groups": True},
    "learned sinks": {"softmax_type": "learnable"},
    "norms around 1": {"layernorm_zero_centered_gamma": True},
    "tied embeddings": {"model": {"share_embeddings_and_output_weights": True}},
    "learned positions": {"model": {"position_embedding_type": "learned_absolute"}},
}
_LIBRARY = (
    "distributed",
    "models.gpt",
    "models.gpt.gpt_layer_specs",
    "pipeline_parallel",
    "tensor_parallel",
    "transformer.moe.router",
)
_PER_TOKEN = {"calculate_per_token_loss": True}
ROUTER: Mapping[str, Mapping[str, Any]] = {
    "no balancing": {},
    "z loss": {"moe_z_loss_coeff": 0.1},
    **{
        kind: {"moe_router_load_balancing_type": kind, "moe_aux_loss_coeff": 0.1}
        for kind in ("aux_loss", "seq_aux_loss", "global_aux_loss")
    },
    "sigmoid scores": {"moe_router_score_function": "sigmoid"},
    "scores before the choice": {"moe_router_pre_softmax": True},
    "scaled scores": {"moe_router_topk_scaling_factor": 2.0, "moe_router_pre_softmax": True},
}


def candidates(sizes: tuple[int, ...], options: bool) -> Iterator[Candidate]:
    """Each option of GPT under tensor parallelism; if so asked, under sequence parallelism, too. Each option of the router over
    tensor-parallel ranks and over replicas, by the mean and per token."""
    for module in _LIBRARY:
        import_module(f"megatron.core.{module}")  # once, and not in every rank
    for size in sizes:
        for name, given in GPT.items():
            for split in (False, True) if options else (False,):
                words = f"GPT, {name}{', sequence parallel' if split else ''}"
                yield Candidate(words, {"tp": size}, partial(_verify_gpt, size, given, split))
        for name, given in ROUTER.items():
            for per_token in (False, True):
                words = f"router, {name}{', loss per token' if per_token else ''}"
                both = {**given, **_PER_TOKEN} if per_token else given
                for axis in ("tp", "dp") if name != "aux_loss" else ("tp",):  # of each replica's own tokens, by its definition
                    yield Candidate(words, {axis: size}, partial(_verify_router, axis, size, both))


# ---------------------------------------------------------------------- models
def _started(tp: int, sequence_parallel: bool, options: Mapping[str, Any]) -> Any:
    """The configuration of this rank, with its groups."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    model_parallel_cuda_manual_seed(1)
    heads = {"num_attention_heads": max(4, options.get("ranks", tp))}
    groups = {"num_query_groups": max(2, options.get("ranks", tp))} if options.get("groups") else {}
    given = {name: value for name, value in options.items() if name not in ("model", "groups", "ranks")}
    config = TransformerConfig(
        **{**_PLAIN, **heads, **groups, **given}, tensor_model_parallel_size=tp, sequence_parallel=sequence_parallel
    )
    config.finalize_model_grads_func = _finalize
    return config


def _finalize(model: Any, num_tokens: Any = None, **given: Any) -> None:
    """finalize_model_grads. It reads the number of all tokens, to divide by it; here it is known beforehand."""
    from megatron.core.distributed import finalize_model_grads

    finalize_model_grads(model, None, **given)
    if num_tokens is not None:
        model[0].scale_gradients(1 / (_SEQUENCE * _BATCH))


def _buffered(model: Any) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    return DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)


def _gpt(config: Any, options: Mapping[str, Any]) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    spec = get_gpt_layer_local_spec(normalization=config.normalization, qk_layernorm=config.qk_layernorm)
    given = {"position_embedding_type": "rope", **options.get("model", {})}
    return GPTModel(config, spec, vocab_size=_VOCABULARY, max_sequence_length=_SEQUENCE, **given)


def _router(config: Any, options: Mapping[str, Any]) -> Any:
    from megatron.core.enums import ModelType
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.moe.router import TopKRouter

    class Routed(MegatronModule):
        model_type = ModelType.encoder_or_decoder

        def __init__(self) -> None:
            super().__init__(config)
            self.router = TopKRouter(config=config, pg_collection=ProcessGroupCollection.use_mpu_process_groups())
            self.router.set_layer_number(1)

        def set_input_tensor(self, tensor: Any) -> None:
            """What an earlier stage would send."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.router(x)[0]
            return scores

    return Routed()


Build = Callable[[Any, Mapping[str, Any]], Any]


def _alone(build: Build, options: Mapping[str, Any]) -> Any:
    """megatron-core needs process groups even for one rank."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    return _buffered(build(_started(1, False, options), options))


class _Scheduled(train_step):
    """One step of the library's schedule; `loss_fn(output, **inputs)` is what a trainer gives it."""

    def __call__(self, model: Any, **inputs: Any) -> Any:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        def forward(data: Any, chunk: Any) -> Any:
            given = next(data)
            return chunk(**given), lambda output: self.loss_fn(output, **given)

        get_forward_backward_func()(
            forward_step_func=forward, data_iterator=iter([inputs]), model=[model], num_microbatches=1, seq_length=_SEQUENCE,
            micro_batch_size=_BATCH,
        )  # fmt: skip
        return {"grads": {name: parameter.main_grad for name, parameter in model.named_parameters()}}


# ---------------------------------------------------------------------- verdicts
def _verify_gpt(size: int, options: Mapping[str, Any], split: bool) -> Report:
    options = {**options, "ranks": size}

    def loss(output: torch.Tensor, **given: Any) -> Any:
        return output.mean(), {}

    return verify_model(
        sequential=lambda: _alone(_gpt, options),
        distributed=lambda mesh: _buffered(_gpt(_started(size, split, options), options)),
        step=_Scheduled(loss),
        mesh={"tp": size},
        inputs={
            "input_ids": Input((_BATCH, _SEQUENCE), dtype=torch.int64, low=0, high=_VOCABULARY),
            "position_ids": Input((_BATCH, _SEQUENCE), dtype=torch.int64, low=0, high=_SEQUENCE),
            "attention_mask": Input((_BATCH, 1, _SEQUENCE, _SEQUENCE), dtype=torch.bool),
            "labels": Input((_BATCH, _SEQUENCE), dtype=torch.int64, low=0, high=_VOCABULARY),
        },
    )


def _verify_router(axis: str, size: int, options: Mapping[str, Any]) -> Report:
    balanced = {
        "add_bias_linear": False,
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_router_load_balancing_type": "none",
        **options,
    }
    tp = size if axis == "tp" else 1

    def loss(scores: torch.Tensor, x: torch.Tensor) -> Any:
        """Of this rank's tokens. The count is that of all tokens of the replica, as a trainer's loss mask has it."""
        if not options.get("calculate_per_token_loss"):
            # tensor-parallel ranks have parts of the sequence, whose gradients are added
            return scores.square().sum() / (scores.shape[0] * _copies()), {}
        return scores.square().sum(), torch.tensor(scores.shape[0] * _copies(), dtype=torch.int), {}

    return verify_model(
        sequential=lambda: _alone(_router, balanced),
        distributed=lambda mesh: _buffered(_router(_started(tp, tp > 1, balanced), balanced)),
        step=_Scheduled(loss),
        mesh={axis: size},
        inputs={"x": Input((_SEQUENCE, _BATCH, _HIDDEN), Shard(0 if axis == "tp" else 1))},
    )


def _copies() -> int:
    from megatron.core import parallel_state

    copies: int = parallel_state.get_tensor_model_parallel_world_size()
    return copies
