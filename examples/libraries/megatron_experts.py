"""megatron-core: experts on their own ranks (MoELayer, all-to-all dispatcher), with its gradient buffers and
finalize_model_grads.

Each rank routes its own tokens, two of four experts for each, and sends them to the experts. The shapes do not depend on the
routing because experts are padded to their capacity; it is that of all tokens of a rank, so that none is dropped. The
sequential program is the same layer on one rank.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_distributed import Replicated

import graphguard as gg

SEQUENCE, BATCH, HIDDEN, VOCABULARY, EXPERTS, CHOSEN = 4, 4, 8, 16, 4, 2


def config_of(ep, tp=1, **options):
    parallel_state.initialize_model_parallel(tp, expert_model_parallel_size=ep, expert_tensor_parallel_size=tp)
    model_parallel_cuda_manual_seed(1)
    given = {
        "tensor_model_parallel_size": tp, "expert_tensor_parallel_size": tp, "sequence_parallel": tp > 1,
        "num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 4, "expert_model_parallel_size": ep,
        "num_moe_experts": EXPERTS, "ffn_hidden_size": HIDDEN, "moe_router_topk": CHOSEN,
        "moe_token_dispatcher_type": "alltoall",
        "moe_expert_capacity_factor": EXPERTS / CHOSEN, "moe_pad_expert_input_to_capacity": True,
        "moe_router_load_balancing_type": "none", "add_bias_linear": False, "gated_linear_unit": True,
        "activation_func": F.silu,
        "attention_dropout": 0.0, "hidden_dropout": 0.0, "bias_dropout_fusion": False, "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False, "persist_layer_norm": False, "apply_rope_fusion": False,
    }  # fmt: skip
    return TransformerConfig(**{**given, **options})


def named(model):
    """A rank's experts under their numbers among all: the library counts those of each rank from 0."""
    for module in model.modules():
        if isinstance(module, SequentialMLP):
            first, own = parallel_state.get_expert_model_parallel_rank() * module.num_local_experts, module.local_experts
            own._modules = {str(first + number): expert for number, expert in enumerate(own)}
    return model


def layer(ep, **options):
    spec = get_moe_module_spec(use_te=False, num_experts=EXPERTS, moe_grouped_gemm=False)
    return named(build_module(spec, config=config_of(ep, **options)))


def gpt(ep, **options):
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False)
    config = config_of(ep, **options)
    model = GPTModel(config, spec, VOCABULARY, max_sequence_length=SEQUENCE, position_embedding_type="rope")
    return named(model)


def alone(build, **options):
    """megatron-core needs process groups even for one rank."""

    def model():
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        return build(1, **options)

    return model


def buffered(model):
    return DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)


def replicas(build, ep, prepare=buffered, **options):
    return lambda mesh: prepare(build(ep, **options))


def layer_loss(model, x):
    output, _ = model(x)
    return output.square().mean()


def averaged(model):
    """A fault: the library's mark of what every rank has, on the experts, too."""
    for parameter in model.parameters():
        parameter.allreduce = True
    return buffered(model)


def not_weighed(model, x):
    """A fault: the ranks' experts do not get the gates of their tokens."""
    weighed = SequentialMLP.forward

    def unweighed(self, tokens, counts, gates):
        return weighed(self, tokens, counts, torch.ones_like(gates))

    if isinstance(model, DistributedDataParallel):
        SequentialMLP.forward = unweighed
    return layer_loss(model, x)


def loss(model, ids, positions, mask):
    return model(ids, positions, mask, labels=ids).mean()


def verify_layer(distributed, step=None, ep=2, outputs=None, **options):
    return gg.verify_model(
        sequential=alone(layer, **options),
        distributed=distributed,
        step=step or Replicated(layer_loss),
        mesh={"ep": ep},
        inputs={"x": gg.Input((SEQUENCE, BATCH, HIDDEN), gg.Shard(0))},
        outputs=outputs or {"loss": gg.Partial("avg")},
    )


@gg.check
def output_of_the_layer():
    def forward(model, x):
        return model(x)[0]

    return verify_layer(replicas(layer, 2, prepare=named), forward, outputs={"out": gg.Shard(0)})


@gg.check
def experts_on_two_ranks():
    return verify_layer(replicas(layer, 2))


@gg.check
def experts_on_four_ranks():
    eight = {"num_moe_experts": 8, "moe_expert_capacity_factor": 8 / CHOSEN}
    return verify_layer(replicas(layer, 4, **eight), ep=4, **eight)


@gg.check
def gpt_with_experts():
    def split(*shape, high, dtype=torch.int64):
        return gg.Input((BATCH, *shape), gg.Shard(0), dtype, low=0, high=high)

    return gg.verify_model(
        sequential=alone(gpt),
        distributed=replicas(gpt, 2),
        step=Replicated(loss),
        mesh={"ep": 2},
        inputs={
            "ids": split(SEQUENCE, high=VOCABULARY), "positions": split(SEQUENCE, high=SEQUENCE),
            "mask": gg.Input((BATCH, 1, SEQUENCE, SEQUENCE), gg.Shard(0), torch.bool),
        },
        outputs={"loss": gg.Partial("avg")},
    )  # fmt: skip


# ---------------------------------------------------------------------- without a capacity
def verify_dropless(dispatcher="alltoall", step=None, prepare=buffered, mesh=None, tokens=None, paths=3, **more):
    """How many tokens go to which expert is decided by the router, and read on the host: verified along paths.

    tokens: by axis of the mesh, how the tokens are placed. What ranks of tp have of the loss is added up."""
    options = {"moe_token_dispatcher_type": dispatcher, "moe_expert_capacity_factor": None,
               "moe_pad_expert_input_to_capacity": False, **more}  # fmt: skip
    mesh, tokens = mesh or {"ep": 2}, tokens or {"ep": gg.Shard(0)}
    return gg.verify_model(
        sequential=alone(layer, **options),
        distributed=replicas(layer, mesh["ep"], prepare=prepare, tp=mesh.get("tp", 1), **options),
        step=step or Replicated(layer_loss),
        mesh=mesh,
        inputs={"x": gg.Input((SEQUENCE, 2, HIDDEN), tokens)},
        outputs={"loss": {axis: gg.Partial() if axis == "tp" else gg.Partial("avg") for axis in tokens}},
        paths=paths,
    )


def share_of_loss(model, x):
    """With sequence parallelism: gradients are summed over tp, whose ranks have different tokens."""
    return layer_loss(model, x) / parallel_state.get_tensor_model_parallel_world_size()


WITH_TP = {"mesh": {"ep": 2, "tp": 2}, "tokens": {"ep": gg.Shard(1), "tp": gg.Shard(0)}, "paths": 2}


@gg.check
def dropless_by_all_to_all():
    return verify_dropless("alltoall")


@gg.check
def dropless_by_all_gather():
    return verify_dropless("allgather")


@gg.check
def dropless_with_a_shared_expert():
    return verify_dropless(moe_shared_expert_intermediate_size=HIDDEN)


@gg.check
def dropless_with_data_parallelism():
    return verify_dropless(mesh={"dp": 2, "ep": 2}, tokens={"dp": gg.Shard(0), "ep": gg.Shard(0)}, paths=2)


@gg.check
def dropless_with_tensor_parallelism():
    return verify_dropless(step=Replicated(share_of_loss), **WITH_TP)


@gg.check(expect="refuted")
def dropless_loss_is_not_shared_out():
    """With tensor parallelism: each of its ranks takes the whole mean of its own tokens."""
    return verify_dropless(step=Replicated(layer_loss), **WITH_TP)


@gg.check(expect="refuted")
def dropless_experts_are_averaged_like_replicas():
    return verify_dropless("alltoall", prepare=averaged)


@gg.check(expect="refuted")
def dropless_gradients_are_not_finalized():
    return verify_dropless("alltoall", Replicated(layer_loss, synchronised=False))


@gg.check(expect="refuted")
def dropless_experts_are_not_weighed():
    return verify_dropless("allgather", Replicated(not_weighed))


# ---------------------------------------------------------------------- faults
@gg.check(expect="refuted")
def tokens_are_dropped_by_each_rank():
    """A capacity of half the tokens: of which ones is chosen among a rank's own on the ranks, among all on one."""
    return verify_layer(replicas(layer, 2, moe_expert_capacity_factor=1.0))


@gg.check(expect="refuted")
def experts_are_averaged_like_replicas():
    return verify_layer(replicas(layer, 2, prepare=averaged))


@gg.check(expect="refuted")
def gradients_are_not_finalized():
    return verify_layer(replicas(layer, 2), Replicated(layer_loss, synchronised=False))


@gg.check(expect="refuted")
def results_are_not_sent_back():
    """What the experts return stays on their rank."""

    def kept(model, x):
        if isinstance(model, DistributedDataParallel):
            token_dispatcher.MoEAlltoAllTokenDispatcher.token_combine = lambda self, hidden_states, *args, **given: (
                hidden_states
            )
        return layer_loss(model, x)

    return verify_layer(replicas(layer, 2), Replicated(kept))


@gg.check(expect="refuted")
def loss_is_divided_by_the_ranks():
    """The gradients are averaged already."""

    def divided(model, x):
        loss = layer_loss(model, x)
        if isinstance(model, DistributedDataParallel):
            loss = loss / parallel_state.get_data_parallel_world_size()
        return loss

    return verify_layer(replicas(layer, 2), Replicated(divided))


@gg.check(expect="refuted")
def experts_are_not_weighed():
    return verify_layer(replicas(layer, 2), Replicated(not_weighed))
