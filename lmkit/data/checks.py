"""Checks before batches are cut: token files long enough, documents known, ranks that divide the batch."""

from __future__ import annotations

import logging

import numpy as np

from lmkit.data.token_files import TokenFile
from lmkit.errors import UsageError

_log = logging.getLogger("lmkit")


def document_starts(file: TokenFile) -> np.ndarray:
    """Return the positions at which the documents of a token file begin.

    Raises:
        UsageError: the token file has no `.documents` file ("tokens.no_documents").
    """
    if file.documents is None:
        raise UsageError(
            "tokens.no_documents",
            f"{_name(file.tokens)}: no .documents beside it says where its documents begin",
            hint='copy it, too, or encode the text again; or use data.sampling = "windows"',
        )
    return file.documents


def starts_that_count(file: TokenFile, starts: np.ndarray, context_length: int) -> np.ndarray:
    """Return the document starts whose windows of `context_length` tokens have a target that counts.

    Raises:
        UsageError: no document is followed by enough tokens ("tokens.too_short"), or no target counts
            ("tokens.no_targets").
    """
    starts = starts[starts <= len(file.tokens) - context_length - 1]
    if len(starts) == 0:
        raise UsageError(
            "tokens.too_short",
            f"{_name(file.tokens)}: no document is followed by {context_length + 1} tokens",
            hint="lower model.context_length or sample raw windows",
        )
    if file.mask is None:
        return starts
    before = np.concatenate(([0], np.cumsum(np.unpackbits(file.mask)[: len(file.tokens)], dtype=np.int64)))
    places = starts.astype(np.int64)
    counts = before[places + context_length + 1] > before[places + 1]
    hint = 'raise model.context_length, or use data.sampling = "windows"'
    if not counts.any():
        message = f"{_name(file.tokens)}: no document has a target that counts among its first tokens"
        raise UsageError("tokens.no_targets", message, hint=hint)
    if lost := int((~counts).sum()):
        _log.warning(
            "%s: %d of %d documents begin with more tokens than the context, none of which counts; %s",
            _name(file.tokens),
            lost,
            len(starts),
            hint,
        )
    return starts[counts]


def check_divisible(batch_size: int, ranks: int, accumulation: int) -> None:
    """Refuse a batch that ranks x accumulation steps do not divide ("batches.indivisible")."""
    if batch_size % (ranks * accumulation):
        raise UsageError(
            "batches.indivisible",
            f"train.batch_size = {batch_size} is not divisible by {ranks} ranks x {accumulation} accumulation steps",
            hint=f"use a multiple of {ranks * accumulation}",
        )


def check_length(tokens: np.ndarray, context_length: int) -> None:
    """Refuse token ids that are too few for one window and its targets.

    Raises:
        UsageError: there are fewer than `context_length + 1` ids ("tokens.too_short"); names the file.
    """
    if len(tokens) < context_length + 1:
        raise UsageError(
            "tokens.too_short",
            f"{_name(tokens)}: {len(tokens)} tokens, but model.context_length + 1 = {context_length + 1}",
            hint="use a longer text or a shorter model.context_length",
        )


def _name(tokens: np.ndarray) -> str:
    filename = tokens.filename if isinstance(tokens, np.memmap) else None
    return "token file" if filename is None else str(filename)
