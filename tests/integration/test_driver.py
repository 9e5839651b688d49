"""The driver's four parts, called by themselves as a search or a restart calls them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from finray.checkpoint.rundir import open_run
from finray.data.dataset.prepare import start_preparation
from finray.records import Record, TrainRecord
from finray.runtime import driver
from tests.support import runs, tiny


def test_a_second_fit_on_the_same_connection_and_data_trains_alike(
    tmp_path: Path, tiny_model_dir: Path, ray_cluster: str
) -> None:
    plain = runs.settings(tiny_model_dir, tiny.write_chat_rows(tmp_path, 20), tmp_path / "out", train={"max_steps": 2})
    first, second = (runs.config_of({**plain, "run": {**plain["run"], "name": name}}) for name in ("first", "second"))
    losses: dict[str, list[Any]] = {"first": [], "second": []}

    def fit(config: Any, connected: driver.Connected, prepared: driver.Prepared, run: Any) -> driver.TrainResult:
        def note(record: Record) -> None:
            if isinstance(record, TrainRecord):
                losses[config.run.name].append(record.loss)

        fitted = driver.fit(connected, prepared, config, run, note)
        return driver.finish(connected, prepared, fitted, config, run, note, started=time.perf_counter())

    def ignore(record: Record) -> None: ...

    def say(message: str) -> None: ...

    with open_run(first, fresh=False, say=say) as run, driver.connect(first, run, ignore) as connected:
        with start_preparation(first) as preparation:
            prepared = driver.prepare(connected, preparation, ignore)
        one = fit(first, connected, prepared, run)
        with open_run(second, fresh=False, say=say) as other:
            two = fit(second, connected, prepared, other)
    assert one.final != two.final
    assert len(losses["first"]) == 2
    assert losses["first"] == losses["second"]
