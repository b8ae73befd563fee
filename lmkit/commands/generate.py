"""`lmkit generate`: text from a trained model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmkit.errors import UsageError
from lmkit.generation.generate import generate
from lmkit.generation.sampling import Sampling
from lmkit.parallel.process_group import process_group
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
                f"--set {override}: only [generate] can change here", hint="the other tables made the model"
            )
    recipe = load_recipe(recipe_file if recipe_file.exists() else None, overrides, flags=flags)
    table = recipe.generate
    sampling = Sampling(temperature=table.temperature, top_k=table.top_k, top_p=table.top_p)
    with process_group(device) as ranks:
        checkpoint = newest_checkpoint(source)
        path = (
            tokenizer
            or run_tokenizer(checkpoint.path)
            or (recipe.tokenizer.path if recipe.tokenizer else None)
        )
        if path is None:
            raise UsageError(f"{source}: the run has no tokenizer.json", hint="name one with --tokenizer")
        loaded = Tokenizer.load(path)
        trained_on = checkpoint.state.data
        if trained_on is not None and trained_on.tokenizer_sha256 != loaded.sha256:
            raise UsageError(
                f"{path}: is tokenizer {loaded.sha256}, but the model learnt that of {trained_on.tokenizer_sha256}",
                hint="use the tokenizer that its token files were made with",
            )
        model = plain_model(checkpoint, device=ranks.device)
        prompts = table.prompts
        speak = None if stream is None or len(prompts) > 1 else _PromptFirst(prompts[0], stream)
        generations = generate(
            model,
            loaded,
            prompts,
            max_new_tokens=table.max_new_tokens,
            sampling=sampling,
            seed=table.seed,
            stop_at_end=table.stop_at_end,
            allow_special=allow_special,
            on_text=speak,
        )
        if speak is not None:
            speak(0, "")  # the model may have ended the text at once
    return GenerateResult(tuple(Sample(g.prompt, g.text, len(g.tokens), g.ended) for g in generations))


class _PromptFirst:
    """Streams the prompt before the first piece of text: whatever is wrong with it has been said by then."""

    def __init__(self, prompt: str, stream: Callable[[str], None]) -> None:
        self._prompt = prompt
        self._stream = stream

    def __call__(self, row: int, piece: str) -> None:
        said, self._prompt = self._prompt + piece, ""
        self._stream(said)
