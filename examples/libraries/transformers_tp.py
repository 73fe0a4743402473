"""transformers: models with the library's own tensor-parallel plan (`tp_plan`), a train step with every gradient."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Shard
from transformers import (
    GPTNeoXForCausalLM,
    LlamaForCausalLM,
    MistralForCausalLM,
    MixtralForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
)
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, RowwiseParallel, apply_tensor_parallelism

import graphguard as gg

VOCABULARY = 32


def build(kind, **sizes):
    """A small model: what is proved does not depend on how wide it is, but on how many layers and heads are split."""
    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": VOCABULARY, "use_cache": False}  # fmt: skip
    return kind(kind.config_class(**{**small, **sizes}))


def loss(model, ids):
    return model(input_ids=ids, labels=ids).loss


def verify(kind, tp=2, change=lambda plan: plan, batch=2, loss_fn=loss, **sizes):
    def distributed(mesh):
        model = build(kind, **sizes)
        return apply_tensor_parallelism(model, mesh["tp"], change(dict(model.tp_plan)))

    return gg.verify_model(
        sequential=lambda: build(kind, **sizes),
        distributed=distributed,
        step=gg.train_step(loss_fn),
        mesh={"tp": tp},
        inputs={"ids": gg.Input((batch, 8), dtype=torch.int64, low=0, high=VOCABULARY)},
    )


@gg.check
def llama():
    return verify(LlamaForCausalLM)


@gg.check
def llama_on_eight_ranks():
    return verify(LlamaForCausalLM, tp=8, num_attention_heads=8, num_key_value_heads=8, hidden_size=32, num_hidden_layers=2)


@gg.check
def llama_batch_of_one():
    return verify(LlamaForCausalLM, batch=1, num_hidden_layers=2)


@gg.check
def llama_on_four_ranks():
    return verify(LlamaForCausalLM, **FOUR)


@gg.check
def qwen2():
    return verify(Qwen2ForCausalLM)


@gg.check
def mistral():
    return verify(MistralForCausalLM)


@gg.check
def gpt_neox():
    return verify(GPTNeoXForCausalLM)


@gg.check
def qwen3():
    return verify(Qwen3ForCausalLM, head_dim=4)


FOUR = {"tp": 4, "num_key_value_heads": 4}
EIGHT = {"tp": 8, "hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 8}


@gg.check
def qwen2_on_four_ranks():
    return verify(Qwen2ForCausalLM, **FOUR)


@gg.check
def mistral_on_four_ranks():
    return verify(MistralForCausalLM, **FOUR)


@gg.check
def gpt_neox_on_four_ranks():
    return verify(GPTNeoXForCausalLM, **FOUR)


@gg.check
def qwen3_on_four_ranks():
    return verify(Qwen3ForCausalLM, head_dim=4, **FOUR)


@gg.check
def qwen2_on_eight_ranks():
    return verify(Qwen2ForCausalLM, **EIGHT)


@gg.check
def mistral_on_eight_ranks():
    return verify(MistralForCausalLM, **EIGHT)


@gg.check
def gpt_neox_on_eight_ranks():
    return verify(GPTNeoXForCausalLM, **EIGHT)


@gg.check
def qwen3_on_eight_ranks():
    return verify(Qwen3ForCausalLM, head_dim=4, **EIGHT)


EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "batched_mm"}  # every token goes to both experts


@gg.check
def mixtral():
    return verify(MixtralForCausalLM, num_local_experts=2, **EXPERTS)


@gg.check
def qwen3_moe():
    return verify(Qwen3MoeForCausalLM, num_experts=2, moe_intermediate_size=8, head_dim=4, norm_topk_prob=True, **EXPERTS)


@gg.check
def mixtral_on_four_ranks():
    return verify(MixtralForCausalLM, num_local_experts=2, **EXPERTS, **FOUR)


@gg.check
def mixtral_on_eight_ranks():
    return verify(MixtralForCausalLM, num_local_experts=2, **EXPERTS, **EIGHT)


@gg.check
def mixtral_with_two_of_four_experts():
    return verify(MixtralForCausalLM, num_local_experts=4, **EXPERTS)


@gg.check
def qwen3_moe_on_four_ranks():
    experts = {"num_experts": 2, "moe_intermediate_size": 8, "norm_topk_prob": True, **EXPERTS}
    return verify(Qwen3MoeForCausalLM, head_dim=4, **experts, **FOUR)


@gg.check
def qwen3_moe_on_eight_ranks():
    experts = {"num_experts": 2, "moe_intermediate_size": 8, "norm_topk_prob": True, **EXPERTS}
    return verify(Qwen3MoeForCausalLM, head_dim=4, **experts, **EIGHT)


# ---------------------------------------------------------------------- faults in a copy of the plan
def unreduced(plan):
    """The MLP's second projection leaves each rank with its part of the sum."""
    ALL_PARALLEL_STYLES.register("rowwise_unreduced", RowwiseParallel(input_layouts=Shard(-1), output_layouts=Partial()))
    return plan | {"model.layers.*.mlp.down_proj": "rowwise_unreduced"}


def unsynchronised(plan):
    """Every rank has its own heads, but the norm of the queries is shared: its gradient must be summed."""
    return plan | {"model.layers.*.self_attn.q_norm": "replicate"}


@gg.check(expect="refuted")
def llama_without_a_reduction():
    return verify(LlamaForCausalLM, change=unreduced)


@gg.check(expect="refuted")
def qwen3_without_a_gradient_sum():
    return verify(Qwen3ForCausalLM, change=unsynchronised, head_dim=4)


def scaled_loss(model, ids):
    """Each rank divides the loss by the number of ranks, though all of them have all tokens."""
    whole = loss(model, ids)
    return whole / dist.get_world_size() if dist.is_initialized() else whole


@gg.check(expect="refuted")
def llama_with_a_loss_divided_by_the_ranks():
    return verify(LlamaForCausalLM, loss_fn=scaled_loss)


@gg.check(expect="refuted")
def mixtral_without_a_reduction():
    def change(plan):
        ALL_PARALLEL_STYLES.register("unsummed", RowwiseParallel(input_layouts=Shard(-1), output_layouts=Partial()))
        return plan | {"model.layers.*.self_attn.o_proj": "unsummed"}

    return verify(MixtralForCausalLM, change=change, num_local_experts=2, **EXPERTS)
