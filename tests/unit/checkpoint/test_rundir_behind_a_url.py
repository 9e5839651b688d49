"""A run directory behind a URL, on a storage in memory: what is brought, what is taken, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from finray.checkpoint import CheckpointStore, rundir
from finray.checkpoint.objects import Objects
from finray.checkpoint.remote import RemoteStore
from finray.checkpoint.rundir import RunDir, open_run
from finray.config.load import build_config
from finray.config.schema import Config
from finray.errors import CheckpointError, ConfigError, StorageError
from tests.unit.checkpoint.test_remote import save
from tests.unit.checkpoint.test_rundir import RESOLVED, finish, nobody


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"memory://{tmp_path.name}-{id(tmp_path)}/runs"


def config(url: str, tmp_path: Path, **train: object) -> Config:
    run = {"name": "r", "output_dir": url, "local_dir": str(tmp_path / "copies")}
    return build_config({"run": run, "model": {"name": "m"}, "data": {"source": "d"}, "train": train}, source="test")


def trained(run: RunDir, *steps: int) -> RemoteStore:
    """Give a run checkpoints."""
    store = RemoteStore(run.path, Objects(str(run.url)), attempt="0123abcdef99")
    store.take()
    for step in steps:
        save(store, step)
    return store


def test_records_go_behind_the_url_as_they_are_written(url: str, tmp_path: Path) -> None:
    with open_run(config(url, tmp_path), fresh=False, notify=nobody) as run:
        assert run.url == f"{url}/r"
        kept = Objects(run.url)
        assert kept.read("config.yaml") == run.config_file.read_bytes()
        run.keep_resolved(RESOLVED)
        assert json.loads(kept.read("resolved.json") or b"") == json.loads((run.path / "resolved.json").read_bytes())
        finish(run, 10)
        assert kept.read("summary.json") == run.summary_file.read_bytes()
        run.push("missing")
        assert kept.files() == ["config.sig", "config.yaml", "resolved.json", "summary.json"]
    assert Objects(url).files() == [f"r/{name}" for name in kept.files()], "the probe is removed"
    other = RunDir(tmp_path / "deep" / "other", run.url)
    other.pull()
    assert {one.name for one in other.path.iterdir()} == {"config.sig", "config.yaml", "resolved.json", "summary.json"}
    assert other.resolved() == RESOLVED
    RunDir(tmp_path / "local").pull()
    assert not (tmp_path / "local").exists()


def test_what_never_began_behind_a_url_is_in_nobodys_way(url: str, tmp_path: Path) -> None:
    with open_run(config(url, tmp_path), fresh=False, notify=nobody) as run:
        run.keep_resolved(RESOLVED)
        Objects(str(run.url)).write("logs/0123abcd/training.log", b"x")
        Objects(str(run.url)).write("metrics.jsonl", b"")
    said: list[str] = []
    with open_run(config(url, tmp_path, learning_rate=1.0), fresh=False, notify=said.append) as run:
        assert len(said) == 1
        assert Objects(str(run.url)).files() == ["config.sig", "config.yaml", "logs/0123abcd/training.log"]
        trained(run, 2)
    with (
        pytest.raises(ConfigError, match="a different configuration"),
        open_run(config(url, tmp_path), fresh=False, notify=nobody),
    ):
        pass


def test_a_final_model_comes_only_when_it_is_asked_for_and_whole(url: str, tmp_path: Path) -> None:
    with open_run(config(url, tmp_path), fresh=False, notify=nobody) as run:
        trained(run, 2)
        run.make_final(best=None, warn=nobody)
    other = RunDir(tmp_path / "other", run.url)
    other.pull()
    assert not other.final.exists()
    other.pull(final=True)
    assert (other.final / "model").read_bytes() == b"weights 2"
    Objects(str(run.url)).write("final/model", b"weights 3")
    (other.final / "model").write_bytes(b"cut")
    other.pull(final=True)
    assert not other.final.exists(), "it can be made again"


def test_a_copy_of_a_run_that_is_gone_is_not_continued(url: str, tmp_path: Path) -> None:
    own = config(url, tmp_path)
    with open_run(own, fresh=False, notify=nobody) as run:
        trained(run, 2)
    kept = Objects(str(run.url))
    saved = kept.read("config.yaml") or b""
    kept.remove("config.yaml")
    with pytest.raises(CheckpointError, match=r"config\.yaml is missing"), open_run(own, fresh=False, notify=nobody):
        pass
    kept.remove(*kept.files())
    with pytest.raises(CheckpointError, match="no run at the URL"), open_run(own, fresh=False, notify=nobody):
        pass
    assert (run.path / "checkpoint-000002" / "model").exists()
    shutil.rmtree(run.path / "checkpoint-000002")
    with open_run(own, fresh=False, notify=nobody):
        pass
    assert kept.read("config.yaml") == saved


def test_fresh_moves_the_run_aside_at_both_places(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rundir.time, "strftime", lambda form: "then")
    own, said = config(url, tmp_path), list[str]()
    with open_run(own, fresh=True, notify=nobody) as run:
        trained(run, 2)
    with open_run(config(url, tmp_path, epochs=7), fresh=True, notify=said.append) as again:
        assert again.store().steps() == []
        assert CheckpointStore(again.path).steps() == []
    assert said == [f"the earlier run was moved to {url}/r.before-then"]
    assert RemoteStore(tmp_path / "there", Objects(f"{url}/r.before-then")).steps() == [2]
    assert CheckpointStore(run.path.with_name("r.before-then")).steps() == [2]


def test_a_longer_run_is_finished_no_more_behind_the_url_unless_nothing_was_added(url: str, tmp_path: Path) -> None:
    with open_run(config(url, tmp_path, max_steps=4), fresh=False, notify=nobody) as run:
        trained(run, 4)
        finish(run, 4)
    kept, said = Objects(str(run.url)), list[str]()
    summary, saved = kept.read("summary.json"), kept.read("config.yaml")
    longer = config(url, tmp_path, max_steps=8)
    seen: list[tuple[bytes | None, bytes | None]] = []

    def begin(then: Callable[[RunDir], object]) -> None:
        with open_run(longer, fresh=False, notify=said.append) as run:
            seen.append((kept.read("summary.json"), kept.read("config.yaml")))
            then(run)
            raise CheckpointError("stop")

    with pytest.raises(CheckpointError, match="stop"):
        begin(lambda run: None)
    assert len(said) == 1
    assert (kept.read("summary.json"), kept.read("config.yaml")) == (summary, saved)
    with pytest.raises(CheckpointError, match="stop"):
        begin(lambda run: trained(run, 6))
    assert seen[0] == seen[1] == (None, kept.read("config.yaml"))
    assert kept.read("summary.json") is None
    assert kept.read("config.yaml") != saved


@pytest.mark.parametrize("at", ["said", "removed"])
def test_a_run_is_longer_also_where_the_start_before_ended_as_it_became_so(
    at: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_run(config(url, tmp_path, max_steps=10), fresh=False, notify=nobody) as run:
        run.keep_resolved(RESOLVED)
        trained(run, 10)
        finish(run, 10)
    said: list[str] = []

    def killed(message: str) -> None:
        if at == "said":
            raise KeyboardInterrupt

    def remove(self: Objects, *names: str) -> None:
        if "summary.json" in names:
            raise StorageError("the storage failed")

    longer = config(url, tmp_path, max_steps=20)
    with monkeypatch.context() as patch:
        if at == "removed":
            patch.setattr(Objects, "remove", remove)
        with (
            pytest.raises(KeyboardInterrupt if at == "said" else StorageError),
            open_run(longer, fresh=False, notify=killed),
        ):
            pass
    with open_run(longer, fresh=False, notify=said.append) as run:
        assert run.finished() is None
    assert said == ["train.max_steps was 10, is now 20: the run continues to that step"]


def test_a_first_start_that_was_refused_leaves_nothing_behind_the_url(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="refused"), open_run(config(url, tmp_path), fresh=False, notify=nobody):
        raise ConfigError("refused")
    assert Objects(url).files() == []
    with open_run(config(url, tmp_path, learning_rate=1.0), fresh=False, notify=nobody) as run:
        assert Objects(str(run.url)).files() == ["config.sig", "config.yaml"]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("share", [None, (0, 2), (1, 2)])
def test_the_first_rank_of_a_machine_brings_its_logs_and_profile(
    url: str, tmp_path: Path, first: bool, share: tuple[int, int] | None
) -> None:
    store = RemoteStore(tmp_path / "run", Objects(url), attempt="0123abcdef99", first=first, share=share)
    store.take()
    for name in ("metrics.jsonl", "starts.jsonl", "logs/a.log", "profile/p", "tensorboard/deep/t"):
        (store.run_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (store.run_dir / name).write_text(name)
    store.sync_records()
    of_run = {"metrics.jsonl", "starts.jsonl", "tensorboard/deep/t"} if first else set()
    of_machine = {"logs/0123abcd/a.log", "profile/p"} if (first if share is None else share[0] == 0) else set()
    assert set(Objects(url).files()) == {"attempt", *of_run, *of_machine}
