"""transformers 5.22.2, phi with qk_layernorm: gradients of the norms of queries and keys are not summed over tp.

Each rank has its own heads, and q_layernorm and k_layernorm (weights and biases) are shared by all heads; the plan does not
name them.

In training: the copies on the ranks get different gradients and drift apart, without an error. A checkpoint has one rank's
copy. No public report is known to us.
"""

import real_ranks
from small_models import given, summed
from transformers import PhiForCausalLM

import graphguard as gg

REPAIR = summed("model.layers.*.self_attn.q_layernorm", "model.layers.*.self_attn.k_layernorm")


def case(repair=None):
    return given(PhiForCausalLM, repair, qk_layernorm=True)


@gg.check(expect="refuted")
def shipped():
    return gg.verify_model(**case())


@gg.check
def repaired():
    return gg.verify_model(**case(REPAIR))


if __name__ == "__main__":
    real_ranks.show(**case())
