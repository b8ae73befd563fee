"""The rows of `lmkit bench ddp` in words and pictures."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lmkit.bench.ddp_variants import is_own, is_rounded, is_sharded
from lmkit.bench.harness import grouped
from lmkit.bench.summary import Summary
from lmkit.measure.plots import grouped_bars, line_panels, of_samples, timeline
from lmkit.measure.statistics import FEWEST_PAIRS, overlap, paired_ratio, total
from lmkit.measure.tables import Column, Rows

TIME = Column("step_ms", "ms/step", ".2f", instead="status", axis="ms per step")
THROUGHPUT = Column("tokens_per_s", "tokens/s", ",.0f", axis="tokens per second")
EXPOSED = Column("exposed_ms", "exposed ms", ".2f", axis="ms per step")
COLUMNS = (
    Column("variant", "variant"),
    TIME,
    Column("spread", "spread", ".1%"),
    THROUGHPUT,
    Column("scaling", "scaling", ".1%"),
    EXPOSED,
    Column("peak_overhead", "memory", "+.1%"),
    Column("calls_per_step", "calls", ",d"),
    Column("link_mb", "MB sent", ",.1f"),
    Column("expected_mb", "formula", ",.1f"),
)
WIDE = (
    Column("scaling_low", "scaling 95% from", ".1%"),
    Column("scaling_high", "to", ".1%"),
    Column("exposed_share", "exposed share", ".1%"),
    Column("communication_alone_ms", "alone ms", ".2f"),
    Column("host_ms", "host ms", ".1f"),
    Column("ahead_ms", "ahead ms", ".1f"),
    Column("peak_gb", "peak GB", ".2f"),
)
NOTES = (
    "ms/step: median of the slowest rank's samples; under `one rank` every rank trains alone; spread: "
    "(p90 - p10) / median; scaling: step time of one rank / step time of the variant, same rows per rank; "
    "exposed: step time - step time of `none`; memory: peak relative to one rank's",
    "MB sent: 10^6 bytes per rank and step; formula: 2 (W-1)/W of the gradients' bytes; for PyTorch's ZeRO also "
    "(W-1)/W of the weights' bytes; what Muon sends besides of sharded matrices is not in it",
)
BUCKET_MB = re.compile(r"bucketed ([\d.e+-]+) MB")


def summarize(rows: Rows) -> Summary:
    """Say what the rows support: the fastest, against PyTorch, what overlap hides, bytes, bucket sizes."""
    # The sweep measures "one rank" and "none" again only to compare with them.
    shown = [
        with_units(row)
        for row in rows
        if row.get("part") != "bucket sweep" or row["variant"].startswith("bucketed")
    ]
    cases = grouped(shown, lambda row: str(row["case"]))
    timed = [row for row in rows if row.get("samples_ms")]
    notes = list(NOTES)
    if timed and (fewest := min(len(row["samples_ms"]) for row in timed)) < (timed[0].get("rounds") or 0):
        notes.append(f"{fewest} of {timed[0]['rounds']} rounds: then bench.ddp.max_seconds was over")
    if any(len(row["samples_ms"]) < FEWEST_PAIRS for row in timed):
        notes.append(f"fewer than {FEWEST_PAIRS} rounds give no 95% interval: differences may be chance")
    return Summary(
        "Data parallelism",
        COLUMNS if len(cases) < 2 else (Column("case", "case"), *COLUMNS),
        shown,
        about=f"{', '.join(cases)}, {max(row['world_size'] for row in rows)} ranks",
        findings=[found for members in cases.values() for found in findings(members)],
        notes=notes,
        wide=WIDE,
    )


def summarize_sharding(rows: Rows) -> Summary:
    """Say what sharding does to the speed: sharded variants, one rank and `bucketed`; nothing without sharded."""
    names = {row["variant"] for row in rows}
    if not any(is_sharded(name) for name in names):
        return Summary("Speed", (), [])
    kept = {name for name in names if is_sharded(name) or name.startswith("one rank") or name == "bucketed"}
    return summarize([row for row in rows if row["variant"] in kept])


def with_units(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with megabytes and gigabytes."""
    keys = {
        "link_mb": ("link_bytes", 1e6),
        "expected_mb": ("expected_link_bytes", 1e6),
        "peak_gb": ("peak_bytes", 1e9),
    }
    sizes = {key: row[source] / unit for key, (source, unit) in keys.items() if row.get(source) is not None}
    spread = {"spread": (row["p90_ms"] - row["p10_ms"]) / row["step_ms"]} if row.get("step_ms") else {}
    return row | spread | sizes


def findings(rows: Rows) -> list[str]:
    """Return the sentences that the rows of one case support."""
    timed: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row.get("step_ms"):
            timed.setdefault(row["variant"], row)  # the ladder's, if the bucket sweep has the same variant
    synced = [row for name, row in timed.items() if row["world_size"] > 1 and name != "none"]
    found = []
    if full_precision := [row for row in synced if not is_rounded(row["variant"])]:
        best = min(full_precision, key=lambda row: row["step_ms"])
        scaling = f", {best['scaling']:.1%} of linear scaling" if best.get("scaling") else ""
        found.append(
            f"Fastest without a bf16 option: {best['variant']}, {best['step_ms']:.2f} ms a step{scaling}."
        )
    for sharded in (False, True):
        found += _against_pytorch([row for row in synced if is_sharded(row["variant"]) is sharded])
    naive, bucketed = timed.get("naive"), timed.get("bucketed")
    if naive and bucketed and naive.get("exposed_ms") and bucketed.get("exposed_ms") is not None:
        found.append(
            f"Overlap: {bucketed['exposed_ms']:.2f} ms of bucketed's communication lengthen the step; "
            f"{naive['exposed_ms']:.2f} ms of naive's do."
        )
    if counted := [row for row in synced if row.get("expected_link_bytes") and row.get("link_bytes")]:
        apart = max(abs(row["link_bytes"] / row["expected_link_bytes"] - 1) for row in counted)
        found.append(
            f"Bytes: what {len(counted)} variants sent differs from the formula by at most {apart:.2%}."
        )
    sizes = sorted((row for row in synced if _bucket_mb(row) is not None), key=lambda row: row["step_ms"])
    if len(sizes) > 1:
        said = [f"{_bucket_mb(row):g} MB ({row['step_ms']:.2f} ms)" for row in (sizes[0], sizes[-1])]
        found.append(f"Bucket size: best {said[0]}, worst {said[1]}.")
    return found


def _against_pytorch(rows: Rows) -> list[str]:
    """Compare our fastest variant with PyTorch's fastest, by the ratios of the same rounds."""
    ours = [row for row in rows if is_own(row["variant"]) and _bucket_mb(row) is None]
    rivals = [row for row in rows if not is_own(row["variant"])]
    if not ours or not rivals:
        return []
    best, rival = (min(members, key=lambda row: row["step_ms"]) for members in (ours, rivals))
    if len(best["samples_ms"]) != len(rival["samples_ms"]):
        return []
    ratio = paired_ratio(best["samples_ms"], rival["samples_ms"])
    return [f"{best['variant']} against {rival['variant']}: {ratio}."]


def _bucket_mb(row: Mapping[str, Any]) -> float | None:
    size = BUCKET_MB.fullmatch(row["variant"])
    return float(size[1]) if size else None


def pictures(rows: Rows) -> dict[str, bytes]:
    """Draw throughput, exposed communication, the bucket sweep, and a step of `bucketed` if one was traced."""
    timed = [row for row in rows if row.get("step_ms")]
    first = [row for row in timed if row.get("part") != "bucket sweep"]
    case = f"{', '.join(dict.fromkeys(str(row['case']) for row in rows))}, whiskers p10 to p90"
    size = max(row["world_size"] for row in rows)
    by_variant: dict[str, Any] = {"group": "variant", "x_label": "variant"}
    title = f"Training throughput on {size} ranks: {case}"
    files = {"ddp_throughput.png": grouped_bars(first, THROUGHPUT, title=title, **by_variant)}
    if exposed := [row for row in first if row.get("exposed_ms") is not None]:
        bare = next(row for row in first if row["variant"] == "none")["samples_ms"]

        def beyond(row: Mapping[str, Any]) -> tuple[float, float]:
            return of_samples([mine - alone for mine, alone in zip(row["samples_ms"], bare, strict=True)])

        title = f"Communication that compute does not hide: {case}"
        files["ddp_exposed.png"] = grouped_bars(exposed, EXPOSED, whisker=beyond, title=title, **by_variant)
    if sized := [row | {"bucket_mb": size} for row in timed if (size := _bucket_mb(row)) is not None]:
        title = f"Step time over bucket size: {case}"
        files["ddp_bucket_sweep.png"] = line_panels(
            sized, "bucket_mb", TIME, group=lambda row: "bucketed", title=title, x_label="bucket size (MiB)"
        )
    if traced := next((row["timeline"] for row in rows if row.get("timeline")), None):
        kinds = ("compute", "communication")
        compute, communication = ([(start, end) for start, end in traced[kind]] for kind in kinds)
        files["ddp_overlap.png"] = timeline(
            {"compute": compute, "communication": communication},
            title=f"bucketed: {total(communication):.2f} ms of communication in a step, "
            f"{overlap(communication, compute):.2f} of them while compute runs",
            x_label="time (ms), GPU of the traced rank",
        )
    return files
