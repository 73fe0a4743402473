"""Parameters and outputs that are treated otherwise than their like: the same one of other layers, or those named like it.

Plans, tables of groups and lists of names are plain Python, of which no operation tells: an entry that is missing has no line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from graphguard.engine.proof import Proof
from graphguard.graph.paths import in_words
from graphguard.graph.placement import REPLICATE
from graphguard.render.relations import held_in_words

_FEW = 3  # one in so many may be treated otherwise, and stand out
_ENDING = 4  # letters that names share at their end if they are of one kind: `q_proj` and `k_proj`, `k_norm` and `layernorm`


def odd_ones(treated: Mapping[str, str]) -> list[str]:
    """By path, how it is treated; in words, those that stand out. Which one is right is not known."""
    layers: dict[str, list[str]] = {}
    for path in treated:
        layers.setdefault(".".join("*" if part.isdigit() else part for part in path.split(".")), []).append(path)
    told = [text for pattern, paths in layers.items() for text in _among_layers(pattern, paths, treated)]
    uniform = {pattern: treated[paths[0]] for pattern, paths in layers.items() if len({treated[path] for path in paths}) == 1}
    return told + list(_among_names(uniform))


def odd_outputs(proof: Proof) -> list[str]:
    """Outputs that are held otherwise than their like, as far as it is known how they are held."""
    treated = {path: held_in_words(each) for path, each in proof.relations.items()}
    for finding in proof.findings:
        summed = [axis for each in finding.holdings if each.role == "held" for axis in each.summed_axes]
        if finding.kind == "unexpected-relation" and finding.output is not None and summed:
            treated[finding.output] = f"a sum over {' and '.join(summed)} that nothing adds up"
    return odd_ones(treated)


def odd_parameters(parameters: Mapping[str, str]) -> list[str]:
    """Parameters that are split otherwise than their like. Each is told as its relation, and how that was found."""
    relations = {name: text.split(", ", 1)[0] for name, text in parameters.items()}
    return odd_ones({name: "whole" if how == str(REPLICATE) else how for name, how in relations.items()})


def _among_layers(pattern: str, paths: list[str], treated: Mapping[str, str]) -> Iterator[str]:
    (usual, many), *_ = Counter(treated[path] for path in paths).most_common(1)
    odd = [path for path in paths if treated[path] != usual]
    if odd and many > 1 and _FEW * len(odd) <= len(paths):
        for how in dict.fromkeys(treated[path] for path in odd):
            these = [path for path in odd if treated[path] == how]
            yield f"{in_words(these)} {_is(these)} {how}, and the others of {pattern} are {usual}"


def _among_names(uniform: Mapping[str, str]) -> Iterator[str]:
    """The only one of its kind that is whole, or a sum, where the others are not; by which dim they are split may differ."""
    kinds: dict[object, list[str]] = {}
    for pattern in uniform:
        *_, module, name = ("", *pattern.split("."))
        if len(module) >= _ENDING:
            kinds.setdefault((module[-_ENDING:], name), []).append(pattern)
    for patterns in kinds.values():
        usual = Counter(_kind(uniform[pattern]) for pattern in patterns).most_common(1)[0][0]
        odd = [pattern for pattern in patterns if _kind(uniform[pattern]) != usual]
        if len(odd) == 1 and len(patterns) > _FEW - 1:
            others = [pattern for pattern in patterns if pattern not in odd]
            how = " or ".join(dict.fromkeys(uniform[pattern] for pattern in others))
            yield f"{odd[0]} is {uniform[odd[0]]}, and {in_words(others)} {_is(others)} {how}"


def _kind(how: str) -> str:
    return "split" if "Shard" in how else how


def _is(paths: list[str]) -> str:
    return "is" if len(paths) == 1 else "are"
