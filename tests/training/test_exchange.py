"""Models to and from Hugging Face folders, against transformers, and folders that are damaged or foreign."""

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from raising import raises
from their_models import GROUPED, LLAMA3, byte_tokenizer, make_theirs, their_folder
from torch.utils._python_dispatch import TorchDispatchMode

from lmkit.errors import LmkitError
from lmkit.generation import generate
from lmkit.model import TransformerLM
from lmkit.recipe.load import load_recipe
from lmkit.recipe.tables import GenerateConfig
from lmkit.training import exchange
from lmkit.training.checkpoint import MODEL, TensorFile, newest_checkpoint
from lmkit.training.exchange import export_model, import_model
from lmkit.training.session import train
from lmkit.training.verify import verify_path
from lmkit.training.weights import INDEX, open_weights, weights_of

transformers = pytest.importorskip("transformers")


def ours_of(run: Path) -> TransformerLM:
    return weights_of(newest_checkpoint(run)).model("cpu")


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    files = [TensorFile(path) for path in sorted(folder.glob("*.safetensors"))]
    return {name: file.read(name) for file in files for name in file.tensors}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_weights_keep_their_bits(dtype, tmp_path):
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


@pytest.mark.parametrize(("dtype", "largest"), [("fp16", 65504.0), ("bf16", 3.38e38)])
def test_a_weight_too_large_for_the_dtype_is_refused_by_name(dtype, largest, tmp_path):
    theirs = make_theirs("Llama", {})
    norm = theirs.model.norm.weight.data
    norm[3] = -largest
    theirs.save_pretrained(tmp_path / "fits")
    norm[3] = -1.006 * largest
    theirs.save_pretrained(tmp_path / "large")
    export_model(tmp_path / "fits", tmp_path / "out", dtype=dtype)
    with raises(LmkitError, "weights.not_finite", tmp_path / "large", "model.norm.weight", hint="--dtype"):
        export_model(tmp_path / "large", tmp_path / "refused", dtype=dtype)
    assert {path.name for path in tmp_path.iterdir()} == {"fits", "large", "out"}
    export_model(tmp_path / "large", tmp_path / "wide", dtype="fp32")
    assert torch.equal(tensors_of(tmp_path / "wide")["model.norm.weight"], norm)


def test_greedy_text_is_that_of_transformers(tmp_path):
    """200 tokens, with biases and scaled positions in the KV cache."""
    import_model(their_folder(tmp_path, "Qwen2", {**GROUPED, **LLAMA3}), tmp_path / "run")
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


def test_an_imported_run_is_verified_evaluated_trained_and_resumed(settings, tmp_path):
    import_model(
        their_folder(tmp_path, "Qwen2"), tmp_path / "runs/run", context_length=8, with_tokenizer=False
    )
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
    assert again.evaluation is not None


def test_a_trained_run_opens_in_transformers(tiny, tmp_path):
    changes = ("model.num_kv_heads=1", "model.rope_scaling=linear", "model.rope_factor=2.0", "train.steps=4")
    recipe = tiny(*changes, "model.norm_eps=1e-3")
    train(recipe)
    exported = export_model(recipe.run.path, tmp_path / "exported")
    assert exported.files == ("config.json", "model.safetensors")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    ids = torch.randint(64, (2, 8))
    with torch.no_grad():
        torch.testing.assert_close(ours_of(recipe.run.path)(ids), theirs(ids).logits, rtol=0, atol=1e-5)


def test_one_loader_opens_all_three(tmp_path):
    theirs = their_folder(tmp_path, "Qwen2", GROUPED)
    import_model(theirs, tmp_path / "run")
    places = (theirs, tmp_path / "run", tmp_path / "run/checkpoints/step-00000000")
    first, *others = [open_weights(place) for place in places]
    for other in others:
        assert (other.config, other.specs.keys()) == (first.config, first.specs.keys())
        assert all(torch.equal(first[name], other[name]) for name in first.specs)
    assert [weights.tokenizer and weights.tokenizer.parent for weights in (first, *others)] == [
        theirs,
        tmp_path / "run",
        (tmp_path / "run").resolve(),
    ]
    model = TransformerLM(first.config)
    assert {name: weight.shape for name, weight in model.state_dict().items()} == {
        name: spec.shape for name, spec in first.specs.items()
    }


def test_shards_and_memory(tmp_path, monkeypatch):
    """No more than a tensor and its turned copy are in memory at a time."""
    theirs = their_folder(tmp_path, "Llama", {"hidden_size": 64}, max_shard_size="100KB")
    assert len([*theirs.glob("model-*.safetensors")]) > 2
    with Allocations() as seen:
        import_model(theirs, tmp_path / "run")
    largest = max(tensor.nbytes for tensor in tensors_of(theirs).values())
    assert largest <= seen.peak <= 2 * largest
    monkeypatch.setattr(exchange, "SHARD_BYTES", 100_000)
    with Allocations() as seen:
        exported = export_model(tmp_path / "run", tmp_path / "exported")
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


def test_at_the_terminal(tmp_path, terminal):
    path = their_folder(tmp_path, "Mistral", {"sliding_window": 64})
    terminal.refuses("import", path, "run", code="import.unsupported", says=["sliding_window"])
    shown = json.loads(terminal("import", path, "run", "--context-length", "64", "--json"))
    assert (shown["folder"], shown["dtype"]) == ("run", "float32")
    assert ours_of(Path("run")).config.context_length == 64
    terminal.refuses("import", path, "run", "--context-length", "64", code="output.exists", says=["run"])
    terminal.refuses("import", path, "far", "--context-length", "999", code="import.context_length")
    assert "bfloat16" in terminal("export", "run", "out", "--dtype", "bf16")
    assert "config.json" in terminal("verify", "out")
    terminal.refuses("export", "run", "out", code="output.exists")
    terminal.refuses("export", "nowhere", "other", code="checkpoint.not_found")
    terminal("export", "run", "same")
    words = ("--prompt", "he", "--max-new-tokens", "9")
    made = terminal("generate", "run", *words)
    assert made.startswith("he")
    assert terminal("generate", "same", *words) == made
    Path("text.txt").write_text("the other " * 50)
    assert "perplexity" in terminal("evaluate", "run", "--text", "text.txt")
    weights = Path("run/checkpoints/step-00000000") / MODEL
    weights.write_bytes(weights.read_bytes()[:-9])
    terminal.refuses("export", "run", "other", code="checkpoint.none_good", exit_code=1)
