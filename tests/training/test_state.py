from __future__ import annotations

import json
import random
import re

import pytest
import torch

from lmkit.errors import LmkitError
from lmkit.recipe.tables import ModelConfig
from lmkit.training.state import RngState, TrainingState, capture_rng, parse_state, restore_rng

CPU = torch.device("cpu")


def make_state() -> TrainingState:
    return TrainingState(
        lmkit="0",
        step=7,
        seconds=0.25,
        tokens=448,
        valid_loss=1.25,
        world_size=1,
        strategy="none",
        optimizer_shards=1,
        rng=(capture_rng(CPU),),
        model=ModelConfig(vocab_size=300),
        recipe={"run": {"seed": 1}},
        recipe_sha256="0" * 64,
    )


def test_generators_go_on_where_they_were() -> None:
    torch.manual_seed(3)
    torch.rand(5)
    state = capture_rng(CPU)
    expected = torch.rand(4)
    torch.manual_seed(99)
    restore_rng(state, CPU)
    assert torch.equal(torch.rand(4), expected)


def test_a_gpus_generator_goes_on_too(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 1)
    states = {device: torch.arange(16, dtype=torch.uint8)}
    monkeypatch.setattr(torch.cuda, "get_rng_state", states.__getitem__)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, place: states.update({place: state}))
    state = capture_rng(device)
    states[device] = torch.zeros(16, dtype=torch.uint8)
    restore_rng(state, device)
    assert torch.equal(states[device], torch.arange(16, dtype=torch.uint8))
    restore_rng(capture_rng(CPU), device)  # saved where there was no GPU: it goes on with what it has
    restore_rng(state, CPU)
    assert torch.equal(states[device], torch.arange(16, dtype=torch.uint8))


def test_json_round_trip() -> None:
    state = make_state()
    assert parse_state(state.model_dump_json().encode(), path="state.json") == state


@pytest.mark.parametrize(
    "text", [b"", b"null", b"[]", b"{}", b"\xff", b'{"step": true}', b"[" * 50_000], ids=range(7)
)
def test_anything_else_is_one_error_with_the_file_in_it(text: bytes) -> None:
    with pytest.raises(LmkitError, match=r"^state\.json: [^\n]*$"):
        parse_state(text, path="state.json")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("format", 0),
        ("format", "2"),
        ("step", -1),
        ("seconds", -0.5),
        ("time_fraction", -0.5),
        ("tokens", -1),
        ("skipped_in_a_row", -1),
        ("world_size", 0),
        ("optimizer_shards", 0),
        ("rng", []),
        ("loss_scale.scale", 0.0),
        ("loss_scale.good_steps", -1),
        ("data.num_tokens", -1),
        ("data.vocab_size", 0),
    ],
)
def test_a_number_out_of_range_is_named_by_its_whole_key(key: str, value: object) -> None:
    content = make_state().model_dump(mode="json")
    content |= {
        "loss_scale": {"scale": 4.0, "good_steps": 3},
        "data": {"num_tokens": 9, "vocab_size": 5, "source_sha256": "a", "tokenizer_sha256": "b"},
    }
    assert parse_state(json.dumps(content).encode(), path="state.json").skipped_in_a_row == 0
    *tables, name = key.split(".")
    table = content
    for part in tables:
        table = table[part]
    table[name] = value
    table["zzz"] = 1  # a later mistake
    with pytest.raises(LmkitError, match=rf"^state\.json: {re.escape(key)}: ") as refused:
        parse_state(json.dumps(content).encode(), path="state.json")
    assert refused.value.code == "checkpoint.damaged"
    assert refused.value.hint


@pytest.mark.parametrize(
    "cpu", ["", "AAAA", "not base64", "A" * 6744], ids=["empty", "short", "no base64", "long"]
)
def test_generators_that_cannot_be_restored_are_one_error(cpu: str) -> None:
    before = torch.get_rng_state()
    with pytest.raises(LmkitError, match="cannot be restored"):
        restore_rng(RngState(cpu=cpu), CPU)
    assert torch.equal(torch.get_rng_state(), before)


def test_mutated_states_load_or_end_in_an_error_of_ours() -> None:
    whole = make_state().model_dump_json().encode()
    generator = random.Random(1)
    for _ in range(500):
        damaged = bytearray(whole)
        for _ in range(generator.randrange(1, 4)):
            damaged[generator.randrange(len(whole))] = generator.randrange(256)
        try:
            parse_state(bytes(damaged), path="state.json")
        except LmkitError:
            continue
