"""The formats that lmkit reads: good files, how they are damaged, how they are read, and what a right load is.

`read` raises `LmkitError`, or has checked what was read in another way than the reader's: against a plain parser, or
against the undamaged content if a checksum protects it.
"""

import dataclasses
import functools
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from mutations import damage, damage_header, damage_text

from lmkit.data.corpora import prepare_corpus
from lmkit.data.shards import open_tokens
from lmkit.data.token_files import TokenFileWriter
from lmkit.recipe.load import load_recipe, recipe_to_toml, shipped_recipes, with_our_names
from lmkit.recipe.tables import PRESETS, CorpusConfig
from lmkit.tokenizer import Tokenizer
from lmkit.tokenizer.files import to_bytes

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# For tiny.py, which run_formats.py imports, also where worker.py runs by itself.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

Files = dict[str, bytes]
Mutation = Callable[[Random, bytes], bytes]
npy_header = functools.partial(damage_header, 8, 2)
safetensors_header = functools.partial(damage_header, 0, 8)
TEXT = (damage_text, damage_text, damage)


@dataclass
class Format:
    """One kind of file, or several that belong together.

    Attributes:
        goods: sets of undamaged files; a case takes one of them.
        damages: the mutations of a file; a case applies one.
        read: read(folder, undamaged files, random).
    """

    goods: list[Files]
    damages: dict[str, tuple[Mutation, ...]]
    read: Callable[[Path, Files, Random], None]

    def damaged(self, random: Random) -> tuple[Files, Files]:
        """Return the files of a case, and the undamaged ones."""
        good = random.choice(self.goods)
        victim = random.choice([name for name in good if name in self.damages])
        return {**good, victim: random.choice(self.damages[victim])(random, good[victim])}, good


FORMATS: dict[str, Callable[[Path], Format]] = {}


def form(name: str) -> Callable[[Callable[[Path], Format]], Callable[[Path], Format]]:
    """Register make(empty folder) -> Format."""
    return lambda make: FORMATS.setdefault(name, make)


def write(files: Files, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


# ---- recipes


@form("recipe")
def recipe_file(folder: Path) -> Format:
    def read(folder: Path, good: Files, random: Random) -> None:
        path = folder / "recipe.toml"
        recipe = load_recipe(path)
        written = with_our_names(tomllib.loads(path.read_text("utf-8-sig")))
        if "model" in written:
            written["model"] = PRESETS.get(recipe.model.preset, {}) | written["model"]
        assert_inside(written, recipe.model_dump(mode="json"), "")
        (folder / "again.toml").write_text(recipe_to_toml(recipe), "utf-8")
        assert load_recipe(folder / "again.toml") == recipe

    goods = [{"recipe.toml": path.read_bytes()} for path in shipped_recipes().values()]
    return Format(goods, {"recipe.toml": TEXT}, read)


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


# ---- tokenizers, token files, corpora

SAMPLE = "Once upon a time, there was a tiny héron.\n<|endoftext|>\x00 12345 \U0001f426"


def small_tokenizer() -> Tokenizer:
    pairs = [("h", "e"), (" ", "t"), (" t", "he"), ("\xc3", "\xa9"), ("o", "n"), ("1", "2"), ("12", "3")]
    merges = [(a.encode("latin-1"), b.encode("latin-1")) for a, b in pairs]
    return Tokenizer.from_merges(merges, ("<|endoftext|>", "<|pad|>"))


def assert_works(tokenizer: Tokenizer, vocab: dict[int, bytes]) -> None:
    assert tokenizer.vocab == vocab
    if not tokenizer.missing_bytes:
        assert tokenizer.decode(tokenizer.encode(SAMPLE)) == SAMPLE
    assert max(tokenizer.encode(SAMPLE), default=0) < tokenizer.vocab_size


@form("gpt2 vocab.json + merges.txt")
def gpt2_files(folder: Path) -> Format:
    def read(folder: Path, good: Files, random: Random) -> None:
        tokenizer = Tokenizer.load_gpt2(folder / "vocab.json", folder / "merges.txt")
        content = json.loads((folder / "vocab.json").read_bytes())
        special, vocab = tokenizer.special_ids, {}
        for text, i in content.items():
            token = None if special.get(text) == i else to_bytes(text)
            vocab[i] = text.encode() if token is None else token
        assert_works(tokenizer, vocab)

    small_tokenizer().save_gpt2(folder)
    return Format([content_of(folder)], dict.fromkeys(("vocab.json", "merges.txt"), TEXT), read)


@form("token file")
def token_file(folder: Path) -> Format:
    def read(folder: Path, good: Files, random: Random) -> None:
        opened = open_tokens(folder / "tokens.npy")
        data = (folder / "tokens.npy").read_bytes()
        meta = json.loads((folder / "tokens.json").read_bytes())
        assert dataclasses.asdict(opened.meta) | meta == dataclasses.asdict(opened.meta)
        assert opened.tokens.tobytes() == data[len(data) - opened.tokens.nbytes :]
        assert len(opened.tokens) == meta["num_tokens"] > 0
        assert int(opened.tokens.max()) < meta["vocab_size"]
        bits = "".join(f"{byte:08b}" for byte in opened.mask) if opened.mask is not None else ""
        assert bits.count("1") == meta.get("counted_tokens", 0)

    goods = []
    for vocab_size, masked in ((1000, False), (1 << 16, False), (70_000, False), (1000, True)):
        with TokenFileWriter(
            folder / "tokens.npy", vocab_size=vocab_size, tokenizer_sha256="a" * 64, masked=masked
        ) as writer:
            for counts in (True, False):
                writer.append(np.random.default_rng(vocab_size).integers(0, vocab_size, 250), counts=counts)
            counted = 750 if masked else None
            writer.finish(num_bytes=1500, source_sha256="b" * 64, counted_bytes=counted)
        goods.append(content_of(folder))
    headers = (npy_header, npy_header, damage)
    return Format(goods, {"tokens.npy": headers, "tokens.json": TEXT, "tokens.mask": (damage,)}, read)


@form("token file .bin")
def bin_file(folder: Path) -> Format:
    def read(folder: Path, good: Files, random: Random) -> None:
        opened = open_tokens(folder / "tokens.bin", vocab_size=60_000)
        data = (folder / "tokens.bin").read_bytes()
        assert opened.tokens.tobytes() == data[1024:]
        assert int(opened.tokens.max()) < 60_000
        assert all(opened.tokens[at - 1] in (50256, 128000) for at in opened.documents.astype(int) if at)

    goods = []
    for magic, version, dtype in ((20240520, 1, "<u2"), (20240801, 7, "<u4")):
        header = np.zeros(256, "<i4")
        header[:3] = magic, version, 500
        ids = np.random.default_rng(magic).integers(50_200, 50_300, 500).astype(dtype)
        (folder / "tokens.bin").write_bytes(header.tobytes() + ids.tobytes())
        goods.append(content_of(folder))
    return Format(goods, {"tokens.bin": (damage,)}, read)


@form("corpus .jsonl and .txt")
def corpus(folder: Path) -> Format:
    documents = [f"Story {i}: thé cat sat. \U0001f426\n\nThe end." for i in range(20)]
    lines = "".join(json.dumps({"text": text, "id": 1}) + "\n" for text in documents)

    def read(folder: Path, good: Files, random: Random) -> None:
        for name in good:
            table = CorpusConfig(source="files", train=(folder / name,), errors="strict", valid_fraction=0.25)
            files = prepare_corpus(table, folder / "out")
            written = b"".join(path.read_bytes() for path in (*files.train, *files.valid)).decode()
            data = (folder / name).read_bytes()
            if name == "c.jsonl":
                texts = [json.loads(line)["text"] for line in data.split(b"\n") if line.decode().strip()]
                whole = (text.removesuffix("<|endoftext|>") + "<|endoftext|>" for text in texts if text)
                data = "".join(whole).encode("utf-8", "replace")
            assert written.encode() == data

    text = "<|endoftext|>\n".join(documents)
    files = {"c.jsonl": lines.encode(), "c.txt": text.encode()}
    return Format([files], dict.fromkeys(files, TEXT), read)


def content_of(folder: Path) -> Files:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
