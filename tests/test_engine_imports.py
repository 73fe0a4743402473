"""The engine stands alone."""

import subprocess
import sys


def test_the_engine_imports_neither_torch_nor_jax():
    code = (
        "import sys, pkgutil, importlib, graphguard.engine as e\n"
        "for m in pkgutil.iter_modules(e.__path__): importlib.import_module(f'graphguard.engine.{m.name}')\n"
        "assert len(list(pkgutil.iter_modules(e.__path__))) > 4\n"
        "print(sorted({'torch', 'jax'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
