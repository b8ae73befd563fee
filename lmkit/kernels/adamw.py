"""Update parameters by AdamW in one pass over memory, with one launch for any number of tensors.

Every weight w, gradient g and moment m, v is read once; weights and moments are written once. In float32, with the
scalars that `lmkit.core.adamw.Scalars` explains:

    m = beta1 m + (1 - beta1) g        v = beta2 v + (1 - beta2) g^2        w = kept w + rate m / (sqrt(v) + eps)

`lmkit.core.adamw` states the same update as PyTorch operations. A table on the device says where the tensors are.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from lmkit.kernels.launch import count_tiles, selected

BLOCK = 1024  # elements of a CTA
WARPS = 4
VECTOR_BYTES = 16  # a thread loads as many at once, from addresses that are multiples of it
COLUMNS = tl.constexpr(8)

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
"""Types of tensors that the kernel takes; it calculates in float32."""


@triton.jit
def adamw_kernel(
    table_pointer,  # (tensors, COLUMNS) int64, see AdamWLaunch
    owner_pointer,  # (CTAs,) int32: the tensor that a CTA works on
    factor_pointer,  # one float32 by which gradients are multiplied, or None
    decided_pointer,  # what `decide` wrote, read in place of kept, eps and rate; or None
    beta1, rest1, beta2, rest2,  # rest1 = 1 - beta1
    kept, eps, rate,
    WEIGHT: tl.constexpr,  # dtype of weights and moments
    GRADIENT: tl.constexpr,
    COPY: tl.constexpr,  # None: there is none
    BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row = table_pointer + tl.load(owner_pointer + program).to(tl.int64) * COLUMNS
    block = program - tl.load(row + 6)  # of this tensor; 64 bits, as the table
    if decided_pointer is not None:
        if tl.load(decided_pointer) == 0.0:
            return
        kept = tl.load(decided_pointer + 1)
        eps = tl.load(decided_pointer + 2)
        rate = tl.load(decided_pointer + 3)
    numbers = (beta1, rest1, beta2, rest2, kept, eps, rate)
    factor = 1.0
    if factor_pointer is not None:
        factor = tl.load(factor_pointer)
    if block < tl.load(row + 7):
        update_block(row, block * BLOCK, factor, numbers, WEIGHT, GRADIENT, COPY, BLOCK, WHOLE=True)
    else:
        update_block(row, block * BLOCK, factor, numbers, WEIGHT, GRADIENT, COPY, BLOCK, WHOLE=False)


@triton.jit
def update_block(
    row,
    start,  # the first element
    factor, numbers,
    WEIGHT: tl.constexpr, GRADIENT: tl.constexpr, COPY: tl.constexpr, BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,  # addresses are multiples of VECTOR_BYTES, and the tensor does not end in this block
):  # fmt: skip
    """Update BLOCK elements of one tensor, or as many as it has left."""
    beta1, rest1, beta2, rest2, kept, eps, rate = numbers
    left = tl.minimum(tl.load(row + 5) - start, BLOCK).to(tl.int32)
    inside = None if WHOLE else tl.arange(0, BLOCK) < left
    weight = elements(row, 0, WEIGHT, start, BLOCK, WHOLE)
    gradient = elements(row, 1, GRADIENT, start, BLOCK, WHOLE)
    mean = elements(row, 2, WEIGHT, start, BLOCK, WHOLE)
    square = elements(row, 3, WEIGHT, start, BLOCK, WHOLE)
    copy = None if COPY is None else elements(row, 4, COPY, start, BLOCK, WHOLE)
    g = tl.load(gradient, mask=inside).to(tl.float32) * factor
    m = tl.load(mean, mask=inside).to(tl.float32)
    v = tl.load(square, mask=inside).to(tl.float32)
    w = tl.load(weight, mask=inside).to(tl.float32)
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * (g * g)
    w = kept * w + rate * tl.div_rn(m, tl.sqrt_rn(v) + eps)
    tl.store(mean, m.to(WEIGHT), mask=inside)
    tl.store(square, v.to(WEIGHT), mask=inside)
    tl.store(weight, w.to(WEIGHT), mask=inside)
    if COPY is not None:
        tl.store(copy, w.to(COPY), mask=inside)


@triton.jit
def elements(row, column, TYPE: tl.constexpr, start, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """Return pointers to BLOCK elements of the array in this column, from `start` on."""
    first = tl.load(row + column).to(tl.pointer_type(TYPE)) + start
    if WHOLE:
        first = tl.multiple_of(first, 16)
    return first + tl.arange(0, BLOCK)


@triton.jit
def decide_kernel(
    decision_pointer,
    step_pointer,
    lr_pointer,
    settings_pointer,  # float64: both betas, eps, weight decay
    decided_pointer,  # float32: whether to make the step, kept, eps, rate
):
    """In float64, as the host does it: 1 - beta^step loses digits in float32."""
    applies = tl.load(decision_pointer) != 0
    step = tl.maximum(tl.load(step_pointer), 1).to(tl.float64)
    lr = tl.load(lr_pointer).to(tl.float64)
    power1 = tl.exp(step * tl.log(tl.load(settings_pointer)))  # beta1^step; 0 for beta1 = 0
    power2 = tl.exp(step * tl.log(tl.load(settings_pointer + 1)))
    root = tl.sqrt(1 - power2)
    tl.store(decided_pointer, applies.to(tl.float32))
    tl.store(decided_pointer + 1, (1 - lr * tl.load(settings_pointer + 3)).to(tl.float32))
    tl.store(decided_pointer + 2, (tl.load(settings_pointer + 2) * root).to(tl.float32))
    tl.store(decided_pointer + 3, (-lr * root / (1 - power1)).to(tl.float32))


def decide(decision: Tensor, step: Tensor, lr: Tensor, settings: Tensor) -> Tensor:
    """Return the scalars of an update, calculated on the device, for `AdamWLaunch`.

    `decision`, `step` (counted from 1) and `lr` are scalars; a decision of zero changes nothing. `settings`: float64,
    both betas, eps and weight decay.
    """
    decided = torch.empty(4, dtype=torch.float32, device=decision.device)
    with selected(decision.device):
        decide_kernel[(1,)](decision, step, lr, settings, decided, num_warps=1, enable_fp_fusion=False)
    return decided


class AdamWLaunch:
    """Launch the updates of one list of tensors; keep the table of their addresses on their device.

    The table is sent again when an address has changed. That is rare, because the allocator gives gradients the same
    places in every step. The CPU does not wait for the GPU.
    """

    def __init__(self) -> None:
        self._addresses: list[list[int]] = []
        self._sizes: list[int] = []
        self._programs = 0
        self._table: Tensor | None = None
        self._owners: Tensor | None = None
        self._unsent: Tensor | None = None

    def __call__(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        means: Sequence[Tensor],
        squares: Sequence[Tensor],
        copies: Sequence[Tensor],
        scalars: tuple[float, float, float, float, float],
        factor: Tensor | None,
        decided: Tensor | None = None,
    ) -> None:
        """Update on the current stream of the tensors' device.

        Args:
            params, grads, means, squares: contiguous, each of one dtype of TYPES, the moments' the parameters'.
            copies: receive the new parameters in their own dtype; as many as `params`, or none.
            scalars: beta1, beta2, kept, eps and rate, as `lmkit.core.adamw.Scalars` explains them.
            factor: multiplies every gradient; a float32 scalar on the device.
            decided: made by `decide`; takes the place of kept, eps and rate, and may call the update off.

        ValueError: the tensors of one parameter differ in size, device or (moments) dtype.
        """
        arrays = [params, grads, means, squares, *([copies] if copies else [])]
        addresses = [[tensor.data_ptr() for tensor in array] for array in arrays]
        sizes = [param.numel() for param in params]
        device = params[0].device
        with selected(device):
            if addresses != self._addresses or sizes != self._sizes:
                _check(arrays)
                self._place(addresses, sizes, device)
            if self._programs == 0:
                return
            beta1, beta2, *others = scalars
            numbers = (beta1, 1 - beta1, beta2, 1 - beta2, *others)
            adamw_kernel[(self._programs,)](
                self._table,
                self._owners,
                factor,
                decided,
                *map(float, numbers),  # Triton would compile a kernel for each integer
                WEIGHT=TYPES[params[0].dtype],
                GRADIENT=TYPES[grads[0].dtype],
                COPY=TYPES[copies[0].dtype] if copies else None,
                BLOCK=BLOCK,
                num_warps=WARPS,
                # No fused multiply-add: an element gets the same bits in any block or shard.
                enable_fp_fusion=False,
            )

    def _place(self, addresses: list[list[int]], sizes: list[int], device: torch.device) -> None:
        """Make the table. Its columns: addresses of weight, gradient, both moments and copy; number of elements; the
        first CTA that works on the tensor; how many of its CTAs can update WHOLE blocks."""
        programs = [count_tiles(size, BLOCK) for size in sizes]
        firsts = [0, *accumulate(programs)]
        whole = [
            0 if any(address % VECTOR_BYTES for address in of_tensor) else size // BLOCK
            for size, *of_tensor in zip(sizes, *addresses, strict=True)
        ]
        self._programs = firsts[-1]
        if self._programs:
            copies = addresses[4] if len(addresses) == 5 else [0] * len(sizes)
            rows = zip(*addresses[:4], copies, sizes, firsts[:-1], whole, strict=True)
            table = torch.tensor(list(rows), dtype=torch.int64)
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                if self._table is None or sizes != self._sizes:
                    raise RuntimeError("these tensors were not updated together before the capture")
                self._unsent = table
            else:
                self._table = _send(table, device)
                if sizes != self._sizes:
                    owners = torch.arange(len(sizes), dtype=torch.int32)
                    self._owners = _send(owners.repeat_interleave(torch.tensor(programs)), device)
        self._addresses, self._sizes = addresses, sizes

    def for_graph(self) -> AdamWLaunch:
        """Return a launch of the same tensors for a CUDA graph, with a table already: memory that is allocated during
        a capture may be written to in every replay. Call its `send` after the capture."""
        launch = AdamWLaunch()
        if self._table is not None:
            launch._table, launch._owners = torch.empty_like(self._table), self._owners
            launch._sizes = self._sizes
        return launch

    def send(self) -> None:
        """Send the table of a captured launch: the graph would copy it anew in every replay."""
        if self._unsent is not None:
            assert self._table is not None
            self._table.copy_(self._unsent)
            self._unsent = None


def _check(arrays: Sequence[Sequence[Tensor]]) -> None:
    """Refuse tensors that the kernel would read past their end, or as another type."""
    for param, *others in zip(*arrays, strict=True):
        for other in others:
            if other.numel() != param.numel() or other.device != param.device:
                raise ValueError(
                    f"a parameter of {param.numel()} elements on {param.device} has a gradient, state or copy of "
                    f"{other.numel()} on {other.device}"
                )
        if any(moment.dtype != param.dtype for moment in others[1:3]):
            raise ValueError(f"the moments of a parameter of {param.dtype} are of another dtype")


def _send(numbers: Tensor, device: torch.device) -> Tensor:
    """Copy to the device, in the order of the current stream, from pinned memory: the CPU need not wait."""
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers
