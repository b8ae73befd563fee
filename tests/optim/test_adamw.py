"""AdamW against PyTorch's over recorded gradients, and its state."""

import copy
import pickle

import pytest
import torch

from lmkit.core import adamw as core
from lmkit.core.adamw import decay_groups
from lmkit.optim import adamw as adamw_module
from lmkit.optim.adamw import AdamW, Update, sweeps
from lmkit.recipe.tables import OptimizerConfig
from lmkit.registry import OPTIMIZERS

SHAPES = [(7, 5), (40,), (3, 4, 2), (1,)]
SETTINGS = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def recorded(steps: int) -> list[list[torch.Tensor]]:
    """Gradients of sizes from 1e-6 to 10, some entries zero."""
    torch.manual_seed(0)
    return [
        [torch.randn(shape) * 10 ** (torch.rand(()) * 7 - 6) * (torch.rand(shape) > 0.1) for shape in SHAPES]
        for _ in range(steps)
    ]


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    torch.manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in SHAPES]


def assert_equals_torch(ours: list, theirs: list) -> None:
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6)


def run(optimizer: torch.optim.Optimizer, gradients: list[list[torch.Tensor]], start: int = 0) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for step, grads in enumerate(gradients, start):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (1 + step % 7)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.to(param.dtype)
        optimizer.step()


def test_equals_the_core_bit_for_bit():
    fast, plain = parameters(), parameters()
    run(AdamW(fast, **SETTINGS), recorded(50))
    run(core.AdamW(plain, **SETTINGS), recorded(50))
    assert all(map(torch.equal, fast, plain))


def narrow(exact: list) -> tuple[list, AdamW]:
    """bf16 parameters whose masters are copies of `exact`, and their optimizer."""
    params = [torch.nn.Parameter(param.detach().bfloat16()) for param in exact]
    optimizer = AdamW(params, **SETTINGS)
    optimizer.keep_masters({p: e.detach().clone() for p, e in zip(params, exact, strict=True)})
    return params, optimizer


@pytest.mark.parametrize("saved", [False, True])
def test_bf16_parameters_are_rounded_masters_also_after_their_state_was_loaded(saved):
    """`load_state_dict` of torch casts state to the parameter's dtype."""
    gradients = [[grad.bfloat16() for grad in grads] for grads in recorded(20)]
    exact, initial = parameters(), parameters()
    expected = AdamW(exact, **SETTINGS)
    run(expected, gradients)
    params, optimizer = narrow(initial)
    run(optimizer, gradients[:7])
    if saved:
        state = copy.deepcopy(optimizer.state_dict())
        params, optimizer = narrow([torch.zeros_like(param) for param in initial])
        optimizer.load_state_dict(state)
    run(optimizer, gradients[7:], start=7)
    for param, master in zip(params, exact, strict=True):
        state = optimizer.state[param]
        assert torch.equal(state["master"], master)
        assert torch.equal(param, master.bfloat16())
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state[name], expected.state[master][name])


def test_masters_of_loaded_state_without_any_are_the_weights():
    gradients = recorded(5)
    theirs = parameters()
    yours = torch.optim.AdamW(theirs, **SETTINGS)
    run(yours, gradients)
    params, optimizer = narrow(parameters())
    optimizer.load_state_dict(yours.state_dict())
    for param, other in zip(params, theirs, strict=True):
        assert torch.equal(optimizer.state[param]["master"], param.float())
        assert torch.equal(optimizer.state[param]["exp_avg"], yours.state[other]["exp_avg"])


def test_state_of_another_rule_is_refused():
    mine = AdamW(parameters(), **SETTINGS)
    mine.load_state_dict(torch.optim.Adam(parameters()).state_dict())
    for setting, said in (("maximize", "=True"), ("amsgrad", "=True"), ("weight_decay", " decay")):
        with pytest.raises(ValueError, match=setting.partition("_")[0] + said):
            mine.load_state_dict(torch.optim.Adam(parameters(), **{setting: True}).state_dict())


def test_parameters_without_gradient_stay_and_count_their_own_steps():
    ours, theirs = parameters(), parameters()
    mine, yours = AdamW(ours, **SETTINGS), torch.optim.AdamW(theirs, **SETTINGS)
    for step, grads in enumerate(recorded(9)):
        for params in (ours, theirs):
            for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
                param.grad = grad.clone() if i == 0 or (step + i) % 3 else None
        mine.step()
        yours.step()
    assert_equals_torch(ours, theirs)
    assert int(mine.state[ours[0]]["step"]) == 9
    assert int(mine.state[ours[1]]["step"]) == 6
    dtypes = [
        {name: value.dtype for name, value in state.items()}
        for state in (mine.state[ours[0]], yours.state[theirs[0]])
    ]
    assert dtypes[0] == dtypes[1]


def test_mixed_dtypes_and_a_closure():
    params = [torch.nn.Parameter(torch.ones(4, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)]
    optimizer = AdamW(params, lr=0.1, weight_decay=0.0)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = sum(param.float().square().sum() for param in params)
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 8.0
    for param in params:
        # The first step of Adam moves each weight by lr, whatever its gradient; bf16 rounds 0.9 by up to 2^-9.
        torch.testing.assert_close(param.detach().float(), torch.full((4,), 0.9), rtol=2**-8, atol=0)


@pytest.mark.parametrize(
    "name",
    [
        *("equals_torch", "a_factor_is_a_scaled_gradient", "gradients_and_copies_of_another_dtype"),
        *("any_cut_gives_the_same_bits", "nothing_else_is_touched", "the_device_decides"),
    ],
)
def test_the_operations_do_what_the_kernel_does(name, monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed")
    from adamw_checks import CHECKS

    monkeypatch.setitem(adamw_module.SWEEP_ELEMENTS, "cpu", 30)  # of 100 elements, or thousands
    CHECKS[name]("cpu")


def test_decay_groups_are_matrices_and_vectors():
    params = parameters()
    params[2].requires_grad_(False)
    matrices, vectors = decay_groups(params, 0.1)
    assert [tuple(param.shape) for param in matrices["params"]] == [(7, 5)]
    assert [tuple(param.shape) for param in vectors["params"]] == [(40,), (1,)]
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert len(decay_groups(params[:1], 0.1)) == 1


def test_the_recipes_table_makes_it():
    table = OptimizerConfig(lr=0.0625, betas=(0.5, 0.75), eps=1e-3)
    made = OPTIMIZERS.load(table.name)(decay_groups(parameters(), 0.1), table)
    assert isinstance(made, AdamW)
    for group, decay in zip(made.param_groups, (0.1, 0.0), strict=True):
        assert (group["lr"], group["betas"], group["eps"]) == (0.0625, (0.5, 0.75), 1e-3)
        assert group["weight_decay"] == decay


def test_factor_and_copies_outlive_loaded_state():
    params = parameters()
    optimizer = AdamW(params, **SETTINGS)
    optimizer.copies = {params[0]: torch.zeros_like(params[0])}
    optimizer.gradient_factor = torch.tensor(0.5)
    optimizer.load_state_dict(optimizer.state_dict())
    assert list(optimizer.copies) == params[:1]
    assert optimizer.gradient_factor is not None
    unpickled = pickle.loads(pickle.dumps(optimizer))  # torch pickles settings and state alone
    assert (unpickled.gradient_factor, unpickled.copies) == (None, {})


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([4, 6, 1, 9, 1], [[4, 6], [1, 9], [1]]),
        ([11, 3, 12, 8], [[11], [3], [12], [8]]),
        ([25], [[25]]),
        ([], []),
    ],
)
def test_sweeps_hold_as_much_as_fits_and_at_least_one(sizes, expected):
    assert list(sweeps(sizes, sizes, 10)) == expected


F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("dtype", "grad_dtype", "copy_dtype", "turned", "fits"),
    [
        (F32, F32, None, "", True),
        (BF16, BF16, None, "", True),
        (F32, BF16, None, "", True),
        (F32, F32, F16, "", True),
        (F64, F64, None, "", False),
        (F32, F64, None, "", False),
        (F32, F32, F64, "", False),
        *((F32, F32, None, turned, False) for turned in ("param", "grad", "exp_avg", "exp_avg_sq")),
    ],
)
def test_what_can_be_updated_in_one_pass(monkeypatch, dtype, grad_dtype, copy_dtype, turned, fits):
    """The kernel reads contiguous tensors of at most 32 bits; here a function on a CPU stands for it."""

    def ones(part: str, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.ones(4, 3, dtype=dtype).t() if part == turned else torch.ones(3, 4, dtype=dtype)

    param = torch.nn.Parameter(ones("param"))
    param.grad_dtype = None
    param.grad = ones("grad", grad_dtype)
    optimizer = AdamW([param], lr=0.1)
    moments = {name: ones(name) for name in ("exp_avg", "exp_avg_sq")}
    optimizer.state[param] = {"step": torch.zeros(()), **moments}
    if copy_dtype is not None:
        optimizer.copies[param] = torch.zeros(3, 4, dtype=copy_dtype)
    calls: list[list[Update]] = []
    monkeypatch.setattr(AdamW, "_update_in_one_pass", lambda self, updates, _, **__: calls.append(updates))
    for devices, expected in ((set(), False), ({"cpu"}, fits)):
        monkeypatch.setattr(adamw_module, "ONE_PASS_DEVICES", devices)
        before = param.detach().clone()
        optimizer.step()
        assert [len(updates) for updates in calls] == [1] * expected
        assert torch.equal(param, before) == expected
