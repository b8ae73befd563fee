"""Continue prompts with a trained model."""

from __future__ import annotations

import codecs
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lmkit.errors import LmkitError, UsageError
from lmkit.generation.kv_cache import KVCache
from lmkit.generation.sampling import sample
from lmkit.model.transformer import TransformerLM
from lmkit.recipe.tables import GenerateConfig
from lmkit.registry import ATTENTION
from lmkit.tokenizer import Tokenizer

log = logging.getLogger("lmkit")


@dataclass(frozen=True)
class Generation:
    """A prompt and its continuation.

    Attributes:
        prompt: as it was given.
        text: what follows the prompt.
        tokens: the ids of `text`.
        ended: True if the model ended the text with end-of-text, False if `max_new_tokens` did.
    """

    prompt: str
    text: str
    tokens: tuple[int, ...]
    ended: bool


def generate(
    model: TransformerLM,
    tokenizer: Tokenizer,
    prompts: str | Sequence[str],
    options: GenerateConfig = GenerateConfig(),  # noqa: B008  frozen
    *,
    allow_special: bool = False,
    on_text: Callable[[int, str], None] | None = None,
) -> list[Generation]:
    """Continue each prompt.

        options = GenerateConfig(max_new_tokens=100, temperature=0.8, top_p=0.95)
        generate(model, tokenizer, ["Once upon a time"], options)[0].text

    - An empty prompt starts from end-of-text, that is, with a new document.
    - A prompt longer than the context is cut to its last `context_length - 1` tokens, with a warning in the log.
    - A text that outgrows the context continues from its last half, which is read again as if nothing came before.
      Each later token thus sees between a half and a whole context.
    - Prompt i draws from its own random stream, seeded by `seed + i`; other prompts in the batch do not change it.

    Args:
        prompts: a string is one prompt.
        options: the recipe's table `[generate]`; its own `prompts` are not read.
        allow_special: encode special tokens in prompts as such; by default they are plain text.
        on_text: called with the number of a prompt and each piece of its text as soon as it is known. Pieces hold
            whole characters; where a text ends inside a character, the last piece is U+FFFD.

    Raises:
        UsageError: a prompt is empty and the tokenizer has no end-of-text.
        LmkitError: the logits are not finite.
    """
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    starts = [_prompt_ids(model, tokenizer, prompt, allow_special=allow_special) for prompt in prompts]
    streams = [TextStream(tokenizer) for _ in prompts]
    tokens: list[list[int]] = [[] for _ in prompts]
    pieces: list[list[str]] = [[] for _ in prompts]

    def emit(row: int, piece: str) -> None:
        if piece:
            pieces[row].append(piece)
            if on_text is not None:
                on_text(row, piece)

    stop_id = tokenizer.end_of_text_id if options.stop_at_end else None
    ended = [False] * len(prompts)
    for row, token in generate_tokens(
        model,
        starts,
        options,
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
    options: GenerateConfig,
    *,
    vocab_size: int | None = None,
    never: Sequence[int] = (),
    stop_id: int | None = None,
) -> Iterator[tuple[int, int]]:
    """Yield (number of the prompt, token) as tokens are drawn.

    `generate` says what happens at the end of the context, and how random numbers are drawn.

    Args:
        prompts: token ids, at least one each and at most `context_length`.
        vocab_size: draw ids below it (a model may have more rows than the tokenizer has tokens).
        never: ids that are not drawn (a vocabulary may have gaps).
        stop_id: ends a row after it was yielded; `options.max_new_tokens` ends the others.

    Raises:
        LmkitError: the logits are not finite.
    """
    device, dtype = model.lm_head.weight.device, model.lm_head.weight.dtype
    cache = KVCache(model.config, batch=len(prompts), device=device, dtype=dtype)
    texts = [list(prompt) for prompt in prompts]
    # (batch, max_new_tokens)
    uniforms = _random_streams(options.seed, len(prompts), options.max_new_tokens).to(device)
    active = list(range(len(prompts)))
    rereads = not ATTENTION.facts(model.config.attention).sees_all
    gaps = torch.tensor(never, dtype=torch.int64, device=device)
    logits = torch.zeros(len(prompts), model.lm_head.out_features, device=device, dtype=dtype)

    for number in range(options.max_new_tokens):
        if not active:
            return
        if number == 0:
            _prefill(model, cache, active, texts, logits)
        else:
            full = [row for row in active if cache.lengths[row] == cache.context_length]
            again = active if rereads else full
            growing = [row for row in active if row not in again]
            if growing:
                logits.copy_(_decode(model, cache, growing, texts))
            if again:
                windows = list(texts)
                for row in again:
                    kept = max(1, cache.context_length // 2) if row in full else cache.lengths[row] + 1
                    windows[row] = texts[row][-kept:]
                _prefill(model, cache, again, windows, logits)
        if len(gaps):
            logits.index_fill_(1, gaps, -math.inf)
        if not torch.isfinite(logits[active, :vocab_size].amax(dim=-1)).all():
            raise LmkitError(
                "generate.not_finite",
                "the model's predictions are not finite numbers",
                hint="its training diverged; use an older checkpoint",
            )
        drawn = sample(logits[:, :vocab_size], uniforms[:, number], options).tolist()
        for row in tuple(active):
            texts[row].append(drawn[row])
            if drawn[row] == stop_id:
                active.remove(row)
            yield row, drawn[row]


class TextStream:
    """Decodes the tokens of a text one by one.

    A token may end inside a character: its bytes are held back until the rest has come. Bytes that cannot become a
    character turn into U+FFFD, as in `Tokenizer.decode`; the pieces joined equal the whole text decoded.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """Return the characters that this token completes, perhaps none."""
        return self._decoder.decode(self._tokenizer.decode_bytes([token]))

    def finish(self) -> str:
        """Return U+FFFD if the text ended inside a character, else nothing."""
        return self._decoder.decode(b"", final=True)


def _prompt_ids(model: TransformerLM, tokenizer: Tokenizer, prompt: str, *, allow_special: bool) -> list[int]:
    if not prompt:
        if tokenizer.end_of_text_id is None:
            raise UsageError(
                "generate.empty_prompt",
                "generate.prompts: an empty prompt starts from end-of-text, which this tokenizer does not have",
                hint="give a prompt",
            )
        return [tokenizer.end_of_text_id]
    allowed = "all" if allow_special else frozenset()
    text = tokenizer.encode(prompt, allowed_special=allowed, add_special_tokens=False)
    ids = [*tokenizer.prefix, *text]  # no suffix: the text goes on
    room = max(1, model.config.context_length - 1)
    if len(ids) > room:
        log.warning("the prompt has %d tokens: only the last %d fit into the context", len(ids), room)
    return ids[-room:]


def _random_streams(seed: int, rows: int, length: int) -> Tensor:
    """Return numbers from [0, 1), (rows, length), the same on every device."""
    streams = [torch.rand(length, generator=torch.Generator().manual_seed(seed + row)) for row in range(rows)]
    return torch.stack(streams) if streams else torch.zeros(0, length)


@torch.inference_mode()
def _prefill(
    model: TransformerLM, cache: KVCache, rows: list[int], texts: Sequence[Sequence[int]], logits: Tensor
) -> None:
    """Read the whole texts of these rows; write the logits of the tokens that follow them into `logits`."""
    lengths = [len(texts[row]) for row in rows]
    ids = torch.zeros(len(rows), max(lengths), dtype=torch.int64)
    for index, row in enumerate(rows):
        ids[index, : lengths[index]] = torch.tensor(texts[row])
    # (rows, seq, d_model)
    hidden = model.hidden_states(ids.to(logits.device), cache.prefill(rows, lengths))
    last = hidden[torch.arange(len(rows)), torch.tensor(lengths) - 1]  # (rows, d_model)
    logits[rows] = model.lm_head(last).to(logits.dtype)


@torch.inference_mode()
def _decode(model: TransformerLM, cache: KVCache, rows: list[int], texts: Sequence[Sequence[int]]) -> Tensor:
    """Read the last token of every text; return the next logits (batch, vocab_size), valid for `rows` only."""
    ids = torch.tensor([[text[-1]] for text in texts]).to(cache.keys.device)  # (batch, 1)
    return model(ids, cache.decode(rows))[:, -1]
