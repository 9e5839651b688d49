"""The driver's four parts, called by themselves as a search or a restart calls them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finray.checkpoint.rundir import open_run
from finray.data.dataset.prepare import Preparation, start_preparation
from finray.records import Note, Record, RunHeader, TrainRecord
from finray.runtime import driver
from tests.support import runs, tiny


def test_a_second_fit_on_the_same_connection_and_data_trains_alike(
    tmp_path: Path, tiny_model_dir: Path, ray_cluster: str
) -> None:
    changes = {"train.max_steps": 2}
    plain = runs.tiny_run(tiny_model_dir, tiny.write_chat_rows(tmp_path, 20), tmp_path / "out", changes)
    first, second = (runs.config_of(runs.changed(plain, {"run.name": name})) for name in ("first", "second"))
    losses: dict[str, list[Any]] = {"first": [], "second": []}

    def fit(config: Any, connected: driver.Connected, preparation: Preparation, run: Any) -> driver.TrainResult:
        def note(record: Record) -> None:
            if isinstance(record, TrainRecord):
                losses[config.run.name].append(record.loss)

        fitted = driver.fit(connected, preparation, config, run, note)
        return driver.finish(connected, fitted, config, run, note)

    def ignore(record: Record) -> None: ...

    def say(message: str) -> None: ...

    with (
        open_run(first, fresh=False, notify=say) as run,
        start_preparation(first) as preparation,
        driver.connect(first, run, ignore) as connected,
    ):
        one = fit(first, connected, preparation, run)
        with open_run(second, fresh=False, notify=say) as other:
            two = fit(second, connected, preparation, other)
    assert one.final != two.final
    assert len(losses["first"]) == 2
    assert losses["first"] == losses["second"]


SCRIPT = """
import json, os, socket, sys, tempfile
from finray.config.schema import ClusterConfig
from finray.runtime import cluster
from finray.runtime.progress import Address

def describe(config):
    import ray
    return [ray.get_runtime_context().get_runtime_env_string(), "colorsys" in sys.modules]

env = {"FINRAY_PRELOAD": "colorsys", "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0", "TEXT": "two words, =, \\u00fc"}
with socket.create_server(("127.0.0.1", 0)) as driver, cluster.connected(ClusterConfig()) as ray:
    env |= {name: value for name, value in os.environ.items() if name.startswith("RAY_TRAIN_")}
    from ray.train import RunConfig, ScalingConfig
    from finray.runtime.trainer import Trainer
    run = RunConfig(name="run", storage_path=tempfile.mkdtemp(), worker_runtime_env={"env_vars": env})
    options = {"alone": True, "group": "test", "watch": lambda: None}
    options |= {"listener": Address(*driver.getsockname(), ""), "expected": 1, "evaluator": False}
    trainer = Trainer(describe, **options, scaling_config=ScalingConfig(num_workers=1), run_config=run)
    print(json.dumps([*trainer.fit().return_value, cluster.environment_text(env)]))
"""


def test_a_process_started_early_has_the_environment_that_ray_train_asks_for() -> None:
    """Else Ray would start another one: nothing would fail, and the start would take as long as before."""
    env = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "RAY_AUTH_TOKEN")}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found, preloaded, expected = json.loads(done.stdout.splitlines()[-1])
    assert preloaded
    assert found == expected


def test_little_data_makes_a_sensible_run_which_is_continued_alike(
    tiny_run: Callable[..., runs.Plain], ray_cluster: str
) -> None:
    left_open = {"max_steps": None, "global_batch_size": "auto", "learning_rate": 0.001}
    plain = tiny_run({"train": left_open, "data.max_length": 256}, rows=12)
    said: list[Record] = []
    done = driver.train(runs.config_of(plain), handle=said.append)
    header = next(record for record in said if isinstance(record, RunHeader))
    assert 8 < header.packs <= 12
    assert done.summary.step == 3 * header.packs
    assert (header.global_batch_size, header.epochs) == (1, 3.0)
    notes = [record.message for record in said if isinstance(record, Note)]
    kept = json.loads((done.run_dir / "resolved.json").read_text(encoding="utf-8"))
    assert (kept["global_batch_size"], kept["epochs"]) == (1, 3.0)
    chosen = f"train.global_batch_size=1, with packs of {kept['pack_length']} tokens, and train.epochs=3"
    assert any(f"finray chose {chosen}" in note for note in notes)
    assert kept["pack_length"] < 256
    longer = driver.train(runs.config_of(runs.changed(plain, {"train.epochs": 4})))
    assert longer.summary.step == 4 * header.packs
    named = runs.changed(plain, {"run.name": "named", "train.epochs": 1, "train.global_batch_size": 8})
    driver.train(runs.config_of(named), handle=said.append)
    warnings = [record.message for record in said if isinstance(record, Note) and record.level == "warning"]
    assert any("the run is a single step" in warning and "auto" in warning for warning in warnings)


def test_kto_from_a_yaml_file_and_pairs(tiny_run: Callable[..., runs.Plain], ray_cluster: str, tmp_path: Path) -> None:
    """Planned, trained by two workers, and evaluated; each pair is an answer that is desirable and one that is not."""
    rows = [{"prompt": f"say {at}", "chosen": f"yes {at}", "rejected": "no" + " no" * (at % 4)} for at in range(24)]
    source = tmp_path / "pairs.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"data": {"source": str(source), "eval_ratio": 0.25}, "cluster.num_workers": 2}
    plain = tiny_run({**changes, "train": {"objective": "kto", "max_steps": 4}, "preference.desirable_weight": 2.0})
    file = runs.write_config(plain, tmp_path / "run.yaml")
    code, out, err = runs.finray("plan", file)
    assert code == 0, err
    assert "two forward passes over all rows" in out
    assert "4 steps of 4 rows" in out
    assert "set preference.undesirable_weight between 1.5 and 2" in out
    code, out, err = runs.finray("train", file)
    assert code == 0, err
    run_dir = Path(plain["run"]["output_dir"]) / "run"
    assert runs.values(run_dir, "loss")[0] == pytest.approx(0.75, abs=0.3)
    last = runs.records(run_dir, "eval")[-1]
    assert last["margin"] == pytest.approx(last["desirable_reward"] - last["undesirable_reward"])
    assert {"kl", "accuracy", "eval_loss"} <= last.keys()
    code, out, err = runs.finray("evaluate", run_dir, "--json")
    assert code == 0, err
    assert "the loss is that of the desirable answers" in out
