"""What the code of plugins raises, or wrongly returns, is one line that names the entry and the file."""

import functools
from contextlib import nullcontext

import pytest
import torch
from planted_kernels import first_forgotten, gradient_dropped, wrong_without_gradients
from raising import raises
from tiny import RANDOM_TOKENS, tiny_recipe

from lmkit.attention import attention_function
from lmkit.attention.dispatch import joined_function
from lmkit.core.attention import reference
from lmkit.errors import LmkitError
from lmkit.model.operations import Operations
from lmkit.parallel.ranks import Ranks
from lmkit.parallel.strategy import Strategy, build_strategy
from lmkit.plugins import load_plugin
from lmkit.recipe.recipe import Recipe
from lmkit.recipe.tables import ModelConfig, OptimizerConfig, ParallelConfig, TrainConfig
from lmkit.registry import ATTENTION, OPERATIONS, SCHEDULES, STRATEGIES
from lmkit.training import build_step
from lmkit.training.setup import check_device, learning_rate

PLUGIN = """
from torch.optim import SGD
from lmkit.recipe.tables import Table
from lmkit.registry import ATTENTION, OPERATIONS, BENCHES, OPTIMIZERS, SCHEDULES
class Ends(BaseException): ...
class Options(Table): ...
@ATTENTION.register("my_kernel")
def my_kernel(q, k, v, *, causal, scale=None):
    raise Ends("kernel")
@ATTENTION.register("three")
def three(q, k, v):
    return q
@SCHEDULES.register("my_schedule")
def schedule(step, **options):
    return 1 / 0
@SCHEDULES.register("one")
def one(step):
    return 0.1
@OPTIMIZERS.register("my_optimizer")
class Optimizer(SGD):
    def __init__(self, groups, options):
        super().__init__(groups, lr=0.1)
    def step(self, closure=None):
        return {}["no such key"]
@BENCHES.register("my_bench", help="Raises.", row_keys=("mine",))
def bench(context):
    raise Ends("bench")
@BENCHES.register("my_empty_bench", help="Returns nothing.", row_keys=("mine",))
def empty(context): ...
"""


@pytest.fixture
def plugin(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(PLUGIN)
    (tmp_path / "tiny.toml").write_text(tiny_recipe(*RANDOM_TOKENS, "train.steps=2", "train.batch_size=2"))
    return path


@pytest.mark.parametrize(
    ("command", "entry", "error"),
    [
        ("train tiny.toml --set model.attention=my_kernel", "attention kernel 'my_kernel'", "Ends: kernel"),
        ("train tiny.toml --set optimizer.schedule=my_schedule", "'my_schedule'", "ZeroDivisionError: "),
        ("train tiny.toml --set optimizer.name=my_optimizer", "'my_optimizer'", "KeyError: 'no such key'"),
        ("bench my-bench", "bench 'my_bench'", "Ends: bench"),
        ("train tiny.toml --set optimizer.schedule=one", "schedule 'one'", "argument"),
        ("train tiny.toml --set model.attention=three", "attention kernel 'three'", "argument"),
    ],
)
def test_what_a_plugin_raises_is_one_line(plugin, command, entry, error, terminal):
    refused = terminal.refuses(
        f"{command} --plugin {plugin}", code="plugin.raised", says=[entry, f"{plugin}:", error], exit_code=1
    )
    assert ("CONTRIBUTING.md" if error == "argument" else "--debug") in refused.hint


def test_a_bench_that_returns_no_rows_is_one_line(plugin, terminal):
    says = ["'my_empty_bench'", str(plugin), "NoneType"]
    terminal.refuses(f"bench my-empty-bench --plugin {plugin}", code="bench.no_rows", says=says, exit_code=1)


RETURNS = """
import torch
from torch.optim import SGD
from lmkit.parallel.strategy import Strategy
from lmkit.registry import ATTENTION, OPERATIONS, OPTIMIZERS, STRATEGIES
@ATTENTION.register("my_kernel", joined=__name__ + ":joined")
def my_kernel(q, k, v, *, causal, scale=None):
    return {returned}
def joined(qkv, *, kv_heads, head_dim, first):
    return qkv[..., first:]
@OPTIMIZERS.register("my_optimizer")
def make(groups, options):
    return {returned}
@STRATEGIES.register("my_strategy")
def strategy(ranks, config):
    return {returned}
"""
CALLED = {
    "attention kernel 'my_kernel'": "model.attention=my_kernel",
    "optimizer 'my_optimizer'": "optimizer.name=my_optimizer",
}


@pytest.mark.parametrize(
    ("entry", "returned", "found"),
    [
        *(("attention kernel 'my_kernel'", *case) for case in (
            ("None", "NoneType"), ("(q, None)", "tuple"), ("q[:, :1]", "(3, 1, "), ("q.double()", "float64"),
            ("q.to('meta')", "on meta"), ("q", "wrong attention: relative error"),
            ("q.detach()", "a tensor without a gradient"),
            ("q * float('nan')", "wrong attention: relative error nan"),
        )),
        ("optimizer 'my_optimizer'", "None", "NoneType"),
        ("optimizer 'my_optimizer'", "torch.nn.Linear(1, 1)", "Linear without param_groups"),
        ("optimizer 'my_optimizer'", "torch.optim.LBFGS(groups[0]['params'])", "closure"),
    ],
)  # fmt: skip
def test_what_a_plugin_returns_is_checked(plugin, entry, returned, found, terminal):
    plugin.write_text(RETURNS.format(returned=returned))
    says = [f"{plugin}: {entry} returned", found]
    command = f"train tiny.toml --set {CALLED[entry]} --plugin {plugin}"
    terminal.refuses(command, code="plugin.returned", says=says, exit_code=1)


@pytest.mark.parametrize("returned", ["None", "1j", "'1'", "True", "float('nan')"])
def test_what_a_schedule_returns_is_checked(returned):
    @SCHEDULES.register("my_schedule")
    def schedule(step, **options):
        return eval(returned)

    with raises(LmkitError, "plugin.returned", __file__, "schedule 'my_schedule'", "not a finite number"):
        learning_rate(OptimizerConfig(schedule="my_schedule"), 10)(0, None)


@pytest.mark.parametrize("code", ["", "3", "'done'"])
def test_a_plugin_that_exits_ends_in_one_line(plugin, code, terminal):
    plugin.write_text(RETURNS.format(returned=f"exit({code})"))
    command = f"train tiny.toml --set model.attention=my_kernel --plugin {plugin}"
    terminal.refuses(command, code="command.ended", says=[code.strip("'")], exit_code=1)


def test_what_a_joined_kernel_returns_is_checked(plugin):
    """Of 2 heads of 4 and 1 for keys and values, 16 numbers."""
    plugin.write_text(RETURNS.format(returned="q"))
    load_plugin(plugin)
    qkv, sizes = torch.ones(1, 3, 16), {"kv_heads": 1, "head_dim": 4}
    assert joined_function("my_kernel")(qkv, **sizes, first=8).shape == (1, 3, 8)
    with raises(LmkitError, "plugin.returned", f"{plugin}: attention kernel 'my_kernel'", "(1, 3, 9)"):
        joined_function("my_kernel")(qkv, **sizes, first=7)


SIZES = {"vocab_size": 8, "context_length": 16, "d_model": 16, "d_ff": 16, "num_layers": 1, "num_heads": 2}


def check_training(found, **model):
    """Look at what a model computes before it trains, and expect this fault, or none."""
    recipe = Recipe(model=ModelConfig(**SIZES | model), train=TrainConfig(precision="fp32"))
    with raises(LmkitError, "plugin.returned", found) if found else nullcontext():
        check_device(recipe, torch.device("cpu"))


def right(q, k, v, *, causal, scale=None, first=None):
    return reference(q, k, v, causal=causal, scale=scale, first=first)


def forgets_its_inputs(q, k, v, *, causal, scale=None):
    return reference(*(x.detach().requires_grad_() for x in (q, k, v)), causal=causal, scale=scale)


@functools.cache
def remembered(shape):
    return []


def remembers_without_gradients(q, k, v, *, causal, scale=None):
    out = reference(q, k, v, causal=causal, scale=scale)
    if torch.is_grad_enabled():
        return out
    remembered(q.shape).append(out)
    return remembered(q.shape)[0]


def wrong_for_three(q, k, v, *, causal, scale=None):
    return reference(q, k, v, causal=causal, scale=scale) * (1 if len(q) < 3 else 2)


def joined_without_groups(qkv, *, kv_heads, head_dim):
    heads = qkv.unflatten(-1, (-1, head_dim)).transpose(1, 2)
    q, k, v = heads.split((heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    k, v = (x[:, :1].expand_as(q) for x in (k, v))
    return reference(q, k, v, causal=True).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("kernel", "facts", "found"),
    [
        *((right, {}, ""), (right, {"windows": True}, ""), (gradient_dropped, {}, "wrong gradients: ")),
        (forgets_its_inputs, {}, "wrong gradients: "),
        (wrong_without_gradients, {}, "wrong attention under no_grad: "),
        (remembers_without_gradients, {}, "wrong attention under no_grad: "),
        (wrong_for_three, {}, "wrong attention: "),
        (first_forgotten, {"windows": True}, "wrong attention with first=: "),
        (first_forgotten, {"sees_all": False}, ""),
        (right, {"joined": f"{__name__}:joined_without_groups"}, "wrong attention of a joined projection: "),
    ],
)
def test_values_of_a_kernel_are_checked_before_it_trains(plugin, kernel, facts, found):
    ATTENTION.register("my_kernel", **facts)(kernel)
    check_training(found, attention="my_kernel", context_length=32, d_model=32, num_heads=4, num_kv_heads=2)


class Copies(Operations):
    def swiglu(self, joint, *, casts=False):
        gate, up = joint.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up


class CentredNorm(Operations):
    def add_rms_norm(self, x, delta, gain, eps):
        total = x if delta is None else x + delta
        return total, torch.nn.functional.layer_norm(total, total.shape[-1:]) * gain


class NormWithoutGradientOfGains(Operations):
    def add_rms_norm(self, x, delta, gain, eps):
        return super().add_rms_norm(x, delta, gain.detach() + 0 * gain, eps)


@pytest.mark.parametrize(
    ("operations", "found"),
    [(Copies, ""), (CentredNorm, "wrong gradients of "), (NormWithoutGradientOfGains, "ln1.weight")],
)
def test_values_of_operations_are_checked_before_they_train(operations, found):
    OPERATIONS.register("my_operations")(operations)
    state = torch.get_rng_state()
    check_training(found, operations="my_operations")
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("returned", ["None", "object()"])
def test_what_a_strategy_returns_is_checked(plugin, returned):
    plugin.write_text(RETURNS.format(returned=returned))
    load_plugin(plugin)
    with raises(LmkitError, "plugin.returned", f"{plugin}: strategy 'my_strategy'", "no Strategy"):
        build_strategy("my_strategy", Ranks())


def test_a_strategy_that_returns_no_indices_is_named(plugin):
    """And one whose `attach` returns no model."""

    @STRATEGIES.register("my_strategy")
    class Mine(Strategy):
        returned: object = None

        def _reduce(self, unused, *, wait):
            return self.returned

    made = build_strategy("my_strategy", Ranks(world_size=2))
    for made.returned in (None, "abc", [7], 3):
        with raises(LmkitError, "plugin.returned", __file__, "_reduce"):
            made.finish()
    Mine.attach = lambda self, model, **_: None
    with raises(LmkitError, "plugin.returned", __file__, "NoneType without loss"):
        build_step(ModelConfig(**SIZES), Ranks(), parallel=ParallelConfig(strategy="my_strategy"))


def test_under_autocast_a_kernel_may_return_the_dtype_of_its_products(plugin):
    ATTENTION.register("my_kernel")(product)
    q = torch.ones(1, 1, 2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert attention_function("my_kernel")(q, q, q, causal=True).dtype == torch.bfloat16


def product(q, k, v, *, causal, scale=None):
    return q @ k.mT @ v
