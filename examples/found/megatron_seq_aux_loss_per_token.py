"""megatron-core 0.16.1: with calculate_per_token_loss, the load-balancing loss of sequences depends on the batch of a rank.

The loss is multiplied by the length of a sequence where it should be by all tokens of the rank, and finalize_model_grads
divides by all tokens: a rank with half the batch counts twice as much.

In training: the weight of the loss grows with the data-parallel size at the same global batch, without an error. Repaired
in NVIDIA/Megatron-LM #5798, which is not in this version.
"""

import real_ranks
from megatron.core.transformer.moe.router import TopKRouter
from small_megatron import balanced, routed, summed_loss

import graphguard as gg


class Repaired(TopKRouter):
    def attach_and_log_load_balancing_loss(self, activation, *args, valid_token_count=None, **given):
        tokens = activation.shape[0]
        return super().attach_and_log_load_balancing_loss(activation, *args, valid_token_count=tokens, **given)


def case(kind=TopKRouter):
    return routed(kind, summed_loss, {"dp": 2}, gg.Shard(1), calculate_per_token_loss=True, **balanced("seq_aux_loss"))


@gg.check(expect="refuted")
def shipped():
    return gg.verify_model(**case())


@gg.check
def repaired():
    return gg.verify_model(**case(Repaired))


if __name__ == "__main__":
    real_ranks.show(**case())
