"""torchtitan: its Llama 3 under its own plan of tensor and sequence parallelism, fully sharded, and both.

torchtitan needs triton. Its attention backends for language models are compiled kernels; this uses the one that
it has for images, which is torch's scaled_dot_product_attention.
"""

from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import loss_parallel
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.context_parallel import prepare_context_parallel_input
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models import llama3
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3.parallelize import parallelize_llama
from torchtitan.models.llama3.sharding import set_llama3_sharding_config

import graphguard as gg

BATCH, SEQUENCE, HIDDEN, HEADS, VOCABULARY = 4, 8, 16, 4, 32


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


def distributed(sequence_parallel, tp=1, dp=1, cp=1):
    """The model as torchtitan's trainer makes it: its plan for `tp`, rings over `cp`, fully_shard over `dp` and `cp`."""
    set_spmd_backend("partial_dtensor")
    planned = config()
    if tp > 1:
        set_llama3_sharding_config(planned, enable_sp=sequence_parallel)
    model = planned.build()
    dims = {"dp_replicate": 1, "dp_shard": dp, "cp": cp, "tp": tp, "pp": 1, "ep": 1, "world_size": dp * cp * tp}
    options = {"parallel_dims": ParallelDims(**dims, spmd_backend="partial_dtensor"), "ac_config": None, "dump_folder": ""}
    training = TrainingConfig(mixed_precision_param="float32", mixed_precision_reduce="float32")
    parallelism = ParallelismConfig(spmd_backend="partial_dtensor")
    model.dims = options["parallel_dims"]
    if dp * cp > 1:
        parallelize_llama(model, training=training, parallelism=parallelism, compile_config=CompileConfig(), **options)
    else:
        model.parallelize(options["parallel_dims"])
    model.init_states()
    return model


def loss(model, ids, labels):
    """The sum over a rank's own tokens, divided by the tokens of all ranks, as torchtitan's trainer has it."""
    return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), reduction="sum") / (BATCH * SEQUENCE)


def own_loss(model, ids, labels, deal=None):
    """Of the tokens that torchtitan's trainer gives to this rank: one part of the sequence, or as `deal` says."""
    if getattr(model, "dims", None) is None:
        return loss(model, ids, labels)
    positions = torch.arange(SEQUENCE).expand(BATCH, SEQUENCE)
    mesh, device = model.dims.get_mesh("cp"), torch.device("cpu")
    ids, labels, more = prepare_context_parallel_input(ids, labels, {"positions": positions}, mesh, device, deal)
    return F.cross_entropy(model(ids, **more).flatten(0, 1), labels.flatten(), reduction="sum") / (BATCH * SEQUENCE)


def verify(sequence_parallel=True, tp=1, dp=1, cp=1, change=lambda model: model, loss_fn=loss):
    axes = {name: size for name, size in (("dp", dp), ("cp", cp), ("tp", tp)) if size > 1}
    tokens = gg.Input((BATCH, SEQUENCE), {"dp": gg.Shard(0)} if dp > 1 else {}, torch.int64, low=0, high=VOCABULARY)

    def step(model, ids, labels):
        with loss_parallel() if tp > 1 else nullcontext():
            return gg.train_step(loss_fn)(model, ids=ids, labels=labels)

    return gg.verify_model(
        sequential=sequential,
        distributed=lambda mesh: change(distributed(sequence_parallel, tp, dp, cp)),
        step=step,
        mesh=axes,
        inputs={"ids": tokens, "labels": tokens},
        outputs={"loss": {name: gg.Partial() for name in axes if name != "tp"}},
    )


@gg.check
def tensor_parallel():
    return verify(sequence_parallel=False, tp=2)


@gg.check
def tensor_and_sequence_parallel():
    return verify(tp=2)


@gg.check
def fully_sharded():
    return verify(dp=2)


@gg.check
def fully_sharded_over_tensor_parallelism():
    return verify(dp=2, tp=2)


@gg.check
def context_parallel():
    return verify(cp=2, loss_fn=own_loss)


@gg.check
def context_parallel_in_balance():
    """Each rank has a part from the head of the sequence and one from its tail: torchtitan's default."""
    return verify(cp=2, loss_fn=partial(own_loss, deal="headtail"))


# ---------------------------------------------------------------------- faults
@gg.check(expect="refuted")
def gradients_are_not_synchronised():
    def change(model):
        model.set_requires_gradient_sync(False)
        return model

    return verify(dp=2, change=change)


@gg.check(expect="refuted")
def loss_is_the_mean_of_each_rank():
    """torchtitan's gradients are summed, not averaged: the mean over a rank's own tokens counts once per rank."""

    def mean_loss(model, ids, labels):
        return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())

    return verify(dp=2, loss_fn=mean_loss)


@gg.check(expect="refuted")
def row_parallel_without_a_reduction():
    def unreduced(model):
        """The MLP's second projection takes what its own columns give for the whole."""
        projection = model.layers["0"].feed_forward.w2
        mesh = projection.weight.device_mesh

        def forward(x):
            part = F.linear(x.to_local() if isinstance(x, DTensor) else x, projection.weight.to_local())
            return DTensor.from_local(part, mesh, [Replicate()])

        projection.forward = forward
        return model

    return verify(sequence_parallel=False, tp=2, change=unreduced)
