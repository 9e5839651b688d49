"""What cannot be deleted is left behind, and ends no run; directories are made however deep they lie."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finray.checkpoint import CheckpointStore
from finray.checkpoint.rundir import RunDir


def committed(store: CheckpointStore, *steps: int) -> CheckpointStore:
    def fill(folder: Path) -> None:
        (folder / "deep" / "er").mkdir(parents=True)
        for name in ("model.safetensors", "deep/er/one.json", "deep/er/two.json"):
            (folder / name).write_text(name)

    for step in steps:
        scratch = store.begin(step)
        store.commit(scratch, step, store.fill(scratch, step, fill), metrics={})
    return store


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """No file can be deleted, as on a file system where somebody still has it open; names that were tried."""
    tried: list[str] = []

    def refuse(path: Any, *_: Any, **__: Any) -> None:
        tried.append(os.fspath(path))
        raise PermissionError(13, "busy")

    monkeypatch.setattr(os, "unlink", refuse)
    return tried


def again(store: CheckpointStore) -> None:
    committed(store, 2)


def final(store: CheckpointStore) -> None:
    RunDir(store.run_dir).make_final(best=None, warn=lambda text: None)


CASES: dict[str, Callable[[CheckpointStore], Any]] = {
    "retention": lambda store: store.prune(keep_last=1, best=None),
    "going back": lambda store: store.drop_after(1),
    "a step that comes again": again,
    "an attempt that failed": lambda store: store.abandon(store.path_of(1)),
    "a final that is made again": final,
}


@pytest.mark.parametrize("what", CASES.values(), ids=CASES.keys())
def test_what_cannot_be_deleted_ends_no_run(tmp_path: Path, what: Any, stuck: list[str]) -> None:
    store = committed(CheckpointStore(tmp_path / "deep" / "run"), 1, 2)
    if what is final:
        final(store)
    assert stuck == []
    what(store)
    assert stuck
