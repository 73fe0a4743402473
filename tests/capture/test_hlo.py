"""HLO text: what XLA's partitioner wrote is proved, what it would get wrong is refuted, and damaged files are one sentence."""

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import command

from graphguard import jax as gg_jax
from graphguard.capture.hlo.devices import groups_of, parts_of, shardings_of
from graphguard.errors import GraphGuardError

MESH = {"dp": 2, "tp": 4}
ALL = os.environ.get("GRAPHGUARD_TEST_CASES") == "all"
RANGES = {"embedding": {"ids": (0, 64)}, "cross_entropy": {"labels": (0, 64)}}
TRAINED = ("unrolled_trained", "looped_trained")
NAMES = ("mlp", "attention", "embedding", "cross_entropy", "unrolled", "looped", *TRAINED, "convolved", "ordered", "chosen")
ALONE = "replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}"
PAIRS = "replica_groups={{0,1},{2,3},{4,5},{6,7}}"
GROUPS = re.compile(
    r"replica_groups=(\{\{.*?\}\}|\[[\d,]+\]<=\[[\d,]+\](T\([\d,]+\))?|mesh\[.*?\](, device_ids=\(.*?\))? \{.*?\})"
)


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    """By program, the files before and after partitioning."""
    folder = tmp_path_factory.mktemp("dumps")
    subprocess.run(
        [sys.executable, str(Path(__file__).with_name("partitioned.py")), str(folder)], check=True, capture_output=True
    )
    found = {}
    for name in NAMES:
        (before,) = folder.glob(f"*jit_{name}.*before_spmd-partitioning.txt")
        (after,) = folder.glob(f"*jit_{name}.*after_spmd-partitioning*.txt")
        found[name] = str(before), str(after)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_what_the_partitioner_wrote_is_proved(dumps, name):
    report = gg_jax.verify_hlo(*dumps[name], mesh=MESH, ranges=RANGES.get(name))
    assert report.verdict == "verified", str(report)


def all_reduces(text):
    return [line for line in text.splitlines() if " all-reduce(" in line]


def with_groups(text, line, groups, file):
    """The text with other devices in an all-reduce, in a file."""
    changed = GROUPS.sub(groups, line)
    assert changed != line
    file.write_text(text.replace(line, changed))
    return str(file)


@pytest.mark.parametrize("name", ["mlp", "cross_entropy"])
def test_an_all_reduce_that_is_left_out_or_over_other_devices_is_refuted(dumps, name, tmp_path):
    before, after = dumps[name]
    text = Path(after).read_text()
    lines = all_reduces(text)
    assert len(lines) >= 4
    for line in lines:
        for other in (ALONE, PAIRS):
            changed = with_groups(text, line, other, tmp_path / "changed.txt")
            report = gg_jax.verify_hlo(before, changed, mesh=MESH, ranges=RANGES.get(name))
            assert report.verdict == "refuted", f"{line}\n{report}"


@pytest.mark.parametrize("name", ["attention", *TRAINED])
def test_an_all_reduce_of_gradients_that_is_left_out_is_refuted(dumps, name, tmp_path):
    """The last one; `make test-all` leaves out each of them in its turn."""
    before, after = dumps[name]
    text = Path(after).read_text()
    for line in all_reduces(text) if ALL else all_reduces(text)[-1:]:
        changed = with_groups(text, line, ALONE, tmp_path / "changed.txt")
        report = gg_jax.verify_hlo(before, changed, mesh=MESH)
        assert report.verdict == "refuted", f"{line}\n{report}"


def test_a_report_names_the_line_of_the_program(dumps, tmp_path):
    before, after = dumps["mlp"]
    changed = tmp_path / "changed.txt"
    changed.write_text(Path(after).read_text().replace("replica_groups={{0,1,2,3},{4,5,6,7}}", ALONE, 1))
    report = gg_jax.verify_hlo(before, str(changed), mesh=MESH)
    assert report.findings[0].distributed.file.endswith("jax_cases/tensor_parallel.py")


def test_the_command_line(dumps, tmp_path, capsys):
    before, after = dumps["mlp"]
    assert command(capsys, "verify-hlo", before, after, "--mesh", "dp=2,tp=4")[0] == 0
    changed = tmp_path / "changed.txt"
    changed.write_text(Path(after).read_text().replace("replica_groups={{0,1,2,3},{4,5,6,7}}", PAIRS))
    assert command(capsys, "verify-hlo", before, str(changed), "--output-format", "json")[0] == 1
    assert command(capsys, "verify-hlo", before, after, "--mesh", "dp=2,tp=2")[0] == 2
    assert command(capsys, "verify-hlo", before, after, "--range", "x=a:b")[0] == 2
    assert command(capsys, "verify-hlo", before, str(tmp_path / "nothing.txt"))[0] == 2


# ---------------------------------------------------------------------- files that are damaged, or hostile
def refused(before, text, tmp_path):
    file = tmp_path / "damaged.txt"
    file.write_text(text)
    with pytest.raises(GraphGuardError) as error:
        gg_jax.verify_hlo(before, str(file), mesh=MESH)
    assert "itself" not in str(error.value) and "\n" not in str(error.value)
    return str(error.value).replace(str(file), "damaged.txt")


def test_a_file_that_is_cut_off_is_refused_wherever_that_is(dumps, tmp_path):
    before, after = dumps["mlp"]
    text = Path(after).read_text()
    for end in range(0, len(text) - 3, len(text) // 40):
        refused(before, text[:end], tmp_path)


DAMAGES = {
    "no HLO": (r"\A.*", "Something else", "damaged.txt: it does not begin with HloModule; dump it with --xla_dump_hlo_as_text"),
    "dtype": (r"(?<=tanh.2 = )f32\[4,16\]", "f4[4,16]", "cannot be read as HLO: arrays of f4 have no exact graph yet"),
    "instruction": (r" tanh\(", " fft(", "the instruction fft (tanh.2): it has no exact graph yet"),
    "operand": (r"tanh\(%mul.33", "tanh(%nothing", "tanh.2 reads nothing, which is not there yet"),
    "shape": (r"tanh.2 = f32\[4,16\]", "tanh.2 = f32[4,32]", "its operands are (4, 16), where it gives (4, 32)"),
    "broadcast": (
        r"(%mul.45 = f32\[)4,16",
        r"\g<1>3,16",
        "its operands are (4, 16), (3, 16), where it gives (4, 16)",
    ),
    "groups": (
        r"replica_groups=\{\{0,1,2,3\},\{4,5,6,7\}\}",
        "replica_groups={{0,1,2,3}}",
        "do not name each of the 8 ranks once",
    ),
    "group syntax": (
        r"replica_groups=\{\{0,1,2,3\},\{4,5,6,7\}\}",
        "replica_groups=?",
        "its replica_groups are written in a way that is not known",
    ),
    "replicas": (r"channel_id=1, ", "", "it is over replicas, not over partitions"),
    "region": (r"to_apply=%add.clone", "to_apply=%nothing", "what combines its elements is not one operation"),
    "argument": (
        r"%param = f32\[4,16\]",
        "%param = f32[8,16]",
        "torch has no aten.view of this: shape '[4, 16]' is invalid for input of size 128",
    ),
    "constant": (
        r"constant\(0.044715\)",
        "constant({...})",
        "its numbers are left out of the text; dump with --xla_dump_large_constants",
    ),
    "devices": (r"num_partitions=8", "num_partitions=99999", "it is for 99999 partitions; from 2 to 256 can be read"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_one_sentence(dumps, name, tmp_path):
    before, after = dumps["mlp"]
    pattern, new, text = DAMAGES[name]
    damaged, count = re.subn(pattern, new, Path(after).read_text(), count=1)
    assert count == 1
    assert text in refused(before, damaged, tmp_path)


def test_whatever_is_changed_in_a_file_there_is_a_report_or_one_sentence(dumps, tmp_path):
    before, after = dumps["mlp"]
    text = Path(after).read_text()
    tokens = [found.span() for found in re.finditer(r"[\w.]+|[{}()\[\]=,%]", text[text.index("%add.clone") :])]
    start, rng, file = text.index("%add.clone"), random.Random(0), tmp_path / "changed.txt"
    for _ in range(60):
        begin, end = rng.choice(tokens)
        new = rng.choice(["", "0", "7", "99", "{", "}", "(", "%dot", "f32[3]", "add", text[slice(*rng.choice(tokens))]])
        file.write_text(text[: start + begin] + new + text[start + end :])
        try:
            report = gg_jax.verify_hlo(before, str(file), mesh=MESH, trials=1)
        except GraphGuardError as error:
            assert "itself" not in str(error) and "\n" not in str(error)
        else:
            assert report.verdict in ("verified", "refuted", "unproven")


def test_a_computation_that_calls_itself_is_refused(dumps, tmp_path):
    before, after = dumps["looped"]
    text = Path(after).read_text()
    entry = re.search(r"ENTRY %([\w.\-]+)", text)[1]
    assert "is called before it is there" in refused(
        before, re.sub(r"body=%[\w.\-]+", f"body=%{entry}", text, count=1), tmp_path
    )


# ---------------------------------------------------------------------- devices
def test_all_ways_to_write_groups_are_the_same():
    wanted = ((0, 4), (1, 5), (2, 6), (3, 7))
    for text in ("{{0,4},{1,5},{2,6},{3,7}}", "[4,2]<=[2,4]T(1,0)", "mesh['dp'=2,'tp'=4] {'dp'}"):
        assert groups_of(f"channel_id=1, replica_groups={text}, to_apply=%add", 8) == wanted
    assert groups_of("replica_groups={}", 4) == ((0, 1, 2, 3),)
    assert groups_of("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}", 8) == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_shardings():
    assert parts_of("{devices=[2,1,4]<=[8] last_tile_dim_replicate}", 5) == [(1, 2), (0, 1)]
    assert parts_of("{devices=[1,4,2]<=[2,4]T(1,0) last_tile_dim_replicate}", 5) == [(0, 1), (1, 4)]
    assert parts_of("{devices=[2,2]0,2,1,3}", 2) == [(0, 2), (1, 2)]
    assert parts_of("{replicated}", 3) == [] == parts_of(None, 3)
    assert shardings_of("{{replicated}, {devices=[2]<=[2]}}", 2) == ["{replicated}", "{devices=[2]<=[2]}"]
    with pytest.raises(GraphGuardError, match="has an array on one device"):
        parts_of("{maximal device=0}", 0)
