"""Random programs: nothing that is said of them is false. `make random` looks at 20,000; these are the first ones."""

import pytest

from graphguard.fuzz import campaign
from graphguard.fuzz.page import page
from graphguard.fuzz.program import grown
from graphguard.fuzz.trial import Result

PROGRAMS = 120


@pytest.fixture(scope="module")
def total():
    return campaign.run(range(PROGRAMS))


def test_nothing_false_is_said_of_random_programs(total):
    assert total.false == []
    assert total.crashes == []


def test_most_programs_are_looked_at_and_described(total):
    """Else the test above would say nothing."""
    there = total.looked_at
    assert len(there) > 0.9 * PROGRAMS
    compared, undescribed = sum(each.compared for each in there), sum(each.undescribed for each in there)
    assert compared > 10_000 and undescribed < 0.2 * compared
    assert sum(each.proved for each in there) > PROGRAMS / 2
    assert {each.ranks for each in there} == {1, 2, 3, 4}


def test_a_number_always_gives_the_same_program():
    assert str(grown(11)) == str(grown(11)) != str(grown(12))


def test_what_is_false_fails_the_command_and_is_on_the_page(capsys, monkeypatch):
    wrong = Result(7, 2, 3, 8, 40, wrong=["rank 0: %3 is described as 5"])
    monkeypatch.setattr(campaign, "run", lambda *given: campaign.Total([wrong, Result(8, left_out="CaptureError: no")], []))
    assert campaign.main(["--programs", "2"]) == 1
    assert capsys.readouterr().out.startswith("2 programs in 0 s: 1 false, 0 crashes")
    text = page([wrong], ["seed 9: ValueError: no"], "command", 60)
    assert "| false claims, false proofs | **1**, **0** |" in text
    assert "- seed 7: rank 0: %3 is described as 5\n- seed 9: ValueError: no\n" in text


def test_a_crash_is_told_and_fails(monkeypatch):
    def broken(program):
        raise ValueError("no")

    monkeypatch.setattr(campaign, "looked_at", broken)
    total = campaign.run([3])
    assert total.crashes == ["seed 3: ValueError: no"] and total.exit_code == 2


def test_programs_that_nobody_looked_at_are_no_success():
    assert campaign.Total([Result(1, left_out="CaptureError: no"), Result(2, 1)]).exit_code == 2
    assert campaign.Total().exit_code == 2
    assert campaign.Total([Result(2, 1)]).exit_code == 0
