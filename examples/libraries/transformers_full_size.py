"""transformers: Llama 3 8B and 70B in their full shapes on eight ranks, with the library's own plan; no GPU, no weights."""

import torch
from transformers import LlamaForCausalLM
from transformers.distributed.tensor_parallel import apply_tensor_parallelism
from transformers_tp import loss

import graphguard as gg

SHAPE = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
         "num_key_value_heads": 8, "vocab_size": 128256, "rope_theta": 500000.0, "use_cache": False}  # fmt: skip


LARGE = SHAPE | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}


def verify(shape):
    def build():
        return LlamaForCausalLM(LlamaForCausalLM.config_class(**shape))

    return gg.verify_model(
        sequential=build,
        distributed=lambda mesh: apply_tensor_parallelism(build(), mesh["tp"]),
        step=gg.train_step(loss),
        mesh={"tp": 8},
        inputs={"ids": gg.Input((2, 2048), dtype=torch.int64, low=0, high=SHAPE["vocab_size"])},
    )


@gg.check
def llama_3_8b():
    return verify(SHAPE)


@gg.check
def llama_3_70b():
    return verify(LARGE)
