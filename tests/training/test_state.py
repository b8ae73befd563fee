"""`state.json` and the random generators in it."""

from __future__ import annotations

import json
import random

import pytest
import torch
from run_folders import refused
from test_checkpoint_writer import make_state

from lmkit.errors import LmkitError
from lmkit.training.checkpoint import parse_state
from lmkit.training.state import RngState, capture_rng, restore_rng

CPU = torch.device("cpu")


def test_generators_continue_where_they_were() -> None:
    torch.manual_seed(3)
    torch.rand(5)
    state = capture_rng(CPU)
    expected = torch.rand(4)
    torch.manual_seed(99)
    restore_rng(state, CPU)
    assert torch.equal(torch.rand(4), expected)


def test_a_gpus_generator_continues_too(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 1)
    states = {device: torch.arange(16, dtype=torch.uint8)}
    monkeypatch.setattr(torch.cuda, "get_rng_state", states.__getitem__)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, place: states.update({place: state}))
    state = capture_rng(device)
    states[device] = torch.zeros(16, dtype=torch.uint8)
    restore_rng(state, device)
    assert torch.equal(states[device], torch.arange(16, dtype=torch.uint8))
    restore_rng(capture_rng(CPU), device)  # saved where there was no GPU: its own state stays
    restore_rng(state, CPU)
    assert torch.equal(states[device], torch.arange(16, dtype=torch.uint8))


@pytest.mark.parametrize(
    "text", [b"", b"null", b"[]", b"{}", b"\xff", b'{"step": true}', b"[" * 50_000], ids=range(7)
)
def test_anything_else_is_one_error_with_the_file_in_it(text: bytes) -> None:
    with refused("checkpoint.damaged", "state.json: "):
        parse_state(text, path="state.json")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("format", 0),
        ("format", "2"),
        ("step", -1),
        ("seconds", -0.5),
        ("time_fraction", -0.5),
        ("world_size", 0),
        ("rng", []),
        ("loss_scale.scale", 0.0),
        ("data.vocab_size", 0),
    ],
)
def test_a_number_out_of_range_is_named_by_its_whole_key(key: str, value: object) -> None:
    content = make_state(7).model_dump(mode="json")
    content |= {
        "loss_scale": {"scale": 4.0, "good_steps": 3},
        "data": {"num_tokens": 9, "vocab_size": 5, "source_sha256": "a", "tokenizer_sha256": "b"},
    }
    state = parse_state(json.dumps(content).encode(), path="state.json")
    assert parse_state(state.model_dump_json().encode(), path="state.json") == state
    *tables, name = key.split(".")
    table = content
    for part in tables:
        table = table[part]
    table[name] = value
    table["zzz"] = 1  # a later mistake
    with refused("checkpoint.damaged", f"state.json: {key}: "):
        parse_state(json.dumps(content).encode(), path="state.json")


@pytest.mark.parametrize("cpu", ["", "AAAA", "not base64", "A" * 6744])
def test_generators_that_cannot_be_restored_are_one_error(cpu: str) -> None:
    before = torch.get_rng_state()
    with refused("checkpoint.bad_rng"):
        restore_rng(RngState(cpu=cpu), CPU)
    assert torch.equal(torch.get_rng_state(), before)


def test_mutated_states_load_or_are_refused() -> None:
    whole = make_state(7).model_dump_json().encode()
    generator = random.Random(1)
    for _ in range(500):
        damaged = bytearray(whole)
        for _ in range(generator.randrange(1, 4)):
            damaged[generator.randrange(len(whole))] = generator.randrange(256)
        try:
            parse_state(bytes(damaged), path="state.json")
        except LmkitError:
            continue
