"""Byte-level BPE: train it, encode and decode with it, read and write its files. Free of torch."""

from lmkit.recipe.vocabulary import END_OF_TEXT
from lmkit.tokenizer.tokenizer import Tokenizer
from lmkit.tokenizer.training import train_tokenizer

__all__ = ["END_OF_TEXT", "Tokenizer", "train_tokenizer"]
