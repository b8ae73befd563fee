"""Formats of conversations: chat JSON lines, chat templates of lmkit and of Hugging Face folders."""

import json
from pathlib import Path
from random import Random

import numpy as np
from formats import TEXT, Files, Format, content_of, form

from lmkit.data.corpora import prepare_corpus
from lmkit.data.encoding import encode_chat
from lmkit.data.token_files import open_tokens
from lmkit.errors import LmkitError
from lmkit.recipe.tables import CorpusConfig
from lmkit.tokenizer import Tokenizer
from lmkit.tokenizer.chat import TEMPLATES, Message, beside, from_jinja
from lmkit.training.exchange import their_template

MARKS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|end_header_id|>",
    "<|eot_id|>",
)
TALK = [
    Message("system", "Be kind."),
    Message("user", " Who are\nyou? 12"),
    Message("assistant", "A thé\U0001f426."),
]
TOKENIZER = Tokenizer(
    vocab=Tokenizer.from_merges([]).vocab, merges=[], special_tokens=MARKS, pattern="llama3"
)


@form("chat .jsonl")
def conversations(folder: Path) -> Format:
    """What is encoded is what a plain reader of the lines renders; the mask lies on the assistant's words."""

    def read(folder: Path, good: Files, random: Random) -> None:
        table = CorpusConfig(source="chat", train=(folder / "c.jsonl",), valid_fraction=0.25)
        files = prepare_corpus(table, folder / "out")
        texts, answers, found, counted = [], [], [], []
        for path in (*files.train, *files.valid):
            encode_chat([path], folder / "out/t.npy", TOKENIZER, TEMPLATES["chatml"])
            opened = open_tokens(folder / "out/t.npy")
            assert opened.mask is not None
            flags = np.unpackbits(opened.mask)[: len(opened.tokens)].astype(bool)
            found.append(TOKENIZER.decode(opened.tokens))
            counted.append(TOKENIZER.decode(opened.tokens[flags]))
        for line in (folder / "c.jsonl").read_bytes().split(b"\n"):
            if not line.decode().strip():
                continue
            talk = [(message["role"], message["content"]) for message in json.loads(line)["messages"]]
            plain = [Message(role, text.encode("utf-8", "replace").decode()) for role, text in talk]
            texts.append(TEMPLATES["chatml"].render(plain) + "<|endoftext|>")
            answers += [text.strip() + "<|im_end|>" for role, text, _ in plain if role == "assistant"]
        assert "".join(found) == "".join(texts)
        assert "".join(counted) == "".join(answers)

    talks = [[*TALK, Message("user", str(number)), Message("assistant", "yes")] for number in range(9)]
    lines = [json.dumps({"messages": [message._asdict() for message in talk], "id": 1}) for talk in talks]
    return Format([{"c.jsonl": "\n".join(lines).encode()}], {"c.jsonl": TEXT}, read)


@form("chat template")
def templates(folder: Path) -> Format:
    """A template that fits the tokenizer takes apart what it renders; a folder's is the program that it writes."""

    def read(folder: Path, good: Files, random: Random) -> None:
        template = beside(folder / "tokenizer.json")
        assert template is not None
        assert vars(template) == json.loads((folder / "chat_template.json").read_bytes())
        assert from_jinja(template.to_jinja()) == template
        try:
            template.check(TOKENIZER, folder)
        except LmkitError:
            pass
        else:
            parts = template.encode(TALK, TOKENIZER)
            text = template.render(TALK)
            assert [token for ids, _ in parts for token in ids] == TOKENIZER.encode(text)
        theirs = their_template(folder)
        if theirs is None:
            assert (folder / "tokenizer_config.json").read_bytes() != good["tokenizer_config.json"]
            raise LmkitError("fuzz.refused", "no template of lmkit's")
        config = json.loads((folder / "tokenizer_config.json").read_bytes())
        assert config["chat_template"] == theirs.to_jinja()

    goods = []
    for template in TEMPLATES.values():
        template.save(folder / "chat_template.json")
        config = {"chat_template": template.to_jinja(), "eos_token": "<|endoftext|>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        goods.append(content_of(folder))
    return Format(goods, dict.fromkeys(("chat_template.json", "tokenizer_config.json"), TEXT), read)
