"""megatron-core's multi-latent attention with its local layers, under tensor parallelism without sequence parallelism.

0.16.1 builds it only where Transformer Engine is installed. Without it the class asks whether a layer is of a class that is
none, and hands its attention two arguments that the local one does not take: here the class is an empty one, and the
attention ignores them.
"""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig
from small_megatron import BATCH, HIDDEN, SEQUENCE, Scheduled, Whole, alone, build

import graphguard as gg

if not isinstance(multi_latent_attention.TELinear, type):
    multi_latent_attention.TELinear = type("TELinear", (), {})
LATENT, ROTARY = 8, 4
OPTIONS = {
    "kind": MLATransformerConfig, "multi_latent_attention": True, "kv_lora_rank": LATENT, "qk_head_dim": 4, "v_head_dim": 8,
    "qk_pos_emb_head_dim": ROTARY, "kv_channels": 8, "qk_layernorm": True, "normalization": "RMSNorm", "rope_type": "rope",
}  # fmt: skip


class Core(DotProductAttention):
    def __init__(self, *args, k_channels=None, v_channels=None, **given):
        super().__init__(*args, **given)


class Attention(Whole):
    def __init__(self, config):
        super().__init__(config)
        given = {"multi_latent_attention": True, "qk_layernorm": True, "normalization": "RMSNorm"}
        spec = get_gpt_layer_local_spec(**given).submodules.self_attention
        spec.submodules.core_attention = Core
        groups = ProcessGroupCollection.use_mpu_process_groups()
        self.attention = build_module(spec, config=config, layer_number=1, pg_collection=groups)

    def forward(self, x, mask):
        return self.attention(x, mask)[0]


def mean_loss(output, x, mask):
    return output.square().mean(), {}


class SharedByRanks(torch.autograd.Function):
    """Identity whose gradient is summed over tp. The library's own loses the sum here (megatron_reduce_of_a_copy.py)."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=parallel_state.get_tensor_model_parallel_group())
        return grad


def sum_the_shared_key(model):
    """The rotary key is shared by the heads of all ranks: its gradient is summed over them."""
    gather = multi_latent_attention.gather_from_tensor_model_parallel_region

    def gathered(tensor):
        whole = gather(tensor)
        if whole.size(-1) != LATENT + ROTARY:
            return whole
        latent, key = whole.split([LATENT, ROTARY], dim=-1)
        return torch.cat([latent, SharedByRanks.apply(key)], dim=-1)

    multi_latent_attention.gather_from_tensor_model_parallel_region = gathered


def given(*repairs, **options):
    """What `gg.verify_model` and `real_ranks.show` take. Repairs are made on the ranks."""

    def distributed(mesh):
        model = build(Attention, tp=2, **OPTIONS, **options)
        for repair in repairs:
            repair(model)
        return model

    return {
        "sequential": lambda: alone(Attention, **OPTIONS, **options),
        "distributed": distributed,
        "step": Scheduled(mean_loss),
        "mesh": {"tp": 2},
        "inputs": {
            "x": gg.Input((SEQUENCE, BATCH, HIDDEN)),
            "mask": gg.Input((BATCH, 1, SEQUENCE, SEQUENCE), dtype=torch.bool),
        },
    }
