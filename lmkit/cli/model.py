"""`lmkit train`, `evaluate`, `export`, `import` and `verify`: commands on one model."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from lmkit.cli.console import Result
from lmkit.cli.options import Commands
from lmkit.errors import UsageError

app = Commands()


@app.add(
    "lmkit train quickstart --nproc 2",
    "torchrun --nproc-per-node 2 -m lmkit train quickstart",
    keys=("train.steps", "optimizer.lr", "train.batch_size", "run.device", "run.name", "checkpoint.resume"),
)
def train(
    recipe: str,
    set_: list[str] | None = None,
    *,
    flags: dict[str, Any],
    stop_at_step: Annotated[int | None, typer.Option(min=1)] = None,
    nproc: int = 1,
    print_recipe: bool = False,
    dry_run: bool = False,
) -> Any:
    """Train a model, or resume from its newest checkpoint.

    Needs token files: those that `lmkit run` made in the run folder, or those that [data] of the recipe names.

    Args:
        stop_at_step: Stop after this step; the learning-rate schedule does not change.
    """
    from lmkit.recipe.load import load_recipe, recipe_to_toml

    loaded = load_recipe(recipe, set_ or (), flags=flags)
    if print_recipe:
        return Result(recipe_to_toml(loaded), loaded.model_dump(mode="json"))
    from lmkit.generation import write_samples
    from lmkit.training import session

    if dry_run:
        return session.plan(loaded, stop_at_step=stop_at_step, nproc=nproc)
    return session.train(loaded, stop_at_step=stop_at_step, nproc=nproc, write_samples=write_samples)


@app.add(
    "lmkit evaluate artifacts/runs/quickstart",
    "lmkit evaluate SmolLM-135M --text stories.jsonl --by-document",
    "lmkit evaluate artifacts/runs/quickstart --choices questions.jsonl",
    "lmkit evaluate artifacts/runs/quickstart --harness hellaswag",
)
def evaluate(
    run: Path,
    tokens: Path | None = None,
    text: Path | None = None,
    field: str | None = None,
    by_document: bool = False,
    choices: Path | None = None,
    harness: Annotated[list[str] | None, typer.Option(metavar="TASK")] = None,
    strict: bool = False,
    device: str = "auto",
    plugin: list[Path] | None = None,
) -> Any:
    """Print loss, perplexity and bits per byte on held-out data, or accuracy on questions.

    With --choices: acc counts the questions whose likeliest choice is the answer; acc_norm divides each
    log-likelihood by the choice's number of characters. With --harness, lm-eval itself runs. All but --harness say
    how much of the text, or of the questions with their answers, stands in the training text, if lmkit encoded both.

    Args:
        tokens: Token file to evaluate on; default: the held-out file of the run.
        text: Text, JSON objects or Parquet to evaluate on; the model's tokenizer encodes it.
        by_document: Evaluate each document by itself.
        choices: JSON lines with question, choices and answer: accuracy by likelihood, as lm-eval's.
        harness: Task of lm-eval, or a .yaml file of one; repeatable. Needs lmkit[eval].
        strict: Fail if a whole document or question, or more than 1% of the runs of 13 words, stands in the training
            text; or if that is not known.
    """
    on_text = tokens is not None or text is not None or by_document
    if on_text + (choices is not None) + bool(harness) > 1:
        message = "--choices, --harness and --tokens, --text, --by-document are different evaluations"
        raise UsageError("evaluate.options_exclude", message, hint="leave out all but one of them")
    if strict and harness:
        hint = "leave out one of them"
        raise UsageError("evaluate.options_exclude", "--strict: lm-eval's texts are not compared", hint=hint)
    from lmkit.training import judging

    if harness:
        return judging.run_harness(run, harness, device=device)
    if choices is not None:
        return judging.evaluate_choices(run, choices, device=device, strict=strict)
    judge = judging.evaluate_documents if by_document else judging.evaluate_run
    return judge(run, tokens=tokens, text=text, field=field, device=device, strict=strict)


@app.add("lmkit export artifacts/runs/quickstart exported --dtype bf16")
def export(
    run: Path,
    folder: Path,
    dtype: Literal["fp32", "bf16", "fp16"] | None = None,
    plugin: list[Path] | None = None,
) -> Any:
    """Write a model as a Hugging Face folder, which transformers opens.

    Args:
        run: A run folder or a checkpoint folder.
        folder: The new folder.
        dtype: Dtype of the weights; default: as they are.
    """
    from lmkit.training.exchange import export_model

    return export_model(run, folder, dtype=dtype)


@app.add("lmkit import SmolLM-135M artifacts/runs/smollm --context-length 1024", name="import")
def import_(
    folder: Path,
    run: Path,
    context_length: int | None = None,
    without_tokenizer: bool = False,
    chat_template: Literal["plain", "chatml", "llama3"] | None = None,
) -> Any:
    """Make a run of a Hugging Face folder, to generate with, evaluate and train.

    Reads safetensors files and a byte-level tokenizer.json, and never a pickle.

    Args:
        folder: A Hugging Face folder: Llama, Mistral, Qwen2, Qwen3.
        run: The new run folder.
        context_length: Tokens that the model sees at once; default, and at most: the folder's.
        without_tokenizer: Import the weights alone.
        chat_template: Template of `lmkit chat`; default: the folder's, if lmkit wrote it.
    """
    from lmkit.training.exchange import import_model

    return import_model(
        folder,
        run,
        context_length=context_length,
        with_tokenizer=not without_tokenizer,
        chat_template=chat_template,
    )


@app.add("lmkit verify artifacts/runs/quickstart", "lmkit verify quickstart --resume")
def verify(
    target: str,
    resume: bool = False,
    steps: Annotated[int, typer.Option(min=1)] = 5,
    set_: list[str] | None = None,
) -> Result:
    """Check files, or check that resuming is exact.

    Exit code 1 if something is wrong.

    Args:
        target: Run or Hugging Face folder, checkpoint, token file, tokenizer or recipe; with --resume, a recipe.
        resume: Train the recipe for 2N steps and for N + N; both must agree bit for bit.
        steps: N of --resume.
    """
    if resume:
        from lmkit.recipe.load import load_recipe

        loaded = load_recipe(target, set_ or ())  # before torch is imported
        from lmkit.training.verify import verify_resume

        result = verify_resume(loaded, steps=steps)
    else:
        from lmkit.training.verify import verify_path

        result = verify_path(Path(target))
    return Result(str(result), asdict(result), result.ok)
