"""megatron-core 0.16.1, multi-latent attention: the gradient of the rotary key lacks the heads of the other ranks.

All heads share the rotary part of the key. It is gathered over tp, each rank uses it for its own heads, and the backward of
the gathering only cuts: a rank's part of linear_kv_down_proj has the gradient of its own heads alone.

In training: at tp > 1 without sequence parallelism, linear_kv_down_proj is trained by wrong gradients, without an error.
Reported as NVIDIA/Megatron-LM #1699; a repair is proposed in #6839.
"""

import real_ranks
from small_mla import given, sum_the_shared_key

import graphguard as gg


def case(*repairs):
    return given(*repairs, q_lora_rank=None)


@gg.check(expect="refuted")
def shipped():
    return gg.verify_model(**case())


@gg.check
def repaired():
    return gg.verify_model(**case(sum_the_shared_key))


if __name__ == "__main__":
    real_ranks.show(**case())
