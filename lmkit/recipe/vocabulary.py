"""Facts about every vocabulary, for recipes and the tokenizer. (Nothing heavy is loaded here.)"""

from __future__ import annotations

END_OF_TEXT = "<|endoftext|>"
"""The special token that ends a text, in tokenizers that lmkit trains."""
NUM_BYTES = 256
"""The first tokens of every vocabulary: one per byte."""
MAX_TOKEN_BYTES = 256
"""Default of `tokenizer.max_token_bytes`."""
MAX_VOCABULARY = (1 << 20) - 1
"""The merge search packs an id into 20 bits and needs one value for "no token"."""
