"""The size of the last bucket, and an optimizer's step in two parts, when some gradients are late."""

import pytest
import torch
from torch import nn

from lmkit.parallel import data_parallel
from lmkit.parallel.data_parallel import AveragedBuckets, split_step


def sizes_of_buckets(sizes: tuple[int, ...], capacity: int, dtype: str = "fp32") -> list[list[int]]:
    given = [nn.Parameter(torch.zeros(size)) for size in sizes]
    planned = AveragedBuckets(given, capacity, None, dtype).plan(given)
    return [[parameter.numel() for parameter in bucket] for bucket in planned]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((50, 50, 50, 5, 5), [[50, 50, 50], [5, 5]]),
        ((50, 50, 50), [[50, 50], [50]]),  # the very last alone
        ((5, 5), [[5, 5]]),
        ((), []),
    ],
)
def test_the_last_bucket_is_small(monkeypatch, sizes, expected):
    monkeypatch.setattr(data_parallel, "LAST_BUCKET_BYTES", 4 * 12)
    assert sizes_of_buckets(sizes, 4 * 1000) == expected


def test_a_bucket_is_counted_in_the_dtype_in_which_it_is_reduced():
    planned = sizes_of_buckets((10, 20, 30, 2**20), 2 * 30, "bf16")
    assert planned == [[10, 20], [30], [2**20]]


def test_the_late_gradient_is_waited_for_behind_the_step_of_the_others():
    """Every gradient is still there afterwards, and the next step, with nothing late, is a plain one."""
    early, late = (nn.Parameter(torch.tensor(value)) for value in (10.0, 20.0))
    early.grad, late.grad = torch.tensor(2.0), torch.tensor(1.0)
    optimizer = torch.optim.SGD([early, late], lr=1.0)
    on_its_way = [late]
    events: list[str] = []

    def wait() -> None:
        events.append(f"arrives when early is {early.item():g}")
        late.grad.fill_(3.0)  # which was 1 until it has arrived
        on_its_way.clear()

    split_step(optimizer, lambda: on_its_way, wait)
    for weights in ((8.0, 17.0), (6.0, 14.0)):
        optimizer.step()
        assert (early.item(), late.item()) == weights
        assert (early.grad.item(), late.grad.item()) == (2.0, 3.0)
    assert events == ["arrives when early is 8"]
