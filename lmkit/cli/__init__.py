"""The command line: one file per command or group. Parse, load the recipe, call one function below, print its result.

Nothing heavy is imported here at module level (torch, numpy, pydantic, matplotlib ...): `lmkit --help` must be as
quick as Typer itself. `app.py` imports the module of a command when the command is used.
"""
