"""`lmkit evaluate`: judge a model on text, on questions, or on the tasks of lm-eval."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lmkit.cli.options import Commands, DeviceOption, FieldOption, PluginOption, option
from lmkit.errors import UsageError

app = Commands()


@app.add(
    "lmkit evaluate artifacts/runs/quickstart",
    "lmkit evaluate SmolLM-135M --text stories.jsonl --by-document",
    "lmkit evaluate artifacts/runs/quickstart --choices questions.jsonl",
    "lmkit evaluate artifacts/runs/quickstart --harness hellaswag",
)
def evaluate(
    run: Annotated[Path, typer.Argument(help="A run folder, a checkpoint, or a Hugging Face folder.")],
    tokens: Annotated[
        Path | None, option("Token file to evaluate on; default: the held-out file of the run.")
    ] = None,
    text: Annotated[
        Path | None, option("Text, or JSON objects, to evaluate on; the model's tokenizer encodes it.")
    ] = None,
    field: FieldOption = None,
    by_document: Annotated[
        bool, typer.Option("--by-document", help="Evaluate each document by itself.")
    ] = False,
    choices: Annotated[
        Path | None,
        option("JSON lines with question, choices and answer: accuracy by likelihood, as lm-eval's."),
    ] = None,
    harness: Annotated[
        list[str] | None,
        option("Task of lm-eval, or a .yaml file of one; repeatable. Needs lmkit[eval].", metavar="TASK"),
    ] = None,
    device: DeviceOption = "auto",
    plugin: PluginOption = None,
) -> Any:
    """Print loss, perplexity and bits per byte on held-out data, or accuracy on questions.

    With --choices: acc counts the questions whose likeliest choice is the answer; acc_norm divides each
    log-likelihood by the choice's number of characters. With --harness, lm-eval itself runs.
    """
    on_text = tokens is not None or text is not None or by_document
    if on_text + (choices is not None) + bool(harness) > 1:
        raise UsageError(
            "evaluate.options_exclude",
            "--choices, --harness and --tokens, --text, --by-document are different evaluations",
            hint="leave out all but one of them",
        )
    if harness:
        from lmkit.training.lm_eval_harness import run_harness

        return run_harness(run, harness, device=device)
    if choices is not None:
        from lmkit.training.choices import evaluate_choices

        return evaluate_choices(run, choices, device=device)
    from lmkit.training import judging

    judge = judging.evaluate_documents if by_document else judging.evaluate_run
    return judge(run, tokens=tokens, text=text, field=field, device=device)
