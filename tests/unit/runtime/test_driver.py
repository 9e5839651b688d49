"""What the driver does around a training, without Ray: it forgets old failures, and makes the best checkpoint final."""

from __future__ import annotations

import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finray.checkpoint import CheckpointStore, rundir
from finray.checkpoint.rundir import RunDir
from finray.config.resolved import Execution, Packing, PreparedRun, Resolved, Steps
from finray.errors import DataError
from finray.planning.placement import Placement
from finray.records import RunSummary
from finray.runtime import driver, failures
from finray.runtime.progress import wait_for_data
from finray.runtime.signals import Interrupted
from finray.runtime.worker import Outcome
from tests.support import runs, tiny


class Begun(Exception):
    """The preparation would begin now."""


def config(tmp_path: Path, **changes: Any) -> Any:
    rows = tiny.write_chat_rows(tmp_path, 4)
    return runs.config_of(runs.tiny_run(tmp_path / "model", rows, tmp_path / "out", changes))


def test_a_person_who_starts_a_run_again_has_its_failures_forgotten(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they have mended since may not end the run before it tries."""
    (tmp_path / "model").symlink_to(tiny_model_dir)

    def begin(*arguments: Any, **options: Any) -> None:
        raise Begun

    monkeypatch.setattr(driver, "start_preparation", begin)
    asked = config(tmp_path)
    with pytest.raises(Begun):
        driver.train(asked)
    run_dir = tmp_path / "out" / "run"
    # Refused before anything began, it leaves its log alone: a corrected config is no other run.
    assert [path.name for path in run_dir.iterdir()] == ["logs"]
    with pytest.raises(Begun):
        driver.train(config(tmp_path, train={"learning_rate": 0.5}))
    rundir.RunDir(run_dir).keep_config(asked)
    for attempt in ("a", "b"):
        failures.record(run_dir, failures.Failure(attempt, 4, "ValueError: no"))
    with pytest.raises(Begun):
        driver.train(asked)
    assert not (run_dir / "failures.jsonl").exists()


@pytest.mark.parametrize(("keep_best", "step"), [(True, 4), (False, 6)])
def test_the_best_checkpoint_becomes_final_where_it_is_kept(tmp_path: Path, keep_best: bool, step: int) -> None:
    run = RunDir(tmp_path / "out" / "run")
    store = CheckpointStore(run.path)
    for at, loss in ((2, 3.0), (4, 1.0), (6, 2.0)):
        scratch = store.begin(at)
        entries = store.fill(scratch, at, lambda folder, at=at: (folder / "weights").write_text(f"of step {at}"))  # type: ignore[misc]
        store.commit(scratch, at, entries, metrics={"eval_loss": loss})
    phases = {"load": 1.0, "train": 2.0, "evaluate": 3.0, "checkpoint": 4.0, "data_wait": 0.5}
    summary = RunSummary(6, 6, 10, 5, 2.0, 5.0, 3.0, 2.0, "eval_loss", 1.0, phases, (1,))
    connected = driver.Connected(None, True, None, None, {}, {}, 0.0, 7.0, None)  # type: ignore[arg-type]
    shown: list[Any] = []
    result = driver.finish(
        connected,
        driver.Fitted(summary, 28.0, 8.0),
        config(tmp_path, **{"checkpoint.keep_best": keep_best}),
        run,
        shown.append,
    )
    assert (result.chosen_step, shown) == (step, [])
    assert (result.final / "weights").read_text() == f"of step {step}"
    wanted = {"start_ray": 7.0, "prepare": 8.0, "start_workers": 10.0, **phases}
    assert {name: seconds for name, seconds in result.summary.phases.items() if name != "total"} == wanted


class Slow(Future[str]):
    """A preparation that ends when it has been looked at three times."""

    def __init__(self, outcome: str | DataError) -> None:
        super().__init__()
        self.looks, self.outcome = 0, outcome

    def wait(self, timeout: float | None = None, *, handle: Any) -> bool:
        self.looks += 1
        return self.looks >= 3

    def result(self, timeout: float | None = None, *, handle: Any = None) -> str:
        if isinstance(self.outcome, DataError):
            raise self.outcome
        return self.outcome


def fitted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    outcome: str | DataError,
    *,
    is_local: bool,
    strategy: str = "ddp",
    use_gpu: bool = False,
) -> list[str]:
    """What a fit does, in its order, with workers that ask as soon as they start."""
    did: list[str] = []
    asked = config(tmp_path)
    execution = Execution("fp32", None, None, True, strategy, use_gpu=use_gpu)
    place = Placement(1, 1, use_gpu=use_gpu)
    context = SimpleNamespace(gcs_address="127.0.0.1:1", get_node_id=lambda: "here")
    here = {"NodeID": "here", "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": 1}
    ray = SimpleNamespace(
        util=SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1"),
        get_runtime_context=lambda: context,
        nodes=lambda: [here],
    )
    slow: Any = Slow(outcome)

    def decide(execution: Execution, location: str, *rest: Any) -> PreparedRun:
        did.append(f"prepared {location}")
        return PreparedRun(location, Resolved.of(execution, Steps(5)))

    def make(connected: Any, known: PreparedRun | None, *rest: Any, poll: Any, listener: Any, **options: Any) -> Any:
        def fit() -> Any:
            did.append("workers start")
            got = pool.submit(wait_for_data, listener) if known is None else None
            while got is not None and not got.done():
                poll()
                time.sleep(0.01)
            size = (known if got is None else got.result()).resolved.global_batch_size
            did.append(f"steps of {size}")
            return SimpleNamespace(return_value=Outcome("summary"))  # type: ignore[arg-type]

        return SimpleNamespace(fit=fit)

    monkeypatch.setattr(driver, "decide_from_data", decide)
    monkeypatch.setattr(driver, "_trainer", make)
    monkeypatch.setattr(driver, "refusal", lambda address: None)
    monkeypatch.setattr(driver, "is_refused", lambda address: False)
    monkeypatch.setattr("finray.runtime.trainer.remove_groups", lambda group: None)
    monkeypatch.setattr("finray.runtime.prepare._is_worth_help", lambda preparation: False)
    slow.config, slow.cancel = asked, lambda: did.append("cancelled")
    connected = driver.Connected(ray, is_local, place, execution, {}, {}, 0.0, 0.0, Packing(True, "llama"))
    with ThreadPoolExecutor(1) as pool, suppress(DataError):
        driver.fit(connected, slow, asked, RunDir(tmp_path / "out" / "run"), lambda record: None)
    return did


@pytest.mark.parametrize(
    ("is_local", "use_gpu", "strategy", "early"),
    [
        (True, False, "ddp", True),
        (True, True, "ddp", False),
        (False, False, "ddp", False),
        (True, False, "deepspeed", False),
    ],
)
def test_workers_start_before_the_data_are_prepared_where_that_holds_no_gpu_and_nothing_of_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_local: bool, use_gpu: bool, strategy: str, early: bool
) -> None:
    first = ["workers start", "prepared there"] if early else ["prepared there", "workers start"]
    assert fitted(tmp_path, monkeypatch, "there", is_local=is_local, use_gpu=use_gpu, strategy=strategy) == [
        *first,
        "steps of 5",
        "cancelled",
    ]


def test_data_that_cannot_be_prepared_end_a_run_whose_workers_have_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = DataError("a row is not right")
    assert fitted(tmp_path, monkeypatch, error, is_local=True) == ["workers start", "cancelled"]
    assert fitted(tmp_path, monkeypatch, error, is_local=False) == ["cancelled"]


@pytest.mark.parametrize("use_gpu", [False, True])
def test_a_machine_without_memory_is_told_with_the_smallest_change_where_its_memory_is_the_workers(
    use_gpu: bool, tmp_path: Path, tiny_model_dir: Path
) -> None:
    """Where workers compute on GPUs, no setting of theirs is why a machine lacks memory."""
    (tmp_path / "model").symlink_to(tiny_model_dir)
    asked = config(tmp_path, train={"micro_batch_size": 4, "gradient_checkpointing": "none"})
    text = (
        "1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 192.0.2.2, ID: eef1f) "
        "was 21.85GB used / 23.00GB limit (0.95)"
    )
    error = SimpleNamespace(worker_failures={0: RuntimeError(text)})
    reason = failures.with_relief(
        failures.explain(error, tmp_path),  # type: ignore[arg-type]
        asked,
        runs.resolved_of(asked),
        Placement(1, 1, use_gpu=use_gpu),
    )
    assert reason.message.startswith("node 192.0.2.2 ran out of memory (21.85 of 23.00 GB used)")
    assert reason.repair is not None
    assert "the same command continues from the last checkpoint" in reason.repair
    assert ("the smallest change that should make it fit" in reason.repair) == (not use_gpu), reason.repair


@pytest.mark.parametrize(
    ("saved", "late", "said"),
    [
        ([], None, ["no checkpoint has been saved yet"]),
        ([4], None, ["checkpoint-000004 is saved"]),
        ([4], 4, ["checkpoint-000004 is saved"]),
        ([4], 9, ["checkpoint-000004 is saved", "5 steps are lost, because the running one took longer than"]),
        ([], 1, ["no checkpoint has been saved yet", "1 step is lost, because the running one took longer than"]),
    ],
)
def test_a_stop_tells_what_is_saved_and_what_the_time_was_too_short_for(
    saved: list[int], late: int | None, said: list[str], tmp_path: Path
) -> None:
    run: Any = SimpleNamespace(store=lambda: SimpleNamespace(steps=lambda: saved))
    with pytest.raises(Interrupted) as caught, driver._note_last_checkpoint(run, config(tmp_path)):
        raise Interrupted(signal.SIGINT, late=late)
    notes = caught.value.__notes__
    assert [note.partition(" checkpoint.grace_seconds=20")[0] for note in notes] == said
