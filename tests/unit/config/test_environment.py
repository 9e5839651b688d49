"""Environment variables of workers: the user's own wins, and a default is set only where nothing is."""

from __future__ import annotations

import os

import pytest

from finray.config import environment
from finray.config.environment import accept, secrets_of, set_default, trim_secrets, unset_default, with_defaults
from finray.runtime.spec import WorkerSpec

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
NEW, OLD = ALLOCATOR


@pytest.mark.parametrize(
    ("own", "environ", "expected"),
    [
        ({}, {}, {NEW: "default"}),
        ({NEW: "mine"}, {}, {NEW: "mine"}),
        ({OLD: "mine"}, {}, {OLD: "mine"}),
        ({}, {NEW: "shell"}, {NEW: "shell"}),
        ({}, {OLD: "shell"}, {OLD: "shell"}),
        ({}, {NEW: "a", OLD: "b"}, {NEW: "a", OLD: "b"}),
        # The config is nearer than the shell, by whichever name; a worker inherits the other one.
        ({NEW: "mine"}, {OLD: "shell"}, {NEW: "mine", OLD: "mine"}),
        ({OLD: "mine"}, {NEW: "shell"}, {NEW: "mine", OLD: "mine"}),
        ({NEW: "mine", OLD: "too"}, {OLD: "shell"}, {NEW: "mine", OLD: "too"}),
    ],
)
def test_a_default_is_set_only_where_nothing_is(
    own: dict[str, str], environ: dict[str, str], expected: dict[str, str]
) -> None:
    assert with_defaults(own, {ALLOCATOR: "default"}, environ) == expected


def test_what_finray_has_set_in_this_process_is_not_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_OURS", {})
    environ: dict[str, str] = {}
    set_default("X", "ours", environ)
    assert with_defaults({}, {("X",): "default"}, environ) == {"X": "default"}
    environ = {"X": "theirs"}
    set_default("X", "ours", environ)
    assert environ == {"X": "theirs"}
    assert with_defaults({}, {("X",): "default"}, environ) == {"X": "theirs"}


def test_what_finray_has_set_can_be_taken_back_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_OURS", {})
    environ = {"THEIRS": "1"}
    for name in ("THEIRS", "OURS", "CHANGED"):
        set_default(name, "0", environ)
    environ["CHANGED"] = "2"
    unset_default("THEIRS", "OURS", "CHANGED", "NEVER", environ=environ)
    assert environ == {"THEIRS": "1", "CHANGED": "2"}
    set_default("OURS", "3", environ)
    assert environ["OURS"] == "3"


def test_secrets_go_to_workers_as_arguments_that_nobody_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = secrets_of({"HF_TOKEN": "hf_mine", "HOME": "/root", "HUGGING_FACE_HUB_TOKEN": ""})
    assert secrets == {"HF_TOKEN": "hf_mine"}
    spec = WorkerSpec({}, None, "p", "r", "s", threads=1, listener=("", 0, ""), secrets=secrets)  # type: ignore[arg-type]
    assert "hf_mine" not in repr(spec)
    monkeypatch.setenv("HF_TOKEN", "of-the-node")
    accept(secrets)
    assert environment.os.environ["HF_TOKEN"] == "of-the-node"
    monkeypatch.delenv("HF_TOKEN")
    accept(secrets)
    assert environment.os.environ["HF_TOKEN"] == "hf_mine"


def test_white_space_around_secrets_is_taken_off_and_other_variables_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"MLFLOW_TRACKING_TOKEN": " key\n", "WANDB_API_KEY": "key", "HOME": "/root "}
    trim_secrets(environ)
    assert environ == {"MLFLOW_TRACKING_TOKEN": "key", "WANDB_API_KEY": "key", "HOME": "/root "}
    # A worker's node may have its own, from a mounted file, and that of the driver does not replace it.
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "own\n")
    accept({"MLFLOW_TRACKING_PASSWORD": "another"})
    assert os.environ["MLFLOW_TRACKING_PASSWORD"] == "own"
