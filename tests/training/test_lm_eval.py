"""Questions and documents scored as the real lm-eval scores them, with tokenizers of three families.

Each stands in a folder of transformers. lm-eval sums log-probabilities in float32; the sums agree to `CLOSE`.
"""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from raising import raises
from their_models import spoil, their_folder, write_lines
from tokenizer_families import GPT4

from lmkit.errors import LmkitError
from lmkit.tokenizer import Tokenizer
from lmkit.training.exchange import import_model
from lmkit.training.judging import evaluate_choices, evaluate_documents, run_harness

tokenizers = pytest.importorskip("tokenizers")
pytestmark = pytest.mark.full  # test_judging.py has sums by hand

CLOSE = {"rel": 1e-5, "abs": 1e-4}
CONTEXT = 24
TEXTS = (
    "one fish two fish",
    "red fish, blüe fish 1234 and a much longer line of fish\n\n  than the model's context\r\nholds, 鱼很多 fish",
    *("ok", "e\u0301te\u0301, not composed", " starts with a blank", "\nand with a new line <|pad|> inside"),
)
QUESTIONS: list[dict[str, Any]] = [
    {"question": "one fish", "choices": ["two fish", "red", "a fish of many"], "answer": 0},
    {"question": "two fish ", "choices": ["x", "fishfish"], "answer": 1},
    {"question": "two fish,\n\n ", "choices": ["x", " fishfish", "  blue"], "answer": 2},
    {"question": "e\u0301te\u0301 鱼:", "choices": ["e\u0301", "\u00e9", "鱼很多"], "answer": 0},
    {"question": "longer than what the model sees at once: " * 3, "choices": ["fish", "no"], "answer": 0},
    {"question": "one token: fish!\n", "choices": ["fish", " no"], "answer": 0},
    {"question": "a mark<|pad|>", "choices": ["<|pad|>fish", "no"], "answer": 0},
]
EMPTY = {"question": "", "choices": ["fish", "ünd"], "answer": 1}
BLANK = {"question": " \n", "choices": ["fish", "ünd"], "answer": 1}


def trained(pattern: str, special_tokens: list[str], **parts: Any) -> Any:
    """A tokenizer of the package tokenizers."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=pattern == GPT4))
    split, letters = tokenizers.pre_tokenizers.Split, tokenizers.pre_tokenizers.ByteLevel
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [split(tokenizers.Regex(pattern), "isolated"), letters(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=290, initial_alphabet=letters.alphabet(), show_progress=False
    )
    made.train_from_iterator(
        [" fish fish fish one one the longer longer\n the the a!\na!\na!\na!\n"], trainer
    )
    made.add_special_tokens(special_tokens)
    for name, part in parts.items():
        setattr(made, name, part)
    return made


def llama() -> tuple[Any, dict[str, Any]]:
    begin, *others = ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|pad|>")
    made = trained(GPT4, [begin, *others])
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, made.token_to_id(begin))]
    )
    ids = [made.token_to_id(token) for token in others[:2]]
    return made, {"bos_token": begin, "eos_token": "<|eot_id|>", "eos_token_id": ids}


def qwen() -> tuple[Any, dict[str, Any]]:
    made = trained(
        GPT4.replace("{1,3}", ""),
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"],
        normalizer=tokenizers.normalizers.NFC(),
    )
    ids = [made.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>")]
    return made, {"bos_token": None, "eos_token": "<|im_end|>", "eos_token_id": ids}


def ours() -> tuple[Any, dict[str, Any]]:
    merges = [(b"f", b"i"), (b"fi", b"s"), (b"fis", b"h"), (b" ", b"fish")]
    end = "<|endoftext|>"
    names = {"bos_token": end, "eos_token": end, "eos_token_id": 260}
    return Tokenizer.from_merges(merges, [end, "<|pad|>"]), names


@pytest.fixture(params=[("Llama", llama), ("Qwen2", qwen), ("Llama", ours)], ids=["llama", "qwen", "ours"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of transformers. The weights are large enough for unlike log-likelihoods."""
    pytest.importorskip("lm_eval")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    kind, make = request.param
    path = their_folder(Path(), kind, {"max_position_embeddings": CONTEXT}, scale=0.3)
    tokenizer, names = make()
    tokenizer.save(str(path / "tokenizer.json"))
    ends = names.pop("eos_token_id")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    names["tokenizer_class"] = "PreTrainedTokenizerFast"
    (path / "tokenizer_config.json").write_text(json.dumps(names))
    return path


def task_file(task: str, file: Path, kind: str) -> Path:
    data = (
        f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {file.resolve()}}}}}\ntest_split: test\n"
    )
    folder = Path("tasks").absolute()
    folder.mkdir(exist_ok=True)
    (folder / f"{task}.yaml").write_text(f"task: {task}\n{data}{kind}")
    return folder


def lm_eval_of(folder: Path, task: str, file: Path, kind: str, **options: Any) -> tuple[Any, list[Any]]:
    """lm-eval's figures and log-likelihoods of a task on JSON lines, in their order."""
    import lm_eval

    tasks = task_file(task, file, kind)
    found = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(folder), "dtype": "float32", **options},
        tasks=[task],
        task_manager=lm_eval.tasks.TaskManager(include_path=str(tasks), include_defaults=False),  # thousands
        batch_size=4,
        bootstrap_iters=100,
        device="cpu",
    )
    samples = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
    return found["results"][task], [sample["filtered_resps"] for sample in samples]


CHOICES = (
    "output_type: multiple_choice\ndoc_to_text: '{{question}}'\ndoc_to_choice: choices\ndoc_to_target: answer\n"
    "metric_list: [{metric: acc}, {metric: acc_norm}]\n"
)
DOCUMENTS = (
    "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
    "metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]\n"
)


def test_choices(folder):
    prefix = Tokenizer.load(folder / "tokenizer.json").prefix
    # lm-eval fails at a blank question where a tokenizer puts nothing before it. Where it puts a token there, lm-eval
    # puts two before the answer to an empty one, up to 0.4.9.
    questions = [*QUESTIONS, BLANK] if prefix else [*QUESTIONS]
    if not (prefix and version("lm_eval").startswith(tuple(f"0.4.{i}" for i in range(5, 10)))):
        questions.append(EMPTY)
    file = write_lines("questions.jsonl", questions)
    options = {"add_bos_token": True} if prefix else {}
    figures, found = lm_eval_of(folder, "choices", file, CHOICES, **options)
    result = evaluate_choices(folder, file, device="cpu")
    for answered, theirs in zip(result.answers, found, strict=True):
        assert answered.log_likelihoods == pytest.approx([float(value) for value, _ in theirs], **CLOSE)
    for name in ("acc", "acc_norm", "acc_stderr", "acc_norm_stderr"):
        key = f"{name},none"
        assert getattr(result, name) == pytest.approx(figures[key])
    assert len({answered.chosen for answered in result.answers}) > 1


def test_documents(folder):
    file = write_lines("docs.jsonl", [{"text": text} for text in TEXTS])
    # By default lm-eval 0.4.10 and later begin a document with two begin-of-text tokens where a tokenizer has one.
    figures, found = lm_eval_of(folder, "documents", file, DOCUMENTS, add_bos_token=False)
    result = evaluate_documents(folder, text=file, device="cpu")
    nats = [score.loss * score.tokens for score in result.documents]
    assert nats == pytest.approx([-float(value) for (value,) in found], **CLOSE)
    assert [score.bytes for score in result.documents] == [len(text.encode()) for text in TEXTS[:-1]] + [28]
    # lm-eval counts the letters of <|pad|> as text.
    num_bytes = sum(score.bytes for score in result.documents)
    longer = num_bytes + len("<|pad|>")
    assert figures["bits_per_byte,none"] == pytest.approx(result.bits_per_byte * num_bytes / longer, **CLOSE)


@pytest.mark.parametrize("folder", [("Llama", llama), ("Llama", ours)], indirect=True, ids=["llama", "ours"])
def test_the_harness_and_lmkit_agree_on_a_run(folder):
    """Also where a tokenizer puts a token before every text: with lm-eval's defaults, two would stand there."""
    import_model(folder, Path("run"))
    questions, documents = (
        write_lines("questions.jsonl", QUESTIONS),
        write_lines("docs.jsonl", [{"text": TEXTS[1]}]),
    )
    task_file("choices", questions, CHOICES)
    task_file("documents", documents, DOCUMENTS)
    found = run_harness(Path("run"), ["tasks/choices.yaml", "tasks/documents.yaml"], device="cpu").results
    result = evaluate_choices(Path("run"), questions, device="cpu")
    assert (found["choices"]["acc,none"], found["choices"]["acc_norm,none"]) == (result.acc, result.acc_norm)
    (score,) = evaluate_documents(Path("run"), text=documents, device="cpu").documents
    assert found["documents"]["bits_per_byte,none"] == pytest.approx(score.bits_per_byte, rel=1e-5)
    spoil(folder)
    for task in ("choices", "documents"):
        with raises(LmkitError, "evaluate.not_finite", folder):
            run_harness(folder, [f"tasks/{task}.yaml"], device="cpu")
