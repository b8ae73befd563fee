"""Continue prompts with a trained model."""

from __future__ import annotations

import codecs
import gc
import logging
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, methodcaller
from typing import Any, NamedTuple

import torch

from lmkit.core.sampling import Sampling
from lmkit.errors import LmkitError, UsageError
from lmkit.generation.decoder import Decoder, Newest, can_run_kernels, does_not_fit
from lmkit.model.transformer import TransformerLM
from lmkit.recipe.recipe import Recipe
from lmkit.recipe.run_folder import TOKENIZER
from lmkit.recipe.tables import GenerateConfig
from lmkit.tokenizer import Tokenizer

log = logging.getLogger("lmkit")

MOST_STEPS_LATE = 8  # the host reads tokens at most this many steps after they were drawn


@dataclass(frozen=True)
class Generation:
    """A prompt and its continuation.

    Attributes:
        text, tokens: what follows the prompt.
        logprobs: log-probability of each token, see `Drawn`; None without `options.logprobs`.
        ended: True if the model ended the text with one of the tokenizer's end tokens, False if `max_new_tokens` did.
    """

    prompt: str
    text: str
    tokens: tuple[int, ...]
    ended: bool
    logprobs: tuple[float, ...] | None = None


@contextmanager
def spared_collections() -> Iterator[None]:
    """Let Python's garbage collector skip the objects that exist before the block.

    Scanning all objects of the libraries takes tenths of a second, in which a GPU waits for the host.
    """
    frozen_here = gc.get_freeze_count() == 0
    if frozen_here:
        gc.freeze()
    try:
        yield
    finally:
        if frozen_here:
            gc.unfreeze()


@spared_collections()
def generate(
    model: TransformerLM,
    tokenizer: Tokenizer,
    prompts: str | Sequence[str],
    options: GenerateConfig = GenerateConfig(),  # noqa: B008  frozen
    *,
    on_text: Callable[[int, str], None] | None = None,
    on_end: Callable[[int, Generation], None] | None = None,
    kernels: bool | None = None,
) -> list[Generation]:
    """Continue each prompt.

        options = GenerateConfig(max_new_tokens=100, temperature=0.8, top_p=0.95)
        generate(model, tokenizer, ["Once upon a time"], options)[0].text

    - An empty prompt starts a new text: from the tokenizer's prefix, else from its `start_id`.
    - A prompt longer than the context is cut to its last `context_length - 1` tokens, with a warning in the log.
    - A text that outgrows the context continues from its last half, which is read again as if nothing came before.
      Each later token thus sees between half a context and a whole one.
    - Prompt i draws from its own random stream, seeded by `seed + i`. On a GPU, the other prompts do not change the
      bits of its text if `batch_size` stays the same or stays between 2 and 16.

    Args:
        prompts: a string is one prompt.
        options: the recipe's table `[generate]`; its `prompts` are ignored.
        on_text: called with the number of a prompt and each new piece of its text. Pieces hold whole characters; if a
            text ends inside a character, the last piece is U+FFFD.
        on_end: called with the number of a prompt and its whole text when the text is complete.
        kernels: see `Decoder`.

    Raises:
        ValueError: the tokenizer has more ids than the model has embeddings.
        UsageError: a prompt is empty and the tokenizer has no `start_id`, or `options.weights` is not for this
            device or model, or so many texts.
        LmkitError: the logits are not finite, or memory does not suffice for `options.batch_size` texts.
        Interrupted: in place of KeyboardInterrupt, with the texts so far.
    """
    embeddings = len(model.token_embeddings.weight)
    if tokenizer.vocab_size > embeddings:
        raise ValueError(f"the tokenizer has {tokenizer.vocab_size} ids, the model {embeddings} embeddings")
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    room = max(1, model.config.context_length - 1)
    encode = partial(prompt_ids, tokenizer, most=room, allow_special=options.allow_special)
    if "" in prompts:
        encode("")  # refuses it before anything is written
    # By number of the prompt
    streams: dict[int, TextStream] = defaultdict(partial(TextStream, tokenizer))
    tokens: dict[int, list[int]] = defaultdict(list)
    logprobs: dict[int, list[float]] = defaultdict(list)
    ended: set[int] = set()
    limits = drawn_from(tokenizer, options)
    stops = limits["stops"]

    def made(number: int) -> Generation:
        ids = tuple(tokens[number])
        of_ids = tuple(logprobs[number][: len(ids)]) if options.logprobs else None
        return Generation(prompts[number], tokenizer.decode(ids), ids, number in ended, of_ids)

    finished: dict[int, Generation] = {}
    try:
        drawn = generate_tokens(model, prompts, options, encode=encode, kernels=kernels, **limits)
        for number, token, logprob in drawn:
            if token in stops:
                ended.add(number)
            else:
                if logprob is not None:
                    logprobs[number].append(logprob)
                tokens[number].append(token)
                if on_text is not None and (piece := streams[number].push(token)):
                    on_text(number, piece)
            if number in ended or len(tokens[number]) == options.max_new_tokens:
                if on_text is not None and (piece := streams[number].finish()):
                    on_text(number, piece)
                finished[number] = made(number)
                if on_end is not None:
                    on_end(number, finished[number])
    except KeyboardInterrupt:
        begun = sorted(tokens.keys() | finished.keys())
        generations = {number: finished.get(number) or made(number) for number in begun}
        raise Interrupted(generations, len(finished)) from None
    return list(map(finished.__getitem__, range(len(prompts))))


class Interrupted(KeyboardInterrupt):
    """SIGINT came while texts were written; `generations`: number of the prompt -> its text so far, for all texts
    that have begun, in order."""

    def __init__(self, generations: dict[int, Generation], finished: int) -> None:
        self.generations = generations
        super().__init__(f"interrupted: {finished} of {len(generations)} texts that have begun are complete")


class Drawn(NamedTuple):
    """A token that was drawn.

    Attributes:
        number: of the prompt.
        logprob: natural logarithm of its probability at temperature 1, after the repetition penalty, among the ids
            that may be drawn; None without `options.logprobs`.
    """

    number: int
    token: int
    logprob: float | None


@dataclass
class _Seat:
    """A prompt in a row of the decoder. The host does not know yet whether the model has ended the text."""

    number: int
    length: int
    drawn: int = 0
    read: int = 0
    ended: bool = False


def generate_tokens(
    model: TransformerLM,
    prompts: Sequence[Any],
    options: GenerateConfig,
    *,
    encode: Callable[[Any], Sequence[int]] = list,
    kernels: bool | None = None,
    **limits: Any,
) -> Iterator[Drawn]:
    """Yield tokens as they are drawn; `generate` says what happens at the end of the context.

    `options.batch_size` texts are written at once. A row whose text has ended takes the next prompt; many rows are
    refilled a sixteenth at a time. On a GPU the host reads tokens some steps late, so that it need not wait. Until
    then, steps do not change a row that has ended.

    Hooks of the model see a prompt without its last token, then single tokens: the first step reads the last token of
    the prompt. Add hooks before the first token is drawn.

    Args:
        prompts: token ids, at least one each and at most `context_length`.
        encode: makes the ids of a prompt, when its turn comes: a GPU need not wait until thousands are encoded.
        kernels, limits: `kernels`, `vocab_size`, `never` and `stops` of `Decoder`. An id of `stops` is yielded before
            it ends a row; `options.max_new_tokens` ends the others.
    """
    if not prompts:
        return
    # Only a graph has a fixed width: without one, make no row that stays empty.
    in_graph = can_run_kernels(model) if kernels is None else kernels
    rows = options.batch_size if in_graph else min(options.batch_size, len(prompts))
    try:
        decoder = decoder_for(model, options, rows, kernels=kernels, **limits)
        yield from draw_tokens(decoder, prompts, options.seed, encode)
    except torch.OutOfMemoryError as error:
        why = ". ".join(str(error).split(". ")[:2])
        raise does_not_fit(f"{rows} texts do not fit: {why}", rows // 2) from error


def decoder_for(model: TransformerLM, options: GenerateConfig, rows: int, **limits: Any) -> Decoder:
    """Return a decoder that samples as the table `[generate]` says. limits: see `generate_tokens`."""
    sampling = Sampling(
        *(options.temperature, options.top_k, options.top_p, options.min_p, options.repetition_penalty)
    )
    fixed: dict[str, Any] = {"logprobs": options.logprobs, "weights": options.weights}
    return Decoder(model, rows, sampling=sampling, most=options.max_new_tokens, **fixed, **limits)


def drawn_from(tokenizer: Tokenizer, options: GenerateConfig) -> dict[str, Any]:
    """Return the arguments of `generate_tokens` for the ids that may be drawn and those that end a text."""
    return {
        "vocab_size": tokenizer.vocab_size,
        "never": sorted({*range(tokenizer.vocab_size)} - tokenizer.vocab.keys()),
        "stops": frozenset(tokenizer.marks.stops if options.stop_at_end else ()),
    }


def draw_tokens(
    decoder: Decoder, prompts: Sequence[Any], seed: int, encode: Callable[[Any], Sequence[int]] = list
) -> Iterator[Drawn]:
    """Yield the tokens of prompts that take the rows of a decoder in turn; prompt i draws from stream `seed + i`.

    On KeyboardInterrupt the tokens come that were drawn and not yet read; then it is raised.
    """
    rows, stops, most = decoder.rows, decoder.stops, decoder.most
    waiting, left = iter(enumerate(prompts)), len(prompts)
    free = list(range(rows))
    seats: dict[int, _Seat] = {}  # by row
    # Not yet read: rows with their seats and how many tokens these had drawn before.
    steps: deque[tuple[Newest, list[tuple[int, _Seat, int]]]] = deque()

    def read_oldest() -> Iterator[Drawn]:
        (columns, event), sat = steps[0]
        if event is not None:
            event.synchronize()
        tokens, *logprobs = map(methodcaller("tolist"), columns)
        for row, seat, drawn in sat:
            if seat.ended or seat.read > drawn:  # read before Ctrl-C came
                continue
            token = tokens[row]
            if token < 0:
                message = "the model's predictions are not finite numbers"
                hint = "its training diverged; use an older checkpoint"
                raise LmkitError("generate.not_finite", message, hint=hint)
            found = Drawn(seat.number, token, logprobs[0][row] if logprobs else None)
            # Python runs no signal's handler between these lines and the yield.
            seat.ended = token in stops
            seat.read = drawn + 1
            yield found
            if seat.ended and seats.get(row) is seat:
                free.append(row)
                del seats[row]
        steps.popleft()

    try:
        while True:
            if len(free) >= decoder.refill or not seats:
                texts: dict[int, Sequence[int]] = {}
                seeds: list[int] = []
                # Fewer prompts than rows, or the other way round.
                for row, (number, prompt) in zip(free, waiting, strict=False):
                    texts[row] = encode(prompt)
                    seeds.append((seed + number) % (1 << 63))  # int64
                    seats[row] = _Seat(number, len(texts[row]))
                if texts:
                    left -= len(texts)
                    del free[: len(texts)]
                    decoder.start(list(texts), list(texts.values()), seeds)
            if seats:
                if full := [row for row, seat in seats.items() if seat.length > decoder.capacity]:
                    kept = decoder.slide(full)
                    for row in full:
                        seats[row].length = kept
                decoder.step(max(map(attrgetter("length"), seats.values())))
                taken: list[tuple[int, _Seat, int]] = []
                steps.append((decoder.newest(), taken))
                for row, seat in list(seats.items()):
                    taken.append((row, seat, seat.drawn))
                    seat.length += 1
                    seat.drawn += 1
                    if seat.drawn == most:
                        free.append(row)
                        del seats[row]
            elif not steps:
                return
            # Where all rows end at once and prompts are left, they are refilled first: the device must not run dry.
            while steps:
                _, event = steps[0][0]
                may_wait = (seats or left) and len(steps) <= MOST_STEPS_LATE
                if may_wait and event is not None and not event.query():
                    break
                yield from read_oldest()
    except KeyboardInterrupt:
        while steps:
            yield from read_oldest()
        raise


def weight_dtype(options: GenerateConfig, device: torch.device) -> torch.dtype:
    """Return the dtype of weights under `generate.precision`; `auto` is bfloat16 on a GPU."""
    narrow = options.precision == "bf16" or (options.precision == "auto" and device.type == "cuda")
    return torch.bfloat16 if narrow else torch.float32


def write_samples(model: TransformerLM, recipe: Recipe) -> list[str]:
    """Return a text for each prompt of the table [generate], prompt included; cast the model to its precision.

    Raises:
        LmkitError: the logits are not finite, or memory does not suffice.
    """
    table = recipe.generate.changed(weights="same")  # fp8 needs the kernels
    named = recipe.tokenizer.path if recipe.tokenizer is not None else None
    own = recipe.run.path / TOKENIZER
    tokenizer = Tokenizer.load(own if named is None or own.exists() else named)
    model.to(weight_dtype(table, model.lm_head.weight.device))
    # Without kernels: no CUDA graph beside that of the training step.
    made = generate(model, tokenizer, table.prompts, table, kernels=False)
    return [text.prompt + text.text for text in made]


class TextStream:
    """Decodes the tokens of a text one by one.

    A token may end inside a character; its bytes are held back until the character is complete. Bytes that cannot
    become a character turn into U+FFFD, as in `Tokenizer.decode`. The joined pieces equal the whole text decoded.
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


def prompt_ids(tokenizer: Tokenizer, prompt: str, *, most: int, allow_special: bool) -> list[int]:
    """Return the ids of a prompt: at least one, and at most the last `most` (with a warning in the log)."""
    allowed: Any = "all" if allow_special else frozenset()
    ids = tokenizer.encode(prompt, allowed_special=allowed, add_special_tokens=False)
    prefix = [*tokenizer.prefix]  # no suffix: the text goes on
    ids = ids if ids[: len(prefix)] == prefix else prefix + ids
    if not ids:
        if tokenizer.start_id is None:
            raise UsageError(
                "generate.empty_prompt",
                "generate.prompts: an empty prompt, and this tokenizer has no token that begins or ends a text",
                hint="give a prompt",
            )
        return [tokenizer.start_id]
    if len(ids) > most:
        log.warning("the prompt has %d tokens: only the last %d fit into the context", len(ids), most)
    return ids[-most:]
