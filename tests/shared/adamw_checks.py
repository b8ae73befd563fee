"""What the one-pass AdamW must do, on any device: run by Triton's interpreter on CPUs, and on GPUs.

PyTorch's operations, which update what the kernel does not, run some of the checks on CPUs: tests/optim."""

import copy
import os
from collections.abc import Sequence
from itertools import pairwise
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import lmkit.kernels.adamw as kernel
from lmkit.optim import adamw
from lmkit.optim.adamw import AdamW

# Empty, one element, a part of a block, a whole one, several and a part, more than one dimension.
SIZES = [(0,), (1,), (7, 5), (kernel.BLOCK,), (2 * kernel.BLOCK + 3,), (64, 64)]
SETTINGS = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def parameters(device: str, sizes: Sequence[tuple[int, ...]] = SIZES, dtype: torch.dtype = torch.float32):
    torch.manual_seed(1)
    return [nn.Parameter(torch.randn(size, dtype=dtype).to(device)) for size in sizes]


def gradients(step: int, sizes: Sequence[tuple[int, ...]] = SIZES) -> list[Tensor]:
    """Of sizes from 1e-6 to 10, some entries zero."""
    torch.manual_seed(100 + step)
    scales = [10 ** (torch.rand(()) * 7 - 6) for _ in sizes]
    pairs = zip(sizes, scales, strict=True)
    return [torch.randn(size) * scale * (torch.rand(size) > 0.1) for size, scale in pairs]


def give(params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.to(param)


def steps(optimizer: torch.optim.Optimizer, which: range, sizes: Sequence[tuple[int, ...]] = SIZES) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for step in which:
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (1 + step % 7)
        give(params, gradients(step, sizes))
        optimizer.step()


def counted_launches():
    """Counts the updates that take the kernel."""
    return mock.patch.object(
        kernel.AdamWLaunch, "__call__", autospec=True, side_effect=kernel.AdamWLaunch.__call__
    )


def twins(device: str, kind: type = AdamW, **options):
    """The same parameters twice, each with its optimizer, the second of another kind perhaps."""
    ours, theirs = parameters(device, **options), parameters(device, **options)
    return ours, theirs, AdamW(ours, **SETTINGS), kind(theirs, **SETTINGS)


def assert_equal(ours: Sequence[Tensor], theirs: Sequence[Tensor], tolerance: float = 0.0) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance and 1e-6, atol=tolerance)


def check_equals_torch_in_float64(device: str) -> None:
    """m, v and w, each to the float32 rounding of a few operations a step."""
    params = parameters(device)
    exact = [nn.Parameter(param.detach().double().cpu()) for param in params]
    mine, theirs = AdamW(params, **SETTINGS), torch.optim.AdamW(exact, **SETTINGS)
    with counted_launches() as launches:
        for t in range(10):
            for of_ours, optimizer in ((params, mine), (exact, theirs)):
                optimizer.param_groups[0]["lr"] = (0, 1, 3e-3)[t % 3]  # whole numbers, too
                give(of_ours, gradients(t))
                optimizer.step()
    assert launches.call_count == 10
    for i, (param, truth) in enumerate(zip(params, exact, strict=True)):
        # Ten steps of at most five roundings of 2^-24 each; a sum of gradients of either sign cancels: hence atol.
        largest = max((float(gradients(t)[i].abs().max()) for t in range(10) if param.numel()), default=0)
        found, true = mine.state[param], theirs.state[truth]
        for got, expected, atol in (
            (found["exp_avg"], true["exp_avg"], 3e-6 * largest),
            (found["exp_avg_sq"], true["exp_avg_sq"], 0),
            (param.detach(), truth.detach(), 3e-6),
        ):
            torch.testing.assert_close(got.cpu().double(), expected, rtol=3e-6, atol=atol)


def check_equals_torch(device: str) -> None:
    """1e-6 over a thousand steps, as promised."""
    sizes = [(7, 5), (40,), (3, 4, 2), (1,)]
    ours, theirs, start = (parameters(device, sizes) for _ in range(3))
    with counted_launches() as launches:
        steps(AdamW(ours, **SETTINGS), range(1000), sizes)
    steps(torch.optim.AdamW(theirs, **SETTINGS), range(1000), sizes)
    assert launches.call_count == 1000 * (torch.device(device).type in adamw.ONE_PASS_DEVICES)
    assert all((mine - before).abs().max() > 0.1 for mine, before in zip(ours, start, strict=True))
    # Not the same bits: PyTorch's first moment is m + (1 - beta1) (g - m).
    assert_equal(ours, theirs, 1e-6)


def check_any_cut_gives_the_same_bits(device: str) -> None:
    """Shards of any size, aligned or not, in any company: an element's result is the same."""
    torch.manual_seed(0)
    size = 2 * kernel.BLOCK + 1234
    start = torch.randn(size)
    cuts = [0, 1, 130, kernel.BLOCK + 2, kernel.BLOCK + 2, size]
    whole, parts = start.clone().to(device), start.clone().to(device)
    shards = [parts[a:b] for a, b in pairwise(cuts)]
    at_once, in_shards = AdamW([whole], **SETTINGS), AdamW(shards, **SETTINGS)
    for step in range(4):
        whole.grad = gradients(step, [(size,)])[0].to(device)
        for shard, (a, b) in zip(shards, pairwise(cuts), strict=True):
            shard.grad = whole.grad[a:b]
        at_once.step()
        in_shards.step()
    assert not torch.equal(whole.cpu(), start)
    assert torch.equal(whole, parts)


def check_nothing_else_is_touched(device: str) -> None:
    buffers = [torch.full((kernel.BLOCK + 50,), 7.0, device=device) for _ in range(2)]
    param, grad = (buffer[16:-17] for buffer in buffers)
    param.grad = grad
    AdamW([param], **SETTINGS).step()
    assert (param != 7).all()
    assert (buffers[0][:16] == 7).all()
    assert (buffers[0][-17:] == 7).all()
    assert (buffers[1] == 7).all(), "gradients stay as they are"


def check_gradients_and_copies_of_another_dtype(device: str) -> None:
    """bf16 gradients count as their value in float32; copies are the new weights, rounded."""
    ours, theirs, mine, other = twins(device)
    mine.copies = {param: torch.zeros_like(param, dtype=torch.bfloat16) for param in ours[1:]}
    for step in range(3):
        for param, twin, grad in zip(ours, theirs, gradients(step), strict=True):
            param.grad_dtype = None
            param.grad = grad.to(device, torch.bfloat16)
            twin.grad = param.grad.float()
        mine.step()
        other.step()
    assert_equal(ours, theirs)
    for param, rounded in mine.copies.items():
        if os.environ.get("TRITON_INTERPRET") == "1":  # the interpreter cuts off what it should round
            torch.testing.assert_close(rounded.float(), param.detach(), rtol=2**-7, atol=0)
        else:
            assert torch.equal(rounded, param.bfloat16())


def check_narrow_parameters(device: str) -> None:
    """bf16 and float16 weights and moments: calculated in float32, rounded once."""
    for dtype, resolution in ((torch.bfloat16, 2**-7), (torch.float16, 2**-10)):
        params = parameters(device, dtype=dtype)
        wide = [nn.Parameter(param.detach().float()) for param in params]
        torch.manual_seed(2)
        give(params, [torch.randn(param.shape) for param in params])
        give(wide, [param.grad for param in params])
        with counted_launches() as launches:
            AdamW(params, **SETTINGS).step()
            AdamW(wide, **SETTINGS).step()
        assert launches.call_count == 2
        for param, twin in zip(params, wide, strict=True):
            torch.testing.assert_close(param.float(), twin, rtol=resolution, atol=0)


def check_a_factor_is_a_scaled_gradient(device: str) -> None:
    ours, theirs, mine, other = twins(device)
    for step, scale in enumerate((0.3, None, 2.3, 1e-3)):
        factor = torch.tensor(scale or 1.0, device=device)
        give(ours, gradients(step))
        give(theirs, [grad.to(device) * factor for grad in gradients(step)])
        mine.gradient_factor = scale and factor
        mine.step()
        other.step()
        assert_equal([param.grad.cpu() for param in ours], gradients(step))
        mine.zero_grad(set_to_none=scale is None)
        assert mine.gradient_factor is None
        assert all(param.grad is None if scale is None else not param.grad.any() for param in ours)
    assert_equal(ours, theirs)


def check_what_is_not_contiguous_or_wide_takes_the_operations(device: str) -> None:
    torch.manual_seed(3)
    for base in (torch.randn(8, 6).to(device).T, torch.randn(5, dtype=torch.float64).to(device)):
        ours, theirs = nn.Parameter(base.clone()), nn.Parameter(base.clone())
        assert ours.stride() == base.stride()
        ours.grad = torch.randn(base.shape).to(base)
        theirs.grad = ours.grad.clone()
        with counted_launches() as launches:
            AdamW([ours], **SETTINGS).step()
        assert launches.call_count == 0
        torch.optim.AdamW([theirs], **SETTINGS).step()
        assert_equal([ours], [theirs], 1e-6)
    # A gradient may change its layout from one step to the next.
    ours, theirs, mine, other = twins(device, torch.optim.AdamW, sizes=[(6, 6)])
    grad = torch.randn(6, 6).to(device)
    for layout in (grad, grad.T, grad):
        ours[0].grad, theirs[0].grad = layout, layout.clone()
        mine.step()
        other.step()
    assert_equal(ours, theirs, 1e-6)


def check_the_table_moves_with_the_tensors(device: str) -> None:
    """It is sent again when a gradient, a moment or a parameter lies elsewhere, and only then."""
    params, expected, mine, other = twins(device, torch.optim.AdamW)

    def step(number: int, *, in_place: bool) -> int:
        for param, grad in zip(params + expected, 2 * gradients(number), strict=True):
            if in_place:
                param.grad.copy_(grad)
            else:
                param.grad = grad.to(device, copy=True)
        with mock.patch.object(kernel, "_send", side_effect=kernel._send) as sent:
            mine.step()
        other.step()
        return sent.call_count

    assert step(0, in_place=False) == 2  # with the list of who works on what
    assert step(1, in_place=True) == 0
    kept = [param.grad for param in params]  # or the new ones might get the old ones' places
    assert step(2, in_place=False) == 1
    state = mine.state[params[3]]
    state["exp_avg"] = state["exp_avg"].clone()
    assert step(3, in_place=True) == 1
    kept.append(params[2].data)
    params[2].data = kept[-1].clone()
    assert step(4, in_place=True) == 1
    assert_equal(params, expected, 1e-6)


def check_one_launch_for_other_sizes(device: str) -> None:
    launch, scalars = kernel.AdamWLaunch(), adamw.Scalars(0.9, 0.95, 0.999, 1e-8, -0.01)
    for sizes in ([3, 5], [0, 0], [kernel.BLOCK + 1, 2], [2, kernel.BLOCK + 1]):
        tensors = [[torch.ones(size, device=device) for size in sizes] for _ in range(4)]
        launch(*tensors, [], scalars, None)
        assert all((weight != 1).all() for weight in tensors[0])


def check_state_of_another_size_is_refused(device: str) -> None:
    for name, wrong in (("exp_avg", torch.zeros(9)), ("exp_avg_sq", torch.zeros(10).half())):
        (param,), _, optimizer, _ = twins(device, sizes=[(10,)])
        give([param], [torch.ones(10)])
        optimizer.step()
        optimizer.state[param][name] = wrong.to(device)
        with pytest.raises(ValueError, match=r"9 on|another dtype"):
            optimizer.step()


def check_the_device_decides(device: str) -> None:
    """A refused step changes nothing and does not count; the others are those of an optimizer that never saw it."""
    ours, theirs, mine, other = twins(device)
    for step, decision in enumerate([1, 0, 1, 1, 0, 1, 1]):
        lr = 3e-3 * (1 + step)
        mine.param_groups[0]["lr"] = torch.tensor(lr, dtype=torch.float64).to(device) if step % 2 else lr
        other.param_groups[0]["lr"] = lr
        before = [param.detach().clone() for param in ours]
        give(ours + theirs, 2 * gradients(step))
        for i, (one, two) in enumerate(zip(ours, theirs, strict=True)):
            if not decision:
                one.grad.fill_(float("nan"))
            elif step in (2, 3, 5) and i == step:  # parameters part that have seen the same steps
                one.grad = two.grad = None
        mine.gradient_factor = torch.tensor(0.5 if decision else float("nan"), device=device)
        mine.decision = torch.tensor(decision, device=device)
        if decision:
            other.gradient_factor = torch.tensor(0.5, device=device)
            other.step()
        with counted_launches() as launches:
            mine.step()
        assert bool(launches.call_count) == (torch.device(device).type in adamw.ONE_PASS_DEVICES)
        changed = [bool((a != b).any()) for a, b in zip(ours, before, strict=True) if a.numel()]
        assert any(changed) == bool(decision)
        mine.zero_grad()
        assert mine.decision is None
    assert_equal(ours, theirs, 1e-7)
    for one, two in zip(ours, theirs, strict=True):
        assert mine.state[one]["step"].item() == other.state[two]["step"].item()
    # As checkpoints need them.
    assert len({state["step"].data_ptr() for state in mine.state.values()}) == len(ours)


def check_scalars_of_the_device(device: str) -> None:
    """Those of the host, to the last bit or two: 1 - beta2^step keeps its digits."""
    for betas in ((0.9, 0.999), (0.9, 0.95), (0.0, 0.5)):
        group = {"lr": 3e-4, "betas": betas, "eps": 1e-8, "weight_decay": 0.1}
        settings = torch.tensor([*betas, 1e-8, 0.1], dtype=torch.float64, device=device)
        lr = torch.tensor(3e-4, dtype=torch.float64, device=device)
        for step in (1, 2, 10, 1000, 1_000_000):
            count = torch.tensor(float(step), device=device)
            got = kernel.decide(torch.ones((), device=device), count, lr, settings)
            expected = torch.tensor([1, *adamw.scalars_of(group, step)[2:]], dtype=torch.float32)
            torch.testing.assert_close(got.cpu(), expected, rtol=2e-7, atol=0)


def check_the_host_and_the_device_may_decide_in_turns(device: str) -> None:
    ours, theirs, mine, other = twins(device)
    for step in range(6):
        give(ours + theirs, 2 * gradients(step))
        if step == 3:
            saved, mine = mine, AdamW(ours, **SETTINGS)
            mine.load_state_dict(copy.deepcopy(saved.state_dict()))
        if step not in (2, 5):
            mine.decision = torch.ones((), device=device)
        mine.step()
        mine.zero_grad()
        other.step()
    assert_equal(ours, theirs, 1e-7)
    pairs = zip(ours, theirs, strict=True)
    assert all(mine.state[one]["step"] == other.state[two]["step"] == 6 for one, two in pairs)


CHECKS = {key.removeprefix("check_"): check for key, check in globals().items() if key.startswith("check_")}
