"""Load the Python files that `--plugin` names; say which of their code raised an error or returned a wrong result."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import traceback
from pathlib import Path
from typing import Any

from lmkit.errors import LmkitError, UsageError, first_line
from lmkit.registry import REGISTRIES, Registry

PLUGINS: list[Path] = []
"""Files that the user named with `--plugin`; ranks that are started load them, too."""


def load_plugin(path: Path) -> None:
    """Import a Python file of the user's; UsageError: no such file, not a Python file, or it raises an error."""
    path = Path(os.path.realpath(path))  # `resolve` has no error for a link loop that users understand
    if path in PLUGINS:
        return
    if not path.is_file():
        raise UsageError("plugin.missing", f"--plugin {path}: no such file", hint="name a Python file")
    name = f"lmkit_plugin_{path.stem}"
    if name in sys.modules:  # of a file of the same name in another folder
        name += f"_{len(PLUGINS)}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        message, hint = f"--plugin {path}: not a Python file", "its name has to end in .py"
        raise UsageError("plugin.not_python", message, hint=hint)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (LmkitError, KeyboardInterrupt):  # a name that is taken
        raise
    except BaseException as error:
        message, hint = f"--plugin {path}: {first_line(error)}", f"for the traceback: python {path}"
        raise UsageError("plugin.failed", message, hint=hint) from error
    PLUGINS.append(path)


def plugin_error(error: BaseException) -> LmkitError | None:
    """Return an error that a plugin's code raised as one line that names the plugin's entry, file and line; None for
    errors of other code, and for what ends a program."""
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return None
    entries = [(registry, entry) for registry in REGISTRIES for entry in registry.entries.values()]
    walked = traceback.walk_tb(error.__traceback__)
    frames = [(frame, line) for frame, line in walked if Path(frame.f_code.co_filename) in PLUGINS]
    if not frames:  # Python names a function that refuses its arguments, and runs none of it
        refused = re.match(r"(?:.*\.)?(\w+)\(\) (?:takes|got|missing) ", str(error))
        for registry, entry in entries if isinstance(error, TypeError) else ():
            if refused and entry.attribute == refused[1] and Path(entry.file) in PLUGINS:
                message = f"{registry.noun} {entry.name!r}: {entry.file}: {first_line(error)}"
                return LmkitError("plugin.raised", message, hint="CONTRIBUTING.md shows its arguments")
        return None
    called = {
        (frame.f_globals["__name__"], name)
        for frame, _ in frames
        for name in (frame.f_code.co_name, type(frame.f_locals.get("self")).__name__)
    }
    nouns = [f"{r.noun} {e.name!r}: " for r, e in entries if (e.module, e.attribute) in called]
    frame, line = frames[-1]
    # A function that registers others gives all of them one name: the entry that raised is not known.
    where = f"{nouns[0] if len(nouns) == 1 else ''}{frame.f_code.co_filename}:{line}"
    return LmkitError("plugin.raised", f"{where}: {first_line(error)}", hint="for the traceback: --debug")


def checked(registry: Registry[Any], name: str, made: Any, *attributes: str) -> Any:
    """Return what a registered object returned; LmkitError: it lacks one of the attributes ("plugin.returned")."""
    for attribute in attributes:
        if not hasattr(made, attribute):
            raise wrong_result(registry, name, f"{type(made).__name__} without {attribute}")
    return made


def wrong_result(registry: Registry[Any], name: str, found: str) -> LmkitError:
    """Return the error that names a registered object, its file, and what it wrongly returned."""
    entry = registry.entry(name)
    message = f"{entry.file}: {registry.noun} {entry.name!r} returned {found}"
    return LmkitError("plugin.returned", message, hint="CONTRIBUTING.md shows what it has to return")
