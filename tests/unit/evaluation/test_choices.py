"""The choices of each row: those of the config, else those of its own column."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from finray.config.evaluation import ScoringConfig
from finray.errors import DataError
from finray.evaluation.answers import _choices


class Rows:
    numbers = (4, 7)
    split = SimpleNamespace(where=lambda number: f"rows.jsonl:{number}")

    def __init__(self, *choices: Any) -> None:
        self.choices = choices

    def __len__(self) -> int:
        return len(self.choices)

    def columns(self, config: Any) -> Any:
        return [(at, {"choices": one, "id": at}) for at, one in enumerate(self.choices)]


def found(*choices: Any, of_config: Sequence[str] = ()) -> dict[int, list[str]]:
    rows: Any = Rows(*choices)
    config: Any = None
    return _choices(rows, ScoringConfig(choices=list(of_config)), config)


def test_the_choices_of_the_config_come_before_those_of_a_row() -> None:
    assert found(["a", "b"], ["c", "d", "e"]) == {0: ["a", "b"], 1: ["c", "d", "e"]}
    assert found(None, ["c"], of_config=["yes", "no"]) == {0: ["yes", "no"], 1: ["yes", "no"]}


@pytest.mark.parametrize("odd", [None, "ab", [], ["a"], ["a", 5]])
def test_a_row_without_two_texts_to_choose_from_is_named(odd: Any) -> None:
    with pytest.raises(DataError, match=r"no column `choices` with a list of texts \(columns: choices, id\)") as caught:
        found(["a", "b"], odd)
    assert caught.value.where == "rows.jsonl:7"
