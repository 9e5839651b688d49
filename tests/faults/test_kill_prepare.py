"""Preparation killed at random moments: what is accepted afterwards is complete, byte for byte, or nothing is; the same
command continues where it stopped, and ends with the bytes of a preparation that nobody disturbed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from finray.config.schema import Config
from finray.data.dataset.prepare import is_prepared, prepare_here
from finray.data.dataset.prepared import PreparedDataset
from finray.data.sources import pieces
from finray.errors import DataError
from tests.support import processes, runs, tiny

ROWS = 400
Files = dict[str, bytes]
CHANGES = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir"}


def prepare(plain: dict[str, Any], root: Path, die_at: int | None, told: Path) -> None:
    """In a process of its own, which kills itself right before the n-th change of the file system below the directory;
    else it writes down how many there were."""
    pieces.PIECE_BYTES = 2048
    seen = 0

    def note(event: str, arguments: Any) -> None:
        nonlocal seen
        if event in CHANGES and str(arguments[0]).startswith(f"{root}/"):
            seen += 1
            if seen == die_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(note)
    prepare_here(runs.config_of(plain), root=root)
    told.write_text(str(seen))


def run(plain: dict[str, Any], root: Path, die_at: int | None = None) -> int | None:
    """How many changes a preparation has made at its end; None where it was killed."""
    told = root.with_name(f"{root.name}-changes")
    told.unlink(missing_ok=True)
    process = processes.CONTEXT.Process(target=prepare, args=(plain, root, die_at, told))
    process.start()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return int(told.read_text()) if told.exists() else None


@pytest.fixture(scope="module")
def plain(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Training and evaluation rows, some of them bad: every kind of file that a prepared dataset has."""
    folder = tmp_path_factory.mktemp("rows")
    rows = [*tiny.chat_rows(ROWS), {"messages": []}]
    for name, some in (("rows.jsonl", rows), ("held-out.jsonl", tiny.chat_rows(40, start=ROWS))):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in some), encoding="utf-8")
    changes = {"data.eval_source": str(folder / "held-out.jsonl"), "data.on_bad_row": "drop"}
    return runs.tiny_run(tiny_model_dir, folder / "rows.jsonl", folder / "out", changes)


@pytest.fixture(scope="module")
def undisturbed(plain: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Files, int]:
    """The files of a preparation that nobody disturbed, and the changes that it made."""
    root = tmp_path_factory.mktemp("undisturbed")
    changes = run(plain, root)
    assert changes is not None
    (folder,) = (path for path in root.iterdir() if not path.name.startswith("."))
    files = content(folder)
    assert {"manifest.json", "bad-rows.jsonl", "eval/tokens-00000.arrow"} <= set(files)
    assert len(files) > 30
    return files, changes


def content(folder: Path) -> Files:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def into(plain: dict[str, Any], root: Path) -> Config:
    return runs.config_of(runs.changed(plain, {"prepare.dir": str(root)}))


def check_after_a_kill(config: Config, root: Path, expected: Files) -> None:
    """Nothing passes for a prepared dataset unless it is one, to the last byte."""
    ready = is_prepared(config)
    if ready is not None:
        assert content(Path(ready)) == expected
    for folder in [path for path in root.iterdir() if path.is_dir()]:
        try:
            PreparedDataset(folder)
        except DataError:
            assert str(folder) != ready
        else:
            # One that was killed right before it got its name may hold notes of its parts besides.
            assert expected.items() <= content(folder).items(), folder


def finished_parts(root: Path) -> dict[str, tuple[int, int]]:
    """The data files of parts that are done, with when they were written, and as which file."""
    found = {}
    for note in root.glob(".partial-*/*/part-*.json"):
        number = note.stem.removeprefix("part-")
        for file in (note.with_name(f"{role}-{number}.arrow") for role in ("tokens", "index")):
            stat = file.stat()
            found[f"{file.parent.name}/{file.name}"] = (stat.st_mtime_ns, stat.st_ino)
    return found


def check_after_the_end(config: Config, before: dict[str, tuple[int, int]], expected: Files) -> None:
    ready = is_prepared(config)
    assert ready is not None
    assert content(Path(ready)) == expected
    for name, written in before.items():
        stat = (Path(ready) / name).stat()
        assert (stat.st_mtime_ns, stat.st_ino) == written, f"{name} was written again"


# --- right before a random change of the file system, and again while it is continued ----------------------------


@pytest.mark.parametrize(
    "seed", [pytest.param(one, marks=[] if one in (0, 1, 4) else [pytest.mark.nightly]) for one in range(10)]
)
def test_killed_before_a_random_change(
    seed: int, plain: dict[str, Any], undisturbed: tuple[Files, int], tmp_path: Path
) -> None:
    (expected, changes), root = undisturbed, tmp_path / "prepared"
    root.mkdir()
    config = into(plain, root)
    chance = random.Random(100 + seed)
    # The last changes, where it becomes whole, are worth a round each.
    die_at = changes - seed if seed < 4 else chance.randrange(1, changes - 3)
    assert run(plain, root, die_at) is None
    check_after_a_kill(config, root, expected)
    run(plain, root, chance.randrange(1, changes))
    check_after_a_kill(config, root, expected)
    before = finished_parts(root)
    assert run(plain, root) is not None
    check_after_the_end(config, before, expected)


# --- the command line with a Ray of its own -------------------------------------------------------------------------

_CLI = """
import finray.data.sources.pieces
finray.data.sources.pieces.PIECE_BYTES = 2048
from finray.cli.main import main
main()
"""
_MARK = "FINRAY_TESTS_ROUND"


def start_prepare(config: Path, mark: str) -> subprocess.Popen[bytes]:
    """`finray prepare`, in a process group of its own, with a local Ray of its own."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return subprocess.Popen(
        [sys.executable, "-c", _CLI, "prepare", str(config)],
        env={**env, _MARK: mark},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def marked(mark: str) -> dict[int, str]:
    """Processes that carry a mark in their environment."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if f"{_MARK}={mark}".encode() in (folder / "environ").read_bytes():
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:100]
            except OSError:
                continue
    return found


def gone(mark: str) -> bool:
    """Whether all of them end within a while; those that do not are ended."""
    deadline = time.monotonic() + runs.PATIENCE_S
    while left := marked(mark):
        if time.monotonic() > deadline:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            pytest.fail(f"still there: {left}")
        time.sleep(0.1)
    return True


@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_the_command_killed_with_its_workers(
    seed: int, plain: dict[str, Any], undisturbed: tuple[Files, int], tmp_path: Path
) -> None:
    """The next try is the command again, and once a preparation without Ray."""
    expected, _ = undisturbed
    wanted = random.Random(seed).randrange(1, sum("tokens" in name for name in expected) // 2)
    for attempt in range(5):
        root = tmp_path / str(attempt)
        root.mkdir()
        workers = {"prepare": {"dir": str(root), "num_workers": 2}}
        file = runs.write_config(runs.changed(plain, workers), tmp_path / "run.yaml")
        config, mark = into(plain, root), uuid.uuid4().hex
        process = start_prepare(file, mark)
        deadline = time.monotonic() + runs.PATIENCE_S
        while process.poll() is None and len(list(root.glob(".partial-*/*/part-*.json"))) < wanted:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        _, err = process.communicate()
        assert process.returncode in (0, -signal.SIGKILL), err
        if is_prepared(config) is None:
            break
        # It was finished before it was killed.
        assert gone(mark)
    else:
        pytest.fail("it was never killed")
    check_after_a_kill(config, root, expected)
    # Its workers, which are not of the group, may be at their last part still.
    assert gone(mark)
    check_after_a_kill(config, root, expected)
    before = finished_parts(root)
    assert len(before) >= 2 * wanted

    if seed:
        assert run(plain, root) is not None
    else:
        mark = uuid.uuid4().hex
        process = start_prepare(file, mark)
        _, err = process.communicate(timeout=runs.PATIENCE_S)
        assert process.returncode == 0, err
        assert gone(mark)
    check_after_the_end(config, before, expected)
