"""What the sampler of a decode step must do, on any device: run by Triton's interpreter, and on GPUs.

Draws are compared with the plain form's, token by token, and with exact probabilities.
"""

import itertools
from typing import NamedTuple

import torch
from decode_checks import best_of, nothing, rules_of, tuned
from torch import Tensor

from lmkit.core.sampling import Sampling, draw
from lmkit.kernels.decode import sampling
from lmkit.kernels.decode.products import Stream
from lmkit.kernels.decode.rows import Rows, Rules, log_probabilities, plain_advance, plain_rules, settings_of

SAMPLINGS = {
    "greedy": Sampling(temperature=0.0),
    "all": Sampling(temperature=0.8),
    "flat": Sampling(temperature=1e6),
    "cold": Sampling(temperature=1e-20),
    "top-k": Sampling(top_k=5),
    "top-p": Sampling(top_p=0.7),
    "min-p": Sampling(min_p=0.2),
    "top-p of top-k": Sampling(temperature=1.5, top_k=9, top_p=0.6),
    "top-k of more than there are": Sampling(top_k=1000, top_p=0.9),
}
VOCAB, WIDTH = 150, 24


class Advance(NamedTuple):
    """A batch at the end of a step."""

    logits: Tensor
    rows: Rows
    rules: Rules
    table: Tensor
    gain: Tensor


def batch(sampling_: Sampling, device: str, rows: int = 6, vocab_size: int = VOCAB) -> Advance:
    """Row 1 is done, row 2 has one token left."""
    logits = tuned(rows, vocab_size, device=device) * 1.5
    rules = rules_of(rows, vocab_size, device, sampling_.repetition_penalty)
    rules = rules._replace(settings=settings_of(sampling_, device))
    logits.masked_fill_(rules.banned != 0, -torch.inf)

    def numbers(*values: int) -> Tensor:
        return torch.tensor([values[i % len(values)] for i in range(rows)], device=device)

    state = Rows(
        place=numbers(3, 0, 7, 2),
        text=torch.full((rows, 12), -5, device=device),
        number=numbers(0, 4, 9, 1),
        done=numbers(*(i == 1 for i in range(rows))).long(),
        seeds=numbers(*range(40, 40 + rows)),
        drawn=torch.full((rows,), -7, device=device),
        logprobs=torch.full((rows,), torch.nan, device=device),
    )
    table = tuned(vocab_size, WIDTH, seed=6, device=device)
    return Advance(logits, state, rules, table, tuned(WIDTH, seed=7, device=device))


def run_advance(given: Advance, sampling_: Sampling, most: int = 100) -> Stream:
    """Run the kernel; it changes `given.rows` and returns the stream."""
    rows, device = len(given.logits), given.logits.device
    best = nothing(rows, device)
    best[:, 7:8] = best_of(given.logits)
    sizes = ((rows, WIDTH), (rows, WIDTH), (rows * 3,))
    stream = Stream(*(torch.full(size, torch.nan, device=device) for size in sizes))
    sampling.prepare_advance(
        given.logits, best, given.rows, given.rules, given.table, given.gain, stream, 3,
        sampling=sampling_, most=most, logprobs=True,
    )()  # fmt: skip
    assert torch.equal(best, nothing(rows, device))
    return stream


def plain_step(given: Advance, sampling_: Sampling, most: int = 100) -> None:
    """Do as `run_advance` by PyTorch operations."""
    tokens = draw(given.logits, given.rows.seeds, given.rows.number, sampling_)
    chosen = log_probabilities(given.logits, tokens)
    plain_advance(tokens, given.rows, given.rules, most, chosen)


def check_advance(name: str, device: str) -> None:
    """Tokens and all that is noted equal the plain form's; the embedding begins the next stream."""
    sampling_ = SAMPLINGS[name]
    mine, plain = batch(sampling_, device), batch(sampling_, device)
    for _ in range(3):
        before = mine.rows.done.clone()
        stream = run_advance(mine, sampling_, 10)
        plain_step(plain, sampling_, 10)
        for field, got, other in zip(Rows._fields, mine.rows, plain.rows, strict=True):
            if field == "logprobs":  # logarithms and sums of float32
                torch.testing.assert_close(got, other, rtol=1e-5, atol=1e-5, equal_nan=True)
            else:
                assert torch.equal(got, other), field
        for row, token in enumerate(mine.rows.drawn.tolist()):
            if before[row]:
                assert stream.total[row].isnan().all()
                continue
            assert torch.equal(stream.total[row], mine.table[token])
            assert torch.equal(stream.normed[row], mine.table[token] * mine.gain)
            parts = stream.parts[3 * row : 3 * row + 3]
            torch.testing.assert_close(parts.sum(), mine.table[token].square().sum())
    assert mine.rows.done.tolist() == [0, 1, 1, 0, 0, 0]
    assert mine.rows.place.tolist() == [6, 0, 7, 5, 6, 3]


def probabilities_of(logits: Tensor, sampling_: Sampling) -> Tensor:
    """The exact probability of each token, (vocab_size) float64, by sorting."""
    p = (logits.double() / sampling_.temperature).softmax(0)
    ordered, order = p.sort(descending=True, stable=True)
    kept = torch.ones_like(p, dtype=torch.bool)
    if sampling_.top_k:
        kept[sampling_.top_k :] = False
    share = (ordered * kept).cumsum(0) / (ordered * kept).sum()
    kept &= share - ordered / (ordered * kept).sum() < sampling_.top_p  # those before do not reach it
    kept &= ordered >= sampling_.min_p * ordered[0]
    exact = torch.zeros_like(p)
    exact[order] = ordered * kept
    return exact / exact.sum()


def check_draws_follow_probabilities(sampling_: Sampling, rows: int, device: str) -> None:
    """Chi-square of one draw each of many rows with the same logits and seeds of their own."""
    given = batch(sampling_, device, rows=rows)
    given.logits[:] = given.logits[0] / 2
    run_advance(given, sampling_)
    counts = given.rows.drawn[2:].bincount(minlength=VOCAB).double().cpu()  # row 1 is done
    expected = probabilities_of(given.logits[0].cpu(), sampling_) * (rows - 2)
    assert counts[expected == 0].sum() == 0
    often = expected >= 5
    pairs = list(zip(counts[often].tolist(), expected[often].tolist(), strict=True))
    if (rare := float(expected[~often].sum())) > 0:
        pairs.append((float(counts[~often].sum()), rare))
    statistic = sum((count - mean) ** 2 / mean for count, mean in pairs)
    freedom = len(pairs) - 1
    # Five standard deviations above the mean: once in a hundred thousand; the streams are fixed.
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5 + 5


def check_stop_tokens_end_rows(device: str) -> None:
    greedy = SAMPLINGS["greedy"]
    for ending in ([3], [3, 4]):
        given = batch(greedy, device)
        best = given.logits.argmax(-1)
        assert len({*best.tolist()}) == 6
        stops = torch.zeros_like(given.rules.banned)
        stops[best[ending]] = 1
        one = {"stop": int(best[3])} if len(ending) == 1 else {"stops": stops}
        given = given._replace(rules=given.rules._replace(**one))
        run_advance(given, greedy)
        assert given.rows.done.tolist() == [int(i in (1, *ending)) for i in range(6)]
        assert given.rows.place[ending].tolist() == [i - 1 for i in ending]  # stand still


def check_a_draw_depends_on_seed_and_number_alone(device: str) -> None:
    for sampling_ in SAMPLINGS.values():
        given, other = batch(sampling_, device), batch(sampling_, device)
        run_advance(given, sampling_)
        order = torch.tensor([4, 2, 0], device=device)
        alone = other._replace(
            logits=other.logits[order].contiguous(),
            rows=Rows(*(x[order].contiguous() for x in other.rows)),
            rules=other.rules._replace(seen=other.rules.seen[order].contiguous()),
        )
        run_advance(alone, sampling_)
        assert torch.equal(alone.rows.drawn, given.rows.drawn[order])


def check_rules_change_the_logits_of_a_library(device: str) -> None:
    for penalty in (1.0, 1.3):
        logits, rules = tuned(2, 5000, device=device), rules_of(2, 5000, device, penalty)
        expected, best = plain_rules(logits.clone(), rules), nothing(2, device)
        sampling.prepare_rules(logits, best, rules)()
        torch.testing.assert_close(logits, expected)
        assert torch.equal(best.amax(-1, keepdim=True), best_of(logits))


def check_seen_tokens_are_noted(device: str) -> None:
    sampling_ = Sampling(temperature=0.0, repetition_penalty=1.2)
    given = batch(sampling_, device)
    given.rules.seen.zero_()
    run_advance(given, sampling_)
    expected = torch.zeros_like(given.rules.seen)
    for row in (0, 2, 3, 4, 5):
        expected[row, given.rows.drawn[row]] = 1
    assert torch.equal(given.rules.seen, expected)


def check_logits_that_are_not_finite_end_in_minus_one(device: str) -> None:
    for name, value in itertools.product(("greedy", "all", "top-p"), (torch.nan, torch.inf)):
        given = batch(SAMPLINGS[name], device)
        given.logits[0, 5] = value
        given.logits[3] = -torch.inf
        plain = batch(SAMPLINGS[name], device)
        plain.logits.copy_(given.logits)
        run_advance(given, SAMPLINGS[name])
        plain_step(plain, SAMPLINGS[name])
        for rows in (given.rows, plain.rows):
            assert rows.drawn[[0, 3]].tolist() == [-1, -1]
            assert rows.done[[0, 3, 4]].tolist() == [1, 1, 0]


CHECKS = {name.removeprefix("check_"): check for name, check in list(globals().items())
          if name.startswith("check_") and check.__code__.co_varnames[:1] == ("device",)}  # fmt: skip
