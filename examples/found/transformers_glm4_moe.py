"""transformers 5.22.2, glm4_moe with use_qk_norm: gradients of the norms of queries and keys are not summed over tp.

GLM-4.5 has `use_qk_norm=True`. Each rank has its own heads, and the norms are shared by all heads; the plan does not name
them.

In training: the copies of q_norm and k_norm on the ranks get different gradients and drift apart, without an error. A
checkpoint has one rank's copy. No public report is known to us.
"""

import real_ranks
from small_models import given, summed
from transformers import Glm4MoeForCausalLM

import graphguard as gg

REPAIR = summed("model.layers.*.self_attn.q_norm", "model.layers.*.self_attn.k_norm")


def case(repair=None):
    return given(Glm4MoeForCausalLM, repair, use_qk_norm=True, first_k_dense_replace=1, head_dim=8)


@gg.check(expect="refuted")
def shipped():
    return gg.verify_model(**case())


@gg.check
def repaired():
    return gg.verify_model(**case(REPAIR))


if __name__ == "__main__":
    real_ranks.show(**case())
