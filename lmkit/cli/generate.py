"""`lmkit generate`: write text with a trained model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmkit.cli.console import Result, progress_on_stderr, show, write
from lmkit.cli.options import Commands
from lmkit.errors import LmkitError, UsageError, reason
from lmkit.storage.inputs import read_input

if TYPE_CHECKING:
    from lmkit.generation import Generation
    from lmkit.model.transformer import TransformerLM
    from lmkit.recipe.tables import GenerateConfig
    from lmkit.tokenizer import Tokenizer

app = Commands()


@app.add('lmkit generate artifacts/runs/quickstart --prompt "One day, Lily"', keys=("generate.*",))
def generate(
    run: Path,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p")] = None,
    prompts_file: Path | None = None,
    samples: Annotated[int, typer.Option(min=1, max=1_000_000)] = 1,
    *,
    flags: dict[str, Any],
    tokenizer: Path | None = None,
    device: str = "auto",
    set_: list[str] | None = None,
    as_lines: Annotated[bool, typer.Option("--jsonl")] = False,
    as_json: bool = False,
) -> None:
    """Generate text with a trained model.

    Text i is sampled with seed + i. The run's [generate] table holds the defaults of the options. Several texts are
    separated by a line of three dashes, which a model may write, too; with --json they are a list. Ctrl-C prints what
    there is.

    Args:
        prompts_file: Text file with one prompt a line; blank lines are skipped.
        tokenizer: A tokenizer.json; default: the model's.
        prompt: Text to continue; repeatable. Empty: a new document; -: stdin. Of a long prompt, only the end is used.
        samples: Texts per prompt.
        as_lines: Print each text as a line of JSON as soon as it is complete.
    """
    if as_lines and as_json:
        hint = "choose one of them"
        raise UsageError("generate.two_formats", "--jsonl and --json: two formats for one output", hint=hint)
    flags["generate.prompts"] = _read_prompts(prompt, prompts_file)
    streamed: list[str] = []
    ended: set[int] = set()

    def stream(piece: str) -> None:
        streamed.append(piece)
        write(piece)

    def on_end(number: int, made: Generation, total: int) -> None:
        if as_lines:
            show(Result("", _fields(number, made)), as_json=True)
        ended.add(number)
        if progress is not None:
            progress("texts", len(ended), total)

    def finish(generations: Mapping[int, Generation]) -> None:
        """Print what is not yet printed."""
        if streamed:
            stream("\n")
        elif as_lines:
            for number, made in generations.items():
                if number not in ended:
                    show(Result("", _fields(number, made)), as_json=True)
        elif generations:
            samples = [_fields(number, made) for number, made in generations.items()]
            show(Result(as_text(generations.values()), {"samples": samples}), as_json=as_json)

    try:
        # rich's bar would redirect the lines of JSON to stderr.
        with nullcontext() if as_lines else progress_on_stderr() as progress:
            made = continue_prompts(
                run,
                tokenizer=tokenizer,
                overrides=set_ or (),
                flags=flags,
                device=device,
                samples=samples,
                stream=None if as_json or as_lines else stream,
                on_end=on_end,
            )
    except KeyboardInterrupt as stop:  # once texts are written, it has them
        finish(getattr(stop, "generations", {}))
        raise
    finish(dict(enumerate(made)))


def _read_prompts(given: list[str] | None, file: Path | None) -> list[str] | None:
    """Return all prompts that flags name; None if there are none."""
    prompts = list(given or ())
    if "-" in prompts:
        try:
            typed = sys.stdin.buffer.read().decode("utf-8-sig").replace("\r\n", "\n").removesuffix("\n")
        except UnicodeDecodeError as error:
            message = f"--prompt -: stdin: invalid UTF-8 at byte {error.start}"
            hint = "convert it first, for example with iconv"
            raise LmkitError("text.not_utf8", message, hint=hint) from error
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


SEPARATOR = "\n\n---\n\n"


def as_text(generations: Iterable[Generation]) -> str:
    """Return the texts as they are printed, each with its prompt."""
    return SEPARATOR.join((made.prompt + made.text).rstrip("\n") for made in generations) + "\n"


def _fields(number: int, made: Generation) -> dict[str, Any]:
    """Return what JSON says of a text; `number` counts prompts and their samples."""
    fields = {"number": number, "prompt": made.prompt, "text": made.text, "num_tokens": len(made.tokens)}
    return {**fields, "ended": made.ended, "logprobs": made.logprobs}


def continue_prompts(
    source: Path,
    *,
    tokenizer: Path | None = None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    device: str = "auto",
    samples: int = 1,
    stream: Callable[[str], None] | None = None,
    on_end: Callable[[int, Generation, int], None] | None = None,
) -> list[Generation]:
    """Continue the prompts of a run's [generate] table, or those given."""
    with loaded_model(source, tokenizer, overrides, flags, device) as (model, loaded, table, _):
        from lmkit import generation

        # The prompt is written with the first piece: whatever is wrong with it has been refused by then.
        prompts = [prompt for prompt in table.prompts for _ in range(samples)]
        unwritten = prompts[:] if stream is not None and len(prompts) == 1 else []

        def on_text(row: int, piece: str) -> None:
            assert stream is not None
            stream((unwritten.pop() if unwritten else "") + piece)

        report = on_text if unwritten else None
        ended = None if on_end is None else lambda number, made: on_end(number, made, len(prompts))
        made = generation.generate(model, loaded, prompts, table, on_text=report, on_end=ended)
        if unwritten:  # the model ended the text at once
            on_text(0, "")
    return made


@contextmanager
def loaded_model(
    source: Path,
    tokenizer: Path | None,
    overrides: Sequence[str],
    flags: Mapping[str, Any] | None,
    device: str,
) -> Iterator[tuple[TransformerLM, Tokenizer, GenerateConfig, Path]]:
    """Yield a trained model, its tokenizer, its [generate] table, and the tokenizer's path.

    Args:
        source: a run folder, its checkpoints folder, one checkpoint, or a Hugging Face folder.
        tokenizer: a tokenizer.json; None takes the model's.
        overrides, flags: as for `load_recipe`, over the run's recipe.
    """
    from lmkit.generation.decoder import can_run_kernels
    from lmkit.generation.generate import weight_dtype
    from lmkit.parallel.ranks import process_group
    from lmkit.recipe.load import load_recipe
    from lmkit.recipe.run_folder import CHECKPOINTS, RECIPE, TOKENIZER, tokenizer_in
    from lmkit.training.checkpoint import MANIFEST
    from lmkit.training.weights import open_weights

    for override in overrides:
        if not override.strip().startswith("generate."):
            message = f"--set {override}: only [generate] can change here"
            raise UsageError("generate.other_table", message, hint="the other tables made the model")
    folder = source
    if (source / MANIFEST).exists():
        folder = source.resolve().parent.parent
    elif source.name == CHECKPOINTS:
        folder = source.resolve().parent
    recipe_file = folder / RECIPE
    recipe = load_recipe(recipe_file if recipe_file.exists() else None, overrides, flags=flags)
    table = recipe.generate
    with process_group(device) as ranks:
        weights = open_weights(source)
        path = tokenizer or weights.tokenizer or (recipe.tokenizer.path if recipe.tokenizer else None)
        if path is None:
            message, hint = f"{source}: has no {TOKENIZER}", "name one with --tokenizer"
            raise UsageError("generate.no_tokenizer", message, hint=hint)
        path = tokenizer_in(path)
        loaded = weights.open_tokenizer(path)
        model = weights.model(ranks.device)
        model.to(weight_dtype(table, ranks.device))
        if can_run_kernels(model):
            import lmkit.generation.kernel_step  # noqa: F401  no text should wait for it
        yield model, loaded, table, path
