from __future__ import annotations

from pathlib import Path

import pytest

from lmkit.errors import UsageError
from lmkit.tokenizer import Tokenizer
from lmkit.tokenizer.inspection import describe


def test_facts(trained: Tokenizer, tmp_path: Path, real_text: str) -> None:
    path = tmp_path / "text.txt"
    path.write_text(real_text, "utf-8")
    facts = describe(trained, text=path, longest=3)
    assert facts.vocab_size == 2000
    assert facts.num_merges == 2000 - 256 - 4
    assert facts.sha256 == trained.sha256
    lengths = [len(token) for token in facts.longest_tokens]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == max(len(left + right) for left, right in trained.merges)
    assert facts.bytes_per_token == pytest.approx(len(real_text.encode()) / len(trained.encode(real_text)))


def test_without_a_text_and_with_none_in_it(trained: Tokenizer, tmp_path: Path) -> None:
    assert describe(trained).bytes_per_token is None
    (tmp_path / "empty.txt").touch()
    assert describe(trained, text=tmp_path / "empty.txt").bytes_per_token is None
    with pytest.raises(UsageError):
        describe(trained, text=tmp_path / "missing.txt")
