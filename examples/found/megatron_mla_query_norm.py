"""megatron-core 0.16.1, multi-latent attention: the gradient of the queries' norm is multiplied by the tensor-parallel size.

With qk_layernorm, finalize_model_grads sums the gradients of parameters that are called `q_layernorm` over tp, as ranks of
ordinary attention have their own heads. In multi-latent attention (q_lora_rank) the norm of that name is before the heads:
every rank has the whole gradient already, and the sum is tp times as much.

In training: at tp > 1 without sequence parallelism, q_layernorm learns with tp times its gradient, and it counts as much in
the norm that clips all gradients, without an error. No public report is known to us. The other fault of this attention
(megatron_mla_shared_key.py) is repaired on both sides here.
"""

import real_ranks
from small_mla import given, sum_the_shared_key

import graphguard as gg


def not_summed(model):
    """finalize_model_grads asks this option alone; the norms are built."""
    model.config.qk_layernorm = False


def case(*repairs):
    return given(sum_the_shared_key, *repairs, q_lora_rank=8)


@gg.check(expect="refuted")
def shipped():
    return gg.verify_model(**case())


@gg.check
def repaired():
    return gg.verify_model(**case(not_summed))


if __name__ == "__main__":
    real_ranks.show(**case())
