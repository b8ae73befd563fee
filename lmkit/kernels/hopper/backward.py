"""Compute attention backward on Hopper: choose and launch the kernels.

| width of the heads | gradients | fast | deterministic |
|-|-|-|-|
| 64; 128 where `takes_staggered_kernel` | dQ | `backward_dqdkdv_staggered` | `backward_dq_deterministic` |
| | dK, dV | the same kernel | `backward_dqdkdv_lockstep` |
| 128 | dQ | `backward_dqdkdv_lockstep` with ADD_DQ | `backward_dq_deterministic` |
| | dK, dV | the same kernel | `backward_dqdkdv_lockstep` |
| 256 | dQ | `backward_dq_deterministic` | `backward_dq_deterministic` |
| | dK, dV | `backward_dkdv_d256` | `backward_dkdv_d256` |

Fast: CTAs that own different keys add their shares of dQ to a float32 sum in the order of arrival, so its last bits
vary. `prepare_kernel` runs before (delta, lse in log2 units, zeros for the sum), `finish_kernel` after (rounds the
sum to 16 bits). Deterministic: `backward_dq_deterministic` computes dQ by itself, and delta for the kernel of dK and
dV, which runs next.
"""

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lmkit.kernels.flash.backward import last_queries
from lmkit.kernels.flash.tiles import LOG2_E
from lmkit.kernels.hopper.backward_dkdv_d256 import dkdv_d256_kernel
from lmkit.kernels.hopper.backward_dq_deterministic import dq_kernel
from lmkit.kernels.hopper.backward_dqdkdv_lockstep import dqdkdv_lockstep_kernel
from lmkit.kernels.hopper.backward_dqdkdv_staggered import dqdkdv_staggered_kernel
from lmkit.kernels.hopper.forward import PREPARED_CALLS, aligned, counter_of_stream, used_of, width_of
from lmkit.kernels.hopper.tma import flat_boxes, head_boxes, suits_tma
from lmkit.kernels.launch import Start, count_sms, count_tiles, prepare_launch, selected, strides_in_order_of
from lmkit.kernels.versions import HOPPER_OPTIONS, hopper_assembler

PASS_ROWS = 32  # query rows of one CTA of prepare_kernel and finish_kernel
PADDING = 128  # rows of lse, delta and the sum of dQ are padded to whole tiles
REGISTERS = 168  # a thread at launch
LAUNCH_OPTIONS: dict[str, Any] = {"launch_pdl": True, **HOPPER_OPTIONS}
GLUON_OPTIONS: dict[str, Any] = {"maxnreg": REGISTERS, **LAUNCH_OPTIONS}
CONSUMER_REGISTERS = 240  # of a second consumer that is a partition, after it took the producer's share
# As many heads start together, longest CTAs first (`schedule.locate_longest_first`), as have this many tokens:
# enough to fill the gaps at the end, few enough that what they share stays in the L2 cache.
TOKENS_TOGETHER = 16384


class BackwardConfig(NamedTuple):
    """What differs between the widths of heads.

    queries, keys: of a step of the dK/dV kernel; packed_p: see `dqdkdv_lockstep_kernel`. query_keys, query_k_stages,
    query_v_stages: keys of a block and slots of the dQ kernel.
    """

    queries: int
    keys: int
    packed_p: bool
    query_keys: int
    query_k_stages: int
    query_v_stages: int


CONFIGS = {
    64: BackwardConfig(queries=128, keys=128, packed_p=True, query_keys=128, query_k_stages=3, query_v_stages=2),
    128: BackwardConfig(queries=64, keys=128, packed_p=False, query_keys=128, query_k_stages=2, query_v_stages=2),
    256: BackwardConfig(queries=64, keys=64, packed_p=False, query_keys=64, query_k_stages=2, query_v_stages=1),
}  # fmt: skip


def takes_staggered_kernel(
    head_dim: int, num_queries: int, num_keys: int, causal: bool, dtype: torch.dtype
) -> bool:
    """Return whether `dqdkdv_staggered_kernel` serves fast calls of this kind.

    At head_dim 128 it is faster only without a mask, from about 2048 queries and keys on (bfloat16, H200).
    """
    is_long_and_full = min(num_queries, num_keys) >= 2048 and not causal
    return width_of(head_dim) == 64 or (head_dim == 128 and is_long_and_full and dtype == torch.bfloat16)


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    causal: bool,
    scale: float,
    deterministic: bool,
    into: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    first: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (dq, dk, dv) of `forward`, from its own out and lse.

    Args:
        dout: shaped as out; copied first if TMA cannot take it (an expanded tensor, for example).
        deterministic: return the same bits every time.
        into: tensors shaped as q, k and v, with layouts that TMA takes, which receive the gradients. None: new ones
            in the memory order of q, k, v.
        first: as of `forward`.
    """
    assert into is None or all(suits_tma(x) for x in into)
    if not suits_tma(dout):
        dout = dout.contiguous()
    kind = _Kind(
        *(q.shape, q.stride(), k.shape, k.stride(), v.stride(), out.stride(), dout.stride()),
        *(q.dtype, q.device, causal, scale, deterministic),
        None if into is None else (into[0].stride(), into[1].stride(), into[2].stride()),
        first is not None,
    )
    with selected(q.device):
        bounds = (lse, lse, lse)
        if first is not None:
            bounds = (aligned(first), last_queries(first, k.shape[2]), counter_of_stream(q.device))
        dq_strides, dk_strides, dv_strides, scratch_size, start = _prepare(kind)
        dq, dk, dv = into or (
            torch.empty_strided(q.shape, dq_strides, dtype=q.dtype, device=q.device),
            torch.empty_strided(k.shape, dk_strides, dtype=q.dtype, device=q.device),
            torch.empty_strided(k.shape, dv_strides, dtype=q.dtype, device=q.device),
        )
        scratch = torch.empty(scratch_size, dtype=torch.float32, device=q.device)
        start(*[x.data_ptr() for x in (q, k, v, out, lse, dout, dq, dk, dv, scratch, *bounds)])
    return dq, dk, dv


class _Kind(NamedTuple):
    """What the launches of a call depend on."""

    q_shape: tuple[int, ...]
    q_strides: tuple[int, ...]
    k_shape: tuple[int, ...]
    k_strides: tuple[int, ...]
    v_strides: tuple[int, ...]
    out_strides: tuple[int, ...]
    dout_strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    causal: bool
    scale: float
    deterministic: bool
    places: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None
    """Strides of dq, dk and dv, where the caller has them."""
    has_first: bool

    @property
    def width(self) -> int:
        return width_of(self.q_shape[3])

    @property
    def is_staggered(self) -> bool:
        return takes_staggered_kernel(
            self.q_shape[3], self.q_shape[2], self.k_shape[2], self.causal, self.dtype
        )

    @property
    def output_strides(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Strides of dq, dk and dv."""
        return self.places or (
            strides_in_order_of(self.q_shape, self.q_strides),
            strides_in_order_of(self.k_shape, self.k_strides),
            strides_in_order_of(self.k_shape, self.v_strides),
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """The arguments num_queries, num_keys, padded, batches, heads, group, together."""
        batch, heads, num_queries, _ = self.q_shape
        _, key_heads, num_keys, _ = self.k_shape
        padded = count_tiles(num_queries, PADDING) * PADDING
        # Without a mask all CTAs take equally long: one head after the other.
        together = max(1, TOKENS_TOGETHER // max(num_queries, num_keys)) if self.causal else 1
        return num_queries, num_keys, padded, batch, heads, heads // key_heads, together

    @property
    def plane(self) -> int:
        """Rows of lse, of delta and of the sum of dQ of all query heads."""
        return self.q_shape[0] * self.q_shape[1] * self.sizes[2]

    @property
    def scales(self) -> tuple[float, float]:
        """The arguments scale_log2, scale."""
        return self.scale * math.log2(math.e), self.scale

    def queries(self, strides: tuple[int, ...], rows: int) -> TensorDescriptor:
        """Describe a tensor shaped as q."""
        return head_boxes(self.q_shape, strides, self.dtype, rows, self.width)

    def keys(self, strides: tuple[int, ...], rows: int) -> TensorDescriptor:
        """Describe a tensor shaped as k."""
        return head_boxes(self.k_shape, strides, self.dtype, rows, self.width)

    def eighths(self, strides: tuple[int, ...]) -> list[int]:
        """Return strides of (batch, heads, seq) of a tensor shaped as q, in units of 8 elements."""
        return [stride // 8 for stride in self.queries(strides, PADDING).strides[:3]]


@functools.lru_cache(maxsize=PREPARED_CALLS)
def _prepare(kind: _Kind) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int, Start]:
    """Return (strides of dq, of dk, of dv; float32 numbers of scratch: lse in log2 units, delta and the sum of dQ;
    what launches the kernels)."""
    prepare = _prepare_deterministic if kind.deterministic or kind.width == 256 else _prepare_fast
    with hopper_assembler():
        return *kind.output_strides, *prepare(kind)


def _prepare_fast(kind: _Kind) -> tuple[int, Start]:
    """Return the size of the scratch, and launches of prepare_kernel, of dK, dV and the sum of dQ, of
    finish_kernel."""
    num_queries, _, padded, batch, heads, *_ = kind.sizes
    head_dim, width, plane = kind.q_shape[3], kind.width, kind.plane
    grid, sizes = (batch * heads, padded // PASS_ROWS), (num_queries, padded, heads)
    constants = {"D": width, "HEAD_DIM": head_dim, "ROWS": PASS_ROWS, "num_warps": 4} | LAUNCH_OPTIONS
    pointers = [kind.dtype, kind.dtype, *[torch.float32] * 4]
    numbers = (*sizes, kind.scale, *kind.eighths(kind.out_strides), *kind.eighths(kind.dout_strides))
    launch_prepare = prepare_launch(prepare_kernel, grid, pointers, numbers, constants)
    launch_keys = _prepare_keys(kind, add_dq=True)
    is_staggered = kind.is_staggered
    numbers = (*sizes, *kind.eighths(kind.output_strides[0]))
    launch_finish = prepare_launch(finish_kernel, grid, [torch.float32, kind.dtype], numbers, constants)

    def start(q, k, v, out, lse, dout, dq, dk, dv, lse_log2, first, last, drawn):
        delta, total = lse_log2 + 4 * plane, lse_log2 + 8 * plane  # bytes; a plane is a multiple of 512 bytes
        launch_prepare(out, dout, lse, lse_log2, delta, total)
        launch_keys(q, k, v, dout, lse_log2, delta, dk, dv, total, last, *((drawn,) if is_staggered else ()))
        launch_finish(total, dq)

    return 2 * plane + plane * width, start


def _prepare_deterministic(kind: _Kind) -> tuple[int, Start]:
    """Return the size of the scratch, and launches of dQ with delta, then of dK and dV."""
    width, plane, config = kind.width, kind.plane, CONFIGS[kind.width]
    tensors = [
        kind.queries(kind.q_strides, PADDING),
        kind.keys(kind.k_strides, config.query_keys),
        kind.keys(kind.v_strides, config.query_keys),
        kind.queries(kind.dout_strides, PADDING),
        kind.queries(kind.output_strides[0], PADDING),
        *(torch.float32, torch.float32, torch.float32, kind.dtype, torch.int32),
    ]
    numbers = (*kind.eighths(kind.out_strides), *kind.sizes, kind.sizes[2] // PADDING, *kind.scales)
    head_dim, keys = kind.q_shape[3], config.query_keys
    heads = {"D": width, "HEAD_DIM": head_dim, "USED": used_of(head_dim)}
    blocks = {"KEYS": keys, "K_STAGES": config.query_k_stages, "V_STAGES": config.query_v_stages}
    of_call = {"CAUSAL": kind.causal, "FIRST": kind.has_first, "TAIL": kind.k_shape[2] % keys != 0}
    constants = {**heads, **blocks, **of_call, "num_warps": 8, **GLUON_OPTIONS}
    launch_queries = prepare_launch(dq_kernel, (plane // PADDING, 1), tensors, numbers, constants)
    launch_keys = _prepare_keys(kind, add_dq=False)

    def start(q, k, v, out, lse, dout, dq, dk, dv, lse_log2, first, last, drawn):
        delta, total = lse_log2 + 4 * plane, lse_log2 + 8 * plane
        launch_queries(q, k, v, dout, dq, lse, lse_log2, delta, out, first)
        launch_keys(q, k, v, dout, lse_log2, delta, dk, dv, *(() if width == 256 else (total,)), last)

    return 2 * plane + config.queries * width, start


def _prepare_keys(kind: _Kind, *, add_dq: bool) -> Start:
    """Prepare the kernel whose CTAs own keys: a launch on q, k, v, dout, lse, delta, dk, dv, the sum of dQ (except at
    D = 256), `last` and (`dqdkdv_staggered_kernel` alone) the counter of drawn tiles."""
    width, config, head_dim = kind.width, CONFIGS[kind.width], kind.q_shape[3]
    rows = config.keys  # of a box
    num_query_tiles = count_tiles(kind.q_shape[2], config.queries)
    num_key_tiles = count_tiles(kind.k_shape[2], config.keys)
    units = kind.k_shape[0] * kind.k_shape[1] * num_key_tiles
    constants: dict[str, Any] = {"CAUSAL": kind.causal, "FIRST": kind.has_first, **GLUON_OPTIONS}
    partitions = {"REGISTERS": CONSUMER_REGISTERS, "num_warps": 4}
    heads = {"D": width, "USED": used_of(head_dim)}
    tail = {"TAIL": kind.k_shape[2] % config.keys != 0}
    drawn, dq_sum = [], []
    if width == 256:
        kernel = dkdv_d256_kernel
        constants |= heads | partitions
    elif add_dq and kind.is_staggered:
        kernel, drawn = dqdkdv_staggered_kernel, [torch.int32]
        constants |= tail | partitions
        rows //= 2  # each consumer copies its own half of the keys
        units = min(units, count_sms(kind.device)) if kind.has_first else units  # CTAs draw their tiles
        if width == 64:  # each consumer adds up 64 of the 128 queries
            dq_sum = [flat_boxes((kind.plane * 2, 32), (config.queries, 32))]
        else:  # 64 of the columns, half of every 16 queries' 64 rows
            dq_sum = [flat_boxes((kind.plane // 16, 64, 32), (config.queries // 16, 32, 32))]
    else:
        kernel = dqdkdv_lockstep_kernel
        constants |= heads | tail | {"QUERIES": config.queries, "ADD_DQ": add_dq, "PACKED_P": config.packed_p}
        constants["num_warps"] = 8
        box = config.queries * width // 32
        # Where nothing is added up, the descriptor of the sum still needs room for one box.
        dq_sum = [flat_boxes((kind.plane * width // 32 if add_dq else box, 32), (box, 32))]
    statistics = flat_boxes((kind.plane,), (config.queries,))  # lse and delta
    tensors = [
        kind.queries(kind.q_strides, config.queries),
        kind.keys(kind.k_strides, rows),
        kind.keys(kind.v_strides, rows),
        kind.queries(kind.dout_strides, config.queries),
        *(statistics, statistics),
        *(kind.keys(strides, rows) for strides in kind.output_strides[1:]),
        *(*dq_sum, torch.int32, *drawn),
    ]
    numbers = (*kind.sizes, num_query_tiles, num_key_tiles, *kind.scales)
    return prepare_launch(kernel, (units, 1), tensors, numbers, constants)


# The two small kernels around the fast backward. Strides come in units of 8 elements, so that 16-byte accesses are
# known to be aligned. Heads go along the grid's first axis, the only one that takes more than 65,535. D is the
# width that heads take in the kernels and in the sum of dQ, HEAD_DIM what of it is theirs (`forward.width_of`).


@triton.jit
def _inside(valid, columns, HEAD_DIM: tl.constexpr):
    """Return which elements (ROWS, D) are in a valid row and in the first HEAD_DIM columns."""
    kept = valid[:, None]
    if columns.shape[0] > HEAD_DIM:
        kept = kept & (columns < HEAD_DIM)[None, :]
    return kept


@triton.jit(do_not_specialize=["num_queries", "padded", "heads", "scale", "out_batch", "out_head", "out_row",
                               "dout_batch", "dout_head", "dout_row"])  # fmt: skip
def prepare_kernel(out, dout, lse_in, lse_out, delta_out, dq_sum, num_queries, padded, heads, scale,
                   out_batch: tl.int64, out_head: tl.int64, out_row: tl.int64,
                   dout_batch: tl.int64, dout_head: tl.int64, dout_row: tl.int64,
                   D: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Write delta = scale rowsum(dO * O); lse in log2 units, +inf past the last query (there P = 0); and zeros for
    the sum of dQ."""
    gdc_wait()  # for what the kernel before this one wrote
    gdc_launch_dependents()  # the next kernel may start, and waits in its turn
    flat_head = tl.program_id(0).to(tl.int64)
    batch = flat_head // heads
    head = flat_head % heads
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, D)
    valid = rows < num_queries
    inside = _inside(valid, columns, HEAD_DIM)
    wide = rows[:, None].to(tl.int64)
    out_pointers = out + 8 * (batch * out_batch + head * out_head + wide * out_row) + columns
    o = tl.load(out_pointers, mask=inside, other=0.0)
    dout_pointers = dout + 8 * (batch * dout_batch + head * dout_head + wide * dout_row) + columns
    do = tl.load(dout_pointers, mask=inside, other=0.0)
    tl.store(delta_out + flat_head * padded + rows, scale * tl.sum(o.to(tl.float32) * do.to(tl.float32), 1))
    lse = tl.load(lse_in + flat_head * num_queries + rows, mask=valid, other=float("inf"))
    tl.store(lse_out + flat_head * padded + rows, lse * LOG2_E)
    tl.store(dq_sum + (flat_head * padded + wide) * D + columns, tl.zeros([ROWS, D], tl.float32))


@triton.jit(do_not_specialize=["num_queries", "padded", "heads", "dq_batch", "dq_head", "dq_row"])
def finish_kernel(dq_sum, dq, num_queries, padded, heads, dq_batch: tl.int64, dq_head: tl.int64,
                  dq_row: tl.int64, D: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Round dQ from its float32 sum, which lies in patches of 16 x 8 as `wgmma.in_thread_order` stores them."""
    gdc_wait()  # for what the kernel before this one wrote
    gdc_launch_dependents()  # the next kernel may start, and waits in its turn
    flat_head = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, D)
    wide = rows[:, None].to(tl.int64)
    flat = (flat_head * padded + tl.program_id(1) * ROWS) * D + tl.arange(0, ROWS * D)
    patches = tl.reshape(tl.load(dq_sum + flat), [ROWS // 16, D // 8, 8, 4, 2, 2])
    total = tl.reshape(tl.permute(patches, (0, 4, 2, 1, 3, 5)), [ROWS, D])
    target = (
        dq + 8 * ((flat_head // heads) * dq_batch + (flat_head % heads) * dq_head + wide * dq_row) + columns
    )
    inside = _inside(rows < num_queries, columns, HEAD_DIM)
    tl.store(target, total.to(dq.dtype.element_ty), mask=inside)
