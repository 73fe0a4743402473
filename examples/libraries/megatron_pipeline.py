"""megatron-core: its 1F1B schedule over two stages of a GPT, and its interleaved one; the loss and every gradient.

The sequential program is the same model on one rank.
"""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

import graphguard as gg

MICROBATCHES, BATCH, SEQUENCE, HIDDEN, VOCABULARY = 2, 4, 8, 16, 32


class Stages(torch.nn.ModuleList):
    """What a rank has of the model. Its parameters are called what they are called in the whole model."""

    def named_parameters(self, *args, **options):
        for stage in self:
            yield from stage.named_parameters(*args, **options)


def build(pp, layers, stages=1):
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=stages if stages > 1 else None
    )
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=layers, hidden_size=HIDDEN, num_attention_heads=4, pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=stages if stages > 1 else None, pipeline_dtype=torch.float32,
        attention_dropout=0.0, hidden_dropout=0.0, bias_dropout_fusion=False, masked_softmax_fusion=False,
        gradient_accumulation_fusion=False, persist_layer_norm=False, apply_rope_fusion=False,
    )  # fmt: skip
    return Stages([stage_of(config, number if stages > 1 else None) for number in range(stages)])


def stage_of(config, number):
    stage = GPTModel(
        config, get_gpt_layer_local_spec(), vocab_size=VOCABULARY, max_sequence_length=SEQUENCE,
        position_embedding_type="rope", vp_stage=number,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=number),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=number),
    )  # fmt: skip
    blocks = stage.decoder.layers
    blocks._modules = {str(layer.layer_number - 1): layer for layer in blocks}  # which count from 0 in each stage
    return stage


def alone(layers):
    """megatron-core needs process groups even for one rank."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    return build(1, layers)


def mean_loss(losses):
    return losses.mean()


def whole_loss(model, ids, positions, mask):
    return mean_loss(model[0](ids, positions, mask, labels=ids))


def step_of(loss_fn=mean_loss, microbatches=MICROBATCHES, order=1):
    def step(model, **inputs):
        if parallel_state.get_pipeline_model_parallel_world_size() == 1:
            return gg.train_step(whole_loss)(model, **inputs)
        parts = list(zip(*(tensor.chunk(MICROBATCHES) for tensor in inputs.values()), strict=True))
        if parallel_state.is_pipeline_last_stage():
            parts = parts[::order]

        def forward(data, stage):
            ids, positions, mask = next(data)
            return stage(ids, positions, mask, labels=ids), lambda losses: (loss_fn(losses), mean_loss(losses).detach())

        losses = get_forward_backward_func()(
            forward_step_func=forward, data_iterator=[iter(parts) for _ in model], model=list(model),
            num_microbatches=microbatches, seq_length=SEQUENCE, micro_batch_size=BATCH // MICROBATCHES,
        )  # fmt: skip
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        return {"loss": torch.stack(losses).mean() if losses else None, "grads": gradients}

    return step


def verify(step, pp=2, layers=2, stages=1):
    inputs = {
        "ids": gg.Input((BATCH, SEQUENCE), dtype=torch.int64, low=0, high=VOCABULARY),
        "positions": gg.Input((BATCH, SEQUENCE), dtype=torch.int64, low=0, high=SEQUENCE),
        "mask": gg.Input((BATCH, 1, SEQUENCE, SEQUENCE), dtype=torch.bool),
    }
    return gg.verify_model(
        sequential=lambda: alone(layers),
        distributed=lambda mesh: build(pp, layers, stages),
        step=step,
        mesh={"pp": pp},
        inputs=inputs,
    )


@gg.check
def one_forward_one_backward():
    return verify(step_of())


@gg.check
def interleaved():
    """Each rank has two stages of a layer each."""
    return verify(step_of(), layers=4, stages=2)


# ---------------------------------------------------------------------- faults
@gg.check(expect="refuted")
def loss_is_divided_by_the_microbatches():
    """The schedule divides by them already."""
    return verify(step_of(lambda losses: losses.mean() / MICROBATCHES))


@gg.check(expect="refuted")
def last_stage_has_the_microbatches_in_another_order():
    return verify(step_of(order=-1))


@gg.check(expect="refuted")
def one_microbatch_is_left_out():
    return verify(step_of(microbatches=MICROBATCHES - 1))
