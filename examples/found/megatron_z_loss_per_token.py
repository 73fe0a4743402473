"""megatron-core 0.16.1: with calculate_per_token_loss, the router's z loss shrinks with the tensor-parallel size.

Under sequence parallelism each rank routes its own tokens. The z loss is multiplied by a rank's tokens, and
finalize_model_grads divides by all tokens; its coefficient is divided by the ranks, too. The sum over tp ranks is 1/tp of
what one rank has.

In training: at tp 8 the z loss has an eighth of the weight that the configuration says, without an error. Repaired in
NVIDIA/Megatron-LM #5047, which is not in this version.
"""

import real_ranks
from megatron.core.transformer.moe.router import TopKRouter
from small_megatron import routed, summed_loss

import graphguard as gg


class Repaired(TopKRouter):
    def apply_z_loss(self, logits, padding_mask=None):
        coefficient = self.config.moe_z_loss_coeff
        self.config.moe_z_loss_coeff = coefficient * self.tp_cp_group.size()
        try:
            return super().apply_z_loss(logits, padding_mask)
        finally:
            self.config.moe_z_loss_coeff = coefficient


def case(kind=TopKRouter):
    return routed(kind, summed_loss, {"tp": 2}, gg.Shard(0), tp=2, calculate_per_token_loss=True, moe_z_loss_coeff=0.1)


@gg.check(expect="refuted")
def shipped():
    return gg.verify_model(**case())


@gg.check
def repaired():
    return gg.verify_model(**case(Repaired))


if __name__ == "__main__":
    real_ranks.show(**case())
