"""The tool that measures a recovery by phase adds up what it saw, also where it did not see everything."""

from __future__ import annotations

import pytest
from tools.recovery import PHASES, Marks


def test_phases_add_up_to_the_time_from_the_kill_to_a_step() -> None:
    marks = Marks(100.0, {name: 101.0 + number for number, name in enumerate(PHASES)})
    assert marks.phases() == dict.fromkeys(PHASES, 1.0)
    # Seen late: the one after it had ended by then.
    marks.found["teardown"] = 103.5
    found = marks.phases()
    assert (found["teardown"], found["Ray"], found["workers"]) == (2.5, 0.0, 0.5)
    assert sum(found.values()) == 6.0


@pytest.mark.parametrize("missing", PHASES[:-1])
def test_a_phase_whose_end_was_not_seen_counts_as_none_and_its_time_as_that_of_the_next(missing: str) -> None:
    marks = Marks(100.0, {name: 101.0 + number for number, name in enumerate(PHASES) if name != missing})
    found = marks.phases()
    assert found[missing] == 0.0
    assert found[PHASES[PHASES.index(missing) + 1]] == 2.0
    assert sum(found.values()) == 6.0
