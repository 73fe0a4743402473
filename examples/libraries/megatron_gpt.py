"""megatron-core: GPTModel (local layer spec) under tensor and sequence parallelism, with vocabulary-parallel cross entropy.

The sequential program is the same model on one rank. Where each parameter lies is read from Megatron's own marks.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import _allreduce_non_tensor_model_parallel_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, layers, model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

import graphguard as gg

BATCH, SEQUENCE, VOCABULARY = 2, 8, 32
GATED = {"gated_linear_unit": True, "activation_func": F.silu, "add_bias_linear": False, "normalization": "RMSNorm"}


def build(tp, **options):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=4, tensor_model_parallel_size=tp, attention_dropout=0.0,
        hidden_dropout=0.0, bias_dropout_fusion=False, masked_softmax_fusion=False, gradient_accumulation_fusion=False,
        persist_layer_norm=False, apply_rope_fusion=False, **options,
    )  # fmt: skip
    return GPTModel(
        config, get_gpt_layer_local_spec(normalization=config.normalization), vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE, position_embedding_type="rope",
    )  # fmt: skip


def alone(**options):
    """megatron-core needs process groups even for one rank."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    return build(1, **options)


def loss(model, ids, positions, mask):
    return model(ids, positions, mask, labels=ids).mean()


def layer_loss(model, ids, positions, mask):
    """Of one layer, without the vocabulary-parallel head."""
    hidden, rotary = model.embedding(ids, positions), model.rotary_pos_emb(SEQUENCE)
    output, _ = model.decoder.layers[0](hidden, mask, rotary_pos_emb=rotary)
    if model.config.sequence_parallel:
        output = gather_from_sequence_parallel_region(output, tensor_parallel_output_grad=False)
    return output.square().mean()


def head_loss(model, ids, positions, mask):
    """Of the embedding, the last norm, the head and the vocabulary-parallel cross entropy."""
    logits, _ = model.output_layer(model.decoder.final_layernorm(model.embedding(ids, positions)))
    return model.compute_language_model_loss(ids, logits).mean()


def verify(loss_fn, tp=2, changed=(), finalized=False, **options):
    def distributed(mesh):
        model = build(tp, **options, **dict(changed))
        if finalized:
            model.ddp_config = DistributedDataParallelConfig()
        return model

    inputs = {
        "ids": gg.Input((BATCH, SEQUENCE), dtype=torch.int64, low=0, high=VOCABULARY),
        "positions": gg.Input((BATCH, SEQUENCE), dtype=torch.int64, low=0, high=SEQUENCE),
        "mask": gg.Input((BATCH, 1, SEQUENCE, SEQUENCE), dtype=torch.bool),
    }
    return gg.verify_model(
        sequential=lambda: alone(**options),
        distributed=distributed,
        step=Finalized(loss_fn) if finalized else gg.train_step(loss_fn),
        mesh={"tp": tp},
        inputs=inputs,
    )


class Finalized(gg.train_step):
    """With what finalize_model_grads does for parameters that see a part of the sequence only."""

    def __call__(self, model, **inputs):
        outputs = super().__call__(model, **inputs)
        if hasattr(model, "ddp_config"):
            _allreduce_non_tensor_model_parallel_grads([model], model.config)
        return outputs


@gg.check
def transformer_layer():
    return verify(layer_loss)


@gg.check
def gated_transformer_layer():
    return verify(layer_loss, **GATED)


@gg.check
def transformer_layer_with_sequence_parallelism():
    return verify(layer_loss, changed={"sequence_parallel": True}, finalized=True)


@gg.check
def head_and_cross_entropy():
    return verify(head_loss)


@gg.check
def gpt():
    return verify(loss)


@gg.check
def gpt_with_sequence_parallelism():
    return verify(loss, changed={"sequence_parallel": True}, finalized=True)


@gg.check
def gpt_on_four_ranks():
    return verify(loss, tp=4)


@gg.check
def gpt_with_sequence_parallelism_on_four_ranks():
    return verify(loss, tp=4, changed={"sequence_parallel": True}, finalized=True)


# ---------------------------------------------------------------------- faults
@gg.check(expect="refuted")
def norm_gradients_are_not_summed():
    """Sequence parallelism without finalize_model_grads."""
    return verify(layer_loss, changed={"sequence_parallel": True})


@gg.check(expect="refuted")
def row_parallel_without_a_reduction():
    def unreduced_loss(model, **inputs):
        layers.reduce_from_tensor_model_parallel_region = lambda x, group=None: x
        return layer_loss(model, **inputs)

    return verify(unreduced_loss)


@gg.check(expect="refuted")
def loss_is_divided_by_the_ranks():
    def divided(model, **inputs):
        return loss(model, **inputs) / parallel_state.get_tensor_model_parallel_world_size()

    return verify(divided)
