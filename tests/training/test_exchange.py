"""Models to and from Hugging Face folders, against transformers, and folders that are damaged or foreign."""

import json
from pathlib import Path

import pytest
import torch
from live_memory import LiveMemory
from marking import full_but
from raising import raises
from random_models import random_folder
from their_models import make_theirs, their_folder

from lmkit.errors import LmkitError
from lmkit.model import TransformerLM
from lmkit.recipe.load import load_recipe
from lmkit.tokenizer import Tokenizer
from lmkit.training.checkpoint import MODEL, TensorFile, newest_checkpoint
from lmkit.training.exchange import export_model, import_model
from lmkit.training.session import train
from lmkit.training.verify import verify_path
from lmkit.training.weights import weights_of

transformers = pytest.importorskip("transformers")


def ours_of(run: Path) -> TransformerLM:
    return weights_of(newest_checkpoint(run)).model("cpu")


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    files = [TensorFile(path) for path in sorted(folder.glob("*.safetensors"))]
    return {name: file.read(name) for file in files for name in file.tensors}


@pytest.mark.parametrize("seed", full_but(range(8), range(60)))
def test_random_folders_have_the_logits_of_transformers(seed, tmp_path):
    """As transformers opens them, before and after an import and an export; stops come along."""
    path = random_folder(tmp_path / "theirs", seed)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    import_model(path, tmp_path / "run")
    ours = ours_of(tmp_path / "run").float()
    ids = torch.randint(theirs.config.vocab_size, (2, 60), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        found, expected = ours(ids), theirs(ids).logits
        # Both round in float32; transformers' angles are off by 60 x 2^-24 too. A wrong norm, bias, head or rotation
        # moves logits by more than 1e-3 of the largest.
        assert (found - expected).abs().max() < 2e-5 * float(expected.abs().max())
        export_model(tmp_path / "run", tmp_path / "exported")
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
        assert (again(ids).logits - expected).abs().max() < 2e-5 * float(expected.abs().max())
    stops = Tokenizer.load(path / "tokenizer.json").marks.stops
    assert Tokenizer.load(tmp_path / "run/tokenizer.json").marks.stops == stops
    said = again.generation_config.eos_token_id
    assert tuple(said if isinstance(said, list) else [said]) == stops


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


def test_an_imported_run_is_verified_evaluated_trained_and_resumed(settings, tmp_path):
    run = tmp_path / "runs/run"
    import_model(their_folder(tmp_path, "Qwen2"), run, context_length=8, with_tokenizer=False)
    assert verify_path(run).ok
    before = ours_of(run).state_dict()
    keep = [value for value in settings() if not value.startswith("model.")]
    result = train(load_recipe(run / "recipe.toml", [*keep, "train.steps=4", "optimizer.lr=1e-2"]))
    assert (result.resumed_from, result.step, result.status) == (0, 4, "finished")
    after = ours_of(run).state_dict()
    assert not torch.equal(before["layers.0.attn.q_proj.bias"], after["layers.0.attn.q_proj.bias"])
    again = train(load_recipe(run / "recipe.toml", [*keep, "train.steps=6", "optimizer.lr=1e-2"]))
    assert (again.resumed_from, again.step) == (4, 6)
    assert newest_checkpoint(run).optimizer_tensors()["layers.0.attn.k_proj.bias.exp_avg"].any()
    assert again.evaluation is not None


def test_shards_and_memory(tmp_path):
    """No more than a tensor and its turned copy are in memory at a time."""
    theirs = their_folder(tmp_path, "Llama", {"hidden_size": 64}, max_shard_size="100KB")
    assert len([*theirs.glob("model-*.safetensors")]) > 2
    with LiveMemory() as seen:
        import_model(theirs, tmp_path / "run")
    largest = max(tensor.nbytes for tensor in tensors_of(theirs).values())
    assert largest <= seen.peak <= 2.1 * largest
    with LiveMemory() as seen:
        exported = export_model(tmp_path / "run", tmp_path / "exported")
    assert largest <= seen.peak <= 2.1 * largest
    assert exported.bytes == sum(tensor.nbytes for tensor in tensors_of(theirs).values())
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    before = tensors_of(theirs)
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())


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
