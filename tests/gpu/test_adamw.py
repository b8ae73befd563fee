"""The one-pass AdamW on a GPU: the checks of the interpreter, and what only a device can show."""

import copy

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import adamw_checks as checks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", checks.CHECKS)
def test_one_pass_adamw(name):
    checks.CHECKS[name]("cuda")


@pytest.fixture
def optimizer():
    """Ours, over a hundred parameters with gradients that have seen a step (compiled, tables made)."""
    sizes = [(50, 70), (3,), (4096,), (513, 9)] * 25
    params = checks.parameters("cuda", sizes)
    made = checks.AdamW(params, **checks.SETTINGS)
    checks.steps(made, range(2), sizes)
    return made


def params_of(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


# The mode is a prototype, PyTorch says.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_a_step_never_waits_for_the_gpu(optimizer):
    """Not when gradients have moved and the table is sent again, either; and not with a clipping factor or a
    decision."""
    from lmkit.core.step import clip_for, gradient_norm

    params = params_of(optimizer)
    before, kept = [param.detach().clone() for param in params], [param.grad for param in params]
    optimizer.decision = torch.ones((), device="cuda")
    optimizer.step()  # from here on the device counts the steps
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            grads = [torch.ones_like(param) for param in params]
            checks.give(params, grads)
            kept += grads
            clip_for(optimizer, grads, gradient_norm(grads), 1.0)
            optimizer.decision = torch.ones((), device="cuda")
            optimizer.step()
            optimizer.zero_grad()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all((a != b).any() for a, b in zip(before, params, strict=True))


def test_the_learning_rate_compiles_nothing(optimizer):
    from lmkit.kernels.adamw import adamw_kernel

    device = torch.cuda.current_device()
    variants = len(adamw_kernel.device_caches[device][0])
    for lr in (0.0, 1.0, 0, 1, 16, 3e-4, 1e-3):
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
    assert len(adamw_kernel.device_caches[device][0]) == variants


def test_the_current_stream_is_obeyed(optimizer):
    """A step on a side stream waits for what is before it there, and for nothing else."""
    params = params_of(optimizer)
    expected, twin = copy.deepcopy((params, optimizer))
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)  # longer than the host needs to launch what follows
        for param in params:
            param.grad.fill_(0.5)
        optimizer.step()
    side.synchronize()
    for param in expected:
        param.grad = torch.full_like(param, 0.5)
    twin.step()
    assert all(torch.equal(a, b) for a, b in zip(params, expected, strict=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_parameters_on_another_than_the_current_device():
    assert torch.cuda.current_device() == 0
    for name in ("any_cut_gives_the_same_bits", "a_factor_is_a_scaled_gradient", "equals_torch_in_float64"):
        checks.CHECKS[name]("cuda:1")
    assert torch.cuda.current_device() == 0


def test_a_tensor_of_more_than_2_to_the_31_elements():
    """Its end, in bf16, equals a small tensor's."""
    size = 2**31 + 3 * 2048 + 5
    if torch.cuda.mem_get_info()[0] < 5 * 2 * size:
        pytest.skip("needs 22 GB of free memory")
    big = [torch.full((size,), value, dtype=torch.bfloat16, device="cuda") for value in (1.0, 0.5)]
    small = [tensor[-3000:].clone() for tensor in big]
    for param, grad in (big, small):
        param.grad = grad
        checks.AdamW([param], **checks.SETTINGS).step()
    assert torch.equal(big[0][-3000:], small[0])
    assert torch.equal(big[0][:3000], small[0])
    assert (small[0] != 1).all()


def test_state_on_the_host_makes_the_same_steps():
    from lmkit.optim import HostAdamW

    sizes = [(50, 70), (3,)]
    made = []
    for kind in (checks.AdamW, HostAdamW):
        params = checks.parameters("cuda", sizes)
        optimizer = kind(params, **checks.SETTINGS)
        optimizer.keep_masters({param: param.detach().float() for param in params})
        checks.steps(optimizer, range(3), sizes)
        made.append(params_of(optimizer))
    state = optimizer.state_dict()
    optimizer.load_state_dict(copy.deepcopy(state))
    for of_params in (state["state"], optimizer.state):
        assert {value.device.type for values in of_params.values() for value in values.values()} == {"cpu"}
    for ours, theirs in zip(*made, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)  # a few roundings of float32
