"""Which tile a unit of work is, with plain numbers in the place of Triton's."""

from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="the Hopper kernels need triton")

from lmkit.kernels.hopper import schedule


@pytest.mark.parametrize("num_tiles", [1, 5, 24, 25, 40, 128])
@pytest.mark.parametrize("num_heads", [1, 3, 16, 37])
@pytest.mark.parametrize("together", [1, 2, 8])
def test_units_are_all_tiles_and_end_with_the_last_of_all_heads(monkeypatch, num_tiles, num_heads, together):
    plain = SimpleNamespace(
        maximum=max, minimum=min, where=lambda condition, yes, no: yes if condition else no
    )
    monkeypatch.setattr(schedule, "gl", plain)
    monkeypatch.setattr(schedule, "LAST_TOGETHER", 24)
    order = [
        schedule.locate_uneven.fn(unit, num_tiles, num_heads, together)
        for unit in range(num_tiles * num_heads)
    ]
    assert sorted(order) == [(tile, head) for tile in range(num_tiles) for head in range(num_heads)]
    early = max(num_tiles - 24, 0)
    assert order[early * num_heads :] == [
        (tile, head) for tile in range(early, num_tiles) for head in range(num_heads)
    ]
    first = order[: early * min(together, num_heads)]
    assert {head for _, head in first} <= set(range(together))  # heads that share the L2 cache begin together
