"""Llama as transformers has it, with the library's own tensor-parallel plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from graphguard.bench.models.sizes import Sizes
from graphguard.capture.torch.front import TorchFrontEnd, models
from graphguard.capture.torch.relation.inputs import Input
from graphguard.capture.torch.training import train_step
from graphguard.errors import UsageError


@dataclass(frozen=True)
class TransformersLlama:
    sizes: Sizes
    tp: int
    batch: int = 2
    dp: ClassVar[int] = 1
    pp: ClassVar[int] = 1
    cp: ClassVar[int] = 1
    microbatches: ClassVar[int] = 1

    @property
    def mesh(self) -> dict[str, int]:
        return {"tp": self.tp}

    def front(self) -> TorchFrontEnd:
        try:
            import transformers
        except ImportError:
            raise UsageError("this benchmark needs transformers: pip install 'graphguard[libraries]'") from None
        transformers.logging.set_verbosity_error()
        ids = Input((self.batch, self.sizes.sequence), dtype=torch.int64, low=0, high=self.sizes.vocab)
        step = train_step(lambda model, ids: model(input_ids=ids, labels=ids).loss)
        return TorchFrontEnd(models(self._built, self._split, step, self.mesh, {"ids": ids}, None))

    def _built(self) -> Any:
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = self.sizes
        config = LlamaConfig(
            hidden_size=sizes.hidden, intermediate_size=sizes.inner, num_hidden_layers=sizes.layers, vocab_size=sizes.vocab,
            num_attention_heads=sizes.heads, num_key_value_heads=sizes.groups, rope_theta=500000.0, use_cache=False,
        )  # fmt: skip
        return LlamaForCausalLM(config)

    def _split(self, mesh: Any) -> Any:
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism

        return apply_tensor_parallelism(self._built(), mesh["tp"])
