"""Changes to modules that may not be imported yet."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from typing import Any


def when_imported(name: str, adjust: Callable[[Any], None]) -> None:
    """Adjust a module now, or as soon as the program imports it."""
    if name in sys.modules:
        adjust(sys.modules[name])
        return

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
            if fullname != name:
                return None
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(fullname)
            if spec is not None and spec.loader is not None:
                spec.loader.exec_module = functools.partial(load, spec.loader.exec_module)  # type: ignore[method-assign]
            return spec

    def load(execute: Callable[[Any], None], module: Any) -> None:
        execute(module)
        adjust(module)

    sys.meta_path.insert(0, Finder())
