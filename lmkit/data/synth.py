"""A corpus out of nothing: English stories of any size, the same for a seed on every machine."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator

from lmkit.data.stories.story import tell_story
from lmkit.errors import UsageError
from lmkit.measure.progress import Progress
from lmkit.recipe.vocabulary import END_OF_TEXT
from lmkit.storage import atomic_path

_PROGRESS_EVERY = 1 << 20


def write_stories(
    path: str | os.PathLike[str], *, size_mb: float, seed: int, progress: Progress | None = None
) -> None:
    """Write stories until the file holds at least `size_mb` * 10^6 bytes, each ending with `<|endoftext|>`.

    The last story is whole, so the file is larger than asked by less than one story. A longer corpus of the same
    seed begins with the shorter one. Memory does not depend on the size. ASCII only; the file appears when it is
    complete. `progress` is called with ("stories", bytes written, bytes wanted).

    Raises:
        UsageError: `size_mb` is not a finite positive number ("synth.size").
    """
    if not 0 < size_mb < math.inf:
        raise UsageError("synth.size", f"size_mb: {size_mb} is not a size", hint="for example --size-mb 20")
    wanted = int(size_mb * 1_000_000)
    written = reported = 0
    with atomic_path(path) as partial, open(partial, "w", encoding="ascii", newline="") as file:
        for story in generate_stories(seed):
            written += file.write(story) + file.write(END_OF_TEXT + "\n")
            if progress is not None and (written >= reported + _PROGRESS_EVERY or written >= wanted):
                progress("stories", min(written, wanted), wanted)
                reported = written
            if written >= wanted:
                break


def generate_stories(seed: int) -> Iterator[str]:
    """Yield stories without end, each closed by a line break.

    `random.Random.random` is the one method whose numbers Python promises to keep for a seed; everything is drawn
    from it.
    """
    draw = random.Random(seed).random
    while True:
        yield tell_story(draw) + "\n"
