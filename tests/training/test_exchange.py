"""Models to and from Hugging Face folders, against transformers, and folders that are damaged or foreign."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from run_folders import refused
from their_models import CASES, GROUPED, LLAMA3, make_theirs
from torch.utils._python_dispatch import TorchDispatchMode

from lmkit.errors import LmkitError, UsageError
from lmkit.generation import generate
from lmkit.model import ModelConfig, TransformerLM
from lmkit.model.hugging_face import config_json
from lmkit.recipe.load import load_recipe
from lmkit.recipe.tables import GenerateConfig
from lmkit.tokenizer import Tokenizer
from lmkit.training.atomic_checkpoint import MODEL, write_tensors
from lmkit.training.checkpoint import newest_checkpoint
from lmkit.training.exchange import export_model, import_model
from lmkit.training.given_weights import INDEX, open_weights
from lmkit.training.model_state import plain_model
from lmkit.training.session import train
from lmkit.training.tensor_files import TensorFile
from lmkit.training.verify import verify_path

transformers = pytest.importorskip("transformers")


def byte_tokenizer() -> Tokenizer:
    return Tokenizer.from_merges([(b"h", b"e"), (b" ", b"t"), (b" t", b"he")], ["<|endoftext|>", "<|pad|>"])


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """folder(kind, changes, **options of save_pretrained) -> a Hugging Face folder."""

    def make(kind: str = "Llama", changes: dict[str, Any] | None = None, **options: Any) -> Path:
        path = tmp_path / "theirs"
        make_theirs(kind, changes or {}).save_pretrained(path, **options)
        byte_tokenizer().save(path / "tokenizer.json")
        return path

    return make


def ours_of(run: Path) -> TransformerLM:
    return plain_model(newest_checkpoint(run), device="cpu")


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    files = [TensorFile(path) for path in sorted(folder.glob("*.safetensors"))]
    return {name: file.read(name) for file in files for name in file.tensors}


@pytest.mark.parametrize("case", CASES)
def test_import_and_export_keep_logits_and_tensors(case: str, tmp_path: Path) -> None:
    kind, changes = CASES[case]
    theirs = make_theirs(kind, changes)
    theirs.save_pretrained(tmp_path / "theirs")
    import_model(tmp_path / "theirs", tmp_path / "run", with_tokenizer=False)
    ours = ours_of(tmp_path / "run")
    ids = torch.randint(300, (2, 100))
    with torch.no_grad():
        # transformers computes angles in float32: at position 100 they are off by 1e-5.
        torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=0, atol=1e-5)
    export_model(tmp_path / "run", tmp_path / "exported")
    before, after = tensors_of(tmp_path / "theirs"), tensors_of(tmp_path / "exported")
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert type(again).__name__.startswith("Llama" if kind == "Mistral" else kind)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, theirs(ids).logits)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_weights_keep_their_bits(dtype: str, tmp_path: Path) -> None:
    theirs = make_theirs("Qwen2", GROUPED).to(getattr(torch, dtype))
    theirs.save_pretrained(tmp_path / "theirs")
    assert import_model(tmp_path / "theirs", tmp_path / "run", with_tokenizer=False).dtype == dtype
    result = export_model(tmp_path / "run", tmp_path / "exported")
    assert result.dtype == dtype
    before, after = tensors_of(tmp_path / "theirs"), tensors_of(tmp_path / "exported")
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert {tensor.dtype for tensor in after.values()} == {getattr(torch, dtype)}
    export_model(tmp_path / "run", tmp_path / "wide", dtype="fp32")
    assert json.loads((tmp_path / "wide/config.json").read_text())["torch_dtype"] == "float32"
    wide = tensors_of(tmp_path / "wide")
    assert all(torch.equal(tensor.float(), wide[name]) for name, tensor in before.items())


def test_greedy_text_is_that_of_transformers(folder: Callable[..., Path], tmp_path: Path) -> None:
    """200 tokens, with biases and scaled positions in the KV cache."""
    import_model(folder("Qwen2", {**GROUPED, **LLAMA3}), tmp_path / "run")
    export_model(tmp_path / "run", tmp_path / "exported")
    options = GenerateConfig(max_new_tokens=200, temperature=0.0, stop_at_end=False)
    ours = generate(ours_of(tmp_path / "run"), byte_tokenizer(), "the other", options)[0]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    given_ids = torch.tensor([tokenizer.encode("the other")])
    # The model has ids that the tokenizer lacks; lmkit never draws them.
    lacking = [[i] for i in range(byte_tokenizer().vocab_size, 300)]
    made = model.generate(
        given_ids,
        attention_mask=torch.ones_like(given_ids),
        do_sample=False,
        max_new_tokens=200,
        eos_token_id=None,
        pad_token_id=0,
        bad_words_ids=lacking,
    )
    assert made[0, given_ids.shape[1] :].tolist() == list(ours.tokens)


TEXTS = st.lists(
    st.sampled_from([*"the \n'\té1", "<|endoftext|>", "<|pad|>", "<|pa", "日", "\u0301"]), max_size=30
).map("".join)


def test_the_exported_tokenizer_is_ours(folder: Callable[..., Path], tmp_path: Path) -> None:
    import_model(folder(), tmp_path / "run")
    export_model(tmp_path / "run", tmp_path / "exported")
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported"), byte_tokenizer()
    assert theirs.eos_token_id == theirs.bos_token_id == ours.end_of_text_id
    assert theirs.model_max_length == 256

    @settings(max_examples=200, deadline=None)
    @given(st.one_of(st.text(max_size=60), TEXTS))
    def check(text: str) -> None:
        ids = ours.encode(text)
        assert theirs.encode(text) == ids
        assert theirs.decode(ids) == text

    check()


def test_an_imported_run_is_verified_evaluated_trained_and_resumed(
    folder: Callable[..., Path], settings: Callable[..., list[str]], tmp_path: Path
) -> None:
    import_model(folder("Qwen2"), tmp_path / "runs/run", context_length=8, with_tokenizer=False)
    run = tmp_path / "runs/run"
    assert verify_path(run).ok
    before = ours_of(run).state_dict()
    keep = [value for value in settings() if not value.startswith("model.")]
    result = train(load_recipe(run / "recipe.toml", [*keep, "train.steps=4", "optimizer.lr=1e-2"]))
    assert result is not None
    assert (result.resumed_from, result.step, result.status) == (0, 4, "finished")
    after = ours_of(run).state_dict()
    assert not torch.equal(before["layers.0.attn.q_proj.bias"], after["layers.0.attn.q_proj.bias"])
    again = train(load_recipe(run / "recipe.toml", [*keep, "train.steps=6", "optimizer.lr=1e-2"]))
    assert again is not None
    assert (again.resumed_from, again.step) == (4, 6)
    assert newest_checkpoint(run).optimizer_tensors()["layers.0.attn.k_proj.bias.exp_avg"].any()
    assert again.valid_loss is not None


def test_a_trained_run_opens_in_transformers(tiny: Callable[..., Any], tmp_path: Path) -> None:
    changes = ("model.num_kv_heads=1", "model.rope_scaling=linear", "model.rope_factor=2.0", "train.steps=4")
    recipe = tiny(*changes, "model.norm_eps=1e-3")
    train(recipe)
    exported = export_model(recipe.run.path, tmp_path / "exported")
    assert exported.files == ("config.json", "generation_config.json", "model.safetensors")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    ids = torch.randint(64, (2, 8))
    with torch.no_grad():
        torch.testing.assert_close(ours_of(recipe.run.path)(ids), theirs(ids).logits, rtol=0, atol=1e-5)


def test_one_loader_opens_all_three(folder: Callable[..., Path], tmp_path: Path) -> None:
    theirs = folder("Qwen2", GROUPED)
    import_model(theirs, tmp_path / "run")
    places = (theirs, tmp_path / "run", tmp_path / "run/checkpoints/step-00000000")
    first, *others = [open_weights(place) for place in places]
    for other in others:
        assert (other.config, other.specs.keys()) == (first.config, first.specs.keys())
        assert all(torch.equal(first.read(name), other.read(name)) for name in first.specs)
    assert [weights.tokenizer and weights.tokenizer.parent for weights in (first, *others)] == [
        theirs,
        tmp_path / "run",
        (tmp_path / "run").resolve(),
    ]
    model = TransformerLM(first.config)
    assert {name: weight.shape for name, weight in model.state_dict().items()} == {
        name: spec.shape for name, spec in first.specs.items()
    }


def test_shards_and_memory(folder: Callable[..., Path], tmp_path: Path) -> None:
    """No more than a tensor and its turned copy are in memory at a time."""
    theirs = folder("Llama", {"hidden_size": 64}, max_shard_size="100KB")
    assert len([*theirs.glob("model-*.safetensors")]) > 2
    with Allocations() as seen:
        import_model(theirs, tmp_path / "run")
    largest = max(tensor.nbytes for tensor in tensors_of(theirs).values())
    assert largest <= seen.peak <= 2 * largest
    with Allocations() as seen:
        exported = export_model(tmp_path / "run", tmp_path / "exported", shard_bytes=100_000)
    assert largest <= seen.peak <= 2 * largest
    assert INDEX in exported.files
    shards = [path.stat().st_size for path in (tmp_path / "exported").glob("*.safetensors")]
    assert len(shards) > 2
    assert sum(shards) > exported.bytes == sum(tensor.nbytes for tensor in tensors_of(theirs).values())
    assert max(shards) < 110_000
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    before = tensors_of(theirs)
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())


class Allocations(TorchDispatchMode):
    """Counts the bytes of tensors on the CPU that are alive; `peak` is the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[int, int]] = {}  # tensor -> where its storage begins, bytes
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.device.type == "cpu":
            storage = out.untyped_storage()
            weakref.finalize(out, self.alive.pop, id(out), None)
            self.alive[id(out)] = (storage.data_ptr(), storage.nbytes())
            self.peak = max(self.peak, sum(dict(self.alive.values()).values()))
        return out


# ---- folders that are refused


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gemma"}, "gemma"),
        ({"model_type": None}, "model_type"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"head_dim": 16}, "head_dim"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor"),
        ({"rope_parameters": {"rope_type": "default", "beta_fast": 3}}, "beta_fast"),
        ({"model_type": "mistral", "architectures": None, "sliding_window": 128}, "sliding_window"),
        ({"model_type": "qwen2", "architectures": None, "use_sliding_window": True, "sliding_window": 9},
         "sliding_window"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types"),
        ({"model_type": "qwen3", "architectures": None, "head_dim": None}, "head_dim"),
    ],
)  # fmt: skip
def test_what_lmkit_cannot_express_is_refused_by_name(
    folder: Callable[..., Path], tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    path = folder()
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))
    with refused("import.unsupported", path / "config.json", named, kind=UsageError):
        import_model(path, tmp_path / "run")
    assert {item.name for item in tmp_path.iterdir()} == {"theirs"}


def edited(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def with_header(path: Path, change: Callable[[dict[str, Any]], None], length: int | None = None) -> None:
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes((length or len(text)).to_bytes(8, "little") + text + data[8 + size :])


SHARD = "model-00002-of-00003.safetensors"
NORM = "model.norm.weight"


def with_index(path: Path, **places: str | None) -> None:
    weight_map = json.loads((path / INDEX).read_text())["weight_map"] | places
    edited(path / INDEX, weight_map={name: file for name, file in weight_map.items() if file is not None})


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a shard is missing": (lambda path: (path / SHARD).unlink(), "weights.damaged_file"),
    "a shard is cut": (lambda path: cut(path / SHARD), "weights.damaged_file"),
    "a shard is a folder": (
        lambda path: ((path / SHARD).unlink(), (path / SHARD).mkdir()),
        "weights.damaged_file",
    ),
    "a header of 2^63 bytes": (
        lambda path: with_header(path / SHARD, lambda header: None, 1 << 63),
        "weights.damaged_file",
    ),
    "a shape of 10^30 elements": (
        lambda path: with_header(path / SHARD, lambda header: [*header.values()][-1].update(shape=[10**30])),
        "weights.damaged_file",
    ),
    "tensors that overlap": (
        lambda path: with_header(
            path / SHARD, lambda header: header.update(again=dict([*header.values()][-1]))
        ),
        "weights.damaged_file",
    ),
    "a tensor of integers": (
        lambda path: with_header(path / SHARD, lambda header: [*header.values()][-1].update(dtype="I32")),
        "import.unsupported",
    ),
    "the index is cut": (lambda path: cut(path / INDEX), "weights.damaged_file"),
    "the index lacks a tensor": (
        lambda path: with_index(path, **{NORM: None}),
        "weights.damaged_file",
    ),
    "the index names another file": (
        lambda path: with_index(path, **{NORM: "model-00001-of-00003.safetensors"}),
        "weights.damaged_file",
    ),
    "the index leaves the folder": (
        lambda path: with_index(path, **{NORM: "../theirs/" + SHARD}),
        "weights.damaged_file",
    ),
    "the index is empty": (lambda path: edited(path / INDEX, weight_map={}), "weights.damaged_file"),
    "another number of layers": (
        lambda path: edited(path / "config.json", num_hidden_layers=10_000),
        "weights.missing",
    ),
    "more layers than any model has": (
        lambda path: edited(path / "config.json", num_hidden_layers=1_000_000_000),
        "import.damaged_config",
    ),
    "fewer layers": (lambda path: edited(path / "config.json", num_hidden_layers=1), "import.unsupported"),
    "another width": (
        lambda path: edited(path / "config.json", hidden_size=1 << 60, head_dim=None),
        "weights.other_model",
    ),
    "other heads": (
        lambda path: edited(path / "config.json", num_key_value_heads=2),
        "weights.other_model",
    ),
    "an endless context": (
        lambda path: edited(path / "config.json", max_position_embeddings=10**12),
        "import.context_length",
    ),
    "the configuration is cut": (lambda path: cut(path / "config.json"), "import.damaged_config"),
    "a configuration of true": (
        lambda path: edited(path / "config.json", hidden_size=True),
        "import.damaged_config",
    ),
    "no configuration": (lambda path: (path / "config.json").unlink(), "import.no_config"),
    "no tokenizer": (lambda path: (path / "tokenizer.json").unlink(), "import.no_tokenizer"),
    "a tokenizer of sentencepiece": (
        lambda path: edited(
            path / "tokenizer.json", normalizer={"type": "Prepend", "prepend": "_"}, pre_tokenizer=None
        ),
        "import.tokenizer",
    ),
    "a damaged tokenizer": (lambda path: cut(path / "tokenizer.json"), "tokenizer.damaged_file"),
}


@pytest.fixture(scope="session")
def three_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("three") / "theirs"
    make_theirs("Llama", {}).save_pretrained(path, max_shard_size="60KB")
    byte_tokenizer().save(path / "tokenizer.json")
    assert (path / SHARD).exists()
    return path


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_ends_in_one_line_and_leaves_nothing(
    three_shards: Path, tmp_path: Path, damage: str
) -> None:
    path = tmp_path / "theirs"
    path.mkdir()
    for file in three_shards.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    change, code = DAMAGES[damage]
    change(path)
    with refused(code, path):
        import_model(path, tmp_path / "run")
    assert {item.name for item in tmp_path.iterdir()} == {"theirs"}


def test_a_pickle_is_never_read(tmp_path: Path) -> None:
    path = tmp_path / "theirs"
    make_theirs("Llama", {}).config.save_pretrained(path)
    (path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch stolen'\ntR.")
    with refused("import.pickle", path, kind=UsageError) as caught:
        import_model(path, tmp_path / "run")
    assert "safetensors" in caught.value.hint
    with refused("import.pickle", path, kind=UsageError):
        open_weights(path)


def test_a_tokenizer_larger_than_the_embedding_is_refused(
    folder: Callable[..., Path], tmp_path: Path
) -> None:
    path = folder("Llama", {"vocab_size": 256})
    with refused("import.tokenizer", path / "tokenizer.json", "256", kind=UsageError) as caught:
        import_model(path, tmp_path / "run")
    assert "--without-tokenizer" in caught.value.hint
    import_model(path, tmp_path / "run", with_tokenizer=False)


def test_a_write_that_fails_leaves_nothing(
    folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder()
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


def test_at_the_terminal(folder: Callable[..., Path], terminal: Any) -> None:
    path = folder("Mistral", {"sliding_window": 64})
    terminal.refuses("import", path, "run", code="import.unsupported", says=["sliding_window"])
    shown = json.loads(terminal("import", path, "run", "--context-length", "64", "--json"))
    assert (shown["folder"], shown["dtype"]) == ("run", "float32")
    assert ours_of(Path("run")).config.context_length == 64
    terminal.refuses("import", path, "run", "--context-length", "64", code="output.exists", says=["run"])
    terminal.refuses("import", path, "far", "--context-length", "999", code="import.context_length")
    assert "bfloat16" in terminal("export", "run", "out", "--dtype", "bf16")
    terminal.refuses("export", "run", "out", code="output.exists")
    terminal.refuses("export", "nowhere", "other", code="checkpoint.not_found")
    assert terminal("generate", "run", "--prompt", "he", "--max-new-tokens", "3").startswith("he")
    Path("text.txt").write_text("the other " * 50)
    assert "perplexity" in terminal("evaluate", "run", "--text", "text.txt")
    manifest = Path("run/checkpoints/step-00000000") / MODEL
    cut(manifest)
    terminal.refuses("export", "run", "other", code="checkpoint.none_good", exit_code=1)


def test_an_attention_kernel_that_does_not_see_all_is_refused_by_name(
    tmp_path: Path, folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    from lmkit.registry import ATTENTION

    import_model(folder(), tmp_path / "run")
    facts = replace(ATTENTION.facts("sdpa"), sees_all=False)
    monkeypatch.setattr(type(ATTENTION), "facts", lambda self, name: facts)
    with refused("export.unsupported", "model.attention", "sdpa", kind=UsageError):
        export_model(tmp_path / "run", tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def test_switches_that_llama_lacks_are_refused_by_name() -> None:
    config = ModelConfig(vocab_size=300, mlp="relu2", layer_scalars=True, qkv_bias=True, zero_init=True)
    with refused("export.unsupported", "model.mlp", "model.layer_scalars", kind=UsageError) as caught:
        config_json(config, dtype="float32", begin=None, end=None)
    assert "qkv_bias" not in str(caught.value)
    both = ModelConfig(vocab_size=300, qk_norm=True, qkv_bias=True)
    with refused("export.unsupported", "model.qkv_bias", "model.qk_norm", kind=UsageError):
        config_json(both, dtype="float32", begin=None, end=None)


def test_rope_keys_are_checked() -> None:
    with pytest.raises(ValueError, match="rope_low_freq_factor"):
        ModelConfig(rope_scaling="llama3", rope_low_freq_factor=4.0, rope_high_freq_factor=4.0)
    assert issubclass(UsageError, LmkitError)
