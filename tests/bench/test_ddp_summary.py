"""The rows of the data-parallel bench in words and pictures."""

import pytest

from lmkit.bench.ddp import findings, pictures, read_step, summarize, summarize_sharding
from lmkit.bench.summary import terminal_text
from lmkit.measure import plots
from lmkit.measure.statistics import overlap, total
from lmkit.measure.trace import DeviceWork


def timed(name: str, times: list[float], **more: object) -> dict:
    middle = sorted(times)[len(times) // 2]
    row = {"step_ms": middle, "p10_ms": min(times), "p90_ms": max(times), "samples_ms": times, "status": "ok"}
    return {"case": "small", "variant": name, "world_size": 2, "tokens_per_s": 1000 / middle, **row, **more}


def kernel(name: str, start: int, end: int) -> DeviceWork:
    """Of microseconds."""
    return DeviceWork("kernel", name, 1000 * start, 1000 * end, 0, 0, 0)


@pytest.mark.usefixtures("drawing")
def test_a_trace_is_read_as_what_ran_at_the_same_time():
    """Four steps of 100 us, shifted by 1000: two kernels that touch, a collective half of which overlaps them, one
    after. The second kernel of the third step, the last but one, is longer."""
    events = []
    for step in range(4):
        at = 1000 + 100 * step
        events += [kernel("matmul", at, at + 30), kernel("norm", at + 30, at + (70 if step == 2 else 60))]
        events += [kernel("ncclDevKernel", at + 40, at + 80), kernel("ncclDevKernel", at + 90, at + 100)]
    step = read_step(events, 4)
    assert step == {"compute": [(0.0, 0.07)], "communication": [(0.04, 0.08), (0.09, 0.1)]}
    assert total(step["communication"]) == pytest.approx(0.05)
    assert overlap(step["communication"], step["compute"]) == pytest.approx(0.03)
    assert pictures([timed("bucketed", [2.0] * 6, timeline=step)])["ddp_overlap.png"].startswith(b"\x89PNG")
    assert read_step(events[:1], 4) is None
    with pytest.raises(ValueError, match="7 collectives in 4 steps"):
        read_step(events[:-1], 4)


@pytest.mark.usefixtures("drawing")
def test_pictures_of_times_have_whiskers_and_the_bucket_sizes_an_axis_from_zero(monkeypatch):
    figures = []
    monkeypatch.setattr(plots, "png", lambda figure: figures.append(figure) or b"")
    rows = [timed("none", [7.0, 8.0, 9.0]), timed("bucketed", [9.0, 10.0, 20.0], exposed_ms=2.0)]
    sweep = [timed("bucketed 1 MB", [9.0, 10.0, 12.0]), timed("bucketed 10 MB", [9.9, 10.3, 11.0])]
    drawn = pictures(rows + [row | {"part": "bucket sweep"} for row in sweep])
    assert list(drawn) == ["ddp_throughput.png", "ddp_exposed.png", "ddp_bucket_sweep.png"]
    whiskers = [
        [tuple(end[1] for end in line.get_segments()[0]) for line in figure.axes[0].collections]
        for figure in figures
    ]
    # From 1000 / p90 to 1000 / p10; then of 2, 2 and 11 ms from round to round; then the sizes' own.
    expected = [[(1000 / 9, 1000 / 7), (50, 1000 / 9)], [(2.0, 9.2)], [(9.0, 12.0), (9.9, 11.0)]]
    for ends, right in zip(whiskers, expected, strict=True):
        assert ends == [pytest.approx(pair) for pair in right]
    assert figures[2].axes[0].get_ylim()[0] == 0
    assert "ddp_exposed.png" not in pictures(rows[1:] and [timed("bucketed", [10.0])])


@pytest.mark.parametrize("rounds", [1, 6])
def test_few_rounds_are_said_to_be_few(rounds):
    rows = [timed(name, [2.0] * rounds, rounds=6) for name in ("bucketed", "torch_ddp")]
    table = " ".join(terminal_text(summarize(rows)).split())
    assert ("1 of 6 rounds" in table) == (rounds == 1)
    assert ("fewer than 6 rounds" in table) == (rounds == 1)


def test_findings_account_for_rivals_overlap_bytes_and_bucket_sizes():
    bytes_ = {"link_bytes": 101.0, "expected_link_bytes": 100.0}
    rows = [
        timed("one rank", [9.0] * 6, world_size=1),
        timed("naive", [14.0] * 6, exposed_ms=4.0, **bytes_),
        timed("bucketed", [11.0] * 6, exposed_ms=1.0, scaling=0.5, **bytes_),
        timed("torch_ddp", [22.0] * 6),
        timed("zero1", [10.0] * 6),
        timed("zero1 bf16", [8.0] * 6),
        timed("torch_ddp + ZeRO", [12.0] * 6),
        timed("bucketed 1 MB", [13.0] * 6, part="bucket sweep"),
        timed("bucketed 10 MB", [9.5] * 6, part="bucket sweep"),
    ]
    for sentence, said in zip(
        findings(rows),
        (
            ("bucketed 10 MB, 9.50 ms",),
            ("bucketed against torch_ddp: 2.000x", "faster"),
            ("zero1 bf16 against torch_ddp + ZeRO: 1.500x",),
            ("1.00 ms of bucketed's", "4.00 ms of naive's"),
            ("2 variants", "at most 1.00%"),
            ("best 10 MB (9.50 ms), worst 1 MB (13.00 ms)",),
        ),
        strict=True,
    ):
        for words in said:
            assert words in sentence
    sharding = summarize_sharding(rows)
    assert [row["variant"] for row in sharding.rows][:2] == ["one rank", "bucketed"]
    assert any("zero1 bf16 against" in found for found in sharding.findings)
    assert summarize_sharding(rows[:4]).rows == []
