"""The host of a queue of prompts must not keep a GPU waiting."""

import gc
from types import SimpleNamespace

import pytest
import torch

from lmkit.generation import GenerateConfig, generate
from lmkit.generation.generate import draw_tokens


def test_rows_that_end_together_are_refilled_before_the_host_waits_for_them():
    """A device that is some steps late always has work; every token comes, in its text's order."""
    events = []

    class Late:
        rows, refill, capacity, device, stops, most = 2, 1, 50, torch.device("cuda"), (), 3
        steps = 0

        def start(self, rows, prompts, seeds):
            events.append("start")

        def step(self, longest):
            self.steps += 1
            events.append("step")

        def newest(self):
            tokens = [10 * self.steps, 10 * self.steps + 1]
            return SimpleNamespace(
                has_come=lambda: False, read=lambda: (events.append("read"), (tokens, None))[1]
            )

    drawn = list(draw_tokens(Late(), [[1], [2], [3], [4]], seed=0))
    assert events[:8] == ["start", *["step"] * 3, "start", *["step"] * 3]
    texts = [[token for number, token, _ in drawn if number == text] for text in range(4)]
    assert texts == [[10, 20, 30], [11, 21, 31], [40, 50, 60], [41, 51, 61]]


@pytest.mark.parametrize(("before", "stop"), [(True, -1), (False, -1), (False, 11)])
def test_ctrl_c_between_two_tokens_of_a_step_leaves_no_gap_and_reads_none_twice(before, stop):
    """It comes before the second token of the second step is looked at, or when the consumer asks for the third."""

    class Tokens(list):
        def __getitem__(self, row):
            if before and row == 1 and self[0] == 20 and not came:
                came.append(True)
                raise KeyboardInterrupt
            return super().__getitem__(row)

    class Late:
        rows, refill, capacity, device, stops, most = 2, 1, 50, torch.device("cuda"), (stop,), 4
        steps = 0

        def start(self, rows, prompts, seeds): ...

        def step(self, longest):
            self.steps += 1

        def newest(self):
            tokens = Tokens([10 * self.steps, 10 * self.steps + 1])
            return SimpleNamespace(has_come=lambda: False, read=lambda: (tokens, None))

    came, drawn = [], []
    texts = draw_tokens(Late(), [[1], [2]], seed=0)

    def read() -> None:
        for found in texts:
            drawn.append(found)
            if not before and len(drawn) == 2:
                drawn.append(texts.throw(KeyboardInterrupt))

    with pytest.raises(KeyboardInterrupt):
        read()
    assert [token for number, token, _ in drawn if number == 0] == [10, 20, 30, 40]
    assert [token for number, token, _ in drawn if number == 1] == ([11] if stop == 11 else [11, 21, 31, 41])


@pytest.mark.parametrize("frozen", [False, True])
def test_the_collector_passes_over_what_existed_before(make_model, tokenizer, frozen):
    """And what the caller had frozen stays so."""
    counts = []
    options = GenerateConfig(max_new_tokens=2, stop_at_end=False)
    gc.unfreeze()  # other tests of this process may have frozen objects
    if frozen:
        gc.freeze()
    try:
        generate(
            make_model(), tokenizer, ["a"], options, on_end=lambda *_: counts.append(gc.get_freeze_count())
        )
        assert counts[0] > 1000
        assert (gc.get_freeze_count() > 0) == frozen
    finally:
        gc.unfreeze()
