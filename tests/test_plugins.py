"""Errors that the code of plugins raises are one line that names the entry, the file and the line."""

import pytest
from tiny import RANDOM_TOKENS, tiny_recipe

from lmkit import plugins
from lmkit.plugins import plugin_error
from lmkit.registry import ATTENTION, BENCHES, OPTIMIZERS, SCHEDULES

PLUGIN = """
from torch.optim import SGD

from lmkit.recipe.tables import Table
from lmkit.registry import ATTENTION, BENCHES, OPTIMIZERS, SCHEDULES


class Ends(BaseException): ...


class Options(Table): ...


@ATTENTION.register("my_kernel")
def my_kernel(q, k, v, *, causal, scale=None):
    raise Ends("kernel")


@SCHEDULES.register("my_schedule")
def schedule(step, **options):
    return 1 / 0


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
def plugin(tmp_path, monkeypatch):
    path = tmp_path / "mine.py"
    path.write_text(PLUGIN)
    (tmp_path / "tiny.toml").write_text(tiny_recipe(*RANDOM_TOKENS, "train.steps=2", "train.batch_size=2"))
    monkeypatch.setattr(plugins, "PLUGINS", [])
    yield path
    for registry in (ATTENTION, BENCHES, OPTIMIZERS, SCHEDULES):
        for name in [name for name in registry.names if name.startswith("my_")]:
            registry.unregister(name)


@pytest.mark.parametrize(
    ("command", "entry", "error"),
    [
        ("train tiny.toml --set model.attention=my_kernel", "attention kernel 'my_kernel'", "Ends: kernel"),
        ("train tiny.toml --set optimizer.schedule=my_schedule", "'my_schedule'", "ZeroDivisionError: "),
        ("train tiny.toml --set optimizer.name=my_optimizer", "'my_optimizer'", "KeyError: 'no such key'"),
        ("bench my-bench", "bench 'my_bench'", "Ends: bench"),
    ],
)
def test_what_a_plugin_raises_is_one_line(plugin, command, entry, error, terminal):
    refused = terminal.refuses(
        f"{command} --plugin {plugin}", code="plugin.raised", says=[entry, f"{plugin}:", error], exit_code=1
    )
    assert "--debug" in refused.hint


def test_a_bench_that_returns_no_rows_is_one_line(plugin, terminal):
    says = ["'my_empty_bench'", str(plugin), "NoneType"]
    terminal.refuses(f"bench my-empty-bench --plugin {plugin}", code="bench.no_rows", says=says, exit_code=1)


def test_errors_of_other_code_and_signals_are_no_plugins():
    for error in (ValueError("ours"), KeyboardInterrupt()):
        assert plugin_error(error) is None
