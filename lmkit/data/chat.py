"""Conversations: JSON lines of messages -> a token file with a mask, in which the assistant's words count."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lmkit.data.corpora import opened
from lmkit.data.json_lines import json_records, messages_of
from lmkit.data.token_files import TokenFileWriter, TokenMeta
from lmkit.errors import UsageError
from lmkit.measure.progress import Progress
from lmkit.tokenizer import Tokenizer
from lmkit.tokenizer.chat import ChatTemplate, Part


def encode_chat(
    sources: Sequence[Path],
    output: Path,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    *,
    progress: Progress | None = None,
) -> TokenMeta:
    """Encode conversations, a JSON line each, into one token file with its mask.

    The assistant's words count, with the token that ends its turn. The end-of-text token ends every conversation,
    unless it ends its last message. A conversation is a document.

    Args:
        output: the token file; it is replaced.
        progress: called with ("encode", bytes done, bytes in all).

    Raises:
        UsageError: a line is no conversation (`messages_of`), or there is no word of an assistant to learn in all of
            them ("chat.no_answer").
        LmkitError: a line is not JSON, or not UTF-8.
    """
    end_of_text = tokenizer.end_of_text_id
    closing = [] if end_of_text in (None, tokenizer.special_ids[template.end]) else [end_of_text]
    sizes = [path.stat().st_size for path in sources]
    done = num_bytes = counted_bytes = 0
    digest = hashlib.sha256()
    with TokenFileWriter(
        output, vocab_size=tokenizer.vocab_size, tokenizer_sha256=tokenizer.sha256, masked=True
    ) as writer:
        for path, size in zip(sources, sizes, strict=True):
            with opened(path) as (source, stream):
                for where, record in json_records(stream, path):
                    messages = messages_of(record, where)
                    documents = [0]
                    for part, counts in [*template.encode(messages, tokenizer), Part(closing, False)]:
                        ids, text = np.array(part, np.int64), tokenizer.decode_bytes(part)
                        size_of_text = len(text) - tokenizer.specials_in(ids)[1]
                        num_bytes += size_of_text
                        counted_bytes += size_of_text * counts
                        digest.update(b"%d %d " % (len(text), counts) + text)
                        writer.append(ids, counts=counts, documents=documents if part else ())
                        documents = documents if not part else []
                    if progress is not None:
                        progress("encode", done + source.tell(), sum(sizes))
            done += size
        if not counted_bytes:
            hint = "conversations to learn from, and to hold out, need messages of the role assistant"
            raise UsageError("chat.no_answer", f"{sources[0]}: no words of an assistant", hint=hint)
        return writer.finish(
            num_bytes=num_bytes,
            source_sha256=digest.hexdigest(),
            counted_bytes=counted_bytes,
        )
