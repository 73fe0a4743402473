"""megatron-core 0.16.1: the load-balancing loss of the global batch shrinks with the data-parallel size.

Each replica has its own tokens' part of the loss, with the counts of all replicas: the parts are to be added. The gradients
of replicas are averaged.

In training: on 8 replicas the balancing of experts has an eighth of the weight that the configuration says, without an
error. Reported as NVIDIA/Megatron-LM #3672.
"""

import real_ranks
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from small_megatron import balanced, mean_loss, routed

import graphguard as gg


class Repaired(TopKRouter):
    def attach_and_log_load_balancing_loss(self, activation, coefficient, loss, *args, **given):
        loss = loss * parallel_state.get_data_parallel_world_size()
        return super().attach_and_log_load_balancing_loss(activation, coefficient, loss, *args, **given)


def case(kind=TopKRouter):
    return routed(kind, mean_loss, {"dp": 2}, gg.Shard(1), **balanced("global_aux_loss"))


@gg.check(expect="refuted")
def shipped():
    return gg.verify_model(**case())


@gg.check
def repaired():
    return gg.verify_model(**case(Repaired))


if __name__ == "__main__":
    real_ranks.show(**case())
