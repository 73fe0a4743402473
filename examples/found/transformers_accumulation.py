"""transformers 5.22.2, accumulation under tp: earlier microbatches count once per rank in the gradients of shared norms.

The style `replicated_with_grad_allreduce` (of qwen3 and of 21 more families, mostly for q_norm) sums `param.grad` over tp in
a post-accumulate hook. After the second backward, `param.grad` has the first microbatch's gradient, which is summed
already: at tp 2 it counts twice, after three microbatches the first one counts four times.

In training: with accumulation of n microbatches on tp ranks, these norms have a gradient in which microbatch i counts
tp^(n-1-i) times, without an error. No public report is known to us.
"""

import real_ranks
import torch.distributed as dist
from small_models import given, hidden_loss
from transformers import Qwen3Model
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, ReplicatedWithGradAllReduce

import graphguard as gg

MICROBATCHES = 2


class Accumulated(gg.train_step):
    def __call__(self, model, ids):
        for part in ids.chunk(MICROBATCHES):
            (self.loss_fn(model, part) / MICROBATCHES).backward()
        return {"grads": {name: parameter.grad for name, parameter in model.named_parameters()}}


class SumOfEachBackward(ReplicatedWithGradAllReduce):
    """Sums what one backward adds, before it is added."""

    def install_forward(self, module, mesh):
        def summed(grad):
            grad = grad.clone()
            dist.all_reduce(grad, group=mesh.get_group())
            return grad

        forward, hooked = module.forward, {}

        def tp_forward(*args, **given):
            for name, parameter in module.named_parameters(recurse=False):
                if hooked.get(name) is not parameter:
                    parameter.register_hook(summed)
                    hooked[name] = parameter
            return forward(*args, **given)

        module.forward = tp_forward
        return module


ALL_PARALLEL_STYLES.register("sum_of_each_backward", SumOfEachBackward())
REPAIR = {
    "layers.*.self_attn.q_norm": "sum_of_each_backward",
    "layers.*.self_attn.k_norm": "sum_of_each_backward",
}


def case(repair=None):
    return given(Qwen3Model, repair, step=Accumulated(hidden_loss), head_dim=8, batch=4)


@gg.check(expect="refuted")
def shipped():
    return gg.verify_model(**case())


@gg.check
def repaired():
    return gg.verify_model(**case(REPAIR))


if __name__ == "__main__":
    real_ranks.show(**case())
