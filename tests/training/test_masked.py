"""Training on a token file with a mask: what counts weighs the same in every split of a batch."""

from pathlib import Path

import numpy as np
import pytest
import torch
from raising import raises
from run_folders import assert_same_state, losses, newest, records, train_here

from lmkit.data.token_files import TokenFileWriter, open_tokens
from lmkit.errors import LmkitError, UsageError
from lmkit.training.judging import evaluate_run
from lmkit.training.weights import weights_of


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


def test_the_first_loss_and_the_last_evaluation_are_means_over_what_counts(masked, tiny):
    recipe = tiny(*masked, "optimizer.lr=0.02", "train.eval_batches=0")
    result = train_here(recipe)
    model = weights_of(newest(recipe)).model("cpu")
    file = open_tokens(recipe.data.valid or "")
    assert file.mask is not None
    ids = torch.from_numpy(file.tokens.astype(np.int64))
    flags = np.unpackbits(file.mask)[: len(ids)]
    nats, count = 0.0, 0
    for start in range(0, len(ids) - 1, 8):
        window = ids[start : start + 9]
        with torch.no_grad():
            log_p = model(window[None, :-1])[0].double().log_softmax(-1)
        for position, target in enumerate(window[1:]):
            if flags[start + 1 + position]:
                nats -= float(log_p[position, target])
                count += 1
    assert result.evaluation.loss == pytest.approx(nats / count, rel=1e-6)
    evaluation = evaluate_run(recipe.run.path, device="cpu")
    assert (evaluation.loss, evaluation.tokens) == (result.evaluation.loss, count)
    assert file.meta.counted_tokens is not None
    bits = nats / count / np.log(2) / (50 / file.meta.counted_tokens)
    assert evaluation.bits_per_byte == pytest.approx(bits, rel=1e-6)


def test_resume_is_exact(masked, tiny):
    whole, parts = tiny("run.name=whole", *masked), tiny("run.name=parts", *masked)
    train_here(whole)
    train_here(parts, stop_at_step=5)
    assert train_here(parts).resumed_from == 5
    assert_same_state(newest(whole), newest(parts))
    assert losses(whole) == losses(parts)


def test_windows_in_which_nothing_counts_change_only_by_weight_decay(tiny, tmp_path):
    path = tmp_path / "none.npy"
    with TokenFileWriter(path, vocab_size=64, tokenizer_sha256="a" * 64, masked=True) as writer:
        writer.append(np.arange(64).repeat(9), counts=False)
        writer.finish(num_bytes=9, source_sha256="b" * 64, counted_bytes=0)
    recipe = tiny(f'data.train="{path}"', "optimizer.weight_decay=0", "train.eval_interval=0")
    train_here(recipe)
    assert {loss for _, loss in losses(recipe)} == {0.0}
    _, final = losses(recipe, "final")[-1]
    assert final == pytest.approx(np.log(64), abs=0.3)  # as at the beginning


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
