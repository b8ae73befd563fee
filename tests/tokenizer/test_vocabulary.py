"""The vocabulary of a recipe's model, before anything is encoded."""

import pytest

from lmkit.recipe.load import load_recipe
from lmkit.tokenizer import Tokenizer
from lmkit.tokenizer.vocabulary import required_model, vocabulary_of


def test_fault_169_a_named_tokenizer_says_how_large_the_vocabulary_is(tmp_path):
    path = tmp_path / "tokenizer.json"
    Tokenizer.from_merges([(b"h", b"e")], ["<|endoftext|>"]).save(path)
    recipe = load_recipe("finetune", [f"tokenizer.path={path}"])
    assert required_model(recipe, command="plan").vocab_size == 258


@pytest.mark.parametrize(
    ("overrides", "size"),
    [
        ([], 4096),  # what [tokenizer] asks for
        (["model.vocab_size=5000"], 5000),
        (["tokenizer.path=not_yet_there.json"], 4096),
    ],
)
def test_where_no_tokenizer_is_read(overrides, size):
    recipe = load_recipe("quickstart", ["tokenizer.vocab_size=4096", *overrides])
    assert vocabulary_of(recipe) == size
