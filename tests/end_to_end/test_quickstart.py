"""The quickstart, in full, judged against its targets: time, memory, loss against a word bigram, and the story."""

import json
import os
import resource
import subprocess
import sys
import time

import pytest
from bigram_baseline import BigramModel, words_without_case

MOST_MINUTES = 3.0
MOST_GB = 2.0
BIGRAM_SHARE = 0.85  # of the bits per byte of an interpolated word bigram trained on the same text
KNOWN_WORDS = 0.95
COPIED_SHARE = 0.30
COPIED_RUN = 8  # words in a row


def copied_share(words: list[str], corpus: list[str]) -> float:
    """Share of the words that lie in a run of `COPIED_RUN` words which the corpus has too."""
    runs = set(zip(*(corpus[i:] for i in range(COPIED_RUN)), strict=False))
    covered: set[int] = set()
    for i in range(len(words) - COPIED_RUN + 1):
        if tuple(words[i : i + COPIED_RUN]) in runs:
            covered.update(range(i, i + COPIED_RUN))
    return len(covered) / len(words)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_quickstart_meets_its_targets(tmp_path):
    # With as many threads as a user's run has; the other tests have one each.
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}

    def lmkit(*words: str) -> tuple[str, float]:
        command = [sys.executable, "-m", "lmkit", *words]
        started = time.monotonic()
        done = subprocess.run(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True, check=True)
        return done.stdout, time.monotonic() - started

    printed, seconds = lmkit("run", "quickstart", "--json")
    summary = json.loads(printed)
    gigabytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e9
    _, rerun_seconds = lmkit("run", "quickstart")

    run = tmp_path / summary["folder"]
    train, valid = (run / "corpus" / f"{part}.txt" for part in ("train", "valid"))
    model = BigramModel(train.read_text("utf-8"))
    bigram = model.bits_per_byte(valid.read_text("utf-8"))

    # One text of 200 words may copy 8% or 30%, by chance: four longer ones are judged together.
    words: list[str] = []
    for seed in range(4):
        generate = ("generate", str(run), "--max-new-tokens", "600", "--no-stop-at-end", "--seed", str(seed))
        words += words_without_case(lmkit(*generate)[0].replace("<|endoftext|>", " "))
    corpus = words_without_case(train.read_text("utf-8"))
    vocabulary = set(corpus)
    known = sum(word in vocabulary for word in words) / len(words)
    copied = copied_share(words, corpus)

    print(
        f"\n{os.cpu_count()} CPUs: {seconds / 60:.2f} minutes, {gigabytes:.2f} GB, rerun {rerun_seconds:.1f} s; "
        f"{summary['bits_per_byte']:.4f} bits per byte, bigram {bigram:.4f} "
        f"(ratio {summary['bits_per_byte'] / bigram:.3f}); words known {known:.1%}, copied {copied:.1%}"
    )
    assert len(words) > 1000
    assert seconds / 60 <= MOST_MINUTES
    assert gigabytes <= MOST_GB
    assert rerun_seconds < 5
    assert summary["bits_per_byte"] <= BIGRAM_SHARE * bigram
    assert known >= KNOWN_WORDS
    assert copied <= COPIED_SHARE
