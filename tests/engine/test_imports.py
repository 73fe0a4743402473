"""The engine stands alone."""

from harness import python


def test_the_engine_imports_neither_torch_nor_jax():
    code = (
        "import sys, pkgutil, importlib, graphguard.engine as e\n"
        "names = [m.name for m in pkgutil.walk_packages(e.__path__, 'graphguard.engine.')]\n"
        "assert 'graphguard.engine.store.table' in names\n"
        "for name in names: importlib.import_module(name)\n"
        "print(sorted({'torch', 'jax'} & set(sys.modules)))"
    )
    assert python(code) == "[]\n"
