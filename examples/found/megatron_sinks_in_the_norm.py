"""megatron-core 0.16.1: gradients of learned attention sinks are left out of the norm that clips, but for the first rank's.

With softmax_type "learnable" each head has a trained number, and each rank has those of its heads. The parameter is not
marked as tensor parallel, so that `get_main_grads_for_grad_norm` takes it for a copy that every rank has, and counts the
first rank's alone.

In training: at tp > 1 the norm of all gradients is too small, so they are clipped less than on one rank, and the norm in
the logs depends on tp, without an error. No public report is known to us.
"""

from types import SimpleNamespace

import real_ranks
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.spec_utils import build_module
from small_megatron import BATCH, HIDDEN, SEQUENCE, Scheduled, Whole, alone, build

import graphguard as gg

OPTIONS = {"softmax_type": "learnable"}


class Attention(Whole):
    def __init__(self, config):
        super().__init__(config)
        spec, groups = get_gpt_layer_local_spec().submodules.self_attention, ProcessGroupCollection.use_mpu_process_groups()
        self.attention = build_module(spec, config=config, layer_number=1, pg_collection=groups)

    def forward(self, x, mask):
        return self.attention(x, mask)[0]


class Marked(Attention):
    def __init__(self, config):
        super().__init__(config)
        set_tensor_model_parallel_attributes(self.attention.core_attention.softmax_offset, True, 0, 1)


class Norm(Scheduled):
    """The square of the norm that the library's optimizers clip by, of the gradients that they choose."""

    def __call__(self, model, **inputs):
        outputs = super().__call__(model, **inputs)
        parameters = list(model.parameters())
        for parameter in parameters:
            parameter.grad = parameter.main_grad
        options = SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=False)
        optimizer = SimpleNamespace(get_parameters=lambda: parameters, config=options)
        squares = sum(grad.square().sum() for grad in MegatronOptimizer.get_main_grads_for_grad_norm(optimizer))
        dist.all_reduce(squares, group=parallel_state.get_model_parallel_group())
        return {**outputs, "squared_norm": squares}


def loss(output, x, mask):
    return output.square().mean(), {}


def case(model=Attention):
    return {
        "sequential": lambda: alone(Attention, **OPTIONS),
        "distributed": lambda mesh: build(model, tp=2, **OPTIONS),
        "step": Norm(loss),
        "mesh": {"tp": 2},
        "inputs": {
            "x": gg.Input((SEQUENCE, BATCH, HIDDEN)),
            "mask": gg.Input((BATCH, 1, SEQUENCE, SEQUENCE), dtype=torch.bool),
        },
        "outputs": {"squared_norm": gg.Replicate()},
    }


@gg.check(expect="refuted")
def shipped():
    return gg.verify_model(**case())


@gg.check
def repaired():
    return gg.verify_model(**case(Marked))


if __name__ == "__main__":
    real_ranks.show(**case())
