"""What the kernels of a decode step must do, on any device: run by Triton's interpreter on CPUs, and on GPUs.

Results are compared with the plain form in float64. They may be at most twice as wrong as the plain form in the same
dtype, plus one rounding; attention_oracle.py says how errors are measured. Draws are compared with the plain form's,
token by token.
"""

from typing import NamedTuple

import torch
from attention_oracle import beyond, error_of
from step_cases import tuned
from torch import Tensor

from lmkit.attention import attention_function
from lmkit.core.model import apply_rope
from lmkit.core.sampling import Sampling
from lmkit.kernels.decode import attention, products
from lmkit.kernels.decode.products import Matrix, Stream, to_fp8
from lmkit.kernels.decode.rows import Rules, plain_rules, settings_of
from lmkit.model.operations import PLAIN, rms_norm

EPS = 1e-5


def faults_of(got: Tensor, rival: Tensor, exact: Tensor) -> list[str]:
    """What `got` gets wrong; `rival` is the plain form in the same dtype."""
    rounding = torch.finfo(got.dtype).eps / 2 + 32 * torch.finfo(torch.float32).eps
    if got.dtype == torch.bfloat16 and not got.is_cuda:
        rounding *= 3  # the interpreter cuts off what it should round
    return beyond(error_of(got, exact), error_of(rival, exact), times=2, floor=rounding)


class Product(NamedTuple):
    """A product: which tile, rows, columns, outputs, what follows, whether a norm precedes, whether in fp8."""

    name: str
    rows: int
    columns: int
    outputs: int
    then: products.Then
    norm: bool
    fp8: bool = False


PRODUCTS = [
    Product("qkv", 1, 96, 37, "store", True),
    Product("qkv", 5, 96, 37, "store", True),
    Product("qkv", 16, 64, 24, "store", False),
    Product("output", 1, 48, 32, "residual", False),
    Product("output", 2, 64, 48, "residual", False),
    Product("down", 1, 112, 64, "residual", False),
    Product("down", 16, 112, 64, "residual", False),
    Product("gate_up", 1, 64, 50, "swiglu", True),
    Product("gate_up", 7, 64, 50, "swiglu", True),
    Product("head", 1, 64, 101, "logits", True),
    Product("head", 3, 64, 101, "logits", True),
    # Long rows, which have tiles of their own; one is longer than a tile.
    Product("qkv", 1, 4096, 13, "store", True),
    Product("gate_up", 1, 4160, 13, "swiglu", True),
    Product("output", 1, 4096, 32, "residual", False),
    Product("gate_up", 7, 4096, 50, "swiglu", True),
]
PRODUCTS += [case._replace(fp8=True) for case in PRODUCTS]


def nothing(rows: int, device: str) -> Tensor:
    """What a step's largest keys begin as."""
    return torch.full((rows, products.SLOTS.value), products.NOTHING.value, device=device)


def best_of(logits: Tensor) -> Tensor:
    """The largest keys of logits (rows, vocab_size): (rows, 1)."""
    bits = torch.where(logits == 0, 0.0, logits).view(torch.int32).long()
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).masked_fill(logits.isnan(), 0x7FFFFFFF)
    ids = torch.arange(logits.shape[1], device=logits.device)
    return (bits * 2**32 + 0xFFFFFFFF - ids).amax(-1, keepdim=True)


def rules_of(rows: int, vocab_size: int, device: str, penalty: float = 1.0) -> Rules:
    """Every seventh id is banned, every third has been seen by row 0, every fourth by row 1..."""
    ids = torch.arange(vocab_size)
    seen = torch.stack([ids % (3 + row) == 0 for row in range(rows)]).to(device, torch.int8)
    settings = settings_of(Sampling(repetition_penalty=penalty), device)
    banned = (ids % 7 == 6).to(device, torch.int8)
    return Rules(banned, seen, settings, penalty != 1)


def run_product(
    case: Product, dtype: torch.dtype, device: str, rows: slice = slice(None)
) -> dict[str, Tensor]:
    """Run the kernel on these rows of the inputs; return its results by name."""
    stream, gain, weight = inputs_of(case, dtype, device)
    stream = stream[rows]
    count = len(stream)
    next_gain = tuned(case.outputs, seed=4, device=device, dtype=dtype)
    x, num_parts = stream, 0
    parts = torch.full((count * max(case.columns, case.outputs),), torch.nan, device=device)
    if case.norm:
        num_parts = case.columns // 16
        x = (stream.float() * gain.float()).to(dtype)
        squares = stream.float().square().unflatten(-1, (num_parts, -1)).sum(-1)
        parts[: squares.numel()] = squares.flatten()
    kind = torch.float32 if case.then == "logits" else dtype
    out = torch.full((count, case.outputs), torch.nan, device=device, dtype=kind)
    if case.then == "residual":
        out.copy_(before_of(case, dtype, device)[rows])
    normed = torch.full_like(out, torch.nan, dtype=dtype)
    best = nothing(count, device)
    space = Stream(out, normed, parts)
    rules = rules_of(case.rows, case.outputs, device, penalty=1.3)
    rules = rules._replace(seen=rules.seen[rows].contiguous())
    products.prepare_product(
        case.name, x.contiguous(), weight, out, space, then=case.then, gain=next_gain, num_parts=num_parts,
        eps=EPS, rules=rules if case.then == "logits" else None, best=best,
    )()  # fmt: skip
    tile = products.tile_of(case.name, count, case.columns, dtype, fp8=case.fp8)
    made = {"out": out}
    if case.then == "residual":
        kept = products.parts_of(case.outputs, tile)
        squares = parts[: count * kept].view(count, kept).sum(-1, keepdim=True)
        made |= {"normed": normed, "squares": squares.to(dtype)}  # of the stream, which is rounded
    if case.then == "logits":
        largest = best.amax(-1, keepdim=True)
        assert torch.equal(best_of(out), largest)
    return made


def inputs_of(case: Product, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Matrix]:
    sizes = (case.rows, case.columns), (case.columns,)
    height = case.outputs * (2 if case.then == "swiglu" else 1)
    stream, gain = (tuned(*size, seed=i, device=device, dtype=dtype) for i, size in enumerate(sizes))
    weight = tuned(height, case.columns, seed=3, device=device) * case.columns**-0.5
    return stream, gain, to_fp8(weight) if case.fp8 else weight.to(dtype)


def before_of(case: Product, dtype: torch.dtype, device: str) -> Tensor:
    return tuned(case.rows, case.outputs, seed=8, device=device, dtype=dtype)


def plain_results(case: Product, dtype: torch.dtype, device: str, wide: torch.dtype) -> dict[str, Tensor]:
    """The same by the plain forms in dtype `wide`; logits with their rules."""
    stream, gain, weight = inputs_of(case, dtype, device)
    stream, gain = stream.to(wide), gain.to(wide)
    weight = weight.values.to(wide) * weight.scales.to(wide)[:, None] if case.fp8 else weight.to(wide)
    x = rms_norm(stream, gain, EPS) if case.norm else stream
    y = torch.nn.functional.linear(x, weight)
    if case.then == "swiglu":
        return {"out": PLAIN.swiglu(y)}
    if case.then == "logits":
        logits = plain_rules(y, rules_of(case.rows, case.outputs, device, penalty=1.3))
        return {"out": logits}
    if case.then != "residual":
        return {"out": y}
    total = before_of(case, dtype, device).to(wide) + y
    normed = total * tuned(case.outputs, seed=4, device=device, dtype=dtype).to(wide)
    return {"out": total, "normed": normed, "squares": total.square().sum(-1, keepdim=True)}


def product_faults(case: Product, got: dict[str, Tensor], dtype: torch.dtype, device: str) -> list[str]:
    exact = plain_results(case, dtype, device, torch.float64)
    rivals = plain_results(case, dtype, device, dtype)
    faults = []
    for name, truth in exact.items():
        never = truth == -torch.inf
        if not torch.equal(never, got[name] == -torch.inf):
            faults.append(f"{name}: other ids are banned")
        trio = (x.masked_fill(never, 0) for x in (got[name], rivals[name].to(got[name].dtype), truth))
        faults += [f"{name}: {fault}" for fault in faults_of(*trio)]
    return faults


def check_product(case: Product, dtype: torch.dtype, device: str) -> None:
    assert product_faults(case, run_product(case, dtype, device), dtype, device) == []


def check_product_faults_are_seen(case: Product, device: str) -> None:
    right = plain_results(case, torch.float32, device, torch.float32)
    for name, tensor in right.items():
        spoilt = tensor.clone()
        spoilt[-1, -1] = 0.0
        for wrong in (torch.zeros_like(tensor), spoilt):
            assert product_faults(case, {**right, name: wrong}, torch.float32, device), name


def check_products_ignore_company(dtype: torch.dtype, device: str) -> None:
    """A row has the same bits among 2, 3 and 16 rows, and at any place."""
    for case in (Product("gate_up", 16, 192, 96, "swiglu", True), Product("down", 16, 192, 96, "residual", False),
                 Product("head", 16, 192, 201, "logits", True),
                 Product("gate_up", 16, 192, 96, "swiglu", True, fp8=True)):  # fmt: skip
        whole = run_product(case, dtype, device)
        for part in (slice(0, 2), slice(5, 8), slice(3, 16)):
            for name, got in run_product(case, dtype, device, part).items():
                assert torch.equal(got, whole[name][part]), (case, part, name)


class Attend(NamedTuple):
    """Heads, key heads, head_dim, capacity, the places of the rows, and the window."""

    heads: int
    kv_heads: int
    head_dim: int
    capacity: int
    places: tuple[int, ...]
    window: int | None = None


ATTENDS = [
    Attend(2, 2, 16, 600, (0,)),
    Attend(2, 2, 16, 600, (64,)),
    Attend(4, 2, 16, 600, (299,)),
    Attend(2, 1, 80, 300, (257,)),
    Attend(2, 1, 128, 300, (257,)),
    Attend(2, 2, 16, 600, (0, 1, 63, 64, 65)),
    Attend(6, 2, 8, 600, (599, 256, 257)),
    Attend(20, 1, 32, 300, (299, 5)),
    Attend(2, 2, 16, 600, (0,), 1),
    Attend(2, 2, 16, 600, (512,), 1),
    Attend(4, 2, 16, 600, (299,), 40),
    Attend(2, 2, 16, 600, (599,), 300),
    Attend(6, 2, 8, 600, (599, 256, 257, 3), 40),
    Attend(2, 2, 16, 600, (599, 256, 512), 1),
]


def attend_inputs(case: Attend, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    """qkv, keys, values, place, angles; what lies beyond a row's place is NaN."""
    rows = len(case.places)
    width = (case.heads + 2 * case.kv_heads) * case.head_dim
    qkv = tuned(rows, width, device=device, dtype=dtype)
    shape = rows, case.kv_heads, case.capacity, case.head_dim
    keys, values = (tuned(*shape, seed=i, device=device, dtype=dtype) for i in (1, 2))
    place = torch.tensor(case.places, device=device)
    angles = tuned(case.capacity, case.head_dim // 2, seed=3, device=device)
    return qkv, keys, values, place, torch.stack((angles.cos(), angles.sin()), dim=-1)


def run_attend(case: Attend, dtype: torch.dtype, device: str, rows: slice = slice(None)) -> list[Tensor]:
    """Run the kernel; return (output, keys, values)."""
    qkv, keys, values, place, table = attend_inputs(case, dtype, device)
    qkv, keys, values, place = (x[rows].contiguous() for x in (qkv, keys, values, place))
    for row, at in enumerate(place.tolist()):
        keys[row, :, at:], values[row, :, at:] = torch.nan, torch.nan
    out = torch.full((len(qkv), case.heads * case.head_dim), torch.nan, device=device, dtype=dtype)
    sizes = len(qkv), case.heads, case.kv_heads, case.head_dim, case.capacity
    space = attention.attend_space(*sizes, qkv)
    longest = int(place.max())
    for _ in range(2):  # the second run finds the counters as the first has left them
        tensors = qkv, keys, values, place, table, out, space
        attention.prepare_attend(*tensors, longest=longest, window=case.window)()
    assert not space.arrived.any()
    return [out, keys, values]


def plain_attend(case: Attend, dtype: torch.dtype, device: str, wide: torch.dtype) -> list[Tensor]:
    """The same by PyTorch operations in dtype `wide`, row by row."""
    qkv, keys, values, _, table = attend_inputs(case, dtype, device)
    keys, values = keys.to(wide), values.to(wide)
    heads = qkv.to(wide).unflatten(-1, (-1, case.head_dim))  # (rows, heads + 2 kv_heads, head_dim)
    outs = []
    for row, at in enumerate(case.places):
        turned = apply_rope(heads[row, None, None, : -case.kv_heads], table[at, None])[0, 0]
        keys[row, :, at], values[row, :, at] = turned[case.heads :], heads[row, -case.kv_heads :]
        q = turned[None, : case.heads, None]  # (1, heads, 1, head_dim)
        seen = slice(max(0, at + 1 - (case.window or at + 1)), at + 1)
        sdpa = attention_function("sdpa")
        outs.append(sdpa(q, keys[row, None, :, seen], values[row, None, :, seen], causal=False).flatten())
    return [torch.stack(outs), keys, values]


def attend_faults(case: Attend, got: list[Tensor], dtype: torch.dtype, device: str) -> list[str]:
    rivals, exact = (plain_attend(case, dtype, device, wide) for wide in (dtype, torch.float64))
    faults = [f"out: {fault}" for fault in faults_of(got[0], rivals[0], exact[0])]
    for name, filled_cache, rival, truth in zip(
        ("keys", "values"), got[1:], rivals[1:], exact[1:], strict=True
    ):
        filled = [(slice(None), row, slice(0, place + 1)) for row, place in enumerate(case.places)]
        for at in filled:
            trio = [x.transpose(0, 1)[at] for x in (filled_cache, rival, truth)]
            faults += [f"{name}: {fault}" for fault in faults_of(*trio)]
    return faults


def check_attend(case: Attend, dtype: torch.dtype, device: str) -> None:
    assert attend_faults(case, run_attend(case, dtype, device), dtype, device) == []


def check_attend_faults_are_seen(case: Attend, device: str) -> None:
    right = plain_attend(case, torch.float32, device, torch.float32)
    zeros = torch.zeros_like(right[0])
    assert attend_faults(case, [zeros, *right[1:]], torch.float32, device)
    if max(case.places):  # a mask that is off by one
        other = case._replace(places=tuple(max(0, place - 1) for place in case.places))
        late = plain_attend(other, torch.float32, device, torch.float32)
        assert attend_faults(case, late, torch.float32, device)


def check_attend_ignores_company(dtype: torch.dtype, device: str) -> None:
    case = Attend(4, 2, 64, 800, (700, 3, 256, 255, 513))
    whole = run_attend(case, dtype, device)
    for part in (slice(0, 2), slice(1, 4), slice(3, 5)):
        assert torch.equal(run_attend(case, dtype, device, part)[0], whole[0][part])


def check_a_row_that_is_too_long_for_a_launch_harms_nothing(device: str) -> None:
    """It has ended. The counters are ready for the text that takes its row."""
    case = Attend(2, 2, 16, 600, (599, 60))
    qkv, keys, values, place, table = attend_inputs(case, torch.float32, device)
    out = torch.empty(2, 32, device=device)
    space = attention.attend_space(2, 2, 2, 16, 600, qkv)
    attend = attention.prepare_attend(qkv, keys, values, place, table, out, space, longest=300)
    attend()
    assert not space.arrived.any()
    expected = plain_attend(case, torch.float32, device, torch.float32)[0]
    torch.testing.assert_close(out[1], expected[1])
    place[0] = 299
    attend()
    expected = plain_attend(case._replace(places=(299, 60)), torch.float32, device, torch.float32)[0]
    torch.testing.assert_close(out, expected)


def check_texts_are_stored_in_their_rows(device: str) -> None:
    joined = tuned(2, 70, 5 * 24, device=device).unflatten(-1, (5, 24)).transpose(1, 2)
    k, v = joined[:, 1:3].contiguous(), joined[:, 3:5]
    rows = torch.tensor([[3, 7], [0, 7]], device=device)[:, 0]  # as `Prefill` unpacks them
    caches = torch.zeros(2, 4, 2, 90, 24, device=device)
    attention.store(k, v, rows, *caches)
    expected = torch.zeros_like(caches)
    expected[0, rows, :, :70], expected[1, rows, :, :70] = k, v
    assert torch.equal(caches, expected)


CHECKS = {name.removeprefix("check_"): check for name, check in list(globals().items())
          if name.startswith("check_") and check.__code__.co_varnames[:1] == ("device",)}  # fmt: skip
