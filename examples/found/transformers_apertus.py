"""transformers 5.22.2, apertus: gradients of the activation's two parameters are not summed over tp.

xIELU has the trained numbers alpha_p and alpha_n. It acts between up_proj (colwise) and down_proj (rowwise), where each
rank has its own features: a rank's gradient is the part of its features. The plan names q_norm and k_norm for this reason,
and not `act_fn`.

In training: each rank learns an activation of its own, without an error. A checkpoint has one rank's numbers. No public
report is known to us.
"""

import real_ranks
from small_models import given, summed
from transformers import ApertusForCausalLM

import graphguard as gg

REPAIR = summed("model.layers.*.mlp.act_fn")


def case(repair=None):
    return given(ApertusForCausalLM, repair)


@gg.check(expect="refuted")
def shipped():
    return gg.verify_model(**case())


@gg.check
def repaired():
    return gg.verify_model(**case(REPAIR))


if __name__ == "__main__":
    real_ranks.show(**case())
