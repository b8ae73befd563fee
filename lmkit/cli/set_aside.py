"""Set a run aside, so that its folder can hold another one and nothing is lost if that one fails.

What lmkit made in the run folder moves to `old-<time>` inside it, a run folder that every command takes. Files of the
user's stay where they are.
"""

from __future__ import annotations

import itertools
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from lmkit.cli.stage_record import FILES, paths_of
from lmkit.errors import UsageError
from lmkit.recipe.run_folder import (
    BESIDE_TOKENIZER,
    CHECKPOINTS,
    DATA_FILES,
    METRICS,
    RECIPE,
    RUN_FILES,
    TOKENIZER,
    TRAINED_FILES,
    is_entry,
    is_run,
    read_record,
    save_record,
    token_file,
)
from lmkit.recipe.schema import Recipe
from lmkit.storage import sha256_file, write_atomic
from lmkit.storage.inputs import read_input

OLD = "old-"
"""Begins the name of the folder of a run that was set aside."""


def parts_of(folder: Path, *, checkpoints_only: bool) -> list[Path]:
    """Return what `set_aside` moves of a run; of a folder that is a link, the link. [] of a folder that is no run."""
    names = (CHECKPOINTS,) if checkpoints_only else (CHECKPOINTS, "tensorboard", *RUN_FILES)
    parts = []
    for name in names if is_run(folder) else ():
        top = folder / name.partition("/")[0]
        parts.append(top if top.is_symlink() else folder / name)
    return [path for path in dict.fromkeys(parts) if os.path.lexists(path)]


def refuse_to_move_sources(recipe: Recipe, parts: Sequence[Path]) -> None:
    """Refuse a recipe that reads what would be moved.

    Raises:
        UsageError: names the file and the key ("run.reads_itself").
    """
    folder = recipe.run.path
    for key, path in _sources(recipe) if parts else ():
        places = (Path(os.path.abspath(path)), Path(os.path.realpath(path)))
        inside = any(place.is_relative_to(part.absolute()) for place in places for part in parts)
        if inside or os.path.realpath(path) == os.path.realpath(folder):
            raise UsageError(
                "run.reads_itself",
                f"{path} (key {key}): belongs to the run in {folder} that would start over",
                hint="copy it to another place and name that, or name a new run: --set run.name=...",
            )


def _sources(recipe: Recipe) -> Iterator[tuple[str, Path]]:
    """Yield the keys that name what a run reads, and the files or folders."""
    for dotted in FILES:
        for path in paths_of(recipe, dotted):
            yield dotted, path
    if recipe.checkpoint.resume not in ("auto", "never"):
        yield "checkpoint.resume", Path(recipe.checkpoint.resume)
    if recipe.train is not None and recipe.train.init_from is not None:
        yield "train.init_from", recipe.train.init_from
    for part in ("train", "valid"):
        path = getattr(recipe.data, part)
        if path is not None and path.absolute() != token_file(recipe.run.path, part).absolute():
            yield f"data.{part}", path  # the run's own token files are made again


def set_aside(folder: Path, parts: Sequence[Path]) -> Path:
    """Move parts of a run to a new folder inside it, and return that. If one cannot be moved, all is as it was."""
    stem = f"{OLD}{time.strftime('%Y%m%d-%H%M%S')}"
    names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
    aside = next(folder / name for name in names if not os.path.lexists(folder / name))
    moved: list[tuple[Path, Path]] = []
    try:
        save_record(aside, {})  # a run from the beginning, if the process is killed
        for path in (folder / name for name in (RECIPE, TOKENIZER, *BESIDE_TOKENIZER, METRICS)):
            if path.is_file() and path not in parts:  # what `lmkit generate` needs
                write_atomic(aside / path.name, read_input(path))
        for path in parts:
            place = aside / path.relative_to(folder)
            _move(path, place)
            moved.append((path, place))
    except BaseException:  # a full disk, Ctrl-C
        for path, place in reversed(moved):
            _move(place, path)
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return aside


def _move(path: Path, place: Path) -> None:
    place.parent.mkdir(exist_ok=True)
    if path.is_symlink():  # a relative link would lead elsewhere
        place.unlink(missing_ok=True)
        place.symlink_to(os.path.realpath(path))
        path.unlink()
    else:
        os.replace(path, place)


def delete_replaced(aside: Path) -> None:
    """Delete the data files that lmkit made for a run that was set aside; all that it made, without checkpoints.

    A file that somebody changed since stays.
    """
    entries = [entry for entry in read_record(aside).values() if is_entry(entry)]
    # A text that lies in the run folder may be a source, too.
    sources = {digest for entry in entries for texts in entry.get("content", {}).values() for digest in texts}
    made = {
        name: digest
        for entry in entries
        for name, digest in entry.get("made", {}).items()
        if digest not in sources
    }
    has_checkpoints = any(aside.glob(f"{CHECKPOINTS}/*"))
    for name in DATA_FILES if has_checkpoints else RUN_FILES:
        path, digest = aside / name, made.get(f"./{name}")
        changed = digest is not None and path.is_file() and sha256_file(path) != digest
        if (digest is not None and not changed) or (name in TRAINED_FILES and not has_checkpoints):
            path.unlink(missing_ok=True)
    for folder in (aside / "corpus", aside / "tokens", aside / CHECKPOINTS, aside):
        with suppress(OSError):  # there is none, or something is left in it
            folder.rmdir()
