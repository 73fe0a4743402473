"""Code that is in no file has lines, too: cells of notebooks, `python -c`, and what is read from stdin."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
from harness import python

from graphguard.graph.cells import cell
from graphguard.graph.ir import Source

PROGRAM = """
import graphguard as gg

def seq(x):
    return x + 1

def par(x):
    return x + 2

report = gg.verify(seq, par, mesh={"tp": 2}, inputs={"x": gg.Input((4,), gg.Shard(0))})
print(report.findings[0].distributed)
print(report)
"""
LINE = 8


def test_cells_are_told_by_their_number(monkeypatch):
    assert str(Source("<ipython-input-3-0123456789ab>", 8)) == "In [3]:8"
    assert cell("model.py") is None
    shell = SimpleNamespace(compile=SimpleNamespace(_filename_map={"/tmp/ipykernel_7/12.py": 1}))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert str(Source("/tmp/ipykernel_7/12.py", 8)) == "In [1]:8"
    assert str(Source("/tmp/ipykernel_7/13.py", 8)) == "ipykernel_7/13.py:8"
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    assert cell("/tmp/ipykernel_7/12.py") is None


def test_the_text_of_a_command_has_lines():
    first, *report = python(PROGRAM).splitlines()
    assert first == f"<string>:{LINE}"
    assert any(line.endswith(f"> {LINE:>5} │     return x + 2") for line in report), report


def test_what_is_read_from_stdin_has_lines():
    done = subprocess.run([sys.executable], input=PROGRAM, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[0] == f"<stdin>:{LINE}", done.stderr


@pytest.mark.parametrize("name", ["<string>", "<stdin>", "<frozen importlib>"])
def test_names_of_no_files_stay_as_they_are(name):
    assert str(Source(name, 3)) == f"{name}:3"
