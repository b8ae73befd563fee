"""Texts by a trained model: what `lmkit generate`, `lmkit chat` and the last stage of `lmkit run` share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmkit.errors import UsageError

if TYPE_CHECKING:
    from lmkit.generation import Generation
    from lmkit.measure.progress import Progress
    from lmkit.model.transformer import TransformerLM
    from lmkit.recipe.tables import GenerateConfig
    from lmkit.tokenizer import Tokenizer

SEPARATOR = "\n\n---\n\n"


@dataclass(frozen=True)
class Sample:
    """A prompt and the text that follows it; `ended` says whether the model ended the document itself.

    `number` counts prompts and their samples. `logprobs` holds the natural logarithm of each token's probability, if
    the table asks for it.
    """

    number: int
    prompt: str
    text: str
    num_tokens: int
    ended: bool
    logprobs: tuple[float, ...] | None

    @classmethod
    def of(cls, number: int, made: Generation) -> Sample:
        return cls(number, made.prompt, made.text, len(made.tokens), made.ended, made.logprobs)


@dataclass(frozen=True)
class GenerateResult:
    samples: tuple[Sample, ...]

    def __str__(self) -> str:
        return SEPARATOR.join((sample.prompt + sample.text).rstrip("\n") for sample in self.samples) + "\n"


class Interrupted(KeyboardInterrupt):
    """SIGINT came; `result` holds the texts that have begun."""

    def __init__(self, result: GenerateResult, said: str) -> None:
        self.result = result
        super().__init__(said)


def continue_prompts(
    source: Path,
    *,
    tokenizer: Path | None = None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    device: str = "auto",
    samples: int = 1,
    stream: Callable[[str], None] | None = None,
    on_sample: Callable[[Sample], None] | None = None,
    progress: Progress | None = None,
) -> GenerateResult:
    """Continue the prompts of a run's [generate] table, or those given.

    Args:
        source, tokenizer, overrides, flags, device: as for `loaded_model`.
        samples: texts per prompt.
        stream: called with the prompt and then with each piece of text, if there is a single prompt.
        on_sample: called with each text when it is complete.
        progress: told how many texts are complete.

    Raises:
        UsageError: as `loaded_model`.
        LmkitError: the checkpoint is damaged, or memory does not suffice.
        Interrupted: in place of KeyboardInterrupt, once texts are written.
    """
    with loaded_model(source, tokenizer, overrides, flags, device) as (model, loaded, table, _):
        from lmkit import generation

        # The prompt is written with the first piece: whatever is wrong with it has been refused by then.
        prompts = [prompt for prompt in table.prompts for _ in range(samples)]
        unwritten = prompts[:] if stream is not None and len(prompts) == 1 else []
        complete = 0

        def on_text(row: int, piece: str) -> None:
            assert stream is not None
            stream((unwritten.pop() if unwritten else "") + piece)

        def on_end(number: int, generation: Generation) -> None:
            nonlocal complete
            complete += 1
            if on_sample is not None:
                on_sample(Sample.of(number, generation))
            if progress is not None:
                progress("texts", complete, len(prompts))

        report = on_text if unwritten else None
        try:
            made = generation.generate(model, loaded, prompts, table, on_text=report, on_end=on_end)
        except generation.Interrupted as stop:
            result = GenerateResult(tuple(Sample.of(*item) for item in stop.generations.items()))
            raise Interrupted(result, str(stop)) from None
        if unwritten:  # the model ended the text at once
            on_text(0, "")
    return GenerateResult(tuple(Sample.of(*item) for item in enumerate(made)))


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

    Raises:
        UsageError: no model, no tokenizer or not the model's, or sampling options out of range.
        LmkitError: a file is damaged.
    """
    from lmkit.generation.decoder import can_run_kernels
    from lmkit.generation.generate import weight_dtype
    from lmkit.parallel.ranks import process_group
    from lmkit.recipe.load import load_recipe
    from lmkit.recipe.run_folder import CHECKPOINTS, RECIPE, TOKENIZER, tokenizer_in
    from lmkit.training.checkpoint import MANIFEST
    from lmkit.training.judging import open_trained

    for override in overrides:
        if not override.strip().startswith("generate."):
            hint = "the other tables made the model"
            message = f"--set {override}: only [generate] can change here"
            raise UsageError("generate.other_table", message, hint=hint)
    folder = source
    if (source / MANIFEST).exists():
        folder = source.resolve().parent.parent
    elif source.name == CHECKPOINTS:
        folder = Path(os.path.realpath(source)).parent
    recipe_file = folder / RECIPE
    recipe = load_recipe(recipe_file if recipe_file.exists() else None, overrides, flags=flags)
    table = recipe.generate
    with process_group(device) as ranks:
        trained = open_trained(source)
        path = tokenizer or trained.weights.tokenizer or (recipe.tokenizer.path if recipe.tokenizer else None)
        if path is None:
            message, hint = f"{source}: has no {TOKENIZER}", "name one with --tokenizer"
            raise UsageError("generate.no_tokenizer", message, hint=hint)
        path = tokenizer_in(path)
        loaded = trained.open_tokenizer(path)
        model = trained.weights.model(ranks.device)
        model.to(weight_dtype(table, ranks.device))
        if can_run_kernels(model):
            import lmkit.generation.kernel_step  # noqa: F401  no text should wait for it
        yield model, loaded, table, path
