"""Small `tokenizer.json` files with the structure of well-known models, and random texts to compare ids on.

The normalizer, pre-tokenizer, post-processor, flags and added tokens are those of the models. The vocabularies are
trained here, with Hugging Face's trainer.
"""

import copy
import itertools
import json
import random
import unicodedata
from functools import cache

from lmkit.data.synth import generate_stories
from lmkit.tokenizer.files import to_characters

GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
NO_REGEX = {**BYTE_LEVEL, "use_regex": False}
DIGITS = {"type": "Digits", "individual_digits": True}


def sequence(*steps):
    return {"type": "Sequence", "pretokenizers": list(steps)}


def split(regex, behavior="Isolated", invert=False):
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": behavior, "invert": invert}


GPT2 = BYTE_LEVEL
STARCODER = sequence(DIGITS, {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True})
LLAMA3 = sequence(split(GPT4), NO_REGEX)
QWEN2 = sequence(split(GPT4.replace("{1,3}", "")), NO_REGEX)
FALCON = sequence(
    {"type": "Punctuation", "behavior": "Contiguous"},
    BYTE_LEVEL,
    {"type": "Digits", "individual_digits": False},
    split("[0-9][0-9][0-9]"),
)
DEEPSEEK = sequence(split(r"\p{N}{1,3}"), split(r"[一-龥぀-ゟ゠-ヿ]+"), split(GPT4), NO_REGEX)


def added(content, token_id, special=True, normalized=False, **flags):
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip"), False) | flags
    return {"id": token_id, "content": content, **flags, "normalized": normalized, "special": special}


def template(before=(), after=()):
    sides = [[{"SpecialToken": {"id": text, "type_id": 0}} for text, _ in side] for side in (before, after)]
    single = [*sides[0], {"Sequence": {"id": "A", "type_id": 0}}, *sides[1]]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    used = {text: {"id": text, "ids": [i], "tokens": [text]} for text, i in [*before, *after]}
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": used}


# ---- vocabularies


@cache
def training_text():
    stories = list(itertools.islice(generate_stories(0), 60))
    more = [
        "naïve café Ελληνικά 日本語のテキスト 한국어 русский текст עברית हिन्दी ½ ٣٤٥ 👩‍👩‍👧 e\u0301",
        "def f(x):\n    return x + 123  # 4567\n\n\n        if (a == b) {\r\n\t\treturn;\n    }",
        "It's I'LL we've THEY'RE don't", "the the the them then other    word\u00a0x\u2003y",
    ]  # fmt: skip
    return [*stories, *(text for text in more for _ in range(8))]


@cache
def trained(pre_tokenizer, size, alphabet):
    """Return vocabulary and merges; `alphabet` is "all" bytes, the "seen" ones, or those of "utf8"."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    content = {"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}
    content["pre_tokenizer"] = json.loads(pre_tokenizer)
    model = Tokenizer.from_str(json.dumps(content))
    assert isinstance(model.model, models.BPE)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    if alphabet == "utf8":
        never = [0xC0, 0xC1, *range(0xF5, 0x100)]
        letters = [letter for letter in letters if ord(letter) not in never]
    trainer = trainers.BpeTrainer(
        vocab_size=size, show_progress=False, initial_alphabet=[] if alphabet == "seen" else letters
    )
    model.train_from_iterator(training_text(), trainer)
    found = json.loads(model.to_str())["model"]
    return found["vocab"], found["merges"]


def build(pre_tokenizer, *, first=(), size=500, alphabet="all", extra=(), appended=(), model=(), **parts):
    """Return the content of a file.

    Args:
        first: special tokens with the first ids, in the vocabulary, too.
        extra: strings at the end of the vocabulary.
        appended: added tokens that the vocabulary lacks: arguments of `added` without the id.
    """
    vocab, merges = copy.deepcopy(trained(json.dumps(pre_tokenizer), size, alphabet))
    names = [*first, *(name for name, _ in sorted(vocab.items(), key=lambda item: item[1])), *extra]
    vocab = {name: i for i, name in enumerate(names)}
    tokens = [added(text, i) for i, text in enumerate(first)]
    tokens += [added(name, vocab[name]) for name in extra if name.startswith("<|")]
    tokens += [
        added(text, len(names) + i, **flags)
        for i, (text, flags) in enumerate(
            (given, {}) if isinstance(given, str) else given for given in appended
        )
    ]
    unset = dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"))
    off = dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False)
    bpe = {"type": "BPE", **unset, **off, **dict(model), "vocab": vocab, "merges": merges}
    content = {"version": "1.0", **dict.fromkeys(("truncation", "padding", "normalizer"))}
    content |= {"added_tokens": tokens, "pre_tokenizer": pre_tokenizer}
    return content | {"post_processor": BYTE_LEVEL, "decoder": BYTE_LEVEL, **parts, "model": bpe}


# ---- families

NFC = {"type": "NFC"}
TEXT = {"special": False, "normalized": True}
SPACES = [(" " * n, TEXT) for n in range(24, 1, -1)]
CHAT = ["<|im_start|>", "<|im_end|>"]
TOOLS = [("<tool_call>", {"special": False}), ("</tool_call>", {"special": False})]
THINK = [("<think>", {"special": False}), ("</think>", {"special": False})]
QWEN = {"normalizer": NFC, "appended": ["<|endoftext|>", *CHAT, "<|object_ref_start|>", *TOOLS]}
RESERVED = [f"<|reserved_special_token_{i}|>" for i in range(200)]
BEGIN = "<|begin_of_text|>"


def llama3(**changes):
    given = build(
        LLAMA3,
        appended=[BEGIN, "<|end_of_text|>", *RESERVED, "<|eot_id|>"],
        model={"ignore_merges": True},
        **changes,
    )
    around = template(before=[(BEGIN, given["added_tokens"][0]["id"])])
    return given | {"post_processor": {"type": "Sequence", "processors": [BYTE_LEVEL, around]}}


def modern_bert(**changes):
    names = ["|||IP_ADDRESS|||", "|||EMAIL_ADDRESS|||"]
    brackets = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", ("[MASK]", {"lstrip": True})]
    unused = [(f"[unused{i}]", TEXT) for i in range(20)]
    given = build(
        GPT2, normalizer=NFC, alphabet="utf8", first=["<|padding|>", "<|endoftext|>"],
        appended=[*((name, TEXT) for name in names), *SPACES, *brackets, *unused], **changes,
    )  # fmt: skip
    ids = {token["content"]: token["id"] for token in given["added_tokens"]}
    return given | {"post_processor": template([("[CLS]", ids["[CLS]"])], [("[SEP]", ids["[SEP]"])])}


def neox(**changes):
    first = ["<|endoftext|>", "<|padding|>"]
    return build(GPT2, normalizer=NFC, alphabet="utf8", first=first, appended=SPACES, **changes)


FAMILIES = {
    "gpt2": lambda **kw: build(GPT2, extra=["<|endoftext|>"], **kw),
    "llama3": llama3,
    "qwen2": lambda **kw: build(QWEN2, **QWEN, **kw),
    "qwen3": lambda **kw: build(QWEN2, **QWEN | {"appended": [*QWEN["appended"], *THINK]}, **kw),
    "smollm2": lambda **kw: build(
        STARCODER, alphabet="seen", first=["<|endoftext|>", *CHAT, "<repo_name>", "<file_sep>"], **kw
    ),
    "pythia": neox,
    "olmo": lambda **kw: neox(model={"unk_token": None}, size=450, **kw),
    "olmo2": lambda **kw: build(
        LLAMA3, appended=["<|fim_prefix|>", "|||IP_ADDRESS|||", *CHAT, "<|endoftext|>", "<|pad|>"], **kw
    ),
    "starcoder2": lambda **kw: build(
        STARCODER, first=["<|endoftext|>", "<fim_prefix>", "<fim_middle>", "<gh_stars>", "<reponame>"], **kw
    ),
    "phi2": lambda **kw: build(
        GPT2, extra=["<|endoftext|>"], appended=[*SPACES, *(("\t" * n, TEXT) for n in range(9, 1, -1))], **kw
    ),
    "phi4": lambda **kw: build(
        sequence(split(GPT4, "Removed", invert=True), NO_REGEX),
        appended=[(text, {"lstrip": True, "rstrip": True}) for text in ("<|endoftext|>", *CHAT, "<|im_sep|>")],
        **kw,
    ),
    "modernbert": modern_bert,
    "falcon": lambda **kw: build(FALCON, first=[">>TITLE<<", "<|endoftext|>"], **kw),
    "nemo": lambda **kw: build(
        sequence(split(TEKKEN), NO_REGEX),
        first=["<unk>", "<s>", "</s>", "[INST]"],
        model={"ignore_merges": True},
        **kw,
    ),
    "deepseek3": lambda **kw: build(
        DEEPSEEK,
        normalizer={"type": "Sequence", "normalizers": []},
        appended=["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", ("<｜User｜>", {"special": False})],
        **kw,
    ),
}  # fmt: skip
REFUSED = {"falcon", "nemo", "deepseek3"}


# ---- changes


def with_odd_tokens(content):
    """Add tokens that are ordinary tokens, too, or written like them, and tokens that no text has."""
    vocab = content["model"]["vocab"]
    top = 1 + max([*vocab.values(), *(token["id"] for token in content["added_tokens"])])
    rng = random.Random(len(vocab))
    words = [name for name in vocab if len(name) > 2 and name.isascii() and "<" not in name]
    spaced = [name for name in vocab if name[0] == "Ġ" and len(name) > 3]
    ordinary = [*rng.sample(words, 2), *rng.sample(spaced, 1), "a", "é", "Ċ", "1"]
    tokens = [
        added(name, vocab[name], special=i % 2 == 0) for i, name in enumerate(ordinary) if name in vocab
    ]
    appended = [
        ("\n\n", {"special": False}), ("\n", {}), ("  ", {"special": False}), ("end", {"rstrip": True, **TEXT}),
        ("日本", {"lstrip": True}), ("wordless", TEXT), ("less", {}), ("12", {"special": False}), ("▁the", {}),
    ]  # fmt: skip
    present = {token["content"] for token in content["added_tokens"]} | set(vocab)
    new = [(text, flags) for text, flags in appended if text not in present]
    tokens += [added(text, top + i, **flags) for i, (text, flags) in enumerate(new)]
    present |= {text for text, _ in new}
    content["added_tokens"] += tokens
    return content


def with_leftovers(content):
    """Add tokens that are not in the byte alphabet, and merges of them, and list a merge twice."""
    model = content["model"]
    shift = ["▁", "▁t", "日", "Ġ日"]
    size = len(model["vocab"])
    moved = {name: i + len(shift) if i >= size else i for name, i in model["vocab"].items()}
    model["vocab"] = moved | {name: size + i for i, name in enumerate(shift)}
    for token in content["added_tokens"]:
        token["id"] += len(shift) * (token["id"] >= size)
    for processor in (content["post_processor"] or {}).get("processors", [content["post_processor"]]):
        for used in (processor or {}).get("special_tokens", {}).values():
            used["ids"] = [i + len(shift) * (i >= size) for i in used["ids"]]
    model["merges"] = [["▁", "t"], *model["merges"], ["Ġ", "日"], model["merges"][0]]
    return content


def as_older_files(content):
    """Write merges as strings, and leave out what has a default."""
    content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
    for key in ("type", "fuse_unk", "byte_fallback", "ignore_merges", "dropout", "unk_token"):
        if not content["model"][key] or key == "type":
            del content["model"][key]
    for key in ("truncation", "padding", "decoder", "normalizer"):
        if content[key] is None:
            del content[key]
    return content


def with_unknown(content, *, fuse):
    """Let the end of the vocabulary be the unknown token, for vocabularies without all bytes."""
    content["model"] |= {"unk_token": next(iter(content["model"]["vocab"])), "fuse_unk": fuse}
    return content


FIXED = [
    FAMILIES[name] for name in ("smollm2", "pythia", "olmo", "modernbert")
]  # with alphabets of their own


def with_seen_bytes(make):
    return make() if make in FIXED else make(alphabet="seen")


VARIANTS = {
    "plain": lambda make: make(),
    "odd": lambda make: with_odd_tokens(make()),
    "older": lambda make: as_older_files(with_leftovers(make())),
    "seen": lambda make: with_odd_tokens(with_leftovers(make())) if make in FIXED else with_seen_bytes(make),
    "unknown": lambda make: with_unknown(with_seen_bytes(make), fuse=False),
    "fused": lambda make: with_unknown(with_seen_bytes(make), fuse=True),
}


def files(families=tuple(FAMILIES), variants=tuple(VARIANTS)):
    """Yield (name, content) of each family in each variant."""
    for family, variant in itertools.product(families, variants):
        yield f"{family}-{variant}", VARIANTS[variant](FAMILIES[family])


# ---- any file

CHARACTERS = [*"abé日1K <>ĠĀÃ\n", "e\u0301", "'s", "\u212a", "\u00a0"]


def random_file(rng):
    """Return a file of few characters, whose tokens, merges, added tokens and flags collide as often as possible."""

    def word(size):
        return "".join(rng.choices(CHARACTERS, k=size))

    def characters(text):
        return to_characters(text.encode())

    some = [*rng.sample(range(256), 200), *b"ab<>K1 '\n"]
    names = list(dict.fromkeys(characters_of(range(256) if rng.random() < 0.4 else some)))
    merges = []
    for _ in range(rng.randint(0, 60)):
        text = characters(word(3))
        at = rng.randrange(1, len(text)) if len(text) > 1 else 1
        left, right = (text[:at], text[at:]) if rng.random() < 0.7 else rng.choices(names, k=2)
        if left in names and right in names and len(left + right) < 12:
            names += [left + right] * (left + right not in names)
            merges.append([left, right])
    names += [name for name in {word(2), characters(word(2))} if name not in names]
    unknown = rng.choice([None, "<unk>", "a"])
    names = [unknown] * (unknown not in [None, *names]) + ["<s>"] * (rng.random() < 0.3) + names
    holes = rng.randint(1, 5) * (rng.random() < 0.15)
    vocab = {name: i + holes * (i > len(names) // 2) for i, name in enumerate(names)}
    tokens = {}
    for _ in range(rng.randint(0, 7)):
        text = rng.choice([word(rng.randint(1, 3)), rng.choice(names), characters(word(2))])
        token_id = vocab.get(text, len(names) + sum(known not in vocab for known in tokens))
        flags = {flag: rng.random() < 0.25 for flag in ("normalized", "lstrip", "rstrip")}
        flags["lstrip"] &= bool(text.strip())  # tokenizers panics at whitespace that two tokens take
        tokens.setdefault(text, added(text, token_id, special=rng.random() < 0.5, **flags))
    steps = {"normalizer": rng.choice([None, NFC])}
    steps["pre_tokenizer"] = rng.choice([GPT2, STARCODER, LLAMA3, QWEN2])
    bpe = {"type": "BPE", "vocab": vocab, "merges": merges, "unk_token": unknown}
    bpe |= {"fuse_unk": rng.random() < 0.5, "ignore_merges": rng.random() < 0.4}
    return {"added_tokens": list(tokens.values()), **steps, "model": bpe}


def characters_of(numbers):
    return [to_characters(bytes([number])) for number in numbers]


# ---- texts

SPACE = [*" \t\n\r\x0b\x0c\x1c\x85\u00a0\u1680\u2003\u2028\u202f\u3000\u200b", "  ", "    ", "\r\n", "\n\n"]
LETTERS = [*"aAbBeEsStTzZéÉßſǆΩωЖж日本語한ע\u0905ﬁ𝒜𐐀"]
LETTERS += ["e\u0301", "a\u0323\u0301", "\u1112\u1161\u11ab", "\u212a"]
OTHERS = [
    *"0123456789٣½Ⅷ𝟘.,!?'\"()[]{}<>|/_-+=#@’…、。\u0301\u0903\u200d\ufeff\x00\x01\x7f",
    "'s", "'LL", "'ſ", "👩‍👩‍👧‍👦", "🇩🇪", "<|", "|>", "::", "==", "--", "...",
]  # fmt: skip


@cache
def assigned():
    """The characters that every library of these years knows: those of Python's, without the private ones."""
    all_characters = map(chr, range(0x110000))
    return [c for c in all_characters if unicodedata.category(c) not in ("Cn", "Cs", "Co")]


def random_text(rng, tokens):
    """Return a text of words, spaces, digits, marks, any characters, and the given added tokens."""
    words = [word for text in training_text()[-40:] for word in text.split(" ")]
    kinds = [
        lambda: rng.choice(words),
        lambda: " " + rng.choice(words),
        lambda: rng.choice(SPACE) * rng.randint(1, 3),
        lambda: rng.choice(LETTERS),
        lambda: rng.choice(OTHERS),
        lambda: str(rng.randrange(10 ** rng.randint(1, 8))),
        lambda: rng.choice(assigned()),
        lambda: rng.choice(tokens),
        lambda: " " * rng.randint(1, 40),
        lambda: rng.choice(tokens)[: rng.randint(1, 9)],
    ]
    weights = [4, 6, 3, 3, 3, 1, 2, 1, 0.5, 0.5]
    return "".join(kind() for kind in rng.choices(kinds, weights, k=rng.randint(0, 40)))
