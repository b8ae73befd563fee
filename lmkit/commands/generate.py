"""`lmkit generate`: write text with a trained model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmkit.errors import UsageError
from lmkit.generation import generate
from lmkit.parallel.ranks import process_group
from lmkit.recipe.load import load_recipe
from lmkit.tokenizer import Tokenizer
from lmkit.training.checkpoint import CHECKPOINTS, MANIFEST, newest_checkpoint, run_tokenizer
from lmkit.training.model_state import plain_model

SEPARATOR = "\n\n---\n\n"


@dataclass(frozen=True)
class Sample:
    """One continuation: `text` follows `prompt`; `ended` says whether the model closed the document itself."""

    prompt: str
    text: str
    num_tokens: int
    ended: bool


@dataclass(frozen=True)
class GenerateResult:
    samples: tuple[Sample, ...]

    def __str__(self) -> str:
        return SEPARATOR.join((sample.prompt + sample.text).rstrip("\n") for sample in self.samples) + "\n"


def run(
    source: Path,
    *,
    tokenizer: Path | None = None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    device: str = "auto",
    allow_special: bool = False,
    stream: Callable[[str], None] | None = None,
) -> GenerateResult:
    """Continue the prompts of a run's [generate] table, or those given.

    Args:
        source: a run folder, the checkpoints in it, or one of them.
        tokenizer: a tokenizer.json; None takes the run's.
        overrides, flags: as for `load_recipe`, over the run's recipe.
        stream: called with the prompt and then with each piece of text of a single prompt as it appears.

    Raises:
        UsageError: no checkpoint, no tokenizer or another than the model's, or sampling options out of range.
        LmkitError: the checkpoint is damaged.
    """
    folder = source
    if (source / MANIFEST).exists():
        folder = source.resolve().parent.parent
    elif source.name == CHECKPOINTS:
        folder = source.resolve().parent
    recipe_file = folder / "recipe.toml"
    for override in overrides:
        if not override.strip().startswith("generate."):
            raise UsageError(
                "generate.other_table",
                f"--set {override}: only [generate] can change here",
                hint="the other tables made the model",
            )
    recipe = load_recipe(recipe_file if recipe_file.exists() else None, overrides, flags=flags)
    table = recipe.generate
    with process_group(device) as ranks:
        checkpoint = newest_checkpoint(source)
        path = (
            tokenizer
            or run_tokenizer(checkpoint.path)
            or (recipe.tokenizer.path if recipe.tokenizer else None)
        )
        if path is None:
            raise UsageError(
                "generate.no_tokenizer",
                f"{source}: the run has no tokenizer.json",
                hint="name one with --tokenizer",
            )
        loaded = Tokenizer.load(path)
        trained_on = checkpoint.state.data
        if trained_on is not None and trained_on.tokenizer_sha256 != loaded.sha256:
            raise UsageError(
                "generate.wrong_tokenizer",
                f"{path}: is tokenizer {loaded.sha256}, but the model was trained with {trained_on.tokenizer_sha256}",
                hint="use the tokenizer that encoded its token files",
            )
        model = plain_model(checkpoint, device=ranks.device)
        unsaid = list(table.prompts) if stream is not None and len(table.prompts) == 1 else []

        def on_text(row: int, piece: str) -> None:
            # The prompt comes with the first piece: whatever is wrong with it has been refused by then.
            assert stream is not None
            stream((unsaid.pop() if unsaid else "") + piece)

        speak = on_text if unsaid else None
        generations = generate(
            model, loaded, table.prompts, table, allow_special=allow_special, on_text=speak
        )
        if speak is not None and unsaid:  # the model ended the text at once
            speak(0, "")
    return GenerateResult(tuple(Sample(g.prompt, g.text, len(g.tokens), g.ended) for g in generations))
