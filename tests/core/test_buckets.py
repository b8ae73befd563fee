"""How parameters share buckets. (Averaging them: tests/parallel.)"""

import torch
from torch import nn

from lmkit.core.buckets import fill_buckets


def parameters(*sizes: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]


def test_the_parameter_that_reaches_the_capacity_closes_its_bucket():
    given = parameters(10, 20, 30, 5, 100, 7)
    found = [[parameter.numel() for parameter in bucket] for bucket in fill_buckets(given, 4 * 30)]
    assert found == [[10, 20], [30], [5, 100], [7]]


def test_dtypes_never_share_a_bucket():
    """And buckets are in the order in which they become complete."""
    wide, narrow = parameters(4, 4, 4), parameters(4, 4, dtype=torch.bfloat16)
    mixed = [wide[0], narrow[0], wide[1], narrow[1], wide[2]]
    found = [[next(i for i, p in enumerate(mixed) if p is q) for q in x] for x in fill_buckets(mixed, 4 * 8)]
    assert found == [[0, 2], [1, 3], [4]]
