"""`train.init_from`: the weights of a run, a checkpoint or a Hugging Face folder, with a fresh optimizer."""

from dataclasses import replace

import pytest
from byte_tokenizers import of_bytes
from raising import raises
from run_folders import Tiny, assert_same_state, losses, newest, train_here

from lmkit.errors import LmkitError, UsageError
from lmkit.training.checkpoint import MODEL, Checkpoint, write_manifest, write_tensors
from lmkit.training.exchange import export_model
from lmkit.training.session import plan
from lmkit.training.weights import open_weights, weights_of


@pytest.fixture
def trained(tiny: Tiny) -> Checkpoint:
    recipe = tiny("run.name=before", "optimizer.lr=0.05")
    train_here(recipe)
    return newest(recipe)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_begins_with_the_weights_and_a_fresh_optimizer(trained, tiny, precision):
    chosen = (f"train.init_from={trained.path}", f"train.precision={precision}", "train.eval_batches=0")
    recipe = tiny("run.name=after", *chosen)
    result = train_here(recipe, stop_at_step=3)
    assert (result.status, result.step, result.resumed_from) == ("stopped early", 3, None)
    (step, before), *_ = losses(recipe, "valid")
    ended = losses(tiny("run.name=before"), "final")[-1][1]
    # Weights rounded to 8 bits move a loss of 4 by some thousandths; in fp32 it is the same computation.
    assert (step, before) == (0, pytest.approx(ended, abs=1e-6 if precision == "fp32" else 1e-2))
    untrained = losses(tiny("run.name=before"))[0][1]
    assert ended < untrained - 0.1
    assert losses(recipe)[-1][1] < untrained - 0.1  # the masters of bf16 weights are loaded, too
    (state,) = newest(recipe).all_optimizer_shards()
    counted = [value for name, value in state.items() if name.endswith(".step")]
    assert counted
    assert all(value == 3 for value in counted)


def test_a_run_a_checkpoint_and_an_exported_folder_are_the_same_weights(trained, tiny, tmp_path):
    export_model(trained.path, tmp_path / "exported", dtype=None)
    found = []
    for number, source in enumerate((trained.path.parent.parent, trained.path, tmp_path / "exported")):
        recipe = tiny(f"run.name=after{number}", f"train.init_from={source}")
        train_here(recipe)
        found.append((losses(recipe), losses(recipe, "valid")))
    assert found[0] == found[1] == found[2]


def test_weights_too_large_for_bf16_are_refused(trained, tiny):
    tensors = dict(weights_of(trained))
    tensors["lm_head.weight"][0, 0] = 3.4e38
    entries = {**trained.entries, MODEL: write_tensors(trained.path / MODEL, tensors)}
    write_manifest(trained.path, entries)
    with raises(LmkitError, "weights.not_finite", trained.path, "lm_head.weight", hint="train.precision"):
        train_here(tiny("run.name=after", f"train.init_from={trained.path}", "train.precision=bf16"))


def test_it_resumes_without_the_weights_bit_for_bit(trained, tiny):
    source = f"train.init_from={trained.path.parent.parent}"
    whole, parts = tiny("run.name=whole", source), tiny("run.name=parts", source)
    train_here(whole)
    train_here(parts, stop_at_step=5)
    trained.path.parent.parent.rename(trained.path.parent.parent.with_name("gone"))
    assert train_here(parts).resumed_from == 5
    assert_same_state(newest(whole), newest(parts))
    assert losses(whole) == losses(parts)


def test_another_model_is_refused_with_all_its_differences(trained, tiny):
    recipe = tiny(
        *("run.name=wider", f"train.init_from={trained.path}", "model.d_model=32", "model.d_ff=48"),
        *("model.rope_theta=500.0", "model.vocab_size=80"),
    )
    keys = ("d_model: 32, the weights have 16", "d_ff: 48", "rope_theta: 500.0", "vocab_size: 80")
    for begin in (train_here, plan):
        with raises(UsageError, "train.other_model", trained.path, *keys):
            begin(recipe)
    assert not (recipe.run.path / "checkpoints").exists()


def test_another_context_kernel_and_beginning_are_allowed(trained, tiny):
    recipe = tiny(
        *("run.name=longer", f"train.init_from={trained.path}", "model.context_length=16"),
        *("model.attention=reference", "model.zero_init=true"),
        *("model.activation_checkpointing=selective", "model.activation_gb=0.001"),
    )
    assert train_here(recipe).status == "finished"


def test_another_tokenizer_is_refused(trained, tiny, monkeypatch):
    tokenizer = trained.path.parent.parent / "tokenizer.json"
    of_bytes("<|endoftext|>").save(tokenizer)
    after = tiny("run.name=after", f"train.init_from={trained.path}")
    with raises(UsageError, "checkpoint.wrong_tokenizer", tokenizer, "a" * 12):
        train_here(after)
    # A Hugging Face folder does not say which tokenizer its model was trained with.
    given = open_weights(trained.path)
    of_theirs = {"state": None, "tokenizer_sha256": None, "config": given.config.changed(vocab_size=257)}
    monkeypatch.setattr("lmkit.training.weights.open_weights", lambda path: replace(given, **of_theirs))
    with raises(UsageError, "train.other_tokenizer", trained.path, "a" * 12, hint=str(tokenizer)):
        train_here(after)
