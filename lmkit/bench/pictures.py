"""Draw rows: bars and lines whose groups, series and values are keys of the rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lmkit.measure.plots import Whisker, grouped_bars, line_plot
from lmkit.measure.tables import Rows

SHORT_STATUS = {"out of memory": "OOM", "wrong result": "wrong", "skipped": "too slow"}
NameOf = Callable[[Mapping[str, Any]], str]
WhiskerOf = Callable[[dict[str, Any]], Whisker | None]


def bars(
    rows: Rows,
    value: str,
    *,
    group: str | NameOf,
    series: str | NameOf | None = None,
    whisker: WhiskerOf | None = None,
    title: str,
    x_label: str,
    y_label: str,
    **look: Any,
) -> bytes:
    """Draw a group of bars for each `group` of the rows, and in it a bar for each `series`.

    A row without a value shows its status. A series without any value is left out.

    Args:
        value: key of the bars' height.
        group, series: a key, or a function of a row; without `series` all rows are one series.
        whisker: the lengths of a row's whisker, below and above.
        look: further arguments of `grouped_bars`.
    """
    group_of, series_of = _named(group), _named(series) if series else lambda row: y_label
    groups = list(dict.fromkeys(group_of(row) for row in rows))
    found = {(series_of(row), group_of(row)): row for row in rows}
    names = dict.fromkeys(series_of(row) for row in rows if row.get(value) is not None)
    places = {name: [found.get((name, group), {}) for group in groups] for name in names}
    status = {name: [str(row.get("status", "-")) for row in members] for name, members in places.items()}
    return grouped_bars(
        groups,
        {name: [row.get(value) for row in members] for name, members in places.items()},
        errors={
            name: [whisker(row) if whisker and row.get(value) is not None else None for row in members]
            for name, members in places.items()
        },
        reasons={name: [SHORT_STATUS.get(text, text) for text in texts] for name, texts in status.items()},
        title=title,
        x_label=x_label,
        y_label=y_label,
        **look,
    )


def lines(
    rows: Rows,
    x: str,
    y: str,
    *,
    series: str | NameOf,
    whisker: WhiskerOf | None = None,
    title: str,
    x_label: str,
    y_label: str,
    **look: Any,
) -> bytes:
    """Draw a line for each `series` of the rows, through the points (row[x], row[y]); `look` is of `line_plot`."""
    points: dict[str, list[tuple[float, float]]] = {}
    errors: dict[str, dict[float, Whisker]] = {}
    for row in rows:
        if row.get(y) is None:
            continue
        name = _named(series)(row)
        points.setdefault(name, []).append((row[x], row[y]))
        if whisker and (reach := whisker(row)) is not None:
            errors.setdefault(name, {})[row[x]] = reach
    return line_plot(points, errors=errors, title=title, x_label=x_label, y_label=y_label, log_x=True, **look)


def _named(key: str | NameOf) -> NameOf:
    return (lambda row: str(row[key])) if isinstance(key, str) else key
