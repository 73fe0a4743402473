"""What is shipped and raises on real ranks, while it runs on one process: `python examples/found/loud.py`.

The models are those of `graphguard sweep transformers`, the operators those of `graphguard sweep dtensor`: small, and as
shipped.
"""

import re

import real_ranks
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard
from transformers import logging

import graphguard as gg
from graphguard.sweep import families

logging.set_verbosity_error()
MODELS = {
    "doge": "DogeConfig", "granite_swa": "GraniteSWAConfig", "granitemoe_swa": "GraniteMoeSWAConfig", "hy_v4": "HYV4Config",
    "inkling": "InklingTextConfig", "llama4": "Llama4TextConfig", "muse_glimmer": "MuseGlimmerTextConfig",
    "muse_spark": "MuseSparkTextConfig", "esmc": "EsmcConfig", "cohere": "CohereConfig",
}  # fmt: skip
OPTIONS = {"cohere": {"use_qk_norm": True}}
OPERATORS = {
    "group_norm, backward": (lambda x: F.group_norm(x, 2), (4, 8, 6), Shard(0)),
    "rms_norm of split features": (lambda x: F.rms_norm(x, (8,)), (4, 8), Shard(1)),
    "prod, backward": (lambda x: x.prod(0), (4, 8), Shard(0)),
    "split, backward of one part": (lambda x: x.split(2, 0)[1], (4, 8), Shard(1)),
    "unbind, backward of one part": (lambda x: x.unbind(1)[2], (4, 8), Shard(0)),
}


def model(name):
    (config,) = (each for each in families.configurations() if each.__name__ == MODELS[name])
    return families.given(config, 2, OPTIONS.get(name, {}))


def operator(name):
    function, shape, placement = OPERATORS[name]

    def gradient(x):
        x.requires_grad_()
        return {"grad": torch.autograd.grad(function(x).square().sum(), x)[0]}

    def sharded(x, mesh):
        return gradient(DTensor.from_local(x, mesh, [placement]))

    inputs = {"x": gg.Input(shape, placement)}
    return {"sequential": gradient, "distributed": sharded, "mesh": {"tp": 2}, "inputs": inputs}


def raised(case):
    """The last line of what the ranks raise; None if they do not."""
    try:
        real_ranks.differences(**case)
    except RuntimeError as error:
        alone = str(error).startswith("rank 0 of 1")
        line = [line for line in str(error).splitlines() if re.match(r"\w*(Error|Exception)\b", line)][-1]
        return f"one process raises, too: {line}" if alone else line
    return None


if __name__ == "__main__":
    for name in MODELS:
        words = "".join(f" with {option}" for option in OPTIONS.get(name, {}))
        print(f"transformers {name}{words} | {raised(model(name)) or 'runs'}", flush=True)
    for name in OPERATORS:
        print(f"torch DTensor {name} | {raised(operator(name)) or 'runs'}", flush=True)
