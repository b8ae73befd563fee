"""What the fused kernels of a training step must do, on any device: run by Triton's interpreter on CPUs, and on GPUs.

Every result and gradient is compared with the model's plain operations in float64. It may be at most twice as wrong
as these are in the same dtype, plus one rounding; attention_oracle.py says how errors are measured. Inputs are never
zero: `check_faults_are_seen` makes sure that zeros and a mask that is off by one show.
"""

import itertools
from collections.abc import Sequence
from contextlib import contextmanager

import pytest
import torch
from attention_oracle import beyond, error_of
from step_cases import CASES, Case, Function, plain_norm, targets_of, tuned
from torch import Tensor

from lmkit.core.loss import linear_cross_entropy
from lmkit.kernels import cross_entropy, embedding, norm, rope, swiglu
from lmkit.model.operations import PLAIN


def run(function: Function, inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    """Return the results, then the gradients of the inputs."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    mode = getattr(function, "deterministic", torch.are_deterministic_algorithms_enabled())
    with deterministically(mode):
        results = function(*leaves)
        results = list(results) if isinstance(results, tuple) else [results]
        weights = [grad.to(x.dtype) for x, grad in zip(results, grads, strict=True)]
        return [*(x.detach() for x in results), *torch.autograd.grad(results, leaves, weights)]


@contextmanager
def deterministically(mode: bool):
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(mode)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def inputs_of(case: Case, dtype: torch.dtype, device: str) -> tuple[list[Tensor], list[Tensor]]:
    """Return (inputs, gradients of the results)."""
    inputs = [tuned(*shape, seed=i, dtype=dtype, device=device) for i, shape in enumerate(case.shapes)]
    with torch.no_grad():
        results = case.plain(*inputs)
    results = results if isinstance(results, tuple) else (results,)
    return inputs, [tuned(*x.shape, seed=10 + i, dtype=dtype, device=device) for i, x in enumerate(results)]


def faults_of(
    fused: Function, plain: Function, inputs: Sequence[Tensor], grads: Sequence[Tensor]
) -> list[str]:
    """What `fused` gets wrong, one line per tensor and measure."""
    dtype = inputs[0].dtype
    rounding = torch.finfo(dtype).eps / 2
    if dtype == torch.bfloat16 and not inputs[0].is_cuda:
        rounding *= 3  # the interpreter cuts off what it should round, in two places of a norm
    # A number that is cut off is wrong by up to twice as much as a rounded one.
    times = 4 if dtype == torch.bfloat16 and not inputs[0].is_cuda else 2
    longest = max(max(x.shape) for x in inputs)  # the error of a sum grows with the root of its terms
    floor = rounding + max(16, longest**0.5) * torch.finfo(torch.float32).eps
    exact = run(plain, [x.double() for x in inputs], [x.double() for x in grads])
    theirs, mine = run(plain, inputs, grads), run(fused, inputs, grads)
    faults = []
    for i, (got, rival, truth) in enumerate(zip(mine, theirs, exact, strict=True)):
        if (got.shape, got.dtype) != (truth.shape, rival.dtype):
            faults.append(f"{i}: is {got.dtype} {tuple(got.shape)}, not {rival.dtype} {tuple(truth.shape)}")
            continue
        truth = truth.reshape(-1, truth.shape[-1] if truth.dim() else 1)
        error, budget = error_of(got.reshape_as(truth), truth), error_of(rival.reshape_as(truth), truth)
        faults += [f"{i}: {fault}" for fault in beyond(error, budget, times=times, floor=floor)]
    return faults


def check_case(name: str, dtype: torch.dtype, device: str) -> None:
    case = CASES[name]
    faults = faults_of(case.fused, case.plain, *inputs_of(case, dtype, device))
    assert not faults, faults  # pytest shows no values of this file


def check_faults_are_seen(name: str, device: str) -> None:
    """Zeros, and a mask that leaves out the last channel, in any one result or gradient."""
    case = CASES[name]
    inputs, grads = inputs_of(case, torch.float32, device)
    right = run(case.plain, inputs, grads)
    for at in range(len(right)):
        for spoil in (torch.zeros_like, without_last):
            tensors = [spoil(x) if i == at else x for i, x in enumerate(right)]
            stand_in = pretend(tensors[: len(grads)], tensors[len(grads) :])
            assert faults_of(stand_in, case.plain, inputs, grads), (at, spoil)


def without_last(x: Tensor) -> Tensor:
    x = x.clone()
    x.view(-1)[-1] = 0
    return x


def pretend(results: Sequence[Tensor], gradients: Sequence[Tensor]) -> Function:
    """A function with these results and gradients."""

    class Pretence(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            return tuple(x.clone() for x in results)

        @staticmethod
        def backward(ctx, *grads):
            return tuple(gradients)

    return Pretence.apply


def strided(x: Tensor) -> Tensor:
    """The same numbers as part of a wider array, with a gap between rows."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 3), 7.0, dtype=x.dtype, device=x.device)
    wide[..., 1:-2] = x
    return wide[..., 1:-2]


def transposed(x: Tensor) -> Tensor:
    """The same numbers with channels far apart."""
    return x.mT.contiguous().mT if x.dim() > 1 else x


def expanded(x: Tensor) -> Tensor:
    """One number everywhere, with strides of 0, as `sum` makes gradients."""
    return x.flatten()[:1].reshape([1] * x.dim()).expand(x.shape)


def check_layouts(name: str, device: str) -> None:
    case = CASES[name]
    inputs, grads = inputs_of(case, torch.float32, device)
    for change, which in itertools.product((strided, transposed), range(2)):
        # Every other tensor, so that strides differ.
        changed = [
            [change(x) if x.dim() and i % 2 == which else x for i, x in enumerate(tensors)]
            for tensors in (inputs, grads)
        ]
        assert faults_of(case.fused, case.plain, *changed) == []
    assert faults_of(case.fused, case.plain, inputs, [expanded(x) if x.dim() else x for x in grads]) == []


def check_only_the_sum_has_a_gradient(device: str) -> None:
    inputs = [tuned(3, 8, device=device, seed=i).requires_grad_() for i in range(2)]
    gain = torch.ones(8, device=device, requires_grad=True)
    total, _ = norm.add_rms_norm(*inputs, gain)
    given = tuned(3, 8, device=device, seed=9)
    gradients = torch.autograd.grad(total, [*inputs, gain], given, allow_unused=True)
    assert all(torch.equal(gradient, given) for gradient in gradients[:2])
    assert gradients[2] is None


def check_norm_alone_and_other_dtypes(device: str) -> None:
    """Of x without delta; a float32 stream with float16 layers around it."""
    x, delta, gain = (tuned(*shape, device=device, seed=i) for i, shape in enumerate([(5, 8), (5, 8), (8,)]))
    fused, plain = norm.rms_norm, lambda x, gain: PLAIN.add_rms_norm(x, None, gain, 1e-5)[1]
    assert faults_of(fused, plain, [x, gain], [delta]) == []

    def narrow(x: Tensor, delta: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
        return norm.add_rms_norm(x, delta, gain, dtype=torch.float16)

    def plain_narrow(x: Tensor, delta: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
        total, normed = plain_norm(x, delta, gain)
        return total, normed.half()

    mixed = [x, delta.half(), gain], [delta, x]
    for got, other in zip(run(narrow, *mixed), run(plain_narrow, *mixed), strict=True):
        assert got.dtype == other.dtype
        torch.testing.assert_close(got, other, rtol=2e-3, atol=2e-3)  # two roundings to float16


def check_rope_works_in_place(device: str) -> None:
    qkv = tuned(2, 5, 4 * 8, device=device)
    before, address = qkv.clone(), qkv.data_ptr()
    table = torch.stack((tuned(5, 4, device=device).cos(), tuned(5, 4, device=device).sin()), dim=-1)
    out = rope.rope_(qkv, table, 1)
    assert out.data_ptr() == address
    assert torch.equal(out[..., -8:], before[..., -8:])
    assert (out != before)[..., :-8].all()
    assert qkv._version == 1, "autograd would not see that it has changed"
    rope.rotate_(qkv, table, 1, inverse=True)
    assert qkv._version == 2
    torch.testing.assert_close(qkv, before)
    with pytest.raises(RuntimeError, match="leaf"):
        rope.rope_(before.requires_grad_(), table, 1)


def check_rope_leaves_a_gradient_that_others_read(device: str) -> None:
    """A sum hands the same gradient to both terms."""
    x, other = (tuned(1, 3, 4 * 8, device=device, seed=i).requires_grad_() for i in range(2))
    table = torch.stack((tuned(3, 4, device=device).cos(), tuned(3, 4, device=device).sin()), dim=-1)
    given = tuned(1, 3, 4 * 8, device=device, seed=4)
    kept = given.clone()
    _, of_other = torch.autograd.grad(rope.rope_(x * 1, table, 1) + other, [x, other], given)
    assert torch.equal(of_other, kept)
    assert torch.equal(given, kept)


def check_swiglu_reuses_its_input(device: str) -> None:
    inner = tuned(3, 8, device=device).requires_grad_() * 1
    address = inner.data_ptr()
    out = swiglu.swiglu(inner)
    reader = inner.square().sum()  # saves `inner`, too
    (gradient,) = torch.autograd.grad(out, inner, torch.ones_like(out), retain_graph=True)
    assert gradient.data_ptr() == address
    for late in (out.sum(), reader):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            late.backward(retain_graph=True)


def check_cross_entropy_of_odd_targets(device: str) -> None:
    h, w = tuned(6, 8, device=device).requires_grad_(), tuned(33, 8, device=device, seed=1).requires_grad_()
    ids = targets_of(h, 33)
    masked = torch.full_like(ids, -1)
    loss = cross_entropy.linear_cross_entropy(h, w, masked, chunk=4)
    loss.backward()
    assert (loss.item(), h.grad.abs().max(), w.grad.abs().max()) == (0, 0, 0)
    for wrong in (33, 1000):
        ids[2] = wrong
        assert cross_entropy.linear_cross_entropy(h, w, ids).isnan()


def check_cross_entropy_of_extreme_logits(device: str) -> None:
    case = CASES["cross-entropy"]
    inputs, grads = inputs_of(case, torch.float32, device)
    inputs[0] *= 3000  # exp overflows
    assert faults_of(case.fused, case.plain, inputs, grads) == []


def check_cross_entropy_computes_what_is_asked_for(device: str) -> None:
    h, w = tuned(9, 8, device=device), tuned(21, 8, device=device, seed=1)
    ids = targets_of(h, 21)
    both = run(lambda h, w: cross_entropy.linear_cross_entropy(h, w, ids, chunk=4), [h, w], [torch.ones(())])
    with torch.no_grad():
        assert torch.equal(cross_entropy.linear_cross_entropy(h, w, ids, chunk=4), both[0])
    for at in range(2):
        inputs = [x.detach().requires_grad_(i == at) for i, x in enumerate((h, w))]
        loss = cross_entropy.linear_cross_entropy(*inputs, ids, chunk=4)
        assert torch.equal(torch.autograd.grad(loss, inputs[at], retain_graph=True)[0], both[1 + at])
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(loss, inputs[at])


def check_cross_entropy_scales_float16_late(device: str) -> None:
    """The mean over many tokens would underflow before the loss scale multiplies it."""
    h, w = tuned(256, 4, device=device).half() / 64, tuned(4096, 4, device=device, seed=1).half() / 64
    ids, scale = targets_of(h, 4096), 2.0**14
    leaves, one = [h.double(), w.double()], torch.ones((), device=device)
    exact = run(lambda h, w: linear_cross_entropy(h, w, ids), leaves, [one])[1:]
    leaves = h.requires_grad_(), w.requires_grad_()
    got = torch.autograd.grad(cross_entropy.linear_cross_entropy(*leaves, ids) * scale, leaves)
    for mine, truth in zip(got, exact, strict=True):
        assert error_of(mine.double() / scale, truth).overall < 1e-3  # two roundings


def check_embedding_gradient_dtypes(device: str) -> None:
    ids = torch.randint(5, (40,), generator=torch.Generator().manual_seed(0)).to(device)
    weight = torch.nn.Parameter(tuned(5, 8, device=device, dtype=torch.float16))
    for wanted, dtype in ((torch.float16, torch.float16), (None, torch.float32)):
        weight.grad_dtype = wanted
        for mode in (False, True):
            weight.grad = None
            with deterministically(mode):
                embedding.embedding(ids, weight).sum().backward()
            assert weight.grad.dtype == dtype
            expected = torch.bincount(ids, minlength=5).to(dtype)[:, None].expand(5, 8)
            assert torch.equal(weight.grad, expected)


def check_gain_gradient_in_a_fixed_order(device: str) -> None:
    with deterministically(True):
        check_case("norm of many rows and blocks", torch.float32, device)


def check_second_derivatives_are_refused(device: str) -> None:
    for name in ("norm", "norm of heads", "swiglu in place", "cross-entropy", "embedding"):
        case = CASES[name]
        inputs, grads = inputs_of(case, torch.float32, device)
        leaves = [x.requires_grad_() for x in inputs]
        results = case.fused(*leaves)
        results = results if isinstance(results, tuple) else (results,)
        gradients = torch.autograd.grad(results, leaves, grads, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiable once"):
            sum(x.square().sum() for x in gradients).backward()


def check_rope_has_a_second_derivative(device: str) -> None:
    case = CASES["rope"]
    (x,), (grad,) = inputs_of(case, torch.float32, device)
    weight = grad.requires_grad_()
    (first,) = torch.autograd.grad(case.fused(x.requires_grad_()), x, weight, create_graph=True)
    (second,) = torch.autograd.grad(first, weight, torch.ones_like(first))
    torch.testing.assert_close(second, case.fused(torch.ones_like(x)))


def check_nothing_in_gives_nothing_out(device: str) -> None:
    empty = torch.empty(0, 8, device=device, requires_grad=True)
    gain = torch.ones(8, device=device, requires_grad=True)
    total, result = norm.add_rms_norm(empty, empty, gain)
    (total.sum() + result.sum() + swiglu.swiglu(empty).sum()).backward()
    assert empty.grad.shape == (0, 8)
    assert (gain.grad == 0).all()
    table = torch.ones(0, 2, 2, device=device)
    assert rope.rope_(torch.empty(2, 0, 16, device=device), table, 1).shape == (2, 0, 16)
    weight = tuned(5, 8, device=device).requires_grad_()
    ids = torch.empty(0, dtype=torch.int64, device=device)
    (
        embedding.embedding(ids, weight).sum() + cross_entropy.linear_cross_entropy(empty, weight, ids)
    ).backward()
    assert (weight.grad == 0).all()


CHECKS = {name.removeprefix("check_"): check for name, check in list(globals().items())
          if name.startswith("check_") and check.__code__.co_varnames[:1] == ("device",)}  # fmt: skip
