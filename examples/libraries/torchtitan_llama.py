"""torchtitan: its Llama 3 under its own tensor-parallel sharding plan, with and without sequence parallelism.

torchtitan needs triton. Its attention backends for language models are compiled kernels; this uses the one that
it has for images, which is torch's scaled_dot_product_attention.
"""

import torch
import torch.nn.functional as F
from torch.distributed.tensor.parallel import loss_parallel
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models import llama3
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3.sharding import set_llama3_sharding_config

import graphguard as gg

BATCH, SEQUENCE, HIDDEN, HEADS, VOCABULARY = 2, 8, 16, 4, 32


def config():
    rope = llama3.ComplexRoPE.Config(dim=HIDDEN // HEADS, max_seq_len=SEQUENCE, theta=500000, scaling="llama")
    norm = llama3.RMSNorm.Config(normalized_shape=HIDDEN, param_init=llama3._NORM_INIT)
    layers = llama3._build_llama3_layers(
        n_layers=1, dim=HIDDEN, n_heads=HEADS, hidden_dim=2 * HIDDEN, rope=rope, fuse_qkv=False, attn_backend="flex"
    )
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return llama3.Llama3Model.Config(
        dim=HIDDEN, vocab_size=VOCABULARY, norm=norm, layers=layers,
        tok_embeddings=llama3.Embedding.Config(
            num_embeddings=VOCABULARY, embedding_dim=HIDDEN, param_init=llama3._EMBEDDING_INIT
        ),
        lm_head=llama3.Linear.Config(
            in_features=HIDDEN, out_features=VOCABULARY, param_init=llama3._output_linear_init(HIDDEN)
        ),
    )  # fmt: skip


def sequential():
    model = config().build()
    model.init_states()
    return model


def distributed(mesh, sequence_parallel):
    set_spmd_backend("partial_dtensor")
    planned = config()
    set_llama3_sharding_config(planned, enable_sp=sequence_parallel)
    model = planned.build()
    dims = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": mesh.size(), "pp": 1, "ep": 1, "world_size": mesh.size()}
    model.parallelize(ParallelDims(**dims, spmd_backend="partial_dtensor"))
    model.init_states()
    return model


def loss(model, ids, labels):
    return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())


def step(model, ids, labels):
    with loss_parallel():
        return gg.train_step(loss)(model, ids=ids, labels=labels)


def verify(sequence_parallel):
    tokens = gg.Input((BATCH, SEQUENCE), dtype=torch.int64, low=0, high=VOCABULARY)
    return gg.verify_model(
        sequential=sequential,
        distributed=lambda mesh: distributed(mesh, sequence_parallel),
        step=step,
        mesh={"tp": 2},
        inputs={"ids": tokens, "labels": tokens},
    )


@gg.check(expect="unproven")
def tensor_parallel():
    return verify(sequence_parallel=False)


@gg.check(expect="unproven")
def tensor_and_sequence_parallel():
    return verify(sequence_parallel=True)
