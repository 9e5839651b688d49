"""A temporary directory ends with its process, or by a later one where that was killed; never while it is used."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from finray import files
from finray.files import hold, remove_abandoned, temporary

CODE = """
import os, sys
from pathlib import Path
from finray.files import hold, temporary
with temporary("finray-x-", Path(sys.argv[1])) as folder:
    (folder / "file").write_text("content")
    os.utime(folder, (0, 0))
    print(folder, flush=True)
    input()
"""


def old(folder: Path) -> Path:
    os.utime(folder, (0, 0))
    return folder


def test_what_a_killed_process_left_is_removed_and_not_before(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CODE, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        remove_abandoned(tmp_path, "finray-x-")
        assert (folder / "file").is_file()
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert (folder / "file").is_file()
        remove_abandoned(tmp_path, "finray-y-")
        assert folder.is_dir()
        remove_abandoned(tmp_path, "finray-x-")
        assert not folder.exists()


def test_a_directory_of_this_process_is_its_own_until_it_is_left(tmp_path: Path) -> None:
    with temporary("finray-x-", tmp_path) as folder:
        old(folder)
        remove_abandoned(tmp_path, "finray-x-")
        assert folder.is_dir()
    assert list(tmp_path.iterdir()) == []


def test_a_new_directory_has_time_to_be_locked(tmp_path: Path) -> None:
    (tmp_path / "finray-x-new").mkdir()
    remove_abandoned(tmp_path, "finray-x-")
    assert (tmp_path / "finray-x-new").is_dir()
    now = time.time() - files._NEW_S - 1
    os.utime(tmp_path / "finray-x-new", (now, now))
    remove_abandoned(tmp_path, "finray-x-")
    assert list(tmp_path.iterdir()) == []


def test_several_hold_one_directory(tmp_path: Path) -> None:
    """The ranks of a machine share that of a checkpoint from memory."""
    folder = tmp_path / "finray-x-shared"
    folder.mkdir()
    locks = [hold(folder), hold(folder)]
    for lock in locks:
        old(folder)
        remove_abandoned(tmp_path, "finray-x-")
        assert folder.is_dir()
        assert lock is not None
        os.close(lock)
    remove_abandoned(tmp_path, "finray-x-")
    assert not folder.exists()


def test_a_file_system_without_locks_keeps_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(files.fcntl, "flock", fail)
    (folder := tmp_path / "finray-x-there").mkdir()
    old(folder)
    remove_abandoned(tmp_path, "finray-x-")
    assert folder.is_dir()
    with temporary("finray-x-", tmp_path) as own:
        assert own.is_dir()
