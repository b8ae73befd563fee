"""What commands say fits a terminal."""

from __future__ import annotations

import pytest
import torch

from lmkit.bench.harness import BenchStored
from lmkit.cli.data import Encoded, Synthesised, TokenFileFacts
from lmkit.cli.env import EnvironmentFacts, _features
from lmkit.cli.pipeline import RunSummary
from lmkit.cli.recipe import RecipeCopied, RecipeIsValid
from lmkit.cli.tokenizer import TokenizerWritten, facts_text
from lmkit.measure.tables import TERMINAL_WIDTH
from lmkit.tokenizer.tokenizer import TokenizerFacts
from lmkit.training.evaluation import EvaluateResult

FOLDER = "artifacts/benches/attention-cpu/attention"
FILES = tuple(f"attention_sweep_results-{number}.jsonl" for number in range(9))
RUN = "artifacts/runs/quickstart"


@pytest.mark.parametrize(
    "result",
    [
        BenchStored("attention", FOLDER, FILES, [], "table", measured=True),
    ],
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


LONG = "a-folder-for-all-experiments/of-the-second-year/with-stories-of-many-kinds"
NUMBER = 123_456_789_012


@pytest.mark.parametrize(
    "result",
    [
        Synthesised(f"{LONG}/stories.txt", NUMBER),
        Encoded(f"{LONG}/tokens.npy", NUMBER, NUMBER, 3 * NUMBER),
        TokenFileFacts(
            f"{LONG}/tokens.npy", "uint16", NUMBER, NUMBER, 3 * NUMBER, 50_257, "a" * 64, "word " * 64
        ),
        TokenizerWritten(f"{LONG}/tokenizer.json", 50_257, "a" * 64),
        RecipeIsValid(f"{LONG}/mine.toml", ("checkpoint",) * 12),
        RecipeCopied(f"{LONG}/mine.toml", f"lmkit run {LONG}/mine.toml"),
        RunSummary(
            LONG,
            {},
            NUMBER,
            50_257,
            NUMBER,
            NUMBER,
            NUMBER,
            NUMBER,
            123_456.5,
            9.5,
            1234.5,
            12.5,
            {},
            "The end.",
        ),
        EnvironmentFacts({f"package-{i}": "2.10.0+cu128" for i in range(12)}, "a CPU", (), {"ranks": "gloo"}),
    ],
    ids=lambda result: type(result).__name__,
)
def test_results_with_long_names_and_numbers_fit_too(result: object) -> None:
    lines = str(result).splitlines()
    assert max(map(len, lines)) <= TERMINAL_WIDTH
    path = next((value for value in vars(result).values() if LONG in str(value)), "package-11  2.10.0+cu128")
    assert str(path) in str(result)  # in one piece, to be copied


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0.0 kB"), (10_000, "10.0 kB"), (100_000, "0.1 MB"), (21_000_000, "21.0 MB")]
)
def test_a_small_file_is_not_called_nothing(num_bytes: int, text: str) -> None:
    assert f": {text} of stories" in str(Synthesised("stories.txt", num_bytes))


def test_the_facts_of_a_tokenizer_fit_too() -> None:
    path = f"{LONG}/tokenizer.json"
    special, longest = ("<|endoftext|>",) * 9, (" extraordinarily",) * 10
    text = facts_text(TokenizerFacts(path, 50_257, 50_000, special, longest, "a" * 64, 4.5))
    assert max(map(len, text.splitlines())) <= TERMINAL_WIDTH
    assert path in text


def test_env_says_why_a_kernel_does_not_take_its_fastest_implementation() -> None:
    pytest.importorskip("triton", reason="Triton exists for Linux only")
    if torch.cuda.is_available():
        pytest.skip("a GPU may have the fastest")
    kernels = _features(has_gpu=True)["flash_triton"]
    assert kernels == "portable kernels: the tensors are not on a CUDA device"
