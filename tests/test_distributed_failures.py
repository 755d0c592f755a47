"""A rank that dies or hangs ends the others within the group's timeout, with a message."""

import pytest
from workers import ddp
from workers.pair import Team

PATIENCE = 4.0


@pytest.mark.slow
@pytest.mark.parametrize(("how", "local"), [("dies", False), ("dies", True), ("hangs", True)])
def test_a_lost_rank_ends_the_others(how: str, local: bool) -> None:
    team = Team(timeout=PATIENCE)
    try:
        (well, answer), (lost, _) = team.ask(ddp.deserted, how, local)
    finally:
        team.close()
    assert well
    assert not lost
    said, waited, restored = answer
    print(repr(said), waited, restored)
    assert ("Connection closed by peer" if how == "dies" else "Timed out") in said
    assert waited < PATIENCE + 2
    assert restored, "the weights are back at w"
