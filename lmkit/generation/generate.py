"""Prompts in, text out."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lmkit.errors import LmkitError, UsageError
from lmkit.generation.kv_cache import KVCache
from lmkit.generation.sampling import Sampling, choose
from lmkit.generation.text_stream import TextStream
from lmkit.model.transformer import TransformerLM
from lmkit.tokenizer import Tokenizer

log = logging.getLogger("lmkit")


@dataclass(frozen=True)
class Generation:
    """What a model wrote.

    Attributes:
        prompt: as it was given.
        text: what follows the prompt.
        tokens: the ids of `text`.
        ended: True where the model closed the document, False where `max_new_tokens` did.
    """

    prompt: str
    text: str
    tokens: tuple[int, ...]
    ended: bool


def generate(
    model: TransformerLM,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    sampling: Sampling = Sampling(),  # noqa: B008  frozen
    seed: int = 0,
    stop_at_end: bool = True,
    allow_special: bool = False,
    on_text: Callable[[int, str], None] | None = None,
) -> list[Generation]:
    """Continue each prompt.

    - An empty prompt starts from end-of-text: a new document.
    - Of a prompt longer than the context the last `context_length - 1` tokens are used, with a warning in the log.
    - A text that outgrows the context goes on from its last half: those tokens are read anew as if nothing came
      before. Each later token thus sees between a half and a whole context.
    - Prompt i draws from a random stream of its own, seeded by `seed + i`: what else is in the batch changes nothing.

    Args:
        max_new_tokens: per prompt.
        stop_at_end: end a text at end-of-text, which is not part of it; otherwise write on.
        allow_special: read special tokens in prompts as such; otherwise they are plain text.
        on_text: called with the number of a prompt and each piece of its text as soon as it is there. Pieces hold
            whole characters; where a text ends inside one, the last piece is U+FFFD.

    Raises:
        UsageError: fewer than one token is asked for, or a prompt is empty and the tokenizer has no end-of-text.
        LmkitError: the model's predictions are not finite numbers.
    """
    starts = [_prompt_ids(model, tokenizer, prompt, allow_special=allow_special) for prompt in prompts]
    streams = [TextStream(tokenizer) for _ in prompts]
    tokens: list[list[int]] = [[] for _ in prompts]
    pieces: list[list[str]] = [[] for _ in prompts]

    def emit(row: int, piece: str) -> None:
        if piece:
            pieces[row].append(piece)
            if on_text is not None:
                on_text(row, piece)

    stop_id = tokenizer.end_of_text_id if stop_at_end else None
    ended = [False] * len(prompts)
    for row, token in generate_tokens(
        model,
        starts,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        seed=seed,
        vocab_size=tokenizer.vocab_size,
        never=[number for number in range(tokenizer.vocab_size) if number not in tokenizer.vocab],
        stop_id=stop_id,
    ):
        if token == stop_id:
            ended[row] = True
        else:
            tokens[row].append(token)
            emit(row, streams[row].push(token))
    for row, stream in enumerate(streams):
        emit(row, stream.finish())
    return [
        Generation(prompt, "".join(pieces[row]), tuple(tokens[row]), ended[row])
        for row, prompt in enumerate(prompts)
    ]


def generate_tokens(
    model: TransformerLM,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int = 0,
    vocab_size: int | None = None,
    never: Sequence[int] = (),
    stop_id: int | None = None,
) -> Iterator[tuple[int, int]]:
    """Yield (number of the prompt, token) as they are drawn; a row ends with `stop_id` or after `max_new_tokens`.

    Args:
        prompts: token ids, at least one each and at most `context_length`.
        vocab_size: draw ids below this one (a model may have more rows than the tokenizer has tokens).
        never: ids that are not drawn (a vocabulary may have gaps).

    See `generate` for what happens at the end of the context and for the random streams.

    Raises:
        UsageError: fewer than one token is asked for.
        LmkitError: the model's predictions are not finite numbers.
    """
    if max_new_tokens < 1:
        raise UsageError(
            f"generate.max_new_tokens: must be 1 or more, got {max_new_tokens}", hint="ask for some tokens"
        )
    device, dtype = model.lm_head.weight.device, model.lm_head.weight.dtype
    cache = KVCache(model.config, batch=len(prompts), device=device, dtype=dtype)
    texts = [list(prompt) for prompt in prompts]
    uniforms = _random_streams(seed, len(prompts), max_new_tokens).to(device)  # (batch, max_new_tokens)
    active = list(range(len(prompts)))
    gaps = torch.tensor(never, dtype=torch.int64, device=device)
    logits = torch.zeros(len(prompts), model.lm_head.out_features, device=device, dtype=dtype)

    for number in range(max_new_tokens):
        if not active:
            return
        if number == 0:
            _read(model, cache, active, texts, logits)
        else:
            growing = [row for row in active if cache.lengths[row] < cache.context_length]
            full = [row for row in active if cache.lengths[row] == cache.context_length]
            if growing:
                logits.copy_(_extend(model, cache, growing, texts))
            if full:
                kept = max(1, cache.context_length // 2)
                windows = [texts[row][-kept:] if row in full else [] for row in range(len(texts))]
                _read(model, cache, full, windows, logits)
        if len(gaps):
            logits.index_fill_(1, gaps, -math.inf)
        if not torch.isfinite(logits[active, :vocab_size].amax(dim=-1)).all():
            raise LmkitError(
                "the model's predictions are not finite numbers",
                hint="its training diverged; take an older checkpoint",
            )
        chosen = choose(logits[:, :vocab_size], uniforms[:, number], sampling).tolist()
        for row in tuple(active):
            texts[row].append(chosen[row])
            if chosen[row] == stop_id:
                active.remove(row)
            yield row, chosen[row]


def _prompt_ids(model: TransformerLM, tokenizer: Tokenizer, prompt: str, *, allow_special: bool) -> list[int]:
    if not prompt:
        if tokenizer.end_of_text_id is None:
            raise UsageError(
                "generate.prompts: an empty prompt starts from end-of-text, which this tokenizer does not have",
                hint="give a prompt",
            )
        return [tokenizer.end_of_text_id]
    ids = tokenizer.encode(prompt, allowed_special="all" if allow_special else frozenset())
    room = max(1, model.config.context_length - 1)
    if len(ids) > room:
        log.warning("the prompt has %d tokens: only the last %d fit into the context", len(ids), room)
    return ids[-room:]


def _random_streams(seed: int, rows: int, length: int) -> Tensor:
    """(rows, length) numbers from [0, 1), the same on every device."""
    streams = [torch.rand(length, generator=torch.Generator().manual_seed(seed + row)) for row in range(rows)]
    return torch.stack(streams) if streams else torch.zeros(0, length)


@torch.inference_mode()
def _read(
    model: TransformerLM, cache: KVCache, rows: list[int], texts: Sequence[Sequence[int]], logits: Tensor
) -> None:
    """Read the whole texts of these rows; put the logits of what follows them into `logits`."""
    lengths = [len(texts[row]) for row in rows]
    ids = torch.zeros(len(rows), max(lengths), dtype=torch.int64)
    for index, row in enumerate(rows):
        ids[index, : lengths[index]] = torch.tensor(texts[row])
    hidden = model.hidden_states(ids.to(logits.device), cache.start(rows, lengths))
    last = hidden[torch.arange(len(rows)), torch.tensor(lengths) - 1]  # (rows, d_model)
    logits[rows] = model.lm_head(last).to(logits.dtype)


@torch.inference_mode()
def _extend(model: TransformerLM, cache: KVCache, rows: list[int], texts: Sequence[Sequence[int]]) -> Tensor:
    """Read the last token of every text; logits of what follows, (batch, vocab_size), of use for `rows` only."""
    ids = torch.tensor([[text[-1]] for text in texts]).to(cache.keys.device)
    return model(ids, cache.extend(rows))[:, -1]
