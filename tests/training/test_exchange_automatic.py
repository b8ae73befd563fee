"""What is exported opens in transformers' own automatic classes, with equal logits and equal ids, in every kind."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from their_models import GROUPED, LINEAR, LLAMA3, TIED, make_theirs

from lmkit.tokenizer import Tokenizer
from lmkit.tokenizer.chat import CHATML
from lmkit.tokenizer.marks import Marks
from lmkit.training.exchange import export_model, import_model
from lmkit.training.weights import open_weights

transformers = pytest.importorskip("transformers")

TEXTS = (
    "In 2023 there were 12345 ships, 'twas I'LL we'll DON'T",
    "3.14159 1,000,000 \u00b2\u00b3 \u0661\u0662\u0663 12ab34",
    "na\u00efve caf\u00e9 A\u030angstro\u0308m \ufb01",
    *(" a  b   c\t\td ", "x\n\ny\r\n\r\nz \n \n", "", " ", "\n", "\u00a0\u2003\u3000x\u2028y"),
    "\u65e5\u672c\u8a9e \u4e2d\u6587 \ud55c\uad6d\uc5b4 \u0e44\u0e17\u0e22",
    "\U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467 !? ... //--",
    "a<|endoftext|> b<|im_end|>\n<|im_start|>user\n <|pad|> <|endo",
)
MERGES = [
    *((b"1", b"2"), (b"12", b"3"), (b"2", b"0"), (b" ", b"1"), (b" ", b"t"), (b"h", b"e"), (b" t", b"he")),
    *((b"'", b"L"), (b"'L", b"L"), (b"'", b"l"), (b"'l", b"l"), (b" ", b" "), (b"  ", b"c"), (b"\n", b"\n")),
    *((b"\xc3", b"\xa9"), (b"\xcc", b"\x88"), (b"o", b"\xcc\x88"), (b"\r", b"\n"), (b".", b".")),
    (b"?", b" "),
    *((b"\xe6", b"\x97"), (b"\xe6\x97", b"\xa5"), (b"/", b"/"), (b"//", b"-"), (b"!", b"?"), (b" ", b"a")),
]
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>")


def tokenizer(
    pattern: str = "gpt2", *, pads: bool = False, begins: bool = False, **options: Any
) -> Tokenizer:
    """With `begins`, a prefix of `<s>`."""
    options |= {"vocab": Tokenizer.from_merges(MERGES).vocab, "merges": MERGES, "pattern": pattern}
    options["special_tokens"] = (*SPECIALS, "<|pad|>") if pads else SPECIALS
    made = Tokenizer(**options)
    return Tokenizer(**options, prefix=[made.special_ids["<s>"]]) if begins else made


QWEN3 = {"head_dim": 8}
LLAMA_BIAS, QWEN2_BIAS = "LlamaForCausalLM", "Qwen2ForCausalLM"
# Kind of model, changes of its configuration, tokenizer, its architecture as exported.
EXPORTS: dict[str, tuple[str, dict[str, Any], Tokenizer, str]] = {
    "llama": ("Llama", {}, tokenizer(), "LlamaForCausalLM"),
    "llama tied, with a pad token": ("Llama", {**TIED, **GROUPED}, tokenizer(pads=True), "LlamaForCausalLM"),
    "llama linear, digits": ("Llama", LINEAR, tokenizer("digits"), "LlamaForCausalLM"),
    "llama 3, prefix and whole words": (
        *("Llama", {**GROUPED, **LLAMA3}, tokenizer("llama3", begins=True, whole_words=True)),
        "LlamaForCausalLM",
    ),
    "mistral, narrow heads": (
        "Mistral",
        {"sliding_window": None, "head_dim": 6},
        tokenizer(begins=True),
        "LlamaForCausalLM",
    ),
    "qwen2's biases, words of gpt2": ("Qwen2", {}, tokenizer(), LLAMA_BIAS),
    "qwen2's biases tied, words of llama 3": ("Qwen2", {**TIED, **LLAMA3}, tokenizer("llama3"), LLAMA_BIAS),
    "qwen2's biases, its words without NFC": ("Qwen2", GROUPED, tokenizer("qwen2"), LLAMA_BIAS),
    "qwen2's biases, whole words": ("Qwen2", {}, tokenizer("qwen2", nfc=True, whole_words=True), LLAMA_BIAS),
    "llama's biases": ("Llama", {"attention_bias": True}, tokenizer("digits"), LLAMA_BIAS),
    "qwen2": ("Qwen2", {**GROUPED, **TIED, **LINEAR}, tokenizer("qwen2", nfc=True), QWEN2_BIAS),
    "qwen2 and a prefix": ("Qwen2", {}, tokenizer("qwen2", nfc=True, begins=True), QWEN2_BIAS),
    "qwen3, wide heads, words of gpt2": (
        "Qwen3",
        {"head_dim": 20, **GROUPED, **TIED},
        tokenizer(),
        "Qwen3ForCausalLM",
    ),
    "qwen3": ("Qwen3", {**QWEN3, **GROUPED, **LLAMA3}, tokenizer("qwen2", nfc=True), "Qwen3ForCausalLM"),
}


def run_of(parent: Path, case: str) -> Path:
    kind, changes, tokens, _ = EXPORTS[case]
    model = make_theirs(kind, changes)
    for name, parameter in model.named_parameters():
        if name.endswith("o_proj.bias"):
            parameter.data.zero_()
    model.save_pretrained(parent / "theirs")
    (parent / "theirs/generation_config.json").unlink()
    tokens.save(parent / "theirs/tokenizer.json")
    import_model(parent / "theirs", parent / "run")
    return parent / "run"


def check_ids(folder: Path, ours: Tokenizer) -> Any:
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        ids = ours.encode(text)
        assert theirs.encode(text) == ids, text
        bare = {"add_special_tokens": False}
        assert theirs(text, **bare)["input_ids"] == ours.encode(text, **bare)
        assert theirs.decode(ids) == ours.decode(ids), text
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.start_id, ours.end_of_text_id)
    return theirs


def check_model(folder: Path, run: Path) -> Any:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(256, (2, 60), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        # As in test_exchange.py.
        found = open_weights(run).model("cpu").float()(ids)
        torch.testing.assert_close(found, theirs(ids).logits, rtol=0, atol=1e-5)
    return theirs


@pytest.mark.parametrize("case", EXPORTS)
def test_logits_and_ids_are_ours(case, tmp_path):
    run, folder = run_of(tmp_path, case), tmp_path / "exported"
    assert export_model(run, folder).architecture == EXPORTS[case][-1]
    check_model(folder, run)
    export_model(run, tmp_path / "narrow", dtype="fp16")
    check_model(tmp_path / "narrow", tmp_path / "narrow")
    ours = Tokenizer.load(run / "tokenizer.json")
    theirs = check_ids(folder, ours)
    # Whole ids stay the same on the way back.
    import_model(folder, tmp_path / "back")
    back = Tokenizer.load(tmp_path / "back/tokenizer.json")
    assert [back.encode(text) for text in TEXTS] == [ours.encode(text) for text in TEXTS]
    assert (back.end_of_text_id, back.start_id) == (ours.end_of_text_id, ours.start_id)
    expected, found = open_weights(run), open_weights(tmp_path / "back")
    assert expected.config == found.config
    assert all(torch.equal(expected[name], found[name]) for name in expected.specs)
    assert theirs.pad_token_id == ours.special_ids.get("<|pad|>", ours.end_of_text_id)


def test_texts_of_different_lengths_are_padded_and_end_at_any_stop(tmp_path):
    """A list of end tokens reaches transformers' generation; padding changes no text."""
    model, ours = make_theirs("Llama", {}), tokenizer()
    stops = (ours.special_ids["<|im_end|>"], ours.special_ids["<|endoftext|>"], 65)
    marked = Tokenizer(vocab=ours.vocab, merges=MERGES, special_tokens=SPECIALS, marks=Marks(stops=stops))
    model.save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs/generation_config.json").unlink()
    marked.save(tmp_path / "theirs/tokenizer.json")
    import_model(tmp_path / "theirs", tmp_path / "run")
    export_model(tmp_path / "run", tmp_path / "exported")
    said = json.loads((tmp_path / "exported/generation_config.json").read_text())
    assert (said["eos_token_id"], said["pad_token_id"]) == ([*stops], stops[1])
    tokens = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert theirs.config.pad_token_id is None
    texts = ["the other", "a", "12 ships there"]
    options = {"do_sample": False, "max_new_tokens": 12, "bad_words_ids": [[i] for i in range(290, 300)]}
    batch = theirs.generate(**tokens(texts, return_tensors="pt", padding=True), **options)
    for text, made in zip(texts, batch, strict=True):
        alone = theirs.generate(**tokens(text, return_tensors="pt"), **options)[0]
        length = len(alone) - len(tokens.encode(text))
        width = batch.shape[1] - options["max_new_tokens"]
        assert made[width : width + length].tolist() == alone[-length:].tolist()


def test_the_chat_template_and_its_end_of_turn(tmp_path):
    run, folder = run_of(tmp_path, "llama"), tmp_path / "exported"
    CHATML.save(run / "chat_template.json")
    export_model(run, folder)
    ours, messages = EXPORTS["llama"][2], [{"role": "user", "content": "12 ships"}]
    theirs = check_ids(folder, ours)
    text = "<|im_start|>user\n12 ships<|im_end|>\n<|im_start|>assistant\n"
    found = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert found == text
    said = json.loads((folder / "generation_config.json").read_text())
    assert said["eos_token_id"] == [ours.end_of_text_id, ours.special_ids["<|im_end|>"]]
    import_model(folder, tmp_path / "back")
    assert (tmp_path / "back/chat_template.json").read_bytes() == (run / "chat_template.json").read_bytes()
    assert [*Tokenizer.load(tmp_path / "back/tokenizer.json").marks.stops] == said["eos_token_id"]
