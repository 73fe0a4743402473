"""Which strategies have proof cases, and how many of them are proved: counted from tests/cases, for the README and the site."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class Strategy:
    """phases: which of them the cases go through. families: files of tests/cases."""

    name: str
    phases: tuple[str, ...]
    families: tuple[str, ...]


AREAS = {
    "tensor and sequence parallelism, to whole decoders": (
        Strategy("tensor parallelism: MLPs, adapters, products cut in two and three directions", PHASES[:2],
                 ("mlp", "linear", "partial_gradients")),
        Strategy("attention split by heads: grouped, single and latent keys, masks, rotary positions", PHASES[:2],
                 ("attention", "rope", "attention_variants")),
        Strategy("one fused projection of queries, keys and values", PHASES[:2], ("fused_qkv",)),
        Strategy("split vocabulary: embedding, cross entropy, tied weights", PHASES[:2], ("vocabulary", "tables")),
        Strategy("GPT and Llama decoders of two layers, tensor and sequence parallel", PHASES[:2], ("decoders",)),
        Strategy("sequence parallelism; norms on a part of the sequence or of the hidden dim", PHASES[:2],
                 ("sequence", "norms")),
        Strategy("words, heads and widths that do not divide by the ranks", PHASES[:2], ("padding",)),
    ),
    "data parallelism, FSDP, ZeRO, optimizers, batch statistics": (
        Strategy("data parallelism, FSDP and HSDP written by hand, gradient accumulation", PHASES, ("data",)),
        Strategy("optimizers, with their state whole or sharded (ZeRO 1 to 3)", PHASES, ("zero", "flat")),
        Strategy("clipping, counts of tokens, averages of weights, Muon, LAMB, Adafactor", PHASES,
                 ("step", "optimizers", "accumulated")),
        Strategy("statistics of a split batch (SyncBatchNorm), `no_sync`", PHASES[:2], ("batch",)),
    ),
    "convolutions and recurrences split by positions, samples, channels and heads": (
        Strategy("convolutions split by positions (halos), samples and channels", PHASES[:2], ("convolution",)),
        Strategy("linear attention: causal convolutions of single channels, delta rules in chunks", PHASES[:2], ("recurrent",)),
    ),
    "context parallelism: rings, windows, Ulysses, zigzag": (
        Strategy("context parallelism: gathered keys, rings, windows, exchange of heads (Ulysses)", PHASES[:2],
                 ("context", "windows", "ulysses_ring", "ring_flash", "masked_rings", "dealt")),
        Strategy("context parallelism in zigzag layout", PHASES[:2], ("zigzag",)),
        Strategy("positions and shifted labels on a split sequence", PHASES[:2], ("positions",)),
    ),
    "expert parallelism": (
        Strategy("expert parallelism: routing, capacity, balancing losses, shared experts", PHASES[:2],
                 ("expert", "moe_training", "routes", "fixed_routes")),
    ),
    "pipelines, and meshes of several axes": (
        Strategy("pipelines: GPipe, 1F1B, interleaved, tied stages", PHASES[:2], ("pipeline", "tied_stages")),
        Strategy("meshes of several axes: data, pipeline, context and tensor; reductions in steps", PHASES[:2], ("meshes",)),
    ),
    "inference with a cache of keys and values": (
        Strategy("inference with a cache of keys and values", PHASES[:1], ("inference", "quantised", "pieces")),
    ),
    "programs that are equal by algebra": (
        Strategy("programs that are equal by algebra rather than by layout", PHASES[:2],
                 ("identities", "reformulated", "formulas")),
        Strategy("the programs of GraphGuard's publication, repaired", PHASES[:2], ("published",)),
    ),
}  # fmt: skip
STRATEGIES = tuple(strategy for area in AREAS.values() for strategy in area)


def areas():
    """The table of areas for the front page, as lines of Markdown."""
    families = {family.name: family for family in counted()}
    lines = ["| strategy | correct cases, proved | faulty cases, none verified |", "|---|--:|--:|"]
    for area, members in AREAS.items():
        chosen = [families[name] for strategy in members for name in strategy.families]
        proved, correct = _proved(chosen)
        lines.append(f"| {area} | {proved} of {correct} | {sum(family.faulty for family in chosen)} |")
    return lines


def strategies():
    """The table of strategies, as lines of Markdown."""
    families = {family.name: family for family in counted()}
    lines = ["| strategy | forward | backward | optimizer | families |", "|---|---|---|---|---|"]
    for strategy in STRATEGIES:
        chosen = [families[name] for name in strategy.families]
        proved, correct = _proved(chosen)
        state = "yes" if proved == correct else "partly" if proved else "not yet"
        cells = [state if phase in strategy.phases else "–" for phase in PHASES]
        lines.append(f"| {strategy.name} | {' | '.join(cells)} | {', '.join(f'`{name}`' for name in strategy.families)} |")
    return lines


def _proved(families):
    """How many correct cases are proved, and how many there are."""
    correct = sum(len(family.correct) for family in families)
    return correct - sum(len(family.missing) for family in families), correct


def cases():
    """The table of families, and what is missing, as lines of Markdown."""
    lines = ["| family | its cases | correct | of these proved | faulty |", "|---|---|--:|--:|--:|"]
    for family in counted():
        proved, correct = _proved([family])
        lines.append(f"| `{family.name}` | {family.title} | {correct} | {proved} | {family.faulty} |")
    waiting = [family for family in counted() if family.missing]
    if waiting:
        lines += ["", "Correct cases that are not proved so far:", ""]
        lines += [f"- `{family.name}`: {', '.join(f'`{case}`' for case in family.missing)}" for family in waiting]
    return lines


@dataclass(frozen=True)
class Family:
    name: str
    title: str
    correct: tuple[str, ...]
    missing: tuple[str, ...]
    faulty: int


def counted():
    """All families, counted from the cases themselves."""
    sys.path.insert(0, str(ROOT / "tests"))
    try:
        tests = importlib.import_module("test_cases")
    finally:
        sys.path.pop(0)
    families = []
    for name, module in zip(tests.MODULES, tests.LOADED, strict=True):
        correct = tuple(case.name for case in module.CASES if case.expect == "verified")
        missing = tuple(case for case in correct if case in tests.NOT_YET)
        families.append(Family(name, " ".join(module.__doc__.split()), correct, missing, len(module.CASES) - len(correct)))
    return families
