"""`lmkit chat`: what the model is given, what is printed, and how it ends."""

import io
import json
import sys
from pathlib import Path

import pytest

from lmkit.cli.chat import Conversation
from lmkit.generation import Decoder, Drawn
from lmkit.tokenizer import Tokenizer
from lmkit.tokenizer.chat import TEMPLATES, Message

SETTINGS = "--max-new-tokens 3 --temperature 5 --set generate.stop_at_end=false"
END = 259


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """Of each answer: the ids that the model continues, and those that it adds."""
    answers: list[tuple[list[int], list[int]]] = []
    generate = sys.modules["lmkit.generation.generate"]
    draw_tokens = generate.draw_tokens

    def note(decoder, prompts, seed):
        answers.append((list(prompts[0]), []))
        for drawn in draw_tokens(decoder, prompts, seed):
            answers[-1][1].append(drawn.token)
            yield drawn

    monkeypatch.setattr(generate, "draw_tokens", note)
    return answers


@pytest.fixture
def chat(run: Path, terminal, monkeypatch: pytest.MonkeyPatch):
    """chat(lines, flags=SETTINGS) -> what `lmkit chat` prints."""

    def talk(lines: bytes, flags: str = SETTINGS) -> str:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines)))
        return terminal(f"chat {run} {flags}")

    return talk


def turns(chat, lines: bytes, flags: str = SETTINGS) -> list[dict[str, str]]:
    return json.loads(chat(lines, f"{flags} --json"))["turns"]


def test_each_line_is_answered_from_all_that_fits_into_the_context(chat, heard, run):
    """A context of 8 tokens, 3 of them for the answer."""
    tokenizer = Tokenizer.load(run / "tokenizer.json")
    made = turns(chat, b"fish\nx\n\nlonger\n")
    assert [turn["prompt"] for turn in made] == ["fish", "x", "", "longer"]
    text = [END]
    added = ["fish", "\nx", "", "\nlonger"]
    for words, turn, (given, answer) in zip(added, made, heard, strict=True):
        text += tokenizer.encode(words)
        assert given == text[-5:]
        assert len(answer) == 3
        assert turn["text"] == tokenizer.decode(answer)
        text += answer


def test_ctrl_c_ends_the_answer_and_what_was_written_stays(chat, heard, monkeypatch):
    steps = iter(range(2))

    def step(decoder, longest, step=Decoder.step):
        if next(steps, None) == 1:
            raise KeyboardInterrupt
        step(decoder, longest)

    monkeypatch.setattr(Decoder, "step", step)
    turns(chat, b"a\nb\n")
    (_, cut), (given, answer) = heard
    assert (len(cut), len(answer)) == (1, 3)
    assert given == [END, ord("a"), *cut, *b"\nb"]


# ---- conversations

CHAT = (
    *("run", "fish.toml", "--set", "run.name=talk", "--set", "corpus.source=chat"),
    *("--set", 'corpus.train=["talk.jsonl"]', "--set", "tokenizer.path=runs/fish/tokenizer.json"),
    *("--set", "train.init_from=runs/fish"),
    *("--set", 'generate.prompts=["user:\\nfish?<|endoftext|>assistant:\\n"]'),
    *("--set", "generate.allow_special=true"),
)


@pytest.fixture
def talk(run: Path, terminal) -> Path:
    """A run that was trained on conversations, with the weights of the other one."""
    asked, answer = {"role": "user", "content": "fish?"}, {"role": "assistant", "content": "red fish"}
    Path("talk.jsonl").write_text((json.dumps({"messages": [asked, answer]}) + "\n") * 30)
    terminal(*CHAT)
    return Path("runs/talk")


def test_a_run_on_conversations_keeps_its_template_and_its_mask(talk, terminal):
    template = {"begin": "", "before": "{role}:\n", "after": "<|endoftext|>"}
    assert json.loads((talk / "chat_template.json").read_text()) == template
    meta = json.loads((talk / "tokens/valid.json").read_text())
    assert meta["counted_bytes"] == len("red fish") * meta["num_documents"]
    found = json.loads(terminal("data", "inspect", talk / "tokens/valid.npy", "--json"))
    assert found["counted_tokens"] == meta["counted_tokens"]
    assert (talk / "stories.txt").read_text().startswith("user:\nfish?<|endoftext|>assistant:\n")
    done = json.loads(terminal(*CHAT, "--json"))["stages"]
    assert set(done.values()) == {"up to date"}
    (talk / "tokens/train.mask").unlink()
    done = json.loads(terminal(*CHAT, "--json"))["stages"]
    assert done["encode"] != "up to date"
    assert done["corpus"] == "up to date"


def test_a_changed_template_beside_the_tokenizer_is_other_data(talk, terminal):
    TEMPLATES["plain"].save(Path("runs/fish/chat_template.json"))
    terminal.refuses(*CHAT, code="run.other_data", says=["tokenizer.path"])


def test_answers_are_asked_for_as_the_template_says(talk, terminal, heard, monkeypatch):
    lines = b"a<|endoftext|>\n b \n/reset\nc\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines)))
    terminal(f"chat {talk} --max-new-tokens 1 --temperature 0")
    tokenizer = Tokenizer.load(talk / "tokenizer.json")

    ids = tokenizer.encode
    typed = tokenizer.encode("a<|endoftext|>", allowed_special=())
    between = [*ids("<|endoftext|>assistant:\n")]
    first = [*ids("user:\n"), *typed, *between]
    cut = [] if heard[0][1] == [END] else ids("<|endoftext|>")
    second = [*first, *heard[0][1], *cut, *ids("user:\nb<|endoftext|>assistant:\n")]
    third = ids(TEMPLATES["plain"].render([Message("user", "c")], add_generation_prompt=True))
    kept = 7  # of a context of 8
    assert [given for given, _ in heard] == [whole[-kept:] for whole in (first, second, third)]


def test_a_stop_that_is_not_the_end_of_a_turn_ends_the_answer(talk, terminal, monkeypatch):
    """The history goes on as in training: with the template's end of a turn in its place."""
    (talk / "generation_config.json").write_text(json.dumps({"eos_token_id": [END, ord("!")]}))
    given, reset = [], Conversation.reset
    monkeypatch.setattr(Conversation, "reset", lambda self: (setattr(self, "_kept", 99), reset(self)))

    def draw_tokens(decoder, prompts, seed):
        assert decoder.stops == {END, ord("!")}
        given.append(prompts[0])
        yield Drawn(0, ord("!"), None)

    monkeypatch.setattr(sys.modules["lmkit.generation.generate"], "draw_tokens", draw_tokens)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\nb\n")))
    assert terminal(f"chat {talk}") == "\n\n"
    rendered = [Message("user", "a"), Message("assistant", ""), Message("user", "b")]
    text = TEMPLATES["plain"].render(rendered, add_generation_prompt=True)
    assert given[1] == Tokenizer.load(talk / "tokenizer.json").encode(text)


def test_conversations_need_a_tokenizer(run, terminal):
    terminal.refuses(*CHAT[:8], code="recipe.conflict", says=["tokenizer.path"])
