"""What commands say fits a terminal."""

from __future__ import annotations

import pytest

from lmkit.commands.bench import BenchStored
from lmkit.commands.evaluate import EvaluateResult
from lmkit.commands.profile import Profiled
from lmkit.measure.tables import TERMINAL_WIDTH

FOLDER = "artifacts/benches/attention-cpu/attention"
FILES = tuple(f"attention_sweep_results-{number}.jsonl" for number in range(9))
RUN = "artifacts/runs/quickstart"


@pytest.mark.parametrize(
    "result", [BenchStored("attention", FOLDER, FILES, [], "table"), Profiled(FOLDER, FILES, {}, "table")]
)
def test_a_long_list_of_files_is_wrapped_between_names(result: object) -> None:
    lines = str(result).splitlines()
    assert max(map(len, lines)) <= TERMINAL_WIDTH
    assert lines[1].startswith(f"wrote {FOLDER}: {FILES[0]},")
    assert [name.strip() for name in " ".join(lines[1:]).partition(": ")[2].split(",")] == list(FILES)


def test_an_evaluation_fits_too() -> None:
    result = EvaluateResult(
        checkpoint=f"{RUN}/checkpoints/step-00000850",
        step=850,
        tokens_file=f"{RUN}/tokens/valid.npy",
        tokens=123_456_789,
        loss=1.25,
        perplexity=3.49,
        bits_per_byte=0.5,
    )
    text = str(result)
    assert max(map(len, text.splitlines())) <= TERMINAL_WIDTH
    for part in (result.checkpoint, result.tokens_file, "123,456,789", "1.2500", "3.49", "0.5000"):
        assert part in text
