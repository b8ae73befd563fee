"""Launches of the Hopper kernels: the kernels of a call, their configuration, and what describes the tensors to TMA.

On a GPU that is not there (see `stand_in_gpu`); what reaches the C launcher is looked at.
"""

import importlib

import pytest
import torch
from marking import full_except

pytest.importorskip("triton", reason="the Hopper kernels need triton")

from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lmkit.kernels.hopper.backward import takes_staggered_kernel
from lmkit.kernels.hopper.forward import HEAD_DIMS, WIDTHS, forward_kernel, used_of, width_of
from lmkit.kernels.hopper.tma import head_boxes, shared_layout, suits_tma, tma_strides
from lmkit.kernels.launch import prepare_launch

USED = {64: {40: 48, 56: 64}, 128: {72: 80, 112: 128}, 256: {136: 144, 168: 192, 256: 256}}


@pytest.mark.parametrize("width", WIDTHS)
def test_heads_take_the_next_width(width):
    for head_dim, used in USED[width].items():
        assert head_dim in HEAD_DIMS
        assert (width_of(head_dim), used_of(head_dim)) == (width, used)
    assert width in HEAD_DIMS


def test_long_backward_in_float16_keeps_its_kernel():
    assert takes_staggered_kernel(128, 2048, 2048, False, torch.bfloat16)
    assert not takes_staggered_kernel(128, 2048, 2048, False, torch.float16)


def strides_of(tensor):
    return tma_strides(tensor.shape, tensor.stride(), tensor.element_size())


def test_natural_layouts_need_no_copy():
    fused = torch.zeros(2, 100, 3 * 4 * 64, dtype=torch.bfloat16)
    q = fused[..., : 4 * 64].view(2, 100, 4, 64).transpose(1, 2)
    assert strides_of(q) == (100 * 768, 64, 768, 1)
    assert strides_of(torch.zeros(2, 4, 100, 64, dtype=torch.bfloat16)) == (25600, 6400, 64, 1)
    row = torch.zeros(65, dtype=torch.bfloat16)[:64].as_strided((1, 1, 1, 64), (65, 65, 65, 1))
    assert strides_of(row) is not None  # strides of single elements do not matter


def test_odd_strides_are_refused():
    half = torch.bfloat16
    assert not suits_tma(torch.zeros(2, 4, 100, 65, dtype=half)[..., :64])  # rows not 16-byte aligned
    assert not suits_tma(torch.zeros(2, 4, 100, 72, dtype=half)[..., 1:65])  # nor the base
    assert not suits_tma(torch.zeros(2, 4, 64, 100, dtype=half).mT)  # head_dim not contiguous
    assert not suits_tma(torch.zeros(1, 1, 1, 1, dtype=half).expand(2, 4, 100, 64))
    assert suits_tma(torch.zeros(2, 4, 100, 72, dtype=half)[..., 8:])


@pytest.mark.full
def test_prepared_launch_is_tritons_own(stand_in_gpu):
    """Prepared from descriptions of tensors, against an ordinary launch on the tensors."""
    fused = torch.zeros(2, 128, 3, 4, 64, dtype=torch.bfloat16)
    q, k, v = (fused[:, :, i].transpose(1, 2) for i in range(3))
    out, lse = torch.zeros(2, 4, 128, 64, dtype=torch.bfloat16), torch.zeros(2, 4, 128)
    first, drawn = torch.zeros(2, 128, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    tensors = [(q, 64), (k, 128), (v, 128), (out, 64)]
    numbers = (128, 128, 4, 1, 1, 8, 0.18)
    constants = {
        "enable_fp_fusion": True, "D": 64, "USED": 64, "KEYS": 128, "STAGES": 2, "CAUSAL": True, "TAIL": False,
        "CONSUMERS": 2, "OWN_O": True, "REGISTERS": 240, "num_warps": 4, "maxnreg": 168, "launch_pdl": True,
        "FIRST": True,
    }  # fmt: skip

    boxes = [head_boxes(x.shape, x.stride(), x.dtype, rows, 64) for x, rows in tensors]
    pointers = [torch.float32, torch.int32, torch.int32]
    launch = prepare_launch(forward_kernel, (8, 1), [*boxes, *pointers], numbers, constants)
    launch(*[x.data_ptr() for x in (q, k, v, out, lse, first, drawn)])
    descriptors = [
        TensorDescriptor(
            x, list(x.shape), list(x.stride()), [1, 1, rows, 64], shared_layout((1, 1, rows, 64), x.dtype)
        )
        for x, rows in tensors
    ]
    forward_kernel[(8, 1, 1)](*descriptors, lse, first, drawn, *numbers, **constants)
    prepared, ordinary = stand_in_gpu.launches
    assert prepared == ordinary


FAST = ["prepare_kernel", "dqdkdv_lockstep_kernel", "finish_kernel"]
STAGGERED = ["prepare_kernel", "dqdkdv_staggered_kernel", "finish_kernel"]
DETERMINISTIC = ["dq_kernel", "dqdkdv_lockstep_kernel"]
WIDE = ["dq_kernel", "dkdv_d256_kernel"]


def rows(box, of_a_head):
    """Box, shape and strides of the sum of dQ of 2 x 2 heads, in rows of 32 numbers."""
    return (box, 32), (2 * 2 * of_a_head, 32), (32, 1)


def half_columns(padded):
    """The same where a box is half the columns of 64 of the `padded` queries."""
    return (4, 32, 32), (2 * 2 * padded // 16, 64, 32), (64 * 32, 32, 1)


UNUSED = rows(256, 64)  # the deterministic way adds nothing up: room for one box


BACKWARDS = [
    (64, 200, 200, True, False, STAGGERED, 64, rows(128, 256 * 2)),
    (128, 2049, 3000, False, False, STAGGERED, 64, half_columns(2176)),
    (136, 200, 200, True, False, WIDE, 64, None),
    (64, 200, 200, True, True, DETERMINISTIC, 128, None),
    (96, 2048, 2048, False, False, FAST, 128, rows(256, 2048 * 4)),
    (40, 200, 200, True, False, STAGGERED, 64, rows(128, 256 * 2)),
    (64, 2048, 100, False, False, STAGGERED, 64, rows(128, 2048 * 2)),
    (80, 200, 200, True, False, FAST, 128, rows(256, 256 * 4)),
    (96, 200, 200, True, True, DETERMINISTIC, 128, UNUSED),
    (128, 200, 200, True, False, FAST, 128, rows(256, 256 * 4)),
    (128, 2048, 2048, False, False, STAGGERED, 64, half_columns(2048)),
    (128, 2047, 2048, False, False, FAST, 128, rows(256, 2048 * 4)),
    (128, 2048, 2047, False, False, FAST, 128, rows(256, 2048 * 4)),
    (128, 2048, 2048, True, False, FAST, 128, rows(256, 2048 * 4)),
    (128, 2048, 2048, False, True, DETERMINISTIC, 128, UNUSED),
    (256, 200, 200, True, True, WIDE, 64, None),
]


@pytest.mark.parametrize(
    ("head_dim", "queries", "keys", "causal", "deterministic", "kernels", "key_rows", "dq_sum"),
    full_except(*BACKWARDS),
)
def test_kernels_of_a_backward(
    launcher, stand_in_gpu, head_dim, queries, keys, causal, deterministic, kernels, key_rows, dq_sum
):
    """The kernel of dK and dV, the second, gets K in boxes of the rows that it expects (Triton does not look), and
    the sum of dQ, its last descriptor, as box, shape and strides that it expects."""
    q, out, dout = (torch.zeros(2, 2, queries, head_dim, dtype=torch.bfloat16) for _ in range(3))
    k, v = (torch.zeros(2, 2, keys, head_dim, dtype=torch.bfloat16) for _ in range(2))
    lse = torch.zeros(2, 2, queries)
    launcher.backward(dout, q, k, v, out, lse, causal=causal, scale=0.125, deterministic=deterministic)
    assert [function[0] for _, _, function, *_ in stand_in_gpu.launches] == kernels
    described = [x for x in stand_in_gpu.launches[1][-1] if isinstance(x, tuple) and x[0] == "descriptor"]
    key_box = next(x[5] for x in described if x[1] == k.data_ptr())
    assert key_box[:3] == (1, 1, key_rows)  # in columns of as many as the swizzle takes
    if dq_sum is not None:
        assert described[-1][5:8] == dq_sum


@pytest.mark.full
@pytest.mark.parametrize(("head_dim", "deterministic"), [(64, False), (128, True)])
def test_bounds_reach_the_kernels(launcher, stand_in_gpu, head_dim, deterministic):
    """`first` of the queries (a copy where the address is odd); CTAs draw their tiles where these are many."""
    place = torch.arange(200, dtype=torch.int32)
    first = torch.stack([place // 50 * 50, (place - 7).clamp_min(0)])
    odd = torch.zeros(401, dtype=torch.int32)[1:].view(2, 200)
    assert odd.data_ptr() % 16
    for heads, bounds, ctas in ((2, first, 2 * 2 * 2), (70, first, 132), (2, odd, 2 * 2 * 2)):
        del stand_in_gpu.launches[:]
        q, dout = (torch.zeros(2, heads, 200, head_dim, dtype=torch.bfloat16) for _ in range(2))
        options = {"causal": True, "scale": 0.125, "first": bounds}
        out, lse = launcher.forward(q, q, q, **options)
        launcher.backward(dout, q, q, q, out, lse, **options, deterministic=deterministic)
        launches = {function[0]: (grid, given) for grid, _, function, *_, given in stand_in_gpu.launches}
        assert launches["forward_kernel"][0][0] == ctas
        assert (bounds.data_ptr() in launches["forward_kernel"][1]) == (bounds is first)
        if deterministic:
            assert (bounds.data_ptr() in launches["dq_kernel"][1]) == (bounds is first)
        else:
            assert launches["dqdkdv_staggered_kernel"][0][0] == ctas


def test_only_calls_that_run_one_after_the_other_share_a_counter(launcher, stand_in_gpu, monkeypatch):
    """Of the tiles that CTAs draw: two kernels that drew from one at the same time would leave tiles out."""
    q = torch.zeros(1, 2, 200, 64, dtype=torch.bfloat16)
    first = torch.zeros(1, 200, dtype=torch.int32)

    def counter():
        launcher.forward(q, q, q, causal=True, scale=0.125, first=first)
        arguments = stand_in_gpu.launches[-1][-1]
        return arguments[arguments.index(first.data_ptr()) + 1]

    one = counter()
    assert counter() == one
    monkeypatch.setattr(stand_in_gpu, "get_current_stream", lambda device: 8)
    other = counter()
    assert counter() == other != one
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    zeros, kept = torch.zeros, []
    monkeypatch.setattr(
        torch, "zeros", lambda *sizes, **options: kept.append(zeros(*sizes, **options)) or kept[-1]
    )
    made_before = {counter(), counter()}
    assert not kept  # nothing has to be made 0 in a graph
    forward = importlib.import_module("lmkit.kernels.hopper.forward")
    forward._STOCK[q.device].clear()
    captured = {counter(), counter()}
    assert len(kept) == 2
    assert len(captured | made_before | {one, other}) == 6
