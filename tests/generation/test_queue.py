"""The host of a queue of prompts must not keep a GPU waiting."""

from types import SimpleNamespace

import pytest
import torch

from lmkit.generation.generate import draw_tokens


class Late:
    """A decoder of two rows on a device that is some steps late; its step number n draws 10 n and 10 n + 1."""

    rows, refill, capacity, device = 2, 1, 50, torch.device("cuda")

    def __init__(self, most, stops=(), tokens=list):
        self.most, self.stops, self.tokens = most, stops, tokens
        self.steps, self.events = 0, []

    def start(self, rows, prompts, seeds):
        self.events.append("start")

    def step(self, longest):
        self.steps += 1
        self.events.append("step")

    def newest(self):
        tokens = self.tokens([10 * self.steps, 10 * self.steps + 1])
        event = SimpleNamespace(query=lambda: False, synchronize=lambda: self.events.append("read"))
        return [SimpleNamespace(tolist=lambda: tokens)], event


def texts_of(drawn, count):
    return [[token for number, token, _ in drawn if number == text] for text in range(count)]


def test_rows_that_end_together_are_refilled_before_the_host_waits_for_them():
    """A device that is some steps late always has work; every token comes, in its text's order."""
    decoder = Late(most=3)
    drawn = list(draw_tokens(decoder, [[1], [2], [3], [4]], seed=0))
    assert decoder.events[:8] == ["start", *["step"] * 3, "start", *["step"] * 3]
    assert texts_of(drawn, 4) == [[10, 20, 30], [11, 21, 31], [40, 50, 60], [41, 51, 61]]


@pytest.mark.parametrize(("before", "stop"), [(True, -1), (False, -1), (False, 11)])
def test_ctrl_c_between_two_tokens_of_a_step_leaves_no_gap_and_reads_none_twice(before, stop):
    """It comes before the second token of the second step is looked at, or when the consumer asks for the third."""

    class Tokens(list):
        def __getitem__(self, row):
            if before and row == 1 and self[0] == 20 and not came:
                came.append(True)
                raise KeyboardInterrupt
            return super().__getitem__(row)

    came, drawn = [], []
    texts = draw_tokens(Late(most=4, stops=(stop,), tokens=Tokens), [[1], [2]], seed=0)

    def read() -> None:
        for found in texts:
            drawn.append(found)
            if not before and len(drawn) == 2:
                drawn.append(texts.throw(KeyboardInterrupt))

    with pytest.raises(KeyboardInterrupt):
        read()
    assert texts_of(drawn, 2) == [[10, 20, 30, 40], [11] if stop == 11 else [11, 21, 31, 41]]
