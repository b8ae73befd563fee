"""The file formats that lmkit reads, each with its good files, its damages and its reader (`format.Format`)."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import mutations
import numpy as np
from download_formats import DOWNLOAD_FORMATS
from format import Files, Format, is_changed
from result_formats import RESULT_FORMATS

from lmkit.cli.pipeline import STAGES, Pipeline
from lmkit.cli.recipe import describe
from lmkit.data.corpora import prepare_corpus
from lmkit.data.token_files import TokenFileWriter, open_tokens
from lmkit.errors import LmkitError
from lmkit.optim.adamw import AdamW
from lmkit.recipe.load import (
    fill_preset,
    load_recipe,
    recipe_to_toml,
    shipped_recipes,
    validate,
    with_our_names,
)
from lmkit.recipe.tables import CorpusConfig
from lmkit.tokenizer import Tokenizer
from lmkit.tokenizer.files import to_bytes
from lmkit.training import session, verify
from lmkit.training.checkpoint import (
    MANIFEST,
    MODEL,
    STATE,
    newest_checkpoint,
    newest_valid,
    open_checkpoint,
    shard_name,
    write_manifest,
)
from lmkit.training.metrics import MetricsFile, read_metrics
from lmkit.training.model_state import load_optimizer_tensors, plain_model
from lmkit.training.session import draw_losses
from lmkit.training.state import restore_rng
from lmkit.training.tensor_files import FileEntry

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TEXT = "Once upon a time, there was a tiny héron.\n<|endoftext|>\x00 12345 \U0001f426"


# ---- recipes


class RecipeFile(Format):
    name = "recipe"
    damages = (
        ("recipe.toml", mutations.damage_toml),
        ("recipe.toml", mutations.damage_toml),
        ("recipe.toml", mutations.damage),
    )

    def make(self, folder: Path) -> Files:
        self.shipped = {name: path.read_bytes() for name, path in shipped_recipes().items()}
        return {"recipe.toml": self.shipped["quickstart"]}

    def damaged(self, random: Random) -> Files:
        self.good = {"recipe.toml": random.choice(list(self.shipped.values()))}
        return super().damaged(random)

    def read(self, folder: Path, random: Random) -> None:
        path = folder / "recipe.toml"
        recipe = load_recipe(path)
        describe(recipe)
        written = with_our_names(tomllib.loads(path.read_text("utf-8")))
        if "model" in written:
            written["model"] = fill_preset(written["model"])
        loaded = recipe.model_dump(mode="json")
        for table, content in written.items():
            assert_inside(content, loaded[table], table)
        (folder / "again.toml").write_text(recipe_to_toml(recipe), "utf-8")
        assert load_recipe(folder / "again.toml") == recipe


def assert_inside(written: Any, loaded: Any, where: str) -> None:
    """Every key of the file has its value in the recipe; a path may be spelled in another way."""
    if isinstance(written, dict):
        for key, value in written.items():
            assert_inside(value, loaded[key], f"{where}.{key}")
    elif isinstance(written, list):
        assert len(written) == len(loaded), where
        for one, other in zip(written, loaded, strict=True):
            assert_inside(one, other, where)
    else:
        expected = float(written) if isinstance(loaded, float) else written
        same = loaded == expected and isinstance(loaded, bool) == isinstance(written, bool)
        assert same or (isinstance(written, str) and loaded == str(Path(written))), f"{where}: {loaded!r}"


# ---- tokenizers


def small_tokenizer() -> Tokenizer:
    merges = [
        (b"h", b"e"),
        (b" ", b"t"),
        (b" t", b"he"),
        (b"\xc3", b"\xa9"),
        (b"o", b"n"),
        (b"1", b"2"),
        (b"12", b"3"),
    ]
    vocab = {i: bytes([i]) for i in range(256)} | {256 + i: a + b for i, (a, b) in enumerate(merges)}
    return Tokenizer(vocab=vocab, merges=merges, special_tokens=("<|endoftext|>", "<|pad|>"))


def assert_works(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert max(tokenizer.encode(TEXT)) < tokenizer.vocab_size


class TokenizerFile(Format):
    name = "tokenizer.json"
    damages = (
        ("tokenizer.json", mutations.damage_json),
        ("tokenizer.json", mutations.damage_json),
        ("tokenizer.json", mutations.damage),
    )

    def make(self, folder: Path) -> Files:
        small_tokenizer().save(folder / "tokenizer.json")
        return {"tokenizer.json": (folder / "tokenizer.json").read_bytes()}

    def read(self, folder: Path, random: Random) -> None:
        path = folder / "tokenizer.json"
        tokenizer = Tokenizer.load(path)
        content = json.loads(path.read_bytes())
        special = {token["id"]: token["content"] for token in content["added_tokens"]}
        ordinary = {
            i: to_bytes(token) for token, i in content["model"]["vocab"].items() if special.get(i) != token
        }
        assert tokenizer.vocab == ordinary | {i: text.encode() for i, text in special.items()}
        assert len(tokenizer.merges) == len(content["model"]["merges"])
        assert {i: text for text, i in tokenizer.special_ids.items()} == special
        assert_works(tokenizer)
        tokenizer.save(folder / "again.json")
        assert Tokenizer.load(folder / "again.json").sha256 == tokenizer.sha256


class Gpt2Files(Format):
    name = "gpt2 vocab.json + merges.txt"
    damages = (
        ("vocab.json", mutations.damage_json),
        ("vocab.json", mutations.damage),
        ("merges.txt", mutations.damage),
    )

    def make(self, folder: Path) -> Files:
        small_tokenizer().save_gpt2(folder)
        return {name: (folder / name).read_bytes() for name in ("vocab.json", "merges.txt")}

    def read(self, folder: Path, random: Random) -> None:
        tokenizer = Tokenizer.load_gpt2(folder / "vocab.json", folder / "merges.txt")
        content = json.loads((folder / "vocab.json").read_bytes())
        for token, token_id in content.items():
            assert tokenizer.special_ids.get(token) == token_id or tokenizer.vocab[token_id] == to_bytes(
                token
            )
        assert len(content) == len(tokenizer.vocab)
        assert_works(tokenizer)


# ---- token files


class TokenFiles(Format):
    name = "token file"
    damages = (
        ("tokens.npy", mutations.damage_npy),
        ("tokens.npy", mutations.damage_npy),
        ("tokens.npy", mutations.damage),
        ("tokens.json", mutations.damage_json),
        ("tokens.json", mutations.damage),
    )

    def make(self, folder: Path) -> Files:
        self.kinds = []
        for vocab_size in (1000, 1 << 16, 70_000):
            ids = np.random.default_rng(vocab_size).integers(0, vocab_size, 500)
            with TokenFileWriter(
                folder / "tokens.npy", vocab_size=vocab_size, tokenizer_sha256="a" * 64
            ) as writer:
                writer.append(ids)
                writer.finish(num_documents=3, num_bytes=1500, source_sha256="b" * 64)
            self.kinds.append({name: (folder / name).read_bytes() for name in ("tokens.npy", "tokens.json")})
        return self.kinds[0]

    def damaged(self, random: Random) -> Files:
        self.good = random.choice(self.kinds)
        return super().damaged(random)

    def read(self, folder: Path, random: Random) -> None:
        path = folder / "tokens.npy"
        opened = open_tokens(path)
        data = path.read_bytes()
        meta = json.loads((folder / "tokens.json").read_bytes())
        assert vars(opened.meta) == meta
        raw = data[len(data) - opened.tokens.nbytes :]
        assert opened.tokens.tobytes() == raw
        assert len(opened.tokens) == meta["num_tokens"] > 0
        assert int(opened.tokens.max()) < meta["vocab_size"]
        assert meta["num_bytes"] >= 0
        assert meta["num_documents"] >= 0


# ---- checkpoints

TINY = (
    "run.device=cpu", "run.threads=1", "data.source=random", "model.vocab_size=64", "model.context_length=8",
    "model.d_model=16", "model.d_ff=32", "model.num_layers=1", "model.num_heads=2", "train.steps=2",
    "train.batch_size=2",
)  # fmt: skip
STEP = "run/checkpoints/step-00000002"
OPTIMIZER = shard_name(0, 1)


class CheckpointFiles(Format):
    """A file of a checkpoint is changed; the manifest is not, so nothing that changed may be read."""

    name = "checkpoint"
    damages = (
        (f"{STEP}/{MODEL}", mutations.damage_safetensors),
        (f"{STEP}/{MODEL}", mutations.damage),
        (f"{STEP}/{OPTIMIZER}", mutations.damage_safetensors),
        (f"{STEP}/{OPTIMIZER}", mutations.damage),
        (f"{STEP}/{STATE}", mutations.damage_json),
        (f"{STEP}/{STATE}", mutations.damage),
    )

    def make(self, folder: Path) -> Files:
        recipe = load_recipe(None, [*TINY, f"run.folder={folder}"])
        logging.getLogger("lmkit").setLevel(logging.ERROR)
        with contextlib.redirect_stderr(io.StringIO()):
            session.train(recipe)
        step = folder / STEP
        return {f"{STEP}/{path.name}": path.read_bytes() for path in sorted(step.iterdir())}

    def read(self, folder: Path, random: Random) -> None:
        checkpoint = open_checkpoint(folder / STEP)
        checkpoint.model_tensors()
        checkpoint.optimizer_tensors()
        for name, good in self.good.items():
            assert not is_changed(folder / name, good), f"{name} was changed, and read"
        assert newest_valid(folder / "run" / "checkpoints").path == folder / STEP


class Manifest(CheckpointFiles):
    """The manifest is changed; it carries a checksum of its own."""

    name = "manifest"
    damages = (
        (f"{STEP}/{MANIFEST}", mutations.damage_json),
        (f"{STEP}/{MANIFEST}", mutations.damage),
    )

    def read(self, folder: Path, random: Random) -> None:
        chosen = newest_valid(folder / "run" / "checkpoints").path
        assert chosen == folder / STEP
        manifest = f"{STEP}/{MANIFEST}"
        assert json.loads((folder / manifest).read_bytes()) == json.loads(self.good[manifest])
        open_checkpoint(chosen).model_tensors()


class ForgedCheckpoint(CheckpointFiles):
    """Somebody changes a checkpoint and writes a manifest that fits: what is read must still be sound."""

    name = "forged checkpoint"

    def damaged(self, random: Random) -> Files:
        files = super().damaged(random)
        return {name: data for name, data in files.items() if not name.endswith(MANIFEST)}

    def read(self, folder: Path, random: Random) -> None:
        step = folder / STEP
        write_manifest(
            step,
            {
                p.name: FileEntry(hashlib.sha256(p.read_bytes()).hexdigest(), p.stat().st_size)
                for p in step.iterdir()
            },
        )
        checkpoint = newest_checkpoint(step)
        model = plain_model(checkpoint, device="cpu")
        weights = plain_tensors((step / MODEL).read_bytes())
        for name, tensor in model.state_dict().items():
            shape, raw = weights[name]
            assert list(tensor.shape) == shape
            assert tensor.numpy().tobytes() == raw or checkpoint.model_tensors()[name].dtype != tensor.dtype
        validate(checkpoint.state.recipe, origin="state.json")
        optimizer = AdamW(model.parameters())
        shards = checkpoint.all_optimizer_shards()
        load_optimizer_tensors(optimizer, model, shards, checkpoint.state.optimizer_layout, origin=str(step))
        for parameter, state in optimizer.state.items():
            assert all(
                value.shape in (parameter.shape, ()) for value in state.values() if hasattr(value, "shape")
            )
        restore_rng(checkpoint.state.rng[0], parameter.device)


def plain_tensors(data: bytes) -> dict[str, tuple[list[int], bytes]]:
    """Name -> (shape, bytes) of a safetensors file."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    rest = data[8 + length :]
    return {name: (entry["shape"], rest[slice(*entry["data_offsets"])]) for name, entry in header.items()}


# ---- what runs write and read


class MetricsLines(Format):
    name = "metrics.jsonl"
    damages = (
        ("metrics.jsonl", mutations.damage),
        ("metrics.jsonl", mutations.damage),
        ("metrics.jsonl", mutations.damage_json_lines),
    )

    def make(self, folder: Path) -> Files:
        records: list[dict[str, Any]] = []
        for step in range(1, 21):
            records.append(
                {"kind": "train", "step": step, "loss": 4.0 / step, "lr": 1e-3, "seconds": step / 7}
            )
            if step % 5 == 0:
                records.append(
                    {"kind": "valid", "step": step, "loss": 4.5 / step, "perplexity": 9.0, "tokens": 100}
                )
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        draw_losses(folder, title="loss")  # matplotlib makes code of its own when it is imported
        return {"metrics.jsonl": (folder / "metrics.jsonl").read_bytes()}

    def read(self, folder: Path, random: Random) -> None:
        path = folder / "metrics.jsonl"
        records = read_metrics(path)
        good = [json.loads(line) for line in self.good["metrics.jsonl"].splitlines()]
        lines = set(path.read_bytes().split(b"\n"))
        untouched = [record for record in good if json.dumps(record).encode() in lines]
        assert [record for record in records if record in untouched] or not untouched
        for record in records:
            assert isinstance(record["kind"], str)
            assert isinstance(record["step"], int)
        MetricsFile(path, after_step=12).close()
        again = read_metrics(path)
        assert [r["step"] for r in again] == [r["step"] for r in records if r["step"] <= 12]
        if random.random() < 0.05:  # matplotlib takes a hundred times longer than all the rest
            draw_losses(folder, title="loss")


class Stages(Format):
    name = "stages.json"
    damages = (
        ("stages.json", mutations.damage_json),
        ("stages.json", mutations.damage),
    )

    def make(self, folder: Path) -> Files:
        pipeline = self._pipeline(folder)
        (folder / "train.txt").write_text("text")
        for stage in ("corpus", "tokenizer"):
            pipeline.finish(stage, {"train": [Path("train.txt")], "valid": []})
        return {"stages.json": (folder / "stages.json").read_bytes()}

    def read(self, folder: Path, random: Random) -> None:
        pipeline = self._pipeline(folder)
        for stage in STAGES:
            pipeline.is_finished(stage)
            if pipeline.was_made(stage):
                assert all(
                    isinstance(path, Path) for paths in pipeline.outputs(stage).values() for path in paths
                )
        pipeline.finish("train", {})
        assert self._pipeline(folder).is_finished("train")

    def _pipeline(self, folder: Path) -> Pipeline:
        recipe = load_recipe("quickstart", flags={"run.folder": str(folder.parent), "run.name": folder.name})
        return Pipeline(recipe, progress=lambda *_: None)


class Corpus(Format):
    name = "corpus .jsonl and .txt"
    damages = (
        ("corpus.jsonl", mutations.damage),
        ("corpus.jsonl", mutations.damage_json_lines),
        ("corpus.txt", mutations.damage),
    )

    def make(self, folder: Path) -> Files:
        documents = [f"Story {i}: thé cat sat. \U0001f426\n\nThe end." for i in range(20)]
        return {
            "corpus.jsonl": "".join(json.dumps({"text": text, "id": 1}) + "\n" for text in documents).encode(),
            "corpus.txt": "<|endoftext|>\n".join(documents).encode(),
        }  # fmt: skip

    def read(self, folder: Path, random: Random) -> None:
        for name in self.good:
            table = CorpusConfig(source="files", train=(folder / name,), errors="strict", valid_fraction=0.25)
            files = prepare_corpus(table, folder / "out")
            written = b"".join(path.read_bytes() for path in (*files.train, *files.valid))
            written.decode("utf-8")
            if name == "corpus.txt":
                assert written == (folder / name).read_bytes()
            else:
                lines = (folder / name).read_bytes().split(b"\n")
                texts = [json.loads(line)["text"] for line in lines if line.decode().strip()]
                assert (
                    written.decode()
                    == "".join(text + "<|endoftext|>\n" for text in texts).encode("utf-8", "replace").decode()
                )


class VerifiedRun(CheckpointFiles):
    """`lmkit verify` on a whole run folder."""

    name = "lmkit verify"
    damages = (
        ("run/recipe.toml", mutations.damage_toml),
        ("run/recipe.toml", mutations.damage),
        ("run/environment.json", mutations.damage),
        ("run/metrics.jsonl", mutations.damage),
        ("run/metrics.jsonl", mutations.damage_json_lines),
        (f"{STEP}/{MODEL}", mutations.damage),
        (f"{STEP}/{MANIFEST}", mutations.damage_json),
        (f"{STEP}/{MANIFEST}", mutations.damage),
        (f"{STEP}/{STATE}", mutations.damage_json),
    )

    def make(self, folder: Path) -> Files:
        files = super().make(folder)
        names = ("recipe.toml", "environment.json", "metrics.jsonl")
        return files | {f"run/{name}": (folder / "run" / name).read_bytes() for name in names}

    def read(self, folder: Path, random: Random) -> None:
        result = verify.verify_path(folder / "run")
        assert all("\n" not in str(check) for check in result.checks)
        if not result.ok:
            raise LmkitError("verify says so")
        for name in (f"{STEP}/{MODEL}", f"{STEP}/{STATE}"):
            assert not is_changed(folder / name, self.good[name]), f"{name} was changed, and found well"


FORMATS: dict[str, Callable[[Path], Format]] = {
    form.name: form  # type: ignore[type-abstract]
    for form in (
        RecipeFile, TokenizerFile, Gpt2Files, TokenFiles, Manifest, CheckpointFiles, ForgedCheckpoint, MetricsLines,
        Stages, Corpus, VerifiedRun,
    )
}  # fmt: skip
FORMATS |= RESULT_FORMATS | DOWNLOAD_FORMATS
