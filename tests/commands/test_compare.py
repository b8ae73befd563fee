import json
import math

import pytest

from lmkit.commands.compare import run
from lmkit.errors import UsageError


def store(path, samples, *, status="ok"):
    row = {"kernel": "k", "status": status, "samples_ms": samples}
    path.write_text(json.dumps(row) + "\n")
    return path


def test_nothing_compared_is_not_nothing_worse(tmp_path):
    """Out of memory twice, or too few samples to tell: a regression would not have been seen."""
    failed = store(tmp_path / "failed.jsonl", [], status="out of memory")
    few = store(tmp_path / "few.jsonl", [1.0] * 5)
    enough = store(tmp_path / "enough.jsonl", [1.0] * 6)
    for path in (failed, few):
        result = run(path, path, threshold=0.05)
        assert (result.compared, result.worse, result.is_fine) == (0, 0, False)
        assert "nothing was compared" in str(result)
    result = run(enough, enough, threshold=0.05)
    assert (result.compared, result.is_fine) == (1, True)
    assert "nothing became worse (1 of 1 compared)" in str(result)


def test_results_of_different_benches_are_refused(tmp_path):
    before = store(tmp_path / "before.jsonl", [1.0] * 6)
    after = tmp_path / "after.jsonl"
    after.write_text(json.dumps({"strategy": "flat", "status": "ok", "samples_ms": [1.0] * 6}) + "\n")
    with pytest.raises(UsageError, match=r"after\.jsonl: no measurement of .*before\.jsonl is in it"):
        run(before, after, threshold=0.05)


@pytest.mark.parametrize("threshold", [math.nan, math.inf])
def test_a_threshold_is_a_number(tmp_path, threshold):
    path = store(tmp_path / "a.jsonl", [1.0] * 6)
    with pytest.raises(UsageError, match="--threshold"):
        run(path, path, threshold=threshold)
