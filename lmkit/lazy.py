"""Export names of a package without importing the files that define them (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any


class _Package(ModuleType):
    """A package. Importing a module binds its name in the package: an exported object of the same name must win."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (isinstance(value, ModuleType) and name in self.__all__):
            super().__setattr__(name, value)


def exports(
    package: str, modules: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return a package's `__getattr__`, `__dir__` and `__all__`.

        __getattr__, __dir__, __all__ = exports(__name__, {"transformer": ("TransformerLM", "SwiGLU")})

    Args:
        package: the package's `__name__`.
        modules: module of the package, or `lmkit.` and its path -> the public names that it defines. Where module and
            object have the same name, the package's attribute is the object, whatever was imported before.
    """
    module_of = {name: module for module, names in modules.items() for name in names}
    sys.modules[package].__class__ = _Package

    def getattr_(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = module_of[name]
        where = module if module.startswith("lmkit.") else f"{package}.{module}"
        value = getattr(importlib.import_module(where), name)
        setattr(sys.modules[package], name, value)
        return value

    return getattr_, lambda: sorted(module_of), list(module_of)
