"""Read the text column of a Parquet file, a row group after another."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

from lmkit.data.formats import Stream, text_package
from lmkit.data.json_lines import LEARNED, is_learned
from lmkit.errors import LmkitError, UsageError, some_of
from lmkit.recipe.tables import CorpusConfig
from lmkit.tokenizer.chunks import Chunk, valid_utf8

_BYTES_AT_ONCE = 1 << 22  # of text that becomes Python's objects
_MOST_ROWS = 1 << 10  # at once: a column of equal texts looks small
_READ_BYTES = 1 << 20  # of a column at once; else all of a row group's
_TEXT = ("string", "large_string", "string_view")

log = logging.getLogger("lmkit")


def parquet_texts(stream: Stream, path: Path, table: CorpusConfig) -> Iterator[bytes]:
    """Yield the text of every row that has one and is learned (see `is_learned`), in memory that does not grow with
    the file. Rows without a text are counted in the log.

    UsageError: no such column, or it holds no text ("corpus.no_field"). LmkitError: a damaged file
    ("corpus.damaged_parquet"), or a text that is not UTF-8 ("text.not_utf8").
    """
    arrow, parquet = text_package("pyarrow", path), text_package("pyarrow.parquet", path)
    field, number, missing = table.field, 0, 0
    try:
        # `pre_buffer` would read all row groups, and keep them.
        parts = {"buffer_size": _READ_BYTES, "pre_buffer": False}
        file = parquet.ParquetFile(stream, **parts, page_checksum_verification=True)
        kinds = dict(zip(file.schema_arrow.names, file.schema_arrow.types, strict=True))
        kind = kinds.pop(field, None)
        is_indexed = kind is not None and arrow.types.is_dictionary(kind)
        if str(kind.value_type if is_indexed else kind) not in _TEXT:
            found = f'column "{field}" holds {kind}, no text'
            if kind is None:
                found = f'no column "{field}" (columns: {some_of(kinds, most=20)})'
            hint = "name the column that holds the text: corpus.field in a recipe, or --field"
            raise UsageError("corpus.no_field", f"{path}: {found}", hint=hint)
        weights = [name for name in LEARNED if name in kinds]
        if twice := [name for name in (field, *weights) if file.schema_arrow.names.count(name) > 1]:
            hint = "write the file again with other names of columns"
            raise UsageError("corpus.no_field", f'{path}: two columns "{twice[0]}"', hint=hint)
        for batch in file.iter_batches(_rows_at_once(file.metadata), columns=[field, *weights]):
            texts = batch[field].dictionary_decode() if is_indexed else batch[field]
            rows = batch.select(weights).to_pylist() if weights else repeat({}, len(texts))
            for text, row in zip(texts.cast(arrow.large_binary()).to_pylist(), rows, strict=True):
                number += 1
                where = f"{path}, row {number}"
                if text is None:
                    missing += 1
                elif is_learned(row, where):
                    yield valid_utf8(Chunk(0, 0, len(text), text), Path(where), table.errors)
    except NotImplementedError as error:  # pyarrow's
        hint = "write it again with another encoding, or as JSON lines"
        raise UsageError("corpus.parquet", f"{path}: {error}", hint=hint) from error
    except (arrow.ArrowException, UnicodeDecodeError, OSError) as error:  # names of columns are UTF-8, too
        if isinstance(error, OSError) and error.errno is not None:  # the disk's
            raise
        message = f"{path}: not a whole Parquet file ({error})"
        raise LmkitError("corpus.damaged_parquet", message, hint="make or download it again") from error
    if missing:
        log.warning("%s: %d of %d rows have no %s, and are left out", path, missing, number, field)


def _rows_at_once(metadata: Any) -> int:
    """Return how many rows of the group with the longest ones have about `_BYTES_AT_ONCE`."""
    # The sizes of columns are not asked for: in a damaged file, pyarrow 26 ends the process over them.
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    longest = max((group.total_byte_size / max(group.num_rows, 1) for group in groups), default=1)
    return max(1, min(int(_BYTES_AT_ONCE / max(longest, 1)), _MOST_ROWS))
