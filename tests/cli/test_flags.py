"""Texts and files that commands take by a flag."""

from __future__ import annotations

import json


def test_fault_108_train_takes_the_learning_rate_and_the_batch_size(terminal) -> None:
    shown = json.loads(terminal("train quickstart --lr 0.25 --batch-size 6 --print-recipe --json"))
    assert (shown["optimizer"]["lr"], shown["train"]["batch_size"]) == (0.25, 6)
