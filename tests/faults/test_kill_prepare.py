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
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from finray.config.schema import Config
from finray.data.dataset.prepare import is_prepared
from finray.data.dataset.prepared import PreparedDataset
from finray.errors import DataError
from tests.support import runs, tiny

ROWS = 400
Files = dict[str, bytes]

# Forks a process for each preparation, so that libraries are loaded once. Asked to die at the n-th change of the file
# system below the directory, the process kills itself right before it.
_PREPARER = """
import json, os, signal, sys
import finray.data.sources.pieces
from finray.data.dataset.prepare import prepare_here
from tests.support import runs

finray.data.sources.pieces.PIECE_BYTES = 2048
CHANGES = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir"}

def prepare(order):
    seen = 0
    def note(event, arguments):
        nonlocal seen
        if event in CHANGES and str(arguments[0]).startswith(order["root"]):
            seen += 1
            if seen == order["die_at"]:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(note)
    prepare_here(runs.config_of(order["config"]), root=order["root"])
    return seen

prepare_order = json.loads(sys.stdin.readline())
prepare(prepare_order)
print("ready", flush=True)
for line in sys.stdin:
    order = json.loads(line)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, str(prepare(order)).encode())
        os._exit(0)
    os.close(writer)
    print(child, flush=True)
    _, status = os.waitpid(child, 0)
    print(json.dumps({"status": status, "changes": int(os.read(reader, 32) or 0)}), flush=True)
    os.close(reader)
"""


class Preparer:
    """Runs preparations in processes that can be killed."""

    def __init__(self, plain: dict[str, Any], scratch: Path) -> None:
        self._plain = plain
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PREPARER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._ask(scratch, None)
        assert self._answer() == "ready"

    def run(self, root: Path, *, die_at: int | None = None, kill_after: float | None = None) -> tuple[bool, int]:
        """Whether it came to its end, and how many changes it had made then."""
        self._ask(root, die_at)
        child = int(self._answer())
        if kill_after is not None:
            time.sleep(kill_after)
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        outcome = json.loads(self._answer())
        assert outcome["status"] in (0, signal.SIGKILL), outcome
        return outcome["status"] == 0, outcome["changes"]

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _ask(self, root: Path, die_at: int | None) -> None:
        assert self._process.stdin is not None
        order = {"config": self._plain, "root": str(root), "die_at": die_at}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        assert line, f"ended with {self._process.wait()}"
        return line


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
def preparer(plain: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Preparer]:
    made = Preparer(plain, tmp_path_factory.mktemp("first"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def undisturbed(preparer: Preparer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Files, int, float]:
    """The files of a preparation that nobody disturbed, the changes that it made, and its seconds."""
    root = tmp_path_factory.mktemp("undisturbed")
    started = time.perf_counter()
    finished, changes = preparer.run(root)
    seconds = time.perf_counter() - started
    assert finished
    (folder,) = (path for path in root.iterdir() if not path.name.startswith("."))
    files = content(folder)
    assert {"manifest.json", "bad-rows.jsonl", "eval/tokens-00000.arrow"} <= set(files)
    assert len(files) > 30
    return files, changes, seconds


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


def seeds(count: int, *, gate: tuple[int, ...]) -> list[Any]:
    """The gate has some, and make test-nightly the others."""
    return [pytest.param(one, marks=[] if one in gate else [pytest.mark.nightly]) for one in range(count)]


# --- at a random moment ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", seeds(8, gate=(0, 4, 7)))
def test_killed_at_a_random_moment(
    seed: int, plain: dict[str, Any], preparer: Preparer, undisturbed: tuple[Files, int, float], tmp_path: Path
) -> None:
    expected, _, seconds = undisturbed
    # Eighths of the time, so that no part of it is left out by chance; sooner where it was over by then.
    moment = seconds * (seed + random.Random(seed).random()) / 8
    for attempt in range(10):
        root = tmp_path / str(attempt)
        root.mkdir()
        if not preparer.run(root, kill_after=moment * 0.5**attempt)[0]:
            break
    else:
        pytest.fail("it was never killed")
    config = into(plain, root)
    check_after_a_kill(config, root, expected)
    before = finished_parts(root)
    assert preparer.run(root)[0]
    check_after_the_end(config, before, expected)


# --- right before a random change of the file system, and again while it is continued ----------------------------


@pytest.mark.parametrize("seed", seeds(10, gate=(0, 1, 4)))
def test_killed_before_a_random_change(
    seed: int, plain: dict[str, Any], preparer: Preparer, undisturbed: tuple[Files, int, float], tmp_path: Path
) -> None:
    expected, changes, _ = undisturbed
    config = into(plain, tmp_path)
    chance = random.Random(100 + seed)
    # The last changes, where it becomes whole, are worth a round each.
    die_at = changes - seed if seed < 4 else chance.randrange(1, changes - 3)
    finished, _ = preparer.run(tmp_path, die_at=die_at)
    assert not finished
    check_after_a_kill(config, tmp_path, expected)
    preparer.run(tmp_path, die_at=chance.randrange(1, changes))
    check_after_a_kill(config, tmp_path, expected)
    before = finished_parts(tmp_path)
    assert preparer.run(tmp_path)[0]
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


@pytest.mark.parametrize("seed", range(2))
def test_the_command_killed_with_its_workers(
    seed: int, plain: dict[str, Any], preparer: Preparer, undisturbed: tuple[Files, int, float], tmp_path: Path
) -> None:
    """The next try is the command again, and once a preparation without Ray."""
    expected, _, _ = undisturbed
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
        assert preparer.run(root)[0]
    else:
        mark = uuid.uuid4().hex
        process = start_prepare(file, mark)
        _, err = process.communicate(timeout=runs.PATIENCE_S)
        assert process.returncode == 0, err
        assert gone(mark)
    check_after_the_end(config, before, expected)
