"""A bug is told from bad luck by failing twice in the same way without progress."""

from __future__ import annotations

from pathlib import Path

import pytest

from finray.errors import TrainingError
from finray.runtime.failures import Failure, check, describe, forget, record, repeated_error

SAME = [Failure("a", 4, "ValueError: no"), Failure("b", 4, "ValueError: no")]


def test_the_same_error_from_the_same_step_in_two_attempts_is_repeated() -> None:
    assert repeated_error(SAME, 4) == "ValueError: no"


@pytest.mark.parametrize(
    "failures",
    [
        [],
        SAME[:1],
        # Two ranks of one attempt are one failure.
        [SAME[0], SAME[0]],
        # There was progress in between.
        [SAME[0], Failure("b", 6, "ValueError: no")],
        # Another error may be bad luck.
        [SAME[0], Failure("b", 4, "ConnectionError: lost")],
    ],
)
def test_anything_else_is_worth_another_try(failures: list[Failure]) -> None:
    assert repeated_error(failures, 4) is None


def test_failures_are_kept_between_attempts_until_a_person_starts_the_run_again(tmp_path: Path) -> None:
    check(tmp_path, 4)
    for failure in SAME:
        record(tmp_path, failure)
    check(tmp_path, 5)
    with pytest.raises(TrainingError, match="2 times in the same way from step 4: ValueError: no"):
        check(tmp_path, 4)
    forget(tmp_path)
    check(tmp_path, 4)


def test_errors_are_described_in_one_line() -> None:
    assert describe(ValueError("one\ntwo")) == "ValueError: one"
    assert describe(RuntimeError()) == "RuntimeError"
