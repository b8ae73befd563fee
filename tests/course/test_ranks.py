"""What a course asks of data parallelism, a sharded optimizer and FSDP, through the public API."""

import course_ranks
import pytest

from lmkit.parallel import spawn_ranks


@pytest.mark.full
def test_two_ranks_with_half_a_batch_each_train_as_one_process_with_the_whole():
    spawn_ranks(2, course_ranks.train_together)
