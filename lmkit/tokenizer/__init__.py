"""Byte-level BPE: train a tokenizer, encode and decode text, read and write tokenizer files.

>>> from lmkit.tokenizer import Tokenizer, learn_merges
>>> learn_merges({b"low": 5, b"lower": 2, b"newest": 6, b"widest": 3}, 3)
[(b's', b't'), (b'e', b'st'), (b'o', b'w')]
>>> Tokenizer.from_merges([(b"s", b"t"), (b"e", b"st"), (b"o", b"w")]).encode("lowest")
[108, 258, 257]

Nothing here imports torch.
"""

from typing import TYPE_CHECKING

from lmkit import lazy

if TYPE_CHECKING:
    from lmkit.core.bpe import learn_merges as learn_merges
    from lmkit.tokenizer.pretokenize import END_OF_TEXT as END_OF_TEXT
    from lmkit.tokenizer.pretokenize import PATTERN as PATTERN
    from lmkit.tokenizer.pretokenize import split_words as split_words
    from lmkit.tokenizer.tokenizer import Tokenizer as Tokenizer
    from lmkit.tokenizer.training import inspect_tokenizer as inspect_tokenizer
    from lmkit.tokenizer.training import train_tokenizer as train_tokenizer

__getattr__, __dir__, __all__ = lazy.exports(
    __name__,
    {
        "tokenizer": ("Tokenizer",),
        "training": ("train_tokenizer", "inspect_tokenizer"),
        "lmkit.core.bpe": ("learn_merges",),
        "pretokenize": ("split_words", "PATTERN", "END_OF_TEXT"),
    },
)
