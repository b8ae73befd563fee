"""How the algorithms of the four write-ups work: a page of Markdown beside this file, and a picture, for each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lmkit.measure.plots import grouped_bars, heat_map, timeline
from lmkit.measure.tables import Column

TILES = 8
RANKS = (1, 2, 4, 8)


def page(name: str) -> str:
    """Return the page of a write-up (`attention`), Markdown below a heading of the second level."""
    return (Path(__file__).parent / f"{name}.md").read_text("utf-8")


def tiles() -> bytes:
    """Draw the tiles of causal attention, with the order in which they are visited."""
    order = [[float(key + 1) if key <= query else None for key in range(TILES)] for query in range(TILES)]
    return heat_map(
        [str(key) for key in range(TILES)],
        [str(query) for query in range(TILES)],
        order,
        title="Causal FlashAttention: visits of tiles; grey tiles are skipped, those on the diagonal masked",
        x_label="tile of keys",
        y_label="tile of queries",
        value_label="visit of its row",
        spec=".0f",
    )


def overlap() -> bytes:
    """Draw a step of `naive` and of `bucketed`: three layers, whose backward passes take two units each."""
    return timeline(
        {
            "naive: compute": [(0, 3), (3, 9), (12.6, 13.6)],
            "naive: all-reduces": [(9 + 0.4 * call, 9.35 + 0.4 * call) for call in range(9)],
            "bucketed: compute": [(0, 3), (3, 9), (9.8, 10.8)],
            "bucketed: all-reduces": [(5, 5.8), (7, 7.8), (9, 9.8)],
        },
        title="A step: forward 0 to 3, backward 3 to 9, gradients averaged, optimizer",
        x_label="time (any unit)",
    )


def bytes_per_parameter() -> bytes:
    """Draw what a rank holds of each fp32 parameter under ZeRO-1."""
    return grouped_bars(
        [
            {"ranks": f"{ranks} rank{'s' if ranks > 1 else ''}", "part": part, "bytes": size}
            for ranks in RANKS
            for part, size in (("weight", 4.0), ("gradient", 4.0), ("AdamW's moments", 8.0 / ranks))
        ],
        Column("bytes", "bytes"),
        group="ranks",
        series="part",
        title="ZeRO-1: bytes per fp32 parameter on each rank",
        x_label="",
    )


def queue() -> bytes:
    """Draw a GPU that is the limit, and one that waits for its CPU."""
    return timeline(
        {
            "large kernels: CPU": [(0.6 * call, 0.6 * call + 0.5) for call in range(6)],
            "large kernels: GPU": [(0.5 + 1.5 * call, 1.95 + 1.5 * call) for call in range(6)],
            "small kernels: CPU": [(1.1 * call, 1.1 * call + 1.0) for call in range(8)],
            "small kernels: GPU": [(1.0 + 1.1 * call, 1.3 + 1.1 * call) for call in range(8)],
        },
        title="The GPU is the limit (above); the CPU is the limit (below)",
        x_label="time (any unit)",
    )


PICTURES: dict[str, Callable[[], bytes]] = {
    "attention": tiles,
    "data_parallelism": overlap,
    "optimizer_sharding": bytes_per_parameter,
    "profiling": queue,
}
"""Write-up -> its picture, `<write-up>_explained.png` beside it."""
