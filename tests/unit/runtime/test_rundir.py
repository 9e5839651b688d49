"""Who may write to a run directory, and what beginning anew leaves behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from finray.checkpoint.rundir import open_run, saved_config
from finray.config.load import build_config
from finray.config.schema import Config
from finray.errors import ClusterError, ConfigError


def config(output: Path, **train: object) -> Config:
    plain = {"run": {"output_dir": str(output)}, "model": {"name": "m"}, "data": {"source": "d.jsonl"}, "train": train}
    return build_config(plain, source="test")


def nobody(message: str) -> None:
    raise AssertionError(message)


def test_a_run_is_continued_with_the_same_configuration(tmp_path: Path) -> None:
    for _ in range(2):
        with open_run(config(tmp_path), fresh=False, say=nobody) as run:
            assert saved_config(run) == config(tmp_path)


def test_another_configuration_is_refused_and_nothing_is_touched(tmp_path: Path) -> None:
    with open_run(config(tmp_path), fresh=False, say=nobody) as run:
        before = run.config_file.read_bytes()
    with (
        pytest.raises(ConfigError, match="another configuration"),
        open_run(config(tmp_path, learning_rate=1.0), fresh=False, say=nobody),
    ):
        pass
    assert run.config_file.read_bytes() == before


def test_fresh_moves_the_earlier_run_aside_whole(tmp_path: Path) -> None:
    with open_run(config(tmp_path), fresh=False, say=nobody) as run:
        (run.path / "checkpoint-000001").mkdir()
    said: list[str] = []
    for _ in range(2):
        with open_run(config(tmp_path, learning_rate=1.0), fresh=True, say=said.append) as run:
            assert not (run.path / "checkpoint-000001").exists()
    aside = sorted(tmp_path.glob("run.before-*"))
    assert len(aside) == len(said) == 2
    assert sum((path / "checkpoint-000001").is_dir() for path in aside) == 1


def test_two_drivers_cannot_have_one_run(tmp_path: Path) -> None:
    with (
        open_run(config(tmp_path), fresh=False, say=nobody),
        pytest.raises(ClusterError, match="another `finray train`"),
        open_run(config(tmp_path), fresh=True, say=nobody, wait_s=0.1),
    ):
        pass


def test_rests_of_a_killed_write_are_swept(tmp_path: Path) -> None:
    with open_run(config(tmp_path), fresh=False, say=nobody) as run:
        (run.path / ".tmp-checkpoint-000003-ab").mkdir()
    with open_run(config(tmp_path), fresh=False, say=nobody) as run:
        assert not list(run.path.glob(".tmp-*"))
