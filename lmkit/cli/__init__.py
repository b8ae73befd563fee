"""The command line: Typer signatures only. Parse, load the recipe, call one command, print its result.

Nothing heavy is imported here at module level (torch, numpy, pydantic, matplotlib ...): `lmkit --help` must be
as quick as Typer itself. Commands and recipes are imported inside the functions that need them.

Modules with commands do without `from __future__ import annotations`: Typer would have to evaluate every
annotation from its text, which is a tenth of the time of `lmkit --help`.
"""
