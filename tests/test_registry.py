"""Registries know names and facts without importing what they name; code from outside registers in one file."""

import subprocess
import sys

import pytest
from raising import raises

from lmkit import plugins
from lmkit.errors import UsageError
from lmkit.registry import ATTENTION, STRATEGIES, KernelFacts, Registry

PLUGIN = """
from lmkit.registry import ATTENTION

@ATTENTION.register("from_outside", masks=True, aliases=("out",))
def from_outside(q, k, v, *, causal, scale=None):
    return v
"""
USES_IT = "recipe validate quickstart --set model.attention=from_outside"


@pytest.fixture
def plugin(tmp_path):
    path = tmp_path / "my_kernels.py"
    path.write_text(PLUGIN)
    return path


def test_names_and_facts_are_known_without_torch():
    code = (
        "import sys; from lmkit.registry import ATTENTION, STRATEGIES;"
        "print(ATTENTION.names, STRATEGIES.facts('zero1').shards, 'torch' in sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    names = "('reference', 'vectorized', 'flash_torch', 'flash_triton', 'sdpa', 'flash_cuda')"
    assert told == f"{names} ('optimizer',) False\n"


@pytest.mark.parametrize("kind", [ATTENTION, STRATEGIES])
def test_what_is_read_from_the_source_is_what_the_decorator_registers(kind):
    for name in kind.names:
        if name == "flash_triton":
            pytest.importorskip("triton")
        thing = kind.load(name)
        assert kind.entries[name].attribute == thing.__name__


def test_a_recipe_may_name_what_a_plugin_registers(plugin, terminal):
    terminal.refuses(USES_IT, code="recipe.wrong_value")
    terminal(f"{USES_IT} --plugin {plugin} --plugin {plugin}")
    assert [plugin] == plugins.PLUGINS
    assert ATTENTION.names[-1] == ATTENTION.entry("out").name == "from_outside"
    assert ATTENTION.facts("out").masks
    assert ATTENTION.load("from_outside")(1, 2, 3, causal=True) == 3


@pytest.mark.parametrize(
    ("content", "code"),
    [
        *((None, "plugin.missing"), ("1 +", "plugin.failed"), ("import nothing", "plugin.failed")),
        ("exit(0)", "plugin.failed"),
    ],
)
def test_a_plugin_that_cannot_be_imported_is_one_error(plugin, content, code, terminal):
    plugin.unlink()
    if content is not None:
        plugin.write_text(content)
    terminal.refuses(f"{USES_IT} --plugin {plugin}", code=code, says=[str(plugin)])


def test_a_fact_that_names_no_function_is_refused(plugin):
    plugin.write_text(PLUGIN + "\ndef no_suck(q): ...\n")
    plugins.load_plugin(plugin)
    with raises(UsageError, "registry.no_function", plugin, "from_outside", "no_such", hint="no_suck"):
        ATTENTION.function_of("from_outside", "no_such")


@pytest.mark.parametrize(
    ("name", "facts", "code"),
    [
        ("sdpa", {}, "registry.name_taken"),
        ("scaled_dot_prod_attention", {}, "registry.name_taken"),  # an alias of reference
        ("mine", {"aliases": ("flash_torch",)}, "registry.name_taken"),
        ("mine:fast", {}, "registry.wrong_name"),
        ("", {}, "registry.wrong_name"),
    ],
)
def test_neither_names_nor_aliases_are_given_twice(name, facts, code):
    with raises(UsageError, code, name if code == "registry.wrong_name" else "already"):
        ATTENTION.register(name, **facts)(test_neither_names_nor_aliases_are_given_twice)
    assert "mine" not in ATTENTION.names


def test_unknown_names_are_refused_with_the_nearest():
    with raises(UsageError, "registry.unknown_name", "flash_triton"):
        ATTENTION.load("flash_tritn")


def test_several_decorators_and_classes_are_found(tmp_path, monkeypatch):
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "two.py").write_text(
        '@LAB.register("second", order=2)\nclass Second:\n    pass\n\n\n'
        '@LAB.register(\n    "first",\n    order=1,\n    aliases=("one", "uno"),\n)\n@other\ndef first(): ...\n'
    )
    monkeypatch.setattr("lmkit.registry._PACKAGE", tmp_path)
    lab = Registry("LAB", "thing", KernelFacts, "lab")
    assert lab.names == ("first", "second")
    assert lab.aliases == {"one": "first", "uno": "first"}
