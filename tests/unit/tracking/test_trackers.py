"""Trackers: records survive kills and resumes, and no tracker can stop a run; the console says what matters."""

from __future__ import annotations

import io
import json
import os
import re
import threading
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from finray.errors import CheckpointError, ConfigError
from finray.files import Appending
from finray.records import EvalProgress, EvalRecord, Metrics, Note, RunHeader, TrainRecord
from finray.tracking.base import Trackers, make_tracker
from finray.tracking.console import ConsoleTracker, RunView, describe, header_lines
from finray.tracking.jsonl import JsonlTracker, mean_loss, metrics_table, read_records
from finray.tracking.protocol import RunInfo
from finray.tracking.starts import StartsTracker, read_starts
from finray.tracking.tensorboard import TensorBoardTracker
from tests.support.small_disk import files_of_at_most


def record(step: int, **fields: Any) -> TrainRecord:
    plain: dict[str, Any] = {
        "step": step,
        "epoch": 0.5,
        "loss": 2.0 / step,
        "grad_norm": 0.5,
        "lr": 1e-3,
        "tokens": 100 * step,
        "supervised": 50,
        "samples_digest": "abc",
        "tokens_per_s": 1234.5,
        "data_wait_s": 0.0,
        "peak_memory_bytes": 2**30,
        "seconds": 0.5 * step,
    }
    return TrainRecord(**{**plain, **fields})


def run_info(folder: Path, *, resume_step: int = 0) -> RunInfo:
    header = RunHeader(resume_step, 10, "m", 100, 10, "fp32", 5, 50, 20, 0, True, 2, 1.0, 1, "CPU", 1, 4, 1, 4)
    return RunInfo("run-id", folder, resume_step, {}, header)


def started(tracker: Any, folder: Path, *, resume_step: int = 0) -> Any:
    tracker.start(run_info(folder, resume_step=resume_step))
    return tracker


@pytest.mark.parametrize(
    ("batch", "workers", "micro", "accumulation", "said"),
    [
        (8, 2, 2, 2, "8 packs = 2 workers x 2 micro-batch x 2 accumulation"),
        (1, 2, 1, 1, "1 pack, by 1 of 2 workers"),
        (5, 4, 2, 1, "5 packs, by 3 of 4 workers"),
        (5, 2, 2, 2, "5 packs, at most 2 workers x 2 micro-batch x 2 accumulation"),
    ],
)
def test_the_headers_batch_is_true_also_where_it_is_not_divided_evenly(
    tmp_path: Path, batch: int, workers: int, micro: int, accumulation: int, said: str
) -> None:
    header = replace(
        run_info(tmp_path).header,
        world_size=workers,
        global_batch_size=batch,
        micro_batch_size=micro,
        accumulation=accumulation,
    )
    assert f"batch      {said}" in header_lines(header)


def test_the_header_says_what_share_of_the_tokens_is_learned_where_tokens_are(tmp_path: Path) -> None:
    header = run_info(tmp_path).header
    assert any("5 rows, 50 tokens (40% learned) in 2 packs" in line for line in header_lines(header))
    labelled = header_lines(replace(header, labelled=True))
    assert any("5 rows, 50 tokens in 2 packs" in line for line in labelled)
    for rows, said in ((64, "in 32 pairs"), (65, "in 32 groups")):
        grouped = header_lines(replace(header, packing=False, in_groups=True, rows=rows, packs=32))
        assert any(said in line for line in grouped)


def test_records_come_back_and_those_after_the_resumed_step_are_gone(tmp_path: Path) -> None:
    first = started(JsonlTracker(), tmp_path)
    for step in range(1, 6):
        first.log(record(step))
    second = started(JsonlTracker(), tmp_path, resume_step=3)
    # A process left over from the first attempt goes on writing, to a file that no longer has the name.
    first.log(record(6))
    second.log(record(4, loss=9.0))
    first.finish()
    second.finish()
    found = [(item["step"], item["loss"]) for item in read_records(tmp_path / "metrics.jsonl")]
    assert found == [(1, 2.0), (2, 1.0), (3, 2 / 3), (4, 9.0)]


DAMAGED = {
    "a byte": b'{"kind": "train", "step": 2, "loss": "\xff"}\n',
    "no step": b'{"kind": "train", "step": null}\n',
    "text": b'{"kind": "train", "step": "2"}\n',
    "truth": b'{"kind": "train", "step": true}\n',
    "no kind": b'{"step": 2}\n',
    "half": b'{"kind": "train", "st\n',
    "a list": b"[2]\n",
    "deep": b"[" * 100_000 + b"\n",
    "nothing": b"\n",
}


@pytest.mark.parametrize("line", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_line_is_set_aside_with_a_warning_and_the_run_goes_on(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    good = [json.dumps(record(step).json()).encode() + b"\n" for step in (1, 3)]
    path.write_bytes(good[0] + line + good[1])
    assert [item["step"] for item in read_records(path)] == [1, 3]
    told: list[str] = []
    tracker = started(JsonlTracker(told.append), tmp_path, resume_step=3)
    tracker.log(record(4))
    tracker.finish()
    assert [item["step"] for item in read_records(path)] == [1, 3, 4]
    assert path.read_bytes().startswith(good[0] + good[1])
    assert (tmp_path / "damaged-metrics.jsonl").read_bytes() == line
    assert told == [f"{path}: 1 damaged line set aside in damaged-metrics.jsonl"]
    started(JsonlTracker(pytest.fail), tmp_path, resume_step=4).finish()


def test_a_file_that_cannot_be_read_is_set_aside_and_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.mkdir()
    for number in (1, 2):
        told: list[str] = []
        tracker = started(JsonlTracker(told.append), tmp_path, resume_step=3)
        tracker.log(record(4))
        tracker.finish()
        assert len(told) == 1
        assert str(path) in told[0]
        assert len(list(tmp_path.glob("damaged-metrics.jsonl-*"))) == number
        assert [item["step"] for item in read_records(path)] == [4]
        path.unlink()
        # Its first bytes cannot be read, as of a disk that fails.
        path.symlink_to("/proc/self/mem")


# --- a disk without room --------------------------------------------------------------------------------------------


def steps_in(folder: Path) -> list[int]:
    return [item["step"] for item in read_records(folder / "metrics.jsonl")]


def test_what_a_full_disk_refuses_is_held_and_written_in_order_when_there_is_room(tmp_path: Path) -> None:
    told: list[str] = []
    tracker, path = started(JsonlTracker(told.append), tmp_path), tmp_path / "metrics.jsonl"
    tracker.log(record(1))
    size = path.stat().st_size
    with files_of_at_most(size + 10):
        for step in (2, 3):
            tracker.log(record(step))
        # Control: the disk took a part of a line, which nobody reads.
        assert (path.stat().st_size, steps_in(tmp_path)) == (size + 10, [1])
        assert tracker.is_behind
        with pytest.raises(CheckpointError, match="the run's records could not be written: file too large") as caught:
            tracker.keep()
        assert caught.value.where == str(path)
    tracker.log(EvalRecord(3, {"eval_loss": 1.0}, 9, 0.1))
    assert steps_in(tmp_path) == [1, 2, 3, 3]
    tracker.keep()
    tracker.finish()
    assert len(told) == 2
    assert told[0].startswith(f"{path} cannot be written: file too large; its records are held in memory")
    assert told[1] == f"{path} can be written again, and has every record"


def test_records_that_are_held_at_the_end_are_written_or_said_to_be_lost(tmp_path: Path) -> None:
    for number, room in enumerate((10**6, 10)):
        told: list[str] = []
        folder = tmp_path / str(number)
        folder.mkdir()
        tracker = started(JsonlTracker(told.append), folder)
        with files_of_at_most(10):
            tracker.log(record(1))
            tracker.log(record(2))
        with files_of_at_most(room):
            tracker.finish()
        assert steps_in(folder) == ([1, 2] if room > 10 else [])
        assert any("the last 2 records are lost" in one for one in told) == (room == 10)


def test_more_than_can_be_held_ends_the_run_at_the_next_checkpoint(tmp_path: Path) -> None:
    file = Appending(tmp_path / "f", limit=30)
    with files_of_at_most(5):
        for content in (b"a" * 20, b"b" * 20, b"c" * 10):
            with pytest.raises(OSError, match="File too large"):
                file.append(content)
    assert (file.waiting, file.lost) == (2, 1)
    tracker = started(JsonlTracker(), tmp_path)
    tracker._file = file
    with pytest.raises(CheckpointError, match="records had to wait too long"):
        tracker.keep()
    assert (tmp_path / "f").read_bytes() == b"a" * 20 + b"c" * 10


def test_a_start_without_room_keeps_the_records_that_are_there(tmp_path: Path) -> None:
    first = started(JsonlTracker(), tmp_path)
    for step in (1, 2):
        first.log(record(step))
    first.finish()
    with files_of_at_most(10), pytest.raises(CheckpointError, match="the run's records could not be written"):
        started(JsonlTracker(pytest.fail), tmp_path, resume_step=2)
    assert steps_in(tmp_path) == [1, 2]
    assert [one.name for one in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_start_is_noted_when_there_is_room(tmp_path: Path) -> None:
    with files_of_at_most(10):
        tracker = started(StartsTracker(), tmp_path)
        tracker.log(record(1))
    assert read_starts(tmp_path) == []
    tracker.log(record(2))
    tracker.finish()
    assert [one.header.step for one in read_starts(tmp_path)] == [0]


@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
def test_nothing_is_appended_to_what_is_no_file_of_the_run(tmp_path: Path, kind: str) -> None:
    path, other = tmp_path / "starts.jsonl", tmp_path / "other"
    other.write_text("mine\n")
    {"link": lambda: path.symlink_to(other), "pipe": lambda: os.mkfifo(path), "directory": path.mkdir}[kind]()
    tracker = started(StartsTracker(), tmp_path)
    with pytest.raises(OSError, match=re.escape(str(path))):
        tracker.finish()
    assert other.read_text() == "mine\n"


def test_numbers_of_other_libraries_are_written_as_numbers(tmp_path: Path) -> None:
    tracker = started(JsonlTracker(), tmp_path)
    tracker.log(EvalRecord(1, {"eval_mine": np.float32(0.5), "eval_odd": object()}, 9, 0.1))  # type: ignore[dict-item]
    tracker.finish()
    (found,) = read_records(tmp_path / "metrics.jsonl")
    assert found["eval_mine"] == 0.5
    assert found["eval_odd"].startswith("<object")


def test_tensorboard_files_hold_the_numbers_and_the_mean_loss_at_the_last_step(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trackers = [started(JsonlTracker(), tmp_path), started(TensorBoardTracker(), tmp_path)]
    for step, loss, supervised in ((1, 4.0, 30), (2, 2.0, 10)):
        for tracker in trackers:
            tracker.log(record(step, loss=loss, supervised=supervised))
    for tracker in trackers:
        tracker.finish()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    values = {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}
    assert values["train/loss"] == [(1, 4.0), (2, 2.0)]
    assert values["train/mean_loss"] == [(2, pytest.approx((4 * 30 + 2 * 10) / 40))]
    assert "train/samples_digest" not in values


def test_tensorboard_files_hold_the_config_as_text_and_as_hyperparameters(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import api_pb2, metadata

    tracker = TensorBoardTracker()
    config = {"model": {"name": "m"}, "train": {"learning_rate": 1e-3, "betas": [0.9, 0.95], "min_lr": None}}
    tracker.start(replace(run_info(tmp_path), config=config))
    tracker.log(record(1))
    tracker.finish()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (text,) = events.Tensors("config/text_summary")
    shown = text.tensor_proto.string_val[0].decode()
    # Markdown shows what is indented as it is.
    assert "    model:\n      name: m\n" in shown
    content = events.SummaryMetadata(metadata.SESSION_START_INFO_TAG).plugin_data.content
    hparams = metadata.parse_session_start_info_plugin_data(content).hparams
    assert {name: one.string_value or one.number_value for name, one in hparams.items()} == {
        "model.name": "m",
        "train.learning_rate": 1e-3,
        "train.betas": "[0.9, 0.95]",
    }
    ended = events.SummaryMetadata(metadata.SESSION_END_INFO_TAG).plugin_data.content
    assert metadata.parse_session_end_info_plugin_data(ended).status == api_pb2.STATUS_SUCCESS
    # One run, and not another one beside it for its hyperparameters.
    assert len(list((tmp_path / "tensorboard").rglob("events.*"))) == 1


def test_an_evaluation_does_not_overwrite_a_column_of_training(tmp_path: Path) -> None:
    tracker = started(JsonlTracker(), tmp_path)
    tracker.log(record(1, loss=2.0))
    tracker.log(EvalRecord(1, {"loss": 9.0, "eval_loss": 3.0, "mine": 0.5}, 9, 0.1))
    tracker.finish()
    row = metrics_table(tmp_path).loc[1]
    assert (row["loss"], row["eval/loss"], row["eval_loss"], row["mine"]) == (2.0, 9.0, 3.0, 0.5)


def test_a_record_without_a_loss_is_left_out_of_the_mean(tmp_path: Path) -> None:
    """The others count by their targets."""
    assert mean_loss(tmp_path) is None
    lines = [{"kind": "train", "step": 1, "loss": 2.0, "supervised": 4}, {"kind": "train", "step": 2}]
    lines += [{"kind": "train", "step": 2, "loss": 4.0, "supervised": 12}, {"kind": "eval", "step": 2, "loss": 9.0}]
    lines += [{"kind": "train", "step": 3, "loss": loss, "supervised": 4} for loss in (None, "3.0", [1])]
    lines += [{"kind": "train", "step": 5, "loss": 1.0, "supervised": "4"}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert mean_loss(tmp_path) == (2.0 * 4 + 4.0 * 12) / 16


# --- isolation ------------------------------------------------------------------------------------------------------


class Listed:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def start(self, run: RunInfo) -> None:
        self.told.append(f"start {run.run_id} at {run.resume_step}")

    def log(self, record: Metrics) -> None:
        self.told.append(f"step {record.step}")

    def finish(self) -> None:
        self.told.append("finish")


class Raising(Listed):
    """Breaks at the second step."""

    def log(self, record: Metrics) -> None:
        super().log(record)
        if record.step == 2:
            raise ConnectionError("the service is gone for hf_abcdefghijklmnopqrstuvwxyz0123")


class Hanging(Listed):
    """Never answers at the second step."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()
        self.go = threading.Event()

    def log(self, record: Metrics) -> None:
        if record.step == 2:
            self.reached.set()
            self.go.wait(60)
        super().log(record)


EVERYTHING = ["start run-id at 0", *(f"step {step}" for step in range(1, 6)), "finish"]


@pytest.mark.parametrize("where", ["inline", "background"])
def test_a_tracker_that_raises_is_named_once_and_the_others_go_on(tmp_path: Path, where: str) -> None:
    bad, good, other = Raising(), Listed(), Listed()
    warnings: list[str] = []
    inline = {"own": good, **({"bad": bad} if where == "inline" else {})}
    background = {"other": other, **({"bad": bad} if where == "background" else {})}
    trackers = Trackers(inline, background, warn=warnings.append)
    trackers.start(run_info(tmp_path))
    for step in range(1, 6):
        trackers.log(record(step))
    trackers.finish()
    (warning,) = warnings
    assert "tracker bad failed: ConnectionError: the service is gone for ***" in warning
    # It is not about the run's own file, of which it knows nothing.
    assert "every record" not in warning
    assert good.told == other.told == EVERYTHING
    assert bad.told == ["start run-id at 0", "step 1", "step 2"]


def test_a_tracker_that_cannot_be_created_is_an_error_that_names_it() -> None:
    with pytest.raises(ConfigError, match="Stubborn failed: TypeError: no") as caught:
        make_tracker(f"{__name__}:Stubborn")
    assert caught.value.where == "tracking.trackers"


class Stubborn(Listed):
    def __init__(self) -> None:
        raise TypeError("no")


def test_a_tracker_that_hangs_is_named_once_and_the_others_go_on(tmp_path: Path) -> None:
    bad, good = Hanging(), Listed()
    warnings: list[str] = []
    now = [0.0]
    trackers = Trackers({}, {"bad": bad, "good": good}, warn=warnings.append, clock=lambda: now[0])
    trackers.start(run_info(tmp_path))
    for step in (1, 2):
        trackers.log(record(step))
    assert bad.reached.wait(30)
    trackers.log(record(3))
    # Control: it is not given up before its time.
    assert not warnings
    now[0] = 61.0
    for step in (4, 5):
        trackers.log(record(step))
    trackers.finish()
    bad.go.set()
    (warning,) = warnings
    assert "tracker bad has not answered for 61 s" in warning
    assert good.told == EVERYTHING


def test_the_end_of_a_run_does_not_wait_for_a_tracker_that_hangs(tmp_path: Path) -> None:
    bad = Hanging()
    warnings: list[str] = []
    trackers = Trackers({}, {"bad": bad}, warn=warnings.append, patience_s=0.2)
    trackers.start(run_info(tmp_path))
    trackers.log(record(2))
    assert bad.reached.wait(30)
    trackers.finish()
    bad.go.set()
    assert len(warnings) == 1


def plain_lines(records: list[Any], times: list[float], total: int) -> list[str]:
    target = io.StringIO()
    clock = iter(times)
    tracker = ConsoleTracker(Console(file=target, width=160), total_steps=total, clock=lambda: next(clock))
    for item in records:
        tracker.log(item)
    return target.getvalue().splitlines()


def test_plain_lines_show_progress_and_do_not_flood() -> None:
    lines = plain_lines([record(step) for step in range(1, 11)], [step * 0.5 for step in range(10)], total=10)
    assert len(lines) == 4
    assert lines[0].startswith("step 1/10  loss 2.0000  lr 1.00e-03  grad norm 0.500  1,23")
    assert lines[1].endswith("eta 2s")
    assert lines[-1].startswith("step 10/10")


def test_evaluations_are_always_shown() -> None:
    lines = plain_lines([EvalRecord(5, {"eval_loss": 1.0, "perplexity": 2.718}, 9, 0.1)] * 2, [], total=10)
    assert lines == ["step 5/10  eval loss 1.0000  perplexity 2.7180"] * 2


def evaluating(shares: list[float], **options: Any) -> str:
    target, clock = io.StringIO(), iter(range(0, 1000, 10))
    with RunView(Console(file=target, width=160, **options)) as view:
        view.handle(RunHeader(**{one.name: 1 for one in fields(RunHeader)} | {"workers": (), "total_steps": 10}))
        assert view._progress is not None
        view._progress._clock = lambda: float(next(clock))
        for share in shares:
            view.handle(EvalProgress(5, "evaluating", share))
    return target.getvalue()


def test_an_evaluation_of_some_length_says_how_far_it_is_and_does_not_flood() -> None:
    lines = evaluating([0.04 * at for at in range(26)]).splitlines()
    found = [line for line in lines if line.startswith("step")]
    assert found[0] == "step 5/10  evaluating 0%  eta --"
    # 4 % take ten seconds.
    assert found[1] == "step 5/10  evaluating 12%  eta 3m40s"
    assert len(found) == 9


def test_an_evaluation_is_shown_beside_the_bar() -> None:
    assert "evaluating 50%  10s left" in evaluating([0.0, 0.5], force_terminal=True)


def test_a_terminal_keeps_a_twentieth_of_the_steps_above_the_bar() -> None:
    target = io.StringIO()
    tracker = ConsoleTracker(Console(file=target, width=120, force_terminal=True), total_steps=40)
    for step in range(1, 41):
        tracker.log(record(step))
    tracker.close()
    kept = [line for line in target.getvalue().splitlines() if "step " in line]
    assert [line.split("step ")[1].split("/")[0] for line in kept] == [str(step) for step in range(2, 41, 2)]


def test_the_bar_of_a_continued_run_starts_where_it_stands() -> None:
    target = io.StringIO()
    ConsoleTracker(Console(file=target, width=120, force_terminal=True), total_steps=26, step=4).close()
    assert "4/26" in target.getvalue()
    assert "0/26" not in target.getvalue()


def test_a_quiet_view_shows_warnings_alone() -> None:
    target = io.StringIO()
    with RunView(Console(file=target, width=120), quiet=True) as view:
        for one in (
            Note("hello"),
            record(1),
            Note("look here", level="warning"),
            EvalRecord(1, {"eval_loss": 1.0}, 9, 1),
        ):
            view.handle(one)
    assert target.getvalue() == "warning: look here\n"


def test_a_step_without_a_norm_says_why() -> None:
    assert "grad norm too large for fp16" in describe(record(1, grad_norm=None))


def test_of_a_classifiers_metrics_the_line_has_those_that_say_the_most() -> None:
    metrics = {"eval_loss": 0.5, "accuracy": 0.9, "f1_macro": 0.8, "f1_weighted": 0.9, "matthews_corrcoef": 0.7}
    metrics |= {"precision_a": 1.0, "recall_a": 0.5, "roc_auc": 0.95, "my_metric": 3.0}
    line = describe(EvalRecord(4, metrics, 9, 1))
    assert line == "eval loss 0.5000  accuracy 0.9000  f1 macro 0.8000  roc auc 0.9500  my metric 3.0000"
    # A metric of the user's own is shown under any name.
    assert "precision at 5 0.5000" in describe(EvalRecord(4, {"eval_loss": 1.0, "precision_at_5": 0.5}, 9, 1))
