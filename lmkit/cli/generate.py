"""`lmkit generate`: write text with a trained model."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Annotated, Literal

import typer

from lmkit.cli.console import progress_on_stderr, show, write
from lmkit.cli.options import Commands, DeviceOption, JsonOption, SetOption, key_option, option
from lmkit.cli.texts import GenerateResult, Interrupted, Sample, continue_prompts
from lmkit.errors import UsageError, reason
from lmkit.storage.inputs import read_input

app = Commands()


@app.add('lmkit generate artifacts/runs/quickstart --prompt "One day, Lily"')
def generate(
    run: Annotated[Path, typer.Argument(help="A run folder, a checkpoint, or a Hugging Face folder.")],
    prompt: Annotated[
        list[str] | None,
        option(
            "Text to continue; repeatable. Empty: a new document; -: stdin. Of a long prompt, only the end is used.",
            "--prompt",
            "-p",
        ),
    ] = None,
    prompts_file: Annotated[
        Path | None, option("Text file with one prompt a line; blank lines are skipped.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, max=1_000_000, help="Texts per prompt.")] = 1,
    max_new_tokens: Annotated[int | None, key_option("generate.max_new_tokens")] = None,
    temperature: Annotated[float | None, key_option("generate.temperature")] = None,
    top_k: Annotated[int | None, key_option("generate.top_k")] = None,
    top_p: Annotated[float | None, key_option("generate.top_p")] = None,
    min_p: Annotated[float | None, key_option("generate.min_p")] = None,
    repetition_penalty: Annotated[float | None, key_option("generate.repetition_penalty")] = None,
    logprobs: Annotated[bool | None, key_option("generate.logprobs")] = None,
    batch_size: Annotated[int | None, key_option("generate.batch_size")] = None,
    precision: Annotated[Literal["auto", "fp32", "bf16"] | None, key_option("generate.precision")] = None,
    weights: Annotated[Literal["same", "fp8"] | None, key_option("generate.weights")] = None,
    seed: Annotated[int | None, key_option("generate.seed")] = None,
    stop_at_end: Annotated[bool | None, key_option("generate.stop_at_end")] = None,
    allow_special: Annotated[bool | None, key_option("generate.allow_special")] = None,
    tokenizer: Annotated[Path | None, option("A tokenizer.json; default: the model's.")] = None,
    device: DeviceOption = "auto",
    set_: SetOption = None,
    as_lines: Annotated[
        bool, typer.Option("--jsonl", help="Print each text as a line of JSON as soon as it is complete.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Generate text with a trained model.

    Text i is sampled with seed + i. The run's [generate] table holds the defaults of the options. Several texts are
    separated by a line of three dashes, which a model may write, too; with --json they are a list. Ctrl-C prints what
    there is.
    """
    if as_lines and as_json:
        hint = "choose one of them"
        raise UsageError("generate.two_formats", "--jsonl and --json: two formats for one output", hint=hint)
    flags = {
        "prompts": _read_prompts(prompt, prompts_file),
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "logprobs": logprobs,
        "batch_size": batch_size,
        "precision": precision,
        "weights": weights,
        "seed": seed,
        "stop_at_end": stop_at_end,
        "allow_special": allow_special,
    }
    streamed: list[str] = []
    numbers: set[int] = set()  # of the texts on stdout

    def stream(piece: str) -> None:
        streamed.append(piece)
        write(piece)

    def print_line(sample: Sample) -> None:
        with _uninterrupted():
            write(json.dumps(asdict(sample)) + "\n")
            numbers.add(sample.number)

    def finish(result: GenerateResult) -> None:
        """Print what is not yet printed."""
        if streamed:
            stream("\n")
        elif as_lines:
            for sample in result.samples:
                if sample.number not in numbers:
                    print_line(sample)
        elif result.samples:
            with _uninterrupted():
                show(result, as_json=as_json)

    try:
        # rich's bar would redirect the lines of JSON to stderr.
        with nullcontext() if as_lines else progress_on_stderr() as progress:
            result = continue_prompts(
                run,
                tokenizer=tokenizer,
                overrides=set_ or (),
                flags={f"generate.{key}": value for key, value in flags.items()},
                device=device,
                samples=samples,
                stream=None if as_json or as_lines else stream,
                on_sample=print_line if as_lines else None,
                progress=progress,
            )
    except Interrupted as stop:
        finish(stop.result)
        raise
    finish(result)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C back for the block: half a line would not be JSON.

    Blocking the signal would not do: another thread may take it, and Python's handler runs in this one.
    """
    came: list[tuple[int, FrameType | None]] = []
    if threading.current_thread() is not threading.main_thread():  # no handler runs here
        yield
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came and callable(before):
        before(*came[0])


def _read_prompts(given: list[str] | None, file: Path | None) -> list[str] | None:
    """Return all prompts that flags name; None if there are none."""
    prompts = list(given or ())
    if "-" in prompts:
        typed = sys.stdin.buffer.read().decode("utf-8-sig", "replace")
        typed = typed.replace("\r\n", "\n").removesuffix("\n")
        if not typed:
            hint = 'write the prompt to stdin; to start a new document: --prompt ""'
            raise UsageError("generate.empty_stdin", "--prompt -: stdin holds no prompt", hint=hint)
        prompts = [typed if prompt == "-" else prompt for prompt in prompts]
    if file is not None:
        try:
            # Not `splitlines`, which would cut a prompt at U+2028 or a form feed.
            lines = read_input(file, pipes=True).decode("utf-8-sig").replace("\r\n", "\n").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            why = reason(error) if isinstance(error, OSError) else f"invalid UTF-8 at byte {error.start}"
            hint = "give a UTF-8 text file with one prompt a line"
            raise UsageError("generate.prompts_file", f"--prompts-file: {file}: {why}", hint=hint) from error
        found = [line for line in lines if line.strip()]
        if not found:
            message, hint = f"--prompts-file: {file}: holds no prompt", "write one prompt a line"
            raise UsageError("generate.prompts_file", message, hint=hint)
        prompts += found
    return prompts or None
