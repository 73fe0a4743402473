"""The README and the pages of docs/ are true: their Python runs, and the README's console output is what commands print."""

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


@pytest.mark.parametrize("page", ["lemmas"])
def test_the_python_of_a_page_runs_as_one_program(page, tmp_path, monkeypatch):
    monkeypatch.setattr("graphguard.lemmas.user._REGISTERED", {})
    text = (README.parent / "docs" / f"{page}.md").read_text()
    file = tmp_path / f"{page}.py"
    file.write_text("\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)))
    exec(compile(file.read_text(), str(file), "exec"), {"__name__": page})
