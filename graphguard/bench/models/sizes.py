"""How large the models are: published sizes, and small ones of the same form that can be executed."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: queries, keys and values come from narrow vectors. All heads share `rope` features."""

    queries: int
    keys: int
    plain: int  # features of a head that positions do not turn
    rope: int
    values: int


@dataclass(frozen=True)
class Experts:
    """count: of experts, of which each token takes `chosen`; one more is shared. dense: first layers that have none."""

    count: int
    chosen: int
    inner: int
    dense: int


@dataclass(frozen=True)
class Sizes:
    """Of a decoder. groups: heads that share a key and a value are one group."""

    layers: int
    hidden: int
    heads: int
    groups: int
    head: int
    inner: int
    vocab: int
    sequence: int
    turns_positions: bool = True  # rotary; else positions are learnt
    is_gated: bool = True  # SwiGLU and RMS norms; else GELU, layer norms and a bias everywhere
    has_qkv_bias: bool = False
    latent: Latent | None = None
    experts: Experts | None = None

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer >= self.experts.dense

    @property
    def has_biases(self) -> bool:
        return not self.is_gated


MODELS = {
    "GPT-3 175B": Sizes(96, 12288, 96, 96, 128, 49152, 50304, 2048, turns_positions=False, is_gated=False),
    "Llama-3 8B": Sizes(32, 4096, 32, 8, 128, 14336, 128256, 8192),
    "Llama-3 70B": Sizes(80, 8192, 64, 8, 128, 28672, 128256, 8192),
    "Llama-3 405B": Sizes(126, 16384, 128, 8, 128, 53248, 128256, 8192),
    "Qwen2-72B": Sizes(80, 8192, 64, 8, 128, 29568, 152064, 8192, has_qkv_bias=True),
    "DeepSeek-V3-like 671B": Sizes(
        61, 7168, 128, 128, 192, 18432, 129280, 4096,
        latent=Latent(1536, 512, 128, 64, 128), experts=Experts(256, 8, 2048, 3),
    ),
}  # fmt: skip


def small(sizes: Sizes, layers: int, split: int) -> Sizes:
    """The same form, narrow enough to be executed, where no dim is split into more than `split` parts."""
    latent = None if sizes.latent is None else Latent(6, 5, 4, 2, 3)
    experts = None if sizes.experts is None else Experts(2 * split, 2, 2 * split, 1)
    groups = 2 * split if sizes.groups == sizes.heads else split
    return replace(
        sizes, layers=layers, hidden=8, heads=2 * split, groups=groups, head=6 if latent else 4, inner=2 * split,
        vocab=4 * split, sequence=2 * split, latent=latent, experts=experts,
    )  # fmt: skip
