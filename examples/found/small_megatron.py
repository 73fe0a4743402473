"""Small models of megatron-core, driven by the library's own schedule, gradient buffers and finalize_model_grads.

Nothing of the library is edited. The sequential program is the same model on one rank, with all tokens.
"""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

import graphguard as gg

HIDDEN, SEQUENCE, BATCH = 8, 4, 4
PLAIN = {
    "num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 4, "attention_dropout": 0.0, "hidden_dropout": 0.0,
    "bias_dropout_fusion": False, "masked_softmax_fusion": False, "gradient_accumulation_fusion": False,
    "persist_layer_norm": False, "apply_rope_fusion": False, "add_bias_linear": False, "use_cpu_initialization": True,
}  # fmt: skip


def build(model, tp=1, cp=1, kind=TransformerConfig, **options):
    """`model(config)` on this rank, in the library's gradient buffers."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, context_parallel_size=cp)
    model_parallel_cuda_manual_seed(1)
    config = kind(tensor_model_parallel_size=tp, context_parallel_size=cp, **{**PLAIN, **options})
    config.finalize_model_grads_func = finalize
    return DistributedDataParallel(config, DistributedDataParallelConfig(), model(config))


def finalize(model, num_tokens=None, **given):
    """The library's finalize_model_grads. It reads the number of all tokens, to divide by it; here it is known beforehand."""
    finalize_model_grads(model, None, **given)
    if num_tokens is not None:
        model[0].scale_gradients(1 / (SEQUENCE * BATCH))


def alone(model, **options):
    """megatron-core needs process groups even for one rank."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    return build(model, **options)


class Scheduled(gg.train_step):
    """One step of the library's schedule. `loss_fn(output, **inputs)` is what a trainer gives: a loss, or a sum and a count."""

    def __call__(self, model, **inputs):
        def forward(data, chunk):
            given = next(data)
            return chunk(**given), lambda output: self.loss_fn(output, **given)

        get_forward_backward_func()(
            forward_step_func=forward, data_iterator=iter([inputs]), model=[model], num_microbatches=1, seq_length=SEQUENCE,
            micro_batch_size=BATCH,
        )  # fmt: skip
        return {"grads": {name: parameter.main_grad for name, parameter in model.named_parameters()}}


class Whole(MegatronModule):
    """All of a model, as the schedule asks for it."""

    model_type = ModelType.encoder_or_decoder

    def set_input_tensor(self, tensor):
        assert tensor == [None], "what an earlier stage would send"


class Routed(Whole):
    """The library's router alone; or what repairs it."""

    def __init__(self, config, kind=TopKRouter):
        super().__init__(config)
        self.router = kind(config=config, pg_collection=ProcessGroupCollection.use_mpu_process_groups())
        self.router.set_layer_number(1)

    def forward(self, x):
        scores, _ = self.router(x)
        return scores


EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_router_load_balancing_type": "none"}


def balanced(kind):
    """Options of this load-balancing loss."""
    return {"moe_router_load_balancing_type": kind, "moe_aux_loss_coeff": 0.1}


def summed_loss(scores, x):
    """Of this rank's tokens; the count is that of all tokens of this replica, as a trainer's loss mask has it."""
    tokens = scores.shape[0] * parallel_state.get_tensor_model_parallel_world_size()
    return scores.square().sum(), torch.tensor(tokens, dtype=torch.int), {}


def mean_loss(scores, x):
    return scores.square().sum(-1).mean(), {}


def routed(kind, loss_fn, mesh, placement, tp=1, **options):
    """The router with these options, against the same on one rank."""
    given = {**EXPERTS, **options}

    def model(config):
        return Routed(config, kind)

    return {
        "sequential": lambda: alone(model, **given),
        "distributed": lambda device_mesh: build(model, tp=tp, sequence_parallel=tp > 1, **given),
        "step": Scheduled(loss_fn),
        "mesh": mesh,
        "inputs": {"x": gg.Input((SEQUENCE, BATCH, HIDDEN), placement)},
    }
