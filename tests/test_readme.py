"""The README is true: its Python runs, and its console output is what the commands print."""

import re
from pathlib import Path

import pytest

from graphguard.cli import main

README = Path(__file__).parent.parent / "README.md"
TEXT = README.read_text()


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL), ids=lambda code: code.split("\n")[0])
def test_python_blocks_run(code, tmp_path):
    file = tmp_path / "snippet.py"
    file.write_text(code)
    exec(compile(code, str(file), "exec"), {"__name__": "readme"})


@pytest.mark.parametrize("command, expected", re.findall(r"```console\n\$ graphguard (.*?)\n(.*?)```", TEXT, re.DOTALL))
def test_console_blocks_print_what_they_show(command, expected, capsys, monkeypatch):
    monkeypatch.chdir(README.parent)
    with pytest.raises(SystemExit) as stop:
        main(command.split())
    assert stop.value.code == 0
    assert capsys.readouterr().out == expected
