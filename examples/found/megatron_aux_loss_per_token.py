"""megatron-core 0.16.1: with calculate_per_token_loss, the load-balancing loss shrinks with the tensor-parallel size.

Under sequence parallelism each rank routes its own tokens. Its part of the loss is multiplied by its own tokens, and
finalize_model_grads divides by all of them: the sum over tp ranks is 1/tp of what one rank has.

In training: at tp 8 the balancing of experts has an eighth of the weight that the configuration says, without an error.
Repaired in NVIDIA/Megatron-LM #5047, which is not in this version.
"""

import real_ranks
from megatron.core.transformer.moe.router import TopKRouter
from small_megatron import balanced, routed, summed_loss

import graphguard as gg


class Repaired(TopKRouter):
    def attach_and_log_load_balancing_loss(self, *args, valid_token_count=None, **given):
        tokens = valid_token_count * self.tp_cp_group.size()
        return super().attach_and_log_load_balancing_loss(*args, valid_token_count=tokens, **given)


def case(kind=TopKRouter):
    return routed(kind, summed_loss, {"tp": 2}, gg.Shard(0), tp=2, calculate_per_token_loss=True, **balanced("aux_loss"))


@gg.check(expect="refuted")
def shipped():
    return gg.verify_model(**case())


@gg.check
def repaired():
    return gg.verify_model(**case(Repaired))


if __name__ == "__main__":
    real_ranks.show(**case())
