"""transformers: mixtures of experts under the library's own expert parallelism, two of four experts for each token.

Each rank has its own tokens and its part of the experts. The sequential program loops over the experts that were hit (`eager`),
the ranks multiply in groups (`grouped_mm`). Both decide by values, so they are verified along the paths of samples.
"""

import torch
from transformers import MixtralConfig, Qwen3MoeConfig
from transformers.distributed.expert_parallel import apply_expert_parallelism
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

import graphguard as gg

SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_experts_per_tok": 2, "vocab_size": 32}
PLAN = {"experts.gate_up_proj": "grouped_gemm", "experts.down_proj": "grouped_gemm", "experts": "ep_dispatch_experts"}


def qwen3_moe_block(experts):
    config = Qwen3MoeConfig(num_experts=4, moe_intermediate_size=12, **SIZES)
    config._experts_implementation = experts
    return Qwen3MoeSparseMoeBlock(config)


def mixtral_block(experts):
    config = MixtralConfig(num_local_experts=4, intermediate_size=12, num_key_value_heads=2, **SIZES)
    config._experts_implementation = experts
    return MixtralSparseMoeBlock(config)


def output(model, x):
    y = model(x)
    return y[0] if isinstance(y, tuple) else y


def forward(model, x):
    return {"y": output(model, x)}


def step(model, x):
    y = output(model, x)
    y.square().sum().backward()
    return {"y": y.detach(), "grads": {name: parameter.grad for name, parameter in model.named_parameters()}}


def verify(block, experts="grouped_mm", step=forward, outputs=None, ranks=2):
    def distributed(mesh):
        return apply_expert_parallelism(block(experts), mesh["ep"], mesh["tp"], PLAN)

    return gg.verify_model(
        sequential=lambda: block("eager"),
        distributed=distributed,
        step=step,
        mesh={"ep": ranks, "tp": 1},
        inputs={"x": gg.Input((ranks, 3, SIZES["hidden_size"]), {"ep": gg.Shard(0)})},
        outputs={"y": {"ep": gg.Shard(0)}, **(outputs or {})},
        paths=3,
    )


@gg.check
def qwen3_moe_in_groups():
    return verify(qwen3_moe_block)


@gg.check
def qwen3_moe_in_a_loop():
    return verify(qwen3_moe_block, "eager")


@gg.check
def mixtral_in_groups():
    return verify(mixtral_block)


@gg.check
def qwen3_moe_gradients():
    """With all gradients; those of the router are summands, which whoever trains has to add up."""
    return verify(qwen3_moe_block, step=step)


@gg.check
def mixtral_gradients():
    """The weights of the two experts are divided by their sum."""
    return verify(mixtral_block, step=step)


@gg.check
def qwen3_moe_gradients_on_four_ranks():
    return verify(qwen3_moe_block, step=step, ranks=4)


# ---------------------------------------------------------------------- faults
@gg.check(expect="refuted")
def gradient_of_the_router_is_not_summed():
    return verify(qwen3_moe_block, step=step, outputs={"grads.gate.weight": gg.Replicate()})


@gg.check(expect="refuted")
def ranks_choose_one_expert():
    """The ranks' router takes the best expert alone, twice."""

    def chosen_once(model, x):
        if torch.distributed.is_initialized():
            route = model.gate.forward

            def twice(hidden):
                logits, weights, experts = route(hidden)
                return logits, weights, experts[:, :1].expand_as(experts)

            model.gate.forward = twice
        return forward(model, x)

    return verify(qwen3_moe_block, step=chosen_once)


@gg.check(expect="refuted")
def weights_of_other_experts():
    """Each token's two weights are exchanged on the ranks."""

    def exchanged(model, x):
        if torch.distributed.is_initialized():
            route = model.gate.forward

            def swapped(hidden):
                logits, weights, experts = route(hidden)
                return logits, weights.flip(-1), experts

            model.gate.forward = swapped
        return forward(model, x)

    return verify(qwen3_moe_block, step=exchanged)
