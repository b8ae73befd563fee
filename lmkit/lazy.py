"""Export names of a package without importing the files that define them (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any


def exports(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return a package's `__getattr__`, `__dir__` and `__all__`.

        __getattr__, __dir__, __all__ = exports(__name__, {"TransformerLM": "transformer"})

    Args:
        package: the package's `__name__`.
        modules: public name -> the module that defines it: `lmkit.` and its path, or one of the package. Where both
            have the same name, the package's attribute is the object, whatever was imported before.
    """

    class Package(ModuleType):
        def __setattr__(self, name: str, value: Any) -> None:
            # Importing a module binds its name in the package: a function of the same name must win.
            if not (name in modules and isinstance(value, ModuleType)):
                super().__setattr__(name, value)

    sys.modules[package].__class__ = Package

    def getattr_(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        where = modules[name] if modules[name].startswith("lmkit.") else f"{package}.{modules[name]}"
        value = getattr(importlib.import_module(where), name)
        setattr(sys.modules[package], name, value)
        return value

    return getattr_, lambda: sorted(modules), list(modules)
