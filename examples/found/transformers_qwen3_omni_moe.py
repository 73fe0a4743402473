"""transformers 5.22.2, qwen3_omni_moe: gradients of the norms of queries and keys are not summed over tp.

Each rank has its own heads, and q_norm and k_norm are shared by all heads, so a rank's gradient is its own heads' part of
the sum. The plan of qwen3 and qwen3_moe has the style `replicated_with_grad_allreduce` for these norms. The plan of the
text model of qwen3_omni_moe (the thinker) has not, while that of its talker has.

In training: the copies of q_norm and k_norm on the ranks get different gradients and drift apart, without an error. A
checkpoint has one rank's copy. No public report is known to us.
"""

import real_ranks
from small_models import QWEN3_MOE, given, hidden_loss, summed
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeThinkerTextModel

import graphguard as gg

REPAIR = summed("layers.*.self_attn.q_norm", "layers.*.self_attn.k_norm")


def case(repair=None):
    return given(Qwen3OmniMoeThinkerTextModel, repair, hidden_loss, **QWEN3_MOE)


@gg.check(expect="refuted")
def shipped():
    return gg.verify_model(**case())


@gg.check
def repaired():
    return gg.verify_model(**case(REPAIR))


if __name__ == "__main__":
    real_ranks.show(**case())
