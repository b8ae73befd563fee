from functools import partial

import pytest
from attention_oracle import draw_inputs


@pytest.fixture
def random_inputs():
    """`draw_inputs` with a batch of two."""
    return partial(draw_inputs, batch=2)
