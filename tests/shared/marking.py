"""Which of a test's cases the fast sessions run."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def full_but(often: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Mark the cases that are not `often` for the full session. A tuple has the values of several parameters."""
    full = pytest.mark.full
    values = ((case, case if type(case) is tuple else (case,)) for case in cases)
    return [case if case in often else pytest.param(*parts, marks=full) for case, parts in values]


def full_except(first: Any, *others: Any) -> list[Any]:
    """Mark all cases but the first for the full session."""
    return full_but([first], [first, *others])
