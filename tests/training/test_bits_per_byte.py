"""Bits per byte against sums in float64 over the text alone: whatever the form of the text and of its marks."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from byte_tokenizers import of_bytes
from run_folders import newest, records, train_here
from their_models import log_p, their_folder

from lmkit.data.encoding import encode_chat, encode_corpus
from lmkit.tokenizer import Tokenizer
from lmkit.tokenizer.chat import TEMPLATES
from lmkit.tokenizer.marks import Marks
from lmkit.training.judging import evaluate_documents, evaluate_run
from lmkit.training.weights import open_weights, weights_of

CONTEXT = 16
END = "<|endoftext|>"
TEXTS = ("one fish two fish", "red fish,\n\nblüe fish and a longer line of fish", "\n\nok ", "鱼")
MERGES = [(b"f", b"i"), (b"fi", b"s"), (b"fis", b"h"), (b" ", b"fish"), (b"\n", b"\n")]


tokenizer_of = partial(of_bytes, merges=MERGES)
PLAIN = tokenizer_of(END)
LLAMA = tokenizer_of("<s>", "</s>", prefix=(261,), pattern="llama3", marks=Marks("<s>", "</s>", (262,)))
QWEN = tokenizer_of("<end>", "<pad>", pattern="qwen2", nfc=True, marks=Marks(None, "<end>", (261,)))
SUFFIX = tokenizer_of("<s>", "<sep>", END, prefix=(261,), suffix=(262,))


class Case(NamedTuple):
    tokenizer: Tokenizer
    texts: tuple[str, ...]
    content: str | bytes
    name: str = "text.txt"
    options: dict[str, Any] = {}  # noqa: RUF012


def lines_of(texts: tuple[str, ...]) -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


WINDOWS = tuple(text.replace("\n", "\r\n") for text in TEXTS)
ACCENTS = ("e\u0301te\u0301 fish", "\u00e9te\u0301 " * 30, "one")
BROKEN = b"one \xff\xfe fish" + END.encode() + b"b\xc3l"
CASES = {
    "marks": Case(PLAIN, TEXTS, END.join(TEXTS) + END),
    "no mark at the end": Case(PLAIN, (*TEXTS, "b\n \n"), END.join(TEXTS) + f"{END}b\n \n"),
    "json lines": Case(PLAIN, TEXTS, lines_of(TEXTS), "text.jsonl"),
    "crlf": Case(PLAIN, WINDOWS, END.join(WINDOWS) + END + "\r\n"),
    "errors": Case(PLAIN, ("one \ufffd\ufffd fish", "b\ufffdl"), BROKEN, options={"errors": "replace"}),
    "separator": Case(PLAIN, TEXTS, "\n--\n".join(TEXTS) + "\n--\n", options={"separator": "\n--\n"}),
    "prefix": Case(LLAMA, TEXTS, "</s>".join(TEXTS)),
    "prefix in the text": Case(LLAMA, TEXTS, "".join(f"<s>{text}</s>" for text in TEXTS)),
    "normal form": Case(QWEN, ACCENTS, "<end>".join(ACCENTS) + "<end>"),
    "normal form in json": Case(QWEN, ACCENTS, lines_of(ACCENTS), "text.jsonl"),
    "prefix and suffix": Case(SUFFIX, TEXTS, lines_of(TEXTS), "text.jsonl"),
}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return their_folder(
        tmp_path_factory.mktemp("folders"), "Llama", {"max_position_embeddings": CONTEXT}, 0.3
    )


@pytest.fixture
def folder(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = Path("theirs")
    path.mkdir()
    for name in ("config.json", "model.safetensors"):
        (path / name).symlink_to(weights / name)
    return path


def bits(model, ids, counts=lambda i: True) -> list[float]:
    """-log2 p of each id but the first that counts."""
    return [-value / math.log(2) for i, value in enumerate(log_p(model, ids), 1) if counts(i)]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_windows_and_documents(case, folder):
    """In windows the first token of a file, which nothing predicts, counts like the mean of the others."""
    tokenizer, texts = case.tokenizer, case.texts
    tokenizer.save(folder / "tokenizer.json")
    model = open_weights(folder).model("cpu")
    Path(case.name).write_bytes(case.content if isinstance(case.content, bytes) else case.content.encode())
    size = sum(len(text.encode()) for text in texts)
    documents = [tokenizer.encode(text) for text in texts]
    stream = [i for ids in documents for i in (*ids, tokenizer.end_of_text_id)]
    parts = [stream[first : first + CONTEXT + 1] for first in range(0, len(stream) - 1, CONTEXT)]
    found = [value for part in parts for value in bits(model, part)]
    assert len(found) == len(stream) - 1
    expected = math.fsum(found) * len(stream) / len(found) / size
    encode_corpus(case.name, "text.npy", tokenizer, **case.options)
    places: list[dict[str, Any]] = [{"tokens": Path("text.npy")}]
    if not case.options:
        places.append({"text": Path(case.name)})
    for place in places:
        result = evaluate_run(folder, **place, device="cpu")
        assert result.tokens == len(found)
        assert result.bits_per_byte == pytest.approx(expected, rel=1e-5)  # float32 logits

        scores = evaluate_documents(folder, **place, device="cpu")
        assert [score.bytes for score in scores.documents] == [len(text.encode()) for text in texts]
        total = 0.0
        for score, text in zip(scores.documents, texts, strict=True):
            ids = tokenizer.encode(text, add_special_tokens=False)
            whole = [*(tokenizer.prefix or [tokenizer.end_of_text_id]), *ids]
            nats = []
            for first in range(0, len(ids), CONTEXT):
                last = min(first + CONTEXT, len(ids)) + 1
                nats += bits(model, whole[max(0, last - CONTEXT - 1) : last])[first + 1 - last :]
            assert len(nats) == score.tokens == len(ids)
            assert score.bits_per_byte == pytest.approx(math.fsum(nats) / len(text.encode()), rel=1e-5)
            total += math.fsum(nats)
        assert scores.bits_per_byte == pytest.approx(total / size, rel=1e-5)


def recorded(recipe: Any) -> list[float]:
    """Bits per byte of the last evaluation, in all places that hold it."""
    valid, final = (records(recipe, kind)[-1]["bits_per_byte"] for kind in ("valid", "final"))
    return [valid, final, evaluate_run(recipe.run.path, device="cpu").bits_per_byte]


def test_training_on_conversations(tiny, tmp_path):
    """The bytes are those of the words of the assistant."""
    tokenizer = tokenizer_of(END, "<|im_start|>", "<|im_end|>")
    talks = [
        [("user", "one fish?"), ("assistant", "two fish"), ("user", "ü"), ("assistant", "blüe\r\nfish, 鱼")],
        [("system", "be short"), ("user", "fish"), ("assistant", "ok")],
    ] * 4
    template = TEMPLATES["chatml"]
    for part in ("train", "valid"):
        lines = [{"messages": [{"role": role, "content": words} for role, words in talk]} for talk in talks]
        path = tmp_path / f"{part}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        encode_chat([path], tmp_path / f"b{part}.npy", tokenizer, template)
    data = (f'data.{part}="{tmp_path}/b{part}.npy"' for part in ("train", "valid"))
    recipe = tiny(*data, "train.eval_batches=0", "train.eval_interval=5")
    train_here(recipe)
    model = weights_of(newest(recipe)).model("cpu")
    stream: list[int] = []
    counted: list[bool] = []
    for talk in talks:
        for role, words in talk:
            for text, counts in (
                (f"<|im_start|>{role}\n", False),
                (f"{words}<|im_end|>", role == "assistant"),
                ("\n", False),
            ):
                ids = tokenizer.encode(text)
                stream += ids
                counted += [counts] * len(ids)
        stream.append(261)
        counted.append(False)
    found = [
        value
        for first in range(0, len(stream) - 1, 8)
        for value in bits(model, stream[first : first + 9], lambda i, first=first: counted[first + i])
    ]
    size = sum(len(words.encode()) for talk in talks for role, words in talk if role == "assistant")
    assert recorded(recipe) == [pytest.approx(math.fsum(found) / size, rel=1e-5)] * 3
