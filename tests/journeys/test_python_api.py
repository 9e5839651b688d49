"""`finray.train` on rows in memory under Ray: what it shows, what observers see, and that the same rows continue."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

import finray
from finray.errors import ConfigError
from finray.records import EvalRecord, Record, RunHeader, TrainRecord
from tests.support import runs
from tests.support.tiny import chat_rows


def test_a_run_on_rows_in_memory_is_seen_by_observers_and_found_finished_by_the_same_rows(
    tiny_run: Callable[..., dict[str, Any]], ray_cluster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = tiny_run({"train.max_steps": 3, "data.eval_ratio": 0.2})
    rows = chat_rows(20)
    seen: list[Record] = []

    def broken(record: Record) -> None:
        if isinstance(record, TrainRecord):
            raise ZeroDivisionError("my mistake")

    result = finray.train(plain, data={"source": iter(rows)}, observers=[broken, seen.append])
    shown = capsys.readouterr().out
    assert [record.step for record in seen if isinstance(record, TrainRecord)] == [1, 2, 3]
    assert any(isinstance(record, RunHeader) for record in seen)
    assert any(isinstance(record, EvalRecord) for record in seen)
    assert shown.count("my mistake") == 1
    assert "step 3/3" in shown
    assert result.metrics["loss"].notna().sum() == 3

    again = finray.train(plain, data={"source": list(rows)}, quiet=True)
    assert capsys.readouterr() == ("", "")
    assert again == result
    with pytest.raises(ConfigError, match=r"data\.source: was"):
        finray.train(plain, data={"source": rows[1:]}, quiet=True)

    code, out, err = runs.finray("train", result.run_dir / "config.yaml", "--json")
    assert code == 0
    assert json.loads(out) == json.loads(json.dumps(result.plain()))
    assert "already finished" in err
    assert runs.finray("train", result.run_dir / "config.yaml", "-q", "--json")[2] == ""
