"""Training on a token file with a mask: what counts weighs the same in every split of a batch."""

from pathlib import Path

import numpy as np
import pytest
from raising import raises
from run_folders import assert_resumes_exactly, losses, records, train_here

from lmkit.data.shards import open_tokens
from lmkit.data.token_files import TokenFileWriter
from lmkit.errors import LmkitError, UsageError
from lmkit.training.judging import evaluate_run


@pytest.fixture
def masked(token_files: tuple[Path, Path], tmp_path: Path) -> tuple[str, ...]:
    """Settings with copies of the token files of which runs of 1 to 12 tokens count, or do not."""
    places = []
    for part, source in zip(("train", "valid"), token_files, strict=True):
        tokens, path = np.array(open_tokens(source).tokens), tmp_path / f"{part}.npy"
        generator, counts = np.random.default_rng(3), False
        with TokenFileWriter(path, vocab_size=64, tokenizer_sha256="a" * 64, masked=True) as writer:
            while len(tokens):
                cut = int(generator.integers(1, 13))
                writer.append(tokens[:cut], counts=counts)
                tokens, counts = tokens[cut:], not counts
            writer.finish(num_bytes=100, source_sha256="b" * 64, counted_bytes=50)
        places.append(f'data.{part}="{path}"')
    return tuple(places)


def test_every_split_of_a_batch_is_the_same_step(masked, tiny):
    """Slices of a batch hold unequal numbers of targets that count."""
    found = []
    for accumulation in (1, 2, 8):
        recipe = tiny(f"run.name=by{accumulation}", f"train.accumulation={accumulation}", *masked)
        train_here(recipe)
        found.append([loss for _, loss in losses(recipe)])
    for other in found[1:]:
        assert other == pytest.approx(found[0], abs=1e-5)  # sums in another order
    plain = tiny("run.name=plain", "train.accumulation=1")
    train_here(plain)
    assert [loss for _, loss in losses(plain)] != pytest.approx(found[0], abs=1e-2)


def test_resume_is_exact(masked, tiny):
    assert_resumes_exactly(tiny(*masked))


def test_a_held_out_loss_of_no_tokens_is_refused(tiny, tmp_path):
    """Those of the first windows, while training; those of a file."""
    for name, late in (("late", True), ("none", False)):
        path = tmp_path / f"{name}.npy"
        with TokenFileWriter(path, vocab_size=64, tokenizer_sha256="a" * 64, masked=True) as writer:
            writer.append(np.arange(64).repeat(9), counts=False)
            writer.append(np.arange(64), counts=late)
            writer.finish(num_bytes=9, source_sha256="b" * 64, counted_bytes=9 * late)
    recipe = tiny(f'data.valid="{tmp_path}/late.npy"', "train.eval_batches=1")
    with raises(LmkitError, "train.nonfinite", "step 4", "0 held-out tokens", hint="train.eval_batches"):
        train_here(recipe)
    assert not records(recipe, "valid")
    trained = tiny("run.name=trained")
    train_here(trained)
    evaluate_run(trained.run.path, tokens=tmp_path / "late.npy", device="cpu")
    with raises(UsageError, "evaluate.nothing_counts", "none.npy"):
        evaluate_run(trained.run.path, tokens=tmp_path / "none.npy", device="cpu")
