"""Refused: Hugging Face folders that are damaged or of another kind of model, and models that Llama lacks."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from raising import raises
from their_models import make_theirs, their_folder

from lmkit.errors import LmkitError, UsageError
from lmkit.model import ModelConfig
from lmkit.model.hugging_face import config_json
from lmkit.registry import ATTENTION
from lmkit.training.checkpoint import write_tensors
from lmkit.training.exchange import export_model, import_model
from lmkit.training.weights import INDEX, open_weights


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gemma"}, "gemma"),
        ({"model_type": None}, "model_type"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"model_type": "qwen3", "architectures": None, "head_dim": 8, "attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"is_causal": False}, "is_causal"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor"),
        ({"rope_parameters": {"rope_type": "default", "beta_fast": 3}}, "beta_fast"),
        ({"model_type": "mistral", "architectures": None, "sliding_window": 128}, "sliding_window"),
        ({"model_type": "qwen2", "architectures": None, "use_sliding_window": True, "sliding_window": 9,
          "max_window_layers": 1}, "sliding_window"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_parameters": None}, "dynamic"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling beside"),
        ({"original_max_position_embeddings": 9, "rope_scaling": None, "rope_parameters": {
            "rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 2.0}},
         "original_max_position_embeddings"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types"),
    ],
)  # fmt: skip
def test_what_lmkit_cannot_express_is_refused_by_name(tmp_path, changes, named):
    path = their_folder(tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))
    with raises(UsageError, "import.unsupported", path / "config.json", named):
        import_model(path, tmp_path / "run")
    assert {item.name for item in tmp_path.iterdir()} == {"theirs"}


def test_an_adapter_beside_a_model_is_refused(tmp_path):
    path = their_folder(tmp_path)
    (path / "adapter_config.json").write_text("{}")
    with raises(UsageError, "import.unsupported", "adapter_config.json"):
        open_weights(path)


def edited(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


# What is done to a folder of three shards.
Damage = Callable[[Path], object]
SHARD = "model-00002-of-00003.safetensors"
NORM = "model.norm.weight"


def config(**changes: Any) -> Damage:
    return lambda path: edited(path / "config.json", **changes)


def header(change: Callable[[dict[str, Any]], object], length: int | None = None) -> Damage:
    """`change` is called with the header of a shard; `length` is written in place of the header's true length."""

    def damage(path: Path) -> None:
        data = (path / SHARD).read_bytes()
        size = int.from_bytes(data[:8], "little")
        tensors = json.loads(data[8 : 8 + size])
        change(tensors)
        text = json.dumps(tensors).encode()
        (path / SHARD).write_bytes((length or len(text)).to_bytes(8, "little") + text + data[8 + size :])

    return damage


def last_tensor(header: dict[str, Any]) -> dict[str, Any]:
    return [*header.values()][-1]


def index(**places: str | None) -> Damage:
    """The index says that tensors lie in other files, or lacks them (None)."""

    def damage(path: Path) -> None:
        files = json.loads((path / INDEX).read_text())["weight_map"] | places
        edited(path / INDEX, weight_map={name: file for name, file in files.items() if file is not None})

    return damage


DAMAGES: dict[str, dict[str, Damage]] = {
    "weights.damaged_file": {
        "a shard is missing": lambda path: (path / SHARD).unlink(),
        "a shard is cut": lambda path: cut(path / SHARD),
        "a header of 2^63 bytes": header(lambda tensors: None, length=1 << 63),
        "a shape of 10^30 elements": header(lambda tensors: last_tensor(tensors).update(shape=[10**30])),
        "tensors that overlap": header(lambda tensors: tensors.update(again=dict(last_tensor(tensors)))),
        "the index is cut": lambda path: cut(path / INDEX),
        "the index lists more": index(other="model-00001-of-00003.safetensors"),
        "the index names another file": index(**{NORM: "model-00001-of-00003.safetensors"}),
        "the index leaves the folder": index(**{NORM: "../theirs/" + SHARD}),
        "the index is empty": lambda path: edited(path / INDEX, weight_map={}),
    },
    "weights.missing": {
        "another number of layers": config(num_hidden_layers=10_000),
        "the index lacks a tensor": index(**{NORM: None}),
    },
    "weights.other_model": {
        "another width": config(hidden_size=1 << 29, head_dim=None),
        "other heads": config(num_key_value_heads=2),
    },
    "import.unsupported": {
        "fewer layers": config(num_hidden_layers=1),
    },
    "import.context_length": {"an endless context": config(max_position_embeddings=10**12)},
    "import.damaged_config": {
        "more layers than any model has": config(num_hidden_layers=1_000_000_000),
        "the configuration is cut": lambda path: cut(path / "config.json"),
        "a configuration of true": config(hidden_size=True),
    },
    "import.no_config": {"no configuration": lambda path: (path / "config.json").unlink()},
    "import.no_tokenizer": {"no tokenizer": lambda path: (path / "tokenizer.json").unlink()},
    "import.tokenizer": {
        "a tokenizer of sentencepiece": lambda path: edited(
            path / "tokenizer.json", normalizer={"type": "Prepend", "prepend": "_"}, pre_tokenizer=None
        )
    },
    "tokenizer.damaged_file": {"a damaged tokenizer": lambda path: cut(path / "tokenizer.json")},
}


@pytest.fixture(scope="session")
def three_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = their_folder(tmp_path_factory.mktemp("three"), max_shard_size="60KB")
    assert (path / SHARD).exists()
    return path


@pytest.mark.parametrize(
    ("code", "damage"), [(code, damage) for code, damages in DAMAGES.items() for damage in damages]
)
def test_a_damaged_folder_ends_in_one_line_and_leaves_nothing(three_shards, tmp_path, code, damage):
    path = shutil.copytree(three_shards, tmp_path / "theirs")
    DAMAGES[code][damage](path)
    with raises(LmkitError, code, path):
        import_model(path, tmp_path / "run")
    assert {item.name for item in tmp_path.iterdir()} == {"theirs"}


def test_a_pickle_is_never_read(tmp_path):
    path = tmp_path / "theirs"
    make_theirs("Llama", {}).config.save_pretrained(path)
    (path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch stolen'\ntR.")
    with raises(UsageError, "import.pickle", path, hint="safetensors"):
        import_model(path, tmp_path / "run")
    with raises(UsageError, "import.pickle", path):
        open_weights(path)


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path):
    path = their_folder(tmp_path, "Llama", {"vocab_size": 256})
    with raises(UsageError, "import.tokenizer", path / "tokenizer.json", "256", hint="--without-tokenizer"):
        import_model(path, tmp_path / "run")
    assert "--tokenizer" in str(import_model(path, tmp_path / "run", with_tokenizer=False))


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    path = their_folder(tmp_path)
    import_model(path, tmp_path / "run")

    def full(*arguments: Any, **options: Any) -> None:
        write_tensors(*arguments, **options)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lmkit.training.exchange.write_tensors", full)
    for call in (
        lambda: import_model(path, tmp_path / "other"),
        lambda: export_model(tmp_path / "run", tmp_path / "other"),
    ):
        with pytest.raises(OSError, match="No space"):
            call()
        assert {item.name for item in tmp_path.iterdir()} == {"theirs", "run"}


def test_an_attention_kernel_that_does_not_see_all_is_refused_by_name(tmp_path, monkeypatch):
    import_model(their_folder(tmp_path), tmp_path / "run")
    facts = replace(ATTENTION.facts("sdpa"), sees_all=False)
    monkeypatch.setattr(type(ATTENTION), "facts", lambda self, name: facts)
    with raises(UsageError, "export.unsupported", "model.attention", "sdpa"):
        export_model(tmp_path / "run", tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def test_switches_that_llama_lacks_are_refused_by_name():
    config = ModelConfig(vocab_size=300, attention_window=9, qkv_bias=True, zero_init=True)
    with raises(UsageError, "export.unsupported", "model.attention_window") as caught:
        config_json(config, dtype="float32", begin=None, end=None)
    assert "qkv_bias" not in str(caught.value)
    both = ModelConfig(vocab_size=300, qk_norm=True, qkv_bias=True)
    with raises(UsageError, "export.unsupported", "model.qkv_bias", "model.qk_norm"):
        config_json(both, dtype="float32", begin=None, end=None)
