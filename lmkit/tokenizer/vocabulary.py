"""What a recipe says of its tokenizer: the size of the vocabulary, the token that ends a text, the chat template."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lmkit.errors import UsageError
from lmkit.recipe import END_OF_TEXT
from lmkit.recipe.load import required
from lmkit.recipe.recipe import Recipe
from lmkit.recipe.run_folder import CHAT_TEMPLATE
from lmkit.recipe.tables import ModelConfig, TokenizerConfig
from lmkit.tokenizer.marks import NO_MARKS, resolve_marks
from lmkit.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from lmkit.tokenizer.chat import ChatTemplate


def vocabulary_of(recipe: Recipe) -> int | None:
    """Return what [model] says, else the size of the tokenizer at `path` if it is there, or its `vocab_size`."""
    if recipe.model is not None and recipe.model.vocab_size is not None:
        return recipe.model.vocab_size
    table = recipe.tokenizer
    if table is None:
        return None
    if table.path is not None and table.path.is_file():
        return Tokenizer.load(table.path).vocab_size
    return table.vocab_size


def end_of_text_of(recipe: Recipe) -> str | None:
    """Return the token that ends a document in the tokenizer of a recipe; None if it has none."""
    table = recipe.tokenizer
    if table is not None and table.end_of_text is not None:
        return table.end_of_text
    if table is None or table.path is None:
        special_tokens = (END_OF_TEXT,) if table is None else table.special_tokens
        return resolve_marks(NO_MARKS, dict.fromkeys(special_tokens, 0)).end
    return Tokenizer.load(table.path).marks.end


def awaited_tokenizer(recipe: Recipe) -> Path | None:
    """Return the tokenizer that will say how large the vocabulary is; None: that is known already."""
    table = recipe.tokenizer
    decided = recipe.model is not None and recipe.model.vocab_size is not None
    return None if decided or table is None or table.path is None or table.path.is_file() else table.path


def required_model(recipe: Recipe, *, command: str) -> ModelConfig:
    """Return the table [model] with its vocabulary; UsageError: nothing says how large that is."""
    model = required(recipe.model, "model", recipe, command=command)
    size = vocabulary_of(recipe)
    if size is None:
        message = f"{recipe.origin}: `lmkit {command}` needs model.vocab_size, or a [tokenizer] that gives it"
        raise UsageError("recipe.no_vocabulary", message, hint="for example --set model.vocab_size=10000")
    return model.changed(vocab_size=size)


def template_for(table: TokenizerConfig, tokenizer: Tokenizer, *, source: str) -> ChatTemplate | None:
    """Return the chat template that a recipe names, else the one beside its tokenizer, else `plain` if the corpus is
    conversations; None for other corpora."""
    is_beside = table.path is not None and table.path.with_name(CHAT_TEMPLATE).is_file()
    if table.chat_template is None and not is_beside and source != "chat":
        return None
    from lmkit.tokenizer.chat import beside, named_template

    found = None if table.chat_template is not None else beside(table.path)
    return found or named_template(table.chat_template or "plain", tokenizer)
