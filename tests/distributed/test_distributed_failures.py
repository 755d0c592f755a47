"""A rank that hangs or dies ends the others within the group's timeout, with a message."""

import re

import pytest
from workers import ddp
from workers.pair import Team

PATIENCE = 8.0  # also for the steps before: other programs may hold a rank up for seconds


@pytest.mark.slow
def test_a_lost_rank_ends_the_others() -> None:
    team = Team()
    try:
        hung = team.ask(ddp.deserted, "hangs", True, PATIENCE)
        died = team.ask(ddp.deserted, "dies", False, PATIENCE)
    finally:
        team.close()
    assert [fine for fine, _ in hung] == [True, True]
    assert [fine for fine, _ in died] == [True, False]
    for (said, waited, restored), words in (
        (hung[0][1], "Timed out"),
        (died[0][1], "by peer|Broken pipe"),  # depends on who notices first, reader or writer
    ):
        assert re.search(words, said)
        assert waited < PATIENCE + 30, "and not the minutes of the team's own group"
        assert restored, "the weights are back at w"
