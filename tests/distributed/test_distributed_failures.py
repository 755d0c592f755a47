"""If a rank hangs or dies, the others raise within the timeout of the group."""

import re

import pytest
from workers import ddp
from workers.process_group import ProcessGroup

TIMEOUT = 8.0  # also for the steps before, which take seconds on a busy machine


@pytest.mark.slow
def test_a_lost_rank_ends_the_others() -> None:
    group = ProcessGroup()
    try:
        hung = group.try_run(ddp.lost_rank, "hangs", True, TIMEOUT)
        died = group.try_run(ddp.lost_rank, "dies", False, TIMEOUT)
    finally:
        group.close()
    assert [succeeded for succeeded, _ in hung] == [True, True]
    assert [succeeded for succeeded, _ in died] == [True, False]
    for (message, waited, restored), words in (
        (hung[0][1], "Timed out"),
        (died[0][1], "by peer|Broken pipe"),  # depends on whether a read or a write fails first
    ):
        assert re.search(words, message)
        assert waited < TIMEOUT + 30, "not the timeout of the default group"
        assert restored, "the weights are at w"
