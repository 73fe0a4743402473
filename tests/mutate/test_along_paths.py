"""Mutants of programs that read values: none that computes something else on inputs of the path is verified along it."""

import pytest
from path_cases.reading import CASES

import graphguard as gg
from graphguard.errors import UsageError
from graphguard.mutate import campaign
from graphguard.mutate.campaign import Herd, specimens
from graphguard.mutate.path_specimen import PathSpecimen
from graphguard.pipeline import collecting

MUTANTS = {"dropless-ep2": 6, "rows-picked": 40, "rows-counted": 20, "branch": 30}


@pytest.mark.parametrize("case", [case for case in CASES if case.name in MUTANTS], ids=lambda case: case.name)
def test_mutants_along_two_paths(case):
    """The fixed slice of the campaign; `python -m graphguard.mutate.campaign --cases tests/path_cases` runs more."""
    found = specimens(case.name, campaign.job_of(case), 2)
    assert len(found) == 2 and all(isinstance(each, PathSpecimen) for each in found)
    outcomes = [Herd(each, 0).some(MUTANTS[case.name] // 2, 2, locate_every=1000) for each in found]
    mutants = [each for some, _ in outcomes for each in some]
    rewrites = [each for _, some in outcomes for each in some]
    assert len(mutants) == MUTANTS[case.name]
    assert not any(each.unsound or each.crash for each in (*mutants, *rewrites))
    assert sum(each.difference is not None for each in mutants) >= len(mutants) / 4
    assert any(each.proved for each in (*mutants, *rewrites))


def test_inputs_are_on_the_path():
    (case,) = (case for case in CASES if case.name == "branch")
    for each in specimens(case.name, campaign.job_of(case), 2):
        assert isinstance(each, PathSpecimen)
        assert each.is_on_path(each.sample)
        x = each.sample["x"]
        assert not each.is_on_path({**each.sample, "x": x * 1e-3 if each.name.endswith("1") else x * 1e3})
        assert len({float(trial.local[0]["x"].sum()) for trial in each.trials}) > 2


def wrong(x):
    return x if x.sum() > 0 else -x


def test_only_what_is_verified_along_a_path_can_be_changed():
    inputs = {"x": gg.Input((4,), gg.Shard(0))}
    with collecting() as jobs:
        gg.verify(wrong, wrong, mesh={"dp": 2}, inputs=inputs, outputs={"out": gg.Shard(0)})
    with pytest.raises(UsageError, match="is not verified, and only a check that verifies can be mutated"):
        specimens("wrong", jobs[0], 3)
