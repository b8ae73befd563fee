"""The errors of lmkit that tests expect: by kind, code and what their lines name, not by their wording."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lmkit.errors import LmkitError


@contextmanager
def raises(
    kind: type[LmkitError], code: str, *named: object, hint: object = ""
) -> Iterator[pytest.ExceptionInfo[LmkitError]]:
    """Expect an error with this code, whose message has all of `named`, and whose hint is there and has `hint`."""
    with pytest.raises(kind) as raised:
        yield raised
    error = raised.value
    assert error.code == code
    assert "\n" not in error.message
    for words in named:
        assert str(words) in error.message
    assert error.hint
    assert str(hint) in error.hint
