"""Recipes: TOML in, validated frozen objects out. One file per table; `load.py` reads, overrides and validates.

Importing this package is cheap. pydantic (59 ms) loads with the tables, so commands import `lmkit.recipe.load`
only once they run.
"""
