"""Bad input as a user meets it: one clear message, exit code 2, no traceback, nothing overwritten."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finray.checkpoint.rundir import RunDir
from finray.errors import CheckpointError
from tests.support import processes, runs, tiny
from tests.support.runs import Plain, finray

# CLONE_NEWNS of Linux.
_OWN_MOUNTS = 0x20000
Change = Callable[[Plain, Path], None]


@pytest.fixture
def plain(tiny_model_dir: Path, tmp_path: Path) -> Plain:
    rows = tiny.write_chat_rows(tmp_path, 12)
    return runs.tiny_run(tiny_model_dir, rows, tmp_path / "out", {"train.max_steps": 2})


def refused(answer: tuple[int, str, str], *expected: str) -> None:
    output = answer[1] + answer[2]
    assert answer[0] == 2, output
    assert "Traceback" not in output
    assert output.count("error:") == 1, output
    for part in expected:
        assert part in output


def change_rows(content: str) -> Change:
    def change(plain: Plain, tmp_path: Path) -> None:
        (tmp_path / "rows.jsonl").write_text(content, encoding="utf-8")

    return change


def change_field(section: str, field: str, value: Any) -> Change:
    def change(plain: Plain, tmp_path: Path) -> None:
        plain[section][field] = value

    return change


def forget_template(plain: Plain, tmp_path: Path) -> None:
    shutil.copytree(plain["model"]["name"], tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").unlink()
    plain["model"]["name"] = str(tmp_path / "model")


GOOD = json.dumps(tiny.chat_rows(1)[0]) + "\n"
USER_ONLY = json.dumps({"messages": [{"role": "user", "content": "a"}]}) + "\n"
MISTAKES: list[tuple[str, Change, list[str]]] = [
    ("missing file", change_field("data", "source", "/no/such/file.jsonl"), ["/no/such/file.jsonl", "does not exist"]),
    ("row not JSON", change_rows(GOOD + "{oops\n"), ["rows.jsonl:2", "not JSON"]),
    ("empty dataset", change_rows(""), ["the dataset is empty", "rows.jsonl"]),
    ("all tokens masked", change_rows(USER_ONLY * 3), ["none of the 3 rows has a token to train on"]),
    ("no chat template", forget_template, ["no chat template", "model.chat_template"]),
    ("model not found", change_field("model", "name", "./no/such/model"), ["./no/such/model", "does not exist"]),
    ("too many workers", change_field("cluster", "num_workers", 99), ["99 workers", "the cluster has 4"]),
]


@pytest.mark.parametrize(("mistake", "expected"), [case[1:] for case in MISTAKES], ids=[case[0] for case in MISTAKES])
def test_training(plain: Plain, tmp_path: Path, ray_cluster: str, mistake: Change, expected: list[str]) -> None:
    mistake(plain, tmp_path)
    refused(finray("train", runs.write_config(plain, tmp_path / "run.yaml")), *expected)
    assert not list((tmp_path / "out").glob("run/checkpoint-*"))


def texts(label: str | None) -> list[dict[str, Any]]:
    return [{"text": f"the cat walks {word}", "label": label} for word in tiny.WORDS[:8]]


@pytest.mark.parametrize(
    ("field", "rows", "expected"),
    [
        ("eval_source", [*texts("animal"), *texts("mineral")], "own.jsonl:9: the label `mineral`"),
        ("source", texts("animal"), "all 8 rows to train on have the label `animal`"),
        ("source", [*texts("animal"), *texts(None)], "own.jsonl:9: the column `label` is null"),
    ],
)
def test_labels_that_a_classifier_cannot_learn(
    classifier_run: Callable[..., Plain],
    write_rows: Callable[..., Path],
    tmp_path: Path,
    ray_cluster: str,
    field: str,
    rows: list[Any],
    expected: str,
) -> None:
    base = {"run.output_dir": str(tmp_path / "out"), "classification.class_weights": None}
    plain = classifier_run({**base, f"data.{field}": str(write_rows(rows, "own.jsonl"))})
    config = runs.write_config(plain, tmp_path / "run.yaml")
    code, out, err = finray("plan", config)
    assert (code, expected in out + err) == (2, True), out + err
    answer = finray("train", config)
    refused(answer, expected)
    assert "starting 1 worker" not in answer[1]
    assert not list((tmp_path / "out").glob("run/checkpoint-*"))


def test_the_first_mistake_of_all_is_the_last_of_none(plain: Plain, tmp_path: Path, ray_cluster: str) -> None:
    """Negative control: without a mistake the same command ends well, and is then not repeated."""
    config = runs.write_config(plain, tmp_path / "run.yaml")
    for _ in range(2):
        code, out, err = finray("train", config)
        assert code == 0, out + err
    assert "already finished" in out


@pytest.fixture
def finished_run(plain: Plain, tmp_path: Path) -> Path:
    """A run with a checkpoint, as a driver would leave it half-way."""
    run_dir = tmp_path / "out" / "run"
    runs.run_alone(plain, run_dir)
    RunDir(run_dir).keep_config(runs.config_of(plain))
    return run_dir


def test_every_checkpoint_damaged_ends_the_run_with_the_workers_error(
    plain: Plain, finished_run: Path, tmp_path: Path, ray_cluster: str
) -> None:
    path = finished_run / "checkpoint-000002" / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    refused(
        finray("train", runs.write_config(plain, tmp_path / "run.yaml")),
        "all checkpoints of the run are damaged",
        "--fresh",
    )


def fill_a_disk(rank: int, plain: Plain, disk: str) -> None:
    """Train on a file system of 1.5 MiB, which goes with this process, however it ends."""
    assert ctypes.CDLL(None).unshare(_OWN_MOUNTS) == 0
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1500k", "none", disk], check=True)
    run_dir = Path(disk, "run")
    with pytest.raises(CheckpointError, match="no space left on the device"):
        runs.run_alone(plain, run_dir)
    shutil.rmtree(run_dir / "checkpoint-000001", ignore_errors=True)
    done = runs.assemble_alone(plain, run_dir).loop.state.step
    assert done == len(list(run_dir.glob("checkpoint-*"))) + 1 >= 3


def test_a_full_disk_while_saving_leaves_the_last_checkpoint(plain: Plain, tmp_path: Path) -> None:
    """(Where nothing can be mounted, the test of the store with an injected error has to do.)"""
    mount = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", str(tmp_path)]
    if shutil.which("unshare") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root on Linux")
    plain = runs.changed(plain, {"train.max_steps": 30, "checkpoint": {"every_steps": 1, "keep_last": 100}})
    (tmp_path / "disk").mkdir()
    processes.start(fill_a_disk, (plain, str(tmp_path / "disk")), processes=1)


def test_generate_and_evaluate_and_export(tmp_path: Path, finished_run: Path) -> None:
    refused(finray("generate", tmp_path / "nowhere", "hello"), "does not exist")
    refused(finray("generate", tmp_path, "hello"), "neither an adapter nor a model")
    refused(finray("evaluate", tmp_path), "neither an adapter nor a model")
    refused(finray("evaluate", "runs/nowhere"), "does not exist", "finray runs")
    refused(finray("evaluate", finished_run), "no held-out rows", "--file", "--split")
    refused(finray("export", finished_run, "--output", finished_run), "not empty")
    refused(finray("export", finished_run, "--output", str(tmp_path / "x"), "--dtype", "int3"), "cannot be stored as")
    refused(finray("generate", finished_run, "--file", tmp_path / "none.txt"), "does not exist")
    refused(finray("init", finished_run / "config.yaml"), "already exists")
