"""Whatever the surfaces are given, the answer is a result or one sentence: no traceback, no crash, no hang."""

import contextlib
import copy
import io
import json
import os
import random
import signal

import pytest
import torch
import torch.distributed as dist
from harness import capture_both
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphguard import Input, Shard
from graphguard.cli import main
from graphguard.errors import GraphFormatError
from graphguard.graph import json as graph_json
from graphguard.graph.matching import join

SECONDS = 30  # that one example may take
EXAMPLES = float(os.environ.get("GRAPHGUARD_TEST_FUZZ", "1"))  # times as many


def often(count):
    return settings(
        max_examples=int(count * EXAMPLES),
        deadline=None,
        derandomize=EXAMPLES == 1,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@contextlib.contextmanager
def limited():
    def stop(number, frame):
        raise TimeoutError(f"no answer within {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run(arguments):
    """Exit code, stdout and stderr of the command line."""
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with limited(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(arguments)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 2
    return code, out.getvalue(), err.getvalue()


def assert_answers(arguments):
    code, out, err = run(arguments)
    told = f"{arguments} -> {code}\n{out}\n{err}"
    assert code in (0, 1, 2, 3), told
    assert "Traceback" not in out + err, told
    assert "in GraphGuard itself" not in out + err, told
    assert (code != 2) or err.strip(), f"no word about what went wrong: {told}"
    return code, err


# ---------------------------------------------------------------------- graphs
def halves(x):
    return torch.tanh(x @ torch.ones(6, 3))[:, :2]


def gathered(x):
    whole = x.new_empty(4, 6)
    dist.all_gather_into_tensor(whole, x)
    dist.all_reduce(x)
    return halves(whole) + x.sum()


@pytest.fixture(scope="module")
def ranks():
    return capture_both(halves, gathered, 2, {"x": Input((4, 6), Shard(0))}).ranks


@often(250)
@given(seed=st.integers(0, 2**32), edits=st.integers(1, 4))
def test_ranks_from_changed_files_join_or_are_refused(ranks, seed, edits):
    """What loads may be joined: the fault is a finding."""
    rng = random.Random(seed)
    graphs = []
    for graph in ranks:
        plain = json.loads(graph_json.dumps(graph))
        for _ in range(edits):
            disturb(plain, rng)
        try:
            graphs.append(graph_json.loads(json.dumps(plain)))
        except GraphFormatError as error:
            assert len(str(error)) < 1000
            return
    with limited():
        joint = join(graphs)
    assert all(finding.message for finding in joint.findings)


def disturb(plain, rng):
    """Change one place of a file to something that might stand there."""
    places = list(everywhere(plain))
    at, key = rng.choice(places)
    other, its = rng.choice(places)
    item = other[its]
    match rng.randrange(5):
        case 0 if isinstance(at, list):
            at.pop(key)
        case 1 if isinstance(at, list):
            at.insert(key, copy.deepcopy(item))
        case 2 if type(at[key]) is int:
            at[key] = rng.choice((0, 1, at[key] + 1, at[key] - 1, 2**31, 2**63, 10**40))
        case 3:
            at[key] = rng.choice((None, True, 0, -1, 1.5, "", "x", [], {}, [[]], {"v": 0}, {"s": ["dtype", "x"]}, {"f": "nan"}))
        case _ if type(item) is type(at[key]):
            at[key] = copy.deepcopy(item)


def everywhere(plain):
    items = list(plain.items()) if isinstance(plain, dict) else list(enumerate(plain)) if isinstance(plain, list) else []
    for key, item in items:
        yield plain, key
        yield from everywhere(item)


# ---------------------------------------------------------------------- check files
HEAD = """
import torch, torch.distributed as dist
import graphguard as gg
from graphguard import Shard, Replicate, Partial

class Late:
    def __getattr__(self, name):
        raise ImportError(name)

class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no text")

def endless(x):
    return endless(x)

late = Late()
"""
VALUES = st.sampled_from([
    "10**5000", "{'tp': 10**7}", "{'tp': 10**5000}", "{'x': gg.Input((10**5000,))}", "{'x': gg.Input((4,), high=10**5000)}",
    "Late()", "{'x': Late()}", "lambda x: (_ for _ in ()).throw(Mute)", "lambda x: endless(x)",
    "None", "0", "-1", "1", "2", "1.5", "True", "'tp'", "''", "()", "[]", "{}", "{'tp': 2}", "{'tp': 0}", "{'tp': -3}",
    "{'tp': '2'}", "{0: 2}", "{'tp': 2, 'dp': 1}", "{'': 1}", "{'tp': True}", "{'x': gg.Input((4,))}",
    "{'x': gg.Input((4, 2), Shard(0))}", "{'x': (4,)}", "{'y': gg.Input((4,))}", "{1: gg.Input((4,))}",
    "[gg.Input((4,))]", "gg.Input((4,))", "gg.Input(())", "{'x': gg.Input((4,)), 'y': gg.Input((0,))}", "Shard(0)",
    "Shard(9)", "Shard('a')", "Partial()", "Partial('max')", "Replicate", "{'out': Shard(0)}",
    "{'out': {'tp': Partial()}}", "{'out': {'pp': Shard(0)}}", "{'out': lambda full, coord: full}", "{'out': lambda: 0}",
    "{'out': lambda full, coord: 3}", "{'nothing': Shard(0)}", "{'out': None}", "object()", "float('nan')", "10**30",
    "torch.int64", "torch.ones(3)", "lambda x: x", "lambda x: x * 2", "lambda: None", "lambda x: None",
    "lambda x: x.item()", "lambda x: x.nonzero()", "lambda x: [x, {'a': x}]", "lambda x: 'text'",
    "lambda x: x.view(-1, 7)", "lambda x: 1 / 0", "print", "gg", "gg.verify", "type", "{'x': gg.Input((2**40,))}",
    "lambda *a, **k: k", "lambda x: (dist.all_reduce(x), x)[1]", "lambda x: dist.barrier()", "lambda x: dist.recv(x, 5)",
    "lambda x: exit(3)", "lambda x: (_ for _ in ()).throw(KeyboardInterrupt)",
])  # fmt: skip
INPUTS = st.lists(VALUES, max_size=6).map(lambda given: f"gg.Input({', '.join(given)})")
OPTIONS = st.dictionaries(
    st.sampled_from(["mesh", "inputs", "outputs", "local_inputs", "lemmas", "trials", "seed", "bogus"]),
    VALUES | INPUTS,
    max_size=5,
)
USUAL = {"mesh": "{'tp': 2}", "inputs": "{'x': gg.Input((4, 2))}"}
CALLS = st.builds(
    lambda name, programs, options, usual: (
        f"gg.{name}({', '.join([*programs, *(f'{k}={v}' for k, v in ({**USUAL, **options} if usual else options).items())])})"
    ),
    st.sampled_from(["verify", "verify", "verify", "verify_model"]),
    st.lists(VALUES, min_size=0, max_size=3),
    OPTIONS,
    st.booleans(),
)
STATEMENTS = st.one_of(
    CALLS.map(lambda call: f"@gg.check\ndef check_{{n}}():\n    return {call}\n"),
    VALUES.map(lambda value: f"@gg.check(expect={value})\ndef check_{{n}}():\n    return {value}\n"),
    VALUES.map(lambda value: f"check_{{n}} = gg.check({value})\n"),
    VALUES.map(lambda value: f"@gg.check\ndef check_{{n}}(x={value}):\n    raise ValueError({value})\n"),
    VALUES.map(lambda value: f"@gg.check\ndef check_{{n}}(x):\n    return {value}\n"),
    VALUES.map(lambda value: f"value_{{n}} = {value}\n"),
    st.text(max_size=30),
)


@often(45)
@given(
    statements=st.lists(STATEMENTS, min_size=1, max_size=2), command=st.sampled_from(["verify", "verify", "capture", "mutate"])
)
def test_any_check_file_has_an_answer(tmp_path_factory, statements, command):
    folder = tmp_path_factory.mktemp("fuzz")
    text = HEAD + "".join(statement.replace("{n}", str(number)) for number, statement in enumerate(statements))
    (folder / "checks.py").write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        assert_answers([command, str(folder / "checks.py")])
    except AssertionError as error:
        raise AssertionError(f"{error}\n{text}") from None


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise Mute", "the check one raised Mute: (its text cannot be read)"),
        ("raise GeneratorExit", "the check one raised GeneratorExit: "),
        ("return endless(1)", "the check one raised RecursionError: maximum recursion depth exceeded"),
        (
            "return gg.verify(abs, abs, mesh=10**5000, inputs={})",
            "the mesh has more than 65536 ranks, and each of them is captured",
        ),
        (
            "return gg.verify(endless, endless, mesh=2, inputs={'x': gg.Input((4,))})",
            "the sequential program raised RecursionError",
        ),
        ("return gg.verify(mute, mute, mesh=2, inputs={'x': gg.Input((4,))})", "raised Mute at"),
    ],
)
def test_programs_that_fail_in_strange_ways_are_one_sentence(tmp_path, body, words):
    (tmp_path / "one.py").write_text(HEAD + f"def mute(x):\n    raise Mute\n@gg.check\ndef one():\n    {body}\n")
    code, err = assert_answers(["verify", str(tmp_path / "one.py")])
    assert code == 2 and words in err and len(err.splitlines()) < 30


@often(60)
@given(raw=st.binary(max_size=40))
def test_any_bytes_as_a_check_file_have_an_answer(tmp_path_factory, raw):
    file = tmp_path_factory.mktemp("fuzz") / "checks.py"
    file.write_bytes(raw)
    code, _ = assert_answers(["verify", str(file)])
    assert code == 2


# ---------------------------------------------------------------------- arguments
TOKENS = [
    "verify", "capture", "lemmas", "ls", "explain", "mutate", "--rank", "--sequential", "--output-format", "json", "full",
    "sarif", "junit", "github", "concise", "text", "--output", "--html", "-j", "--jobs", "-q", "-v", "--quiet",
    "--verbose", "-n", "--seed", "--version", "--help", "-h", "--", "-", "0", "-1", "1", "2", "999999999999999999999",
    "1e9", "nan", "", " ", "\t", "\n", "é", "\udcff", "\x00", "::", "a::b", "nothing.py", "nothing.py::check",
    "/dev/null", ".nothing", "GG104", "gg104", "GG999", "race", "mm", "aten.mm.default", "--unknown", "-x", "@file", "*",
    "~", "{}", "%s", "$HOME", "FILE", "FILE::one", "FILE::none", "FILE::",
]  # fmt: skip


def is_no_folder(text):
    """All checks below / or .. are not for tests to run."""
    return not set(text) <= {".", "/"}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("arguments") / "one.py"
    path.write_text(HEAD + "@gg.check\ndef one():\n    return gg.verify(None, None, mesh=2, inputs={})\n")
    return str(path)


@often(400)
@given(arguments=st.lists(st.sampled_from(TOKENS) | st.text(max_size=4).filter(is_no_folder), max_size=6))
def test_any_arguments_have_an_answer(file, elsewhere, arguments):
    assert_answers([argument.replace("FILE", file) for argument in arguments])


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """A folder for whatever is written to relative paths."""
    before = os.getcwd()
    os.chdir(tmp_path_factory.mktemp("here"))
    yield
    os.chdir(before)
