"""`lmkit report`: the write-ups, made again from the rows that benches and profiles left."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from lmkit.errors import LmkitError
from lmkit.reports import attention, data_parallelism, optimizer_sharding, profiling
from lmkit.reports.results import find_results, in_words
from lmkit.reports.writing import Place
from lmkit.storage import write_atomic

# Where benches and profiles write, unless they are told otherwise.
ARTIFACTS, PARTS = Path("artifacts"), ("benches", "profiles")

WRITE_UPS = {
    "attention.md": attention.write_up,
    "data_parallelism.md": data_parallelism.write_up,
    "optimizer_sharding.md": optimizer_sharding.write_up,
    "profiling.md": profiling.write_up,
}


@dataclass(frozen=True)
class Reported:
    """`written`: paths of the write-ups (none when checking); `without_results`: those that no row speaks about."""

    folder: str
    sources: tuple[str, ...]
    written: tuple[str, ...]
    without_results: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"read {len(self.sources)} results below {self.folder}"]
        lines += [f"wrote {name}" for name in self.written]
        lines += [f"no rows for {name}" for name in self.without_results]
        return "\n".join(lines)


def run(folder: Path | None, output: Path | None, *, check: bool = False) -> Reported:
    """Write every write-up that the rows below `folder` support into `output` (default: its `reports`).

    Without a folder, those of artifacts/benches and artifacts/profiles, as far as these exist, into
    artifacts/benches/reports.

    With `check`, nothing is written: the files must say already what they would.

    Raises:
        UsageError: no folder, or no result in it.
        LmkitError: a result is damaged, or (`check`) a write-up is stale.
    """
    root, parts = (ARTIFACTS, PARTS) if folder is None else (folder, ("",))
    found = find_results(root, parts)
    searched = in_words(root, parts)
    target = output or root / parts[0] / "reports"
    place = Place(root.resolve(), target.resolve())
    written, missing, stale = [], [], []
    for name, write_up in WRITE_UPS.items():
        text = write_up(found, place)
        path = target / name
        if text is None:
            missing.append(name)
        elif not check:
            write_atomic(path, text)
            written.append(str(path))
        elif not path.is_file() or path.read_text("utf-8") != text:
            stale.append(str(path))
    if stale:
        words = [] if folder is None else [str(folder)]
        words += [] if output is None else ["--output", str(output)]
        raise LmkitError(
            f"{', '.join(stale)}: does not say what the rows below {searched} say",
            hint=f"{shlex.join(['lmkit', 'report', *words])} writes it again",
        )
    sources = tuple(results.path.as_posix() for results in found)
    return Reported(searched, sources, tuple(written), tuple(missing))
