"""A tiny run: random token files and a model of 7,000 parameters that trains 20 steps in a fraction of a second."""

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import TINY

from lmkit.data.token_files import TokenFileWriter
from lmkit.recipe.load import load_recipe
from lmkit.recipe.recipe import Recipe

VOCABULARY = 64
TRAINING = (
    *("train.steps=10", "train.batch_size=8", "train.accumulation=2", "train.log_interval=1"),
    *("train.eval_interval=4", "train.eval_batches=2", "optimizer.warmup_steps=2"),
)


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """matplotlib takes longer than these runs."""
    monkeypatch.setattr("lmkit.training.metrics.draw_losses", lambda *arguments, **options: None)


@pytest.fixture(scope="session")
def token_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(train.npy, valid.npy): each token depends on the one before, so that there is something to learn."""
    folder = tmp_path_factory.mktemp("tokens")
    generator = np.random.default_rng(7)
    successor = generator.permutation(VOCABULARY)
    paths = []
    for name, length in (("train", 4000), ("valid", 701)):
        ids = [0]
        for _ in range(length - 1):
            follows = generator.random() < 0.8
            ids.append(int(successor[ids[-1]] if follows else generator.integers(VOCABULARY)))
        path = folder / f"{name}.npy"
        with TokenFileWriter(path, vocab_size=VOCABULARY, tokenizer_sha256="a" * 64) as writer:
            starts = [0, *(i for i in range(1, length) if ids[i - 1] == 5)]
            writer.append(np.array(ids), documents=starts)
            writer.finish(num_bytes=3 * length, source_sha256="b" * 64)
        paths.append(path)
    return paths[0], paths[1]


@pytest.fixture
def settings(token_files: tuple[Path, Path], tmp_path: Path) -> Callable[..., list[str]]:
    """`--set` arguments of the tiny run in tmp_path; later ones win."""
    train, valid = token_files
    places = (f'run.folder="{tmp_path / "runs"}"', f'data.train="{train}"', f'data.valid="{valid}"')
    return lambda *more: [*TINY, *TRAINING, *places, *more]


@pytest.fixture
def tiny(settings: Callable[..., list[str]]) -> Callable[..., Recipe]:
    """The tiny run's recipe, with changes."""
    return lambda *more: load_recipe(None, settings(*more))


@pytest.fixture(scope="session")
def processes() -> BaseContext:
    """Real processes that start in milliseconds: a server imports torch once and forks before any thread exists."""
    context = multiprocessing.get_context("forkserver")
    # torch imports its compiler when the first optimizer is made, which takes longer than these runs.
    context.set_forkserver_preload(["lmkit.training.session", "lmkit.recipe.load", "torch._dynamo"])
    return context


@pytest.fixture
def fleet(processes: BaseContext, tmp_path: Path) -> Iterator[Any]:
    from processes import Fleet

    with ExitStack() as meetings:
        fleet = Fleet(processes, tmp_path, meetings)
        yield fleet
        for process in fleet.running:
            if process.is_alive():
                process.kill()
            process.join()
