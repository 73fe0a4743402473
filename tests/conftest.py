import os
import sys
from pathlib import Path

import pytest

# Tests fork, which a pool of threads does not survive; and two workers with a thread each are quicker than with two.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["GRAPHGUARD_CACHE"] = "off"  # tests change GraphGuard itself, of which no key knows
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working folder; what is imported from it is forgotten."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]
