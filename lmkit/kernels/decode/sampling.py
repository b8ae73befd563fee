"""Draw the next token of each row: temperature, top-k, top-p, min-p, greedy.

`lmkit.core.sampling` says how, and draws the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lmkit.core.sampling import Sampling
from lmkit.kernels.decode.products import NOTHING, SLOTS, Stream, keys_of, logit_of, penalized
from lmkit.kernels.decode.rows import Rows, Rules, kind_of
from lmkit.kernels.launch import count_tiles, prepare_call

LARGEST_WEIGHT = tl.constexpr(1 << 40)
BLOCK = 8192  # logits per iteration


@triton.jit
def advance_kernel(
    logits_pointer,  # (rows, vocab_size) float32, with the rules applied
    best_pointer,  # (rows, SLOTS) int64, largest keys of logits, see `keys_of`; NOTHING between steps
    settings_pointer,  # see `settings_of`
    place_pointer, text_pointer, number_pointer, done_pointer, seeds_pointer, drawn_pointer, logprobs_pointer,
    seen_pointer,  # (rows, vocab_size)
    stops_pointer,  # (vocab_size) if STOPS
    table_pointer,  # (vocab_size, d_model), embeddings
    gain_pointer,  # (d_model), the first norm's gain
    stream_pointer, normed_pointer, parts_pointer,  # (rows, d_model), twice
    vocab_size, text_stride, stop, most, num_parts,
    KIND: tl.constexpr, LOGPROBS: tl.constexpr, PENALTY: tl.constexpr, STOPS: tl.constexpr,
    WIDTH: tl.constexpr,  # d_model
    MOST_PARTS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Draw the next token of one row per program, and start the next step's stream with its embedding. KIND is a
    constant: code that does not run would still take space in the instruction cache."""
    row = tl.program_id(0)
    # No other kernel of a step writes these.
    done = tl.load(done_pointer + row)
    number = tl.load(number_pointer + row)
    place = tl.load(place_pointer + row)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    best_at = best_pointer + row * SLOTS + tl.arange(0, SLOTS)
    best = tl.max(tl.load(best_at), 0)
    tl.debug_barrier()  # all threads have read the values that one of them changes
    tl.store(best_at, tl.full((SLOTS,), NOTHING, tl.int64))
    if done != 0:
        return
    logits_row = logits_pointer + row.to(tl.int64) * vocab_size
    highest = logit_of(best)
    token = tl.zeros((), tl.int32) - 1
    if (highest < float("inf")) & (highest > float("-inf")):
        if KIND == "greedy":
            token = (0xFFFFFFFF - (best & 0xFFFFFFFF)).to(tl.int32)
        else:
            seed = tl.load(seeds_pointer + row)
            token = draw(logits_row, highest, seed, number, settings_pointer, vocab_size, KIND, BLOCK, BLOCKS)
        if LOGPROBS:
            i = tl.arange(0, BLOCK)
            mass = tl.zeros((), tl.float32)
            for block in range(BLOCKS):
                at = block * BLOCK + i
                z = tl.load(logits_row + at, mask=at < vocab_size, other=float("-inf"))
                mass += tl.sum(tl.exp(z - highest), 0)
            chosen = tl.load(logits_row + token) - highest - tl.log(mass)
            tl.store(logprobs_pointer + row, chosen)
        if PENALTY:
            tl.store(seen_pointer + row.to(tl.int64) * vocab_size + token, 1)
    known = tl.maximum(token, 0)
    k = tl.arange(0, triton.next_power_of_2(WIDTH))
    inside = k < WIDTH
    embedding = tl.load(table_pointer + known.to(tl.int64) * WIDTH + k, mask=inside, other=0.0)
    tl.store(drawn_pointer + row, token)
    tl.store(text_pointer + row * text_stride + place + 1, known)
    tl.store(number_pointer + row, number + 1)
    ends = (token < 0) | (token == stop) | (number + 1 >= most)
    if STOPS:
        ends |= tl.load(stops_pointer + known) != 0
    ending = ends.to(tl.int64)
    tl.store(done_pointer + row, ending)
    tl.store(place_pointer + row, place + 1 - ending)
    wide = embedding.to(tl.float32)
    normed = wide * tl.load(gain_pointer + k, mask=inside, other=0.0).to(tl.float32)
    tl.store(stream_pointer + row * WIDTH + k, embedding, mask=inside)
    tl.store(normed_pointer + row * WIDTH + k, normed.to(normed_pointer.dtype.element_ty), mask=inside)
    part = tl.arange(0, MOST_PARTS)
    squares = tl.where(part == 0, tl.sum(wide * wide, 0), 0.0)
    tl.store(parts_pointer + row * num_parts + part, squares, mask=part < num_parts)


@triton.jit
def rules_kernel(
    logits_pointer,  # (rows, vocab_size) float32
    best_pointer, banned_pointer, seen_pointer, settings_pointer, vocab_size,
    PENALTY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Apply the rules to BLOCK logits of a row that a library has computed; put the largest key into `best`."""
    row, block = tl.program_id(0), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocab_size
    start = row.to(tl.int64) * vocab_size
    z = tl.load(logits_pointer + start + at, mask=inside, other=float("-inf"))
    banned = tl.load(banned_pointer + at, mask=inside, other=1) != 0
    changed = banned
    if PENALTY:
        seen = tl.load(seen_pointer + start + at, mask=inside, other=0) != 0
        z = tl.where(seen, penalized(z, settings_pointer), z)
        changed |= seen
    z = tl.where(banned, float("-inf"), z)
    tl.store(logits_pointer + start + at, z, mask=inside & changed)
    tl.atomic_max(best_pointer + row * SLOTS + block % SLOTS, tl.max(keys_of(z, at), 0), sem="relaxed")


@triton.jit
def draw(
    logits_row, highest, seed, number, settings_pointer, vocab_size,
    KIND: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Draw a token of one row, as `lmkit.core.sampling` does."""
    scale = (tl.load(settings_pointer) * 1.4426950408889634).to(tl.float32)
    i = tl.arange(0, BLOCK)
    blocks = tl.arange(0, triton.next_power_of_2(BLOCKS))
    sums = tl.zeros((triton.next_power_of_2(BLOCKS),), tl.int64)  # the weight of each block
    for block in tl.range(0, BLOCKS, num_stages=3):
        weights = weights_of(logits_row, block * BLOCK + i, vocab_size, highest, scale)
        sums = tl.where(blocks == block, tl.sum(weights, 0), sums)
    total = tl.sum(sums, 0)
    if KIND != "all":
        top_k = tl.load(settings_pointer + 1).to(tl.int64)
        top_p = tl.load(settings_pointer + 2)
        least = (tl.load(settings_pointer + 3) * LARGEST_WEIGHT).to(tl.int64)
        mass = total
        if KIND == "nested":
            mass = mass_of_top_k(logits_row, top_k, vocab_size, highest, scale, BLOCK, BLOCKS)
        limit = tl.where(top_p < 1, (mass.to(tl.float64) * top_p).to(tl.int64), mass + 1)
    # Tokens up to this weight are not drawn, and with this weight from `low_id` on.
    low = tl.zeros((), tl.int64) - 1
    low_id = vocab_size
    attempt = tl.zeros((), tl.int32)
    accepted = tl.zeros((), tl.int32)
    token = tl.zeros((), tl.int32)
    while accepted == 0:
        zero = tl.zeros((), tl.uint32)
        r1, r0, _, _ = tl.philox(seed, number.to(tl.uint32), attempt.to(tl.uint32), zero, zero)
        bits = (r1.to(tl.uint64) << 32) | r0.to(tl.uint64)
        target = tl.umulhi(bits, total.to(tl.uint64)).to(tl.int64)
        block = tl.sum((tl.cumsum(sums, 0) <= target).to(tl.int32), 0)
        target -= tl.sum(tl.where(blocks < block, sums, 0), 0)
        at = block * BLOCK + i
        weights = weights_of(logits_row, at, vocab_size, highest, scale)
        left = tl.where((weights > low) | ((weights == low) & (at < low_id)), weights, 0)
        inner = tl.sum((tl.cumsum(left, 0) <= target).to(tl.int32), 0)
        token = block * BLOCK + inner
        accepted += 1
        if KIND != "all":
            low, low_id = tl.sum(tl.where(i == inner, weights, 0), 0), token
            ahead = tl.zeros((), tl.int64)
            for s in tl.range(0, BLOCKS, num_stages=3):
                at = s * BLOCK + i
                weights = weights_of(logits_row, at, vocab_size, highest, scale)
                likelier = (weights > low) | ((weights == low) & (at < low_id))
                sums = tl.where(blocks == s, tl.sum(tl.where(likelier, weights, 0), 0), sums)
                ahead += tl.sum(likelier.to(tl.int32), 0)
            total = tl.sum(sums, 0)
            accepted = (((total < limit) & (ahead < top_k) & (low >= least)) | (total == 0)).to(tl.int32)
        attempt += 1
    return token


@triton.jit
def mass_of_top_k(logits_row, top_k, vocab_size, highest, scale, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Return the total weight of the k likeliest tokens: bisect for the weight of the k-th, then add up."""
    i = tl.arange(0, BLOCK)
    low = tl.zeros((), tl.int64) - 1  # k tokens or more are heavier, or all are
    high = tl.zeros((), tl.int64) + LARGEST_WEIGHT  # fewer than k are heavier
    while high - low > 1:
        middle = (low + high) >> 1
        heavier = tl.zeros((), tl.int64)
        for block in tl.range(0, BLOCKS, num_stages=3):
            weights = weights_of(logits_row, block * BLOCK + i, vocab_size, highest, scale)
            heavier += tl.sum((weights > middle).to(tl.int32), 0)
        low = tl.where(heavier >= top_k, middle, low)
        high = tl.where(heavier >= top_k, high, middle)
    mass = tl.zeros((), tl.int64)
    heavier = tl.zeros((), tl.int64)
    for block in tl.range(0, BLOCKS, num_stages=3):
        weights = weights_of(logits_row, block * BLOCK + i, vocab_size, highest, scale)
        mass += tl.sum(tl.where(weights > high, weights, 0), 0)
        heavier += tl.sum((weights > high).to(tl.int32), 0)
    return mass + (top_k - heavier) * high  # ties with the last


@triton.jit
def weights_of(logits_row, at, vocab_size, highest, scale):
    z = tl.load(logits_row + at, mask=at < vocab_size, other=float("-inf"))
    return (tl.exp2((z - highest) * scale) * LARGEST_WEIGHT).to(tl.int64)


def prepare_rules(logits: Tensor, best: Tensor, rules: Rules) -> Callable[[], None]:
    """Prepare the rules for logits (rows, vocab_size) of a library, float32; a row's largest key goes into `best`."""
    rows, vocab_size = logits.shape
    block = min(2048, triton.next_power_of_2(vocab_size))
    tensors = logits, best, rules.banned, rules.seen, rules.settings
    constants = {"PENALTY": rules.penalizes, "BLOCK": block, "num_warps": 4}
    grid = rows, count_tiles(vocab_size, block)
    return prepare_call(rules_kernel, grid, tensors, (vocab_size,), constants)


def prepare_advance(
    logits: Tensor,
    best: Tensor,
    rows: Rows,
    rules: Rules,
    table: Tensor,
    gain: Tensor,
    stream: Stream,
    num_parts: int,
    *,
    sampling: Sampling,
    most: int,
    logprobs: bool = False,
    pdl: bool = False,
) -> Callable[[], None]:
    """Prepare the end of a step; shapes as of `advance_kernel`.

    Args:
        num_parts: number of sums of squares per row that the first product of a step expects.
        most: drawn tokens that end a row.
        logprobs: fill `rows.logprobs`.
        pdl: begin before the previous kernel has ended.
    """
    vocab_size, width = logits.shape[1], table.shape[1]
    block = min(BLOCK, triton.next_power_of_2(vocab_size))
    stops = rules.banned if rules.stops is None else rules.stops
    tensors = (logits, best, rules.settings, *rows, rules.seen, stops, table, gain, *stream)
    numbers = (vocab_size, rows.text.stride(0), rules.stop, most, num_parts)
    drawing = {"KIND": kind_of(sampling), "LOGPROBS": logprobs}
    of_rules = {"PENALTY": rules.penalizes, "STOPS": rules.stops is not None}
    of_stream = {"WIDTH": width, "MOST_PARTS": triton.next_power_of_2(num_parts)}
    blocks = {"BLOCK": block, "BLOCKS": count_tiles(vocab_size, block)}
    warps = 4 if sampling.temperature == 0 and not logprobs else 16
    constants = {**drawing, **of_rules, **of_stream, **blocks, "num_warps": warps}
    return prepare_call(advance_kernel, (len(logits), 1), tensors, numbers, constants, pdl=pdl)
