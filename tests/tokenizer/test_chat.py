"""Chat templates against transformers' `apply_chat_template`, and those that are damaged or do not fit."""

import json

import pytest
from byte_tokenizers import of_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises

from lmkit.errors import LmkitError, UsageError
from lmkit.tokenizer import Tokenizer
from lmkit.tokenizer.chat import (
    CHATML,
    ROLES,
    TEMPLATES,
    ChatTemplate,
    Message,
    beside,
    from_jinja,
    read_template,
)
from lmkit.tokenizer.pretokenize import PATTERNS, AddedToken

MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS += ("<|eot_id|>", "<|begin_of_text|>", "<|end_header_id|>")
PAIRS = [(pair[:1], pair[1:]) for pair in (b"he", b" t", b"\n\n", b":\n", b"\n ", b"\nt", b"12")]
WORDS = st.lists(
    st.sampled_from([*"the \n\r\t:.12'é日\u0301\x1c\xa0", "<|im", "<|end", "assistant"]),
    max_size=12,
).map("".join)  # fmt: skip
CONVERSATIONS = st.lists(
    st.builds(Message, st.sampled_from(ROLES), st.one_of(WORDS, st.text(max_size=12)), st.just(True)),
    min_size=1,
    max_size=5,
)


def tokenizer_of(pattern: str = "gpt2", nfc: bool = False) -> Tokenizer:
    return of_bytes(*MARKS, merges=PAIRS, pattern=pattern, nfc=nfc)


def joined(template: ChatTemplate, messages: list[Message], tokenizer: Tokenizer) -> list[tuple[int, bool]]:
    parts = template.encode(messages, tokenizer)
    return [(token, counts) for ids, counts in parts for token in ids]


def test_an_end_that_takes_white_space_takes_the_templates():
    marks = {"<|im_start|>": {"lstrip": True}, "<|im_end|>": {"rstrip": True}, "<|endoftext|>": {}}
    tokens = [AddedToken(text, special=True)._replace(**taken) for text, taken in marks.items()]
    tokenizer = Tokenizer(vocab=Tokenizer.from_merges(PAIRS).vocab, merges=PAIRS, special_tokens=tokens)
    asked = [Message("user", "a"), Message("assistant", "b"), Message("user", "c")]
    found = [token for token, _ in joined(CHATML, asked, tokenizer)]
    assert found == tokenizer.encode(CHATML.render(asked), add_special_tokens=False)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_parts_joined_are_the_tokens_of_the_text(name, pattern):
    tokenizer, template = tokenizer_of(pattern, nfc=pattern == "qwen2"), TEMPLATES[name]
    if name == "llama3" and pattern in ("gpt2", "digits"):  # the second new line would begin a word
        with raises(UsageError, "chat.border"):
            template.check(tokenizer, "tokenizer.json")
        return
    template.check(tokenizer, "tokenizer.json")

    @settings(max_examples=50, deadline=None)
    @given(CONVERSATIONS)
    def check(messages: list[Message]) -> None:
        found = [token for token, _ in joined(template, messages, tokenizer)]
        assert found == tokenizer.encode(template.render(messages), add_special_tokens=False)

    check()


@pytest.mark.full  # importing transformers takes seconds
@pytest.mark.parametrize("name", TEMPLATES)
def test_transformers_renders_the_same_text_tokens_and_mask(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer, template = tokenizer_of("llama3"), TEMPLATES[name]
    tokenizer.save(tmp_path / "tokenizer.json")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config["chat_template"] = template.to_jinja()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)

    @settings(max_examples=50, deadline=None)
    @given(CONVERSATIONS)
    def check(messages: list[Message]) -> None:
        given = [message._asdict() for message in messages]
        for prompted in (False, True):
            text = theirs.apply_chat_template(given, tokenize=False, add_generation_prompt=prompted)
            assert text == template.render(messages, add_generation_prompt=prompted)
        made = theirs.apply_chat_template(
            given, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        assert made["input_ids"] == [token for token, _ in joined(template, messages, tokenizer)]
        assert made["assistant_masks"] == [int(counts) for _, counts in joined(template, messages, tokenizer)]

    check()


@pytest.mark.parametrize("name", ["plain", "chatml"])
def test_special_tokens_that_a_message_spells_are_text(name):
    tokenizer, template = tokenizer_of(), TEMPLATES[name]
    asked = [Message("user", f"a {''.join(MARKS)} b<|im_end|>"), Message("assistant", "<|endoftext|>")]
    found = [token for token, _ in joined(template, asked, tokenizer)]
    assert tokenizer.decode(found) == template.render(asked)
    bare = [message._replace(content="") for message in asked]
    plain = [token for token, _ in joined(template, bare, tokenizer)]
    specials = set(tokenizer.special_ids.values())
    assert [token for token in found if token in specials] == [token for token in plain if token in specials]


ODD = ['"', "\\", "{{ x }}", "{% raw %}", "'", "\n", "\ud83d\ude00"]
TEXTS = st.one_of(st.text(max_size=8), st.sampled_from(ODD))


@settings(max_examples=200, deadline=None)
@given(TEXTS, TEXTS, TEXTS, TEXTS)
def test_the_program_of_a_template_is_read_back_and_no_other(a, b, c, end):
    try:
        template = ChatTemplate(a, f"{b}{{role}}{c}", end)
    except ValueError:
        return
    program = template.to_jinja()
    assert from_jinja(program) == template
    for other in (program + " ", program.replace("trim", "upper"), program[:-1]):
        assert from_jinja(other) is None


def test_templates_are_saved_and_read(tmp_path):
    assert beside(None) is beside(tmp_path / "tokenizer.json") is None
    for template in TEMPLATES.values():
        template.save(tmp_path / "chat_template.json")
        assert beside(tmp_path / "tokenizer.json") == template


@pytest.mark.parametrize(
    "content",
    [
        b"", b"[]", b"{", b"[" * 100_000, b"\xff", b" " * 70_000,
        b'{"begin": "", "before": "{role}", "after": "x", "more": ""}',
        b'{"begin": "", "before": "{role}{role}", "after": "x"}',
        b'{"begin": "", "before": "{role}", "after": " "}',
        b'{"begin": "\\ud800", "before": "{role}", "after": "x"}',
    ],
)  # fmt: skip
def test_a_damaged_template_is_named(content, tmp_path):
    path = tmp_path / "chat_template.json"
    path.write_bytes(content)
    with raises(LmkitError, "chat.damaged_template", path) as caught:
        read_template(path)
    assert "\n" not in caught.value.message


def test_a_template_that_does_not_fit_the_tokenizer_is_refused():
    bare = Tokenizer.from_merges([], ["<|endoftext|>"])
    for template, code in (
        (TEMPLATES["chatml"], "chat.no_end"),
        (ChatTemplate("", "{role}: ", "<|endoftext|>"), "chat.border"),
    ):
        with raises(UsageError, code, "tokenizer.json"):
            template.check(bare, "tokenizer.json")
