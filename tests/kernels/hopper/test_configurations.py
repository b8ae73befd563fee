"""Which of the shipped configurations a call gets, and which width its heads take."""

import pytest

pytest.importorskip("triton", reason="the Hopper kernels need triton")

from lmkit.kernels.hopper.forward_launcher import (
    HEAD_DIM_64,
    HEAD_DIM_64_SHORT,
    HEAD_DIM_128,
    HEAD_DIM_256,
    choose_config,
)
from lmkit.kernels.hopper.support import HEAD_DIMS, WIDTHS, used_of, width_of


@pytest.mark.parametrize(
    ("num_queries", "causal", "config"),
    [
        (1, True, HEAD_DIM_64_SHORT),
        (2047, True, HEAD_DIM_64_SHORT),
        (2048, True, HEAD_DIM_64),
        (767, False, HEAD_DIM_64_SHORT),
        (768, False, HEAD_DIM_64),
        (2048, False, HEAD_DIM_64),
    ],
)
def test_head_dim_64_goes_by_length_and_mask(num_queries, causal, config):
    assert choose_config(64, num_queries, causal) == config


@pytest.mark.parametrize("num_queries", [1, 2048, 4096])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("head_dim", "config"), [(128, HEAD_DIM_128), (256, HEAD_DIM_256)])
def test_wider_heads_have_one_configuration(head_dim, config, num_queries, causal):
    assert choose_config(head_dim, num_queries, causal) == config


@pytest.mark.parametrize(
    ("head_dim", "width", "used"),
    [
        (40, 64, 48),
        (56, 64, 64),
        (64, 64, 64),
        (72, 128, 80),
        (80, 128, 80),
        (96, 128, 96),
        (112, 128, 128),
        (128, 128, 128),
        (136, 256, 144),
        (168, 256, 192),
        (256, 256, 256),
    ],
)
def test_heads_take_the_next_width(head_dim, width, used):
    assert head_dim in HEAD_DIMS
    assert width_of(head_dim) == width
    assert used_of(head_dim) == used


def test_every_width_is_a_head_dim():
    assert set(WIDTHS) <= set(HEAD_DIMS)
