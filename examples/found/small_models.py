"""Small models of transformers with the library's own tensor-parallel plan, and their train step. The library is not edited."""

import torch
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

import graphguard as gg

VOCABULARY = 32
SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
         "vocab_size": VOCABULARY, "use_cache": False, "pad_token_id": None}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8, "experts_implementation": "batched_mm"}

ROTARY = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
QWEN3_MOE = {"num_experts": 2, "head_dim": 8, "rope_parameters": ROTARY, **EXPERTS}


def summed(*modules):
    """A repair: the gradients of these modules are summed over tp, by a style that the library has."""
    return dict.fromkeys(modules, "replicated_with_grad_allreduce")


def loss(model, ids):
    return model(input_ids=ids, labels=ids).loss


def hidden_loss(model, ids):
    """Of a model without a head."""
    return model(input_ids=ids).last_hidden_state.square().mean()


def given(kind, repair=None, loss_fn=loss, step=None, tp=2, batch=2, **sizes):
    """What `gg.verify_model` and `real_ranks.show` take. The repair is added to the plan that the library ships."""

    def sequential():
        return kind(kind.config_class(**{**SMALL, **sizes}))

    def distributed(mesh):
        model = sequential()
        return apply_tensor_parallelism(model, mesh["tp"], dict(model.tp_plan) | (repair or {}))

    ids = gg.Input((batch, 8), dtype=torch.int64, low=0, high=VOCABULARY)
    return {
        "sequential": sequential, "distributed": distributed, "step": step or gg.train_step(loss_fn), "mesh": {"tp": tp},
        "inputs": {"ids": ids},
    }  # fmt: skip
