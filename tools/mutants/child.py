"""Forked children that run tests against a copy of `src/`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tools.mutants import lines

ROOT = Path(__file__).parents[2]
MARK = "FINRAY_MUTANT"


class Copy:
    """A copy of `src/`, in which a file can have other text for a while, and room for what tests write."""

    def __init__(self) -> None:
        # Ray's sockets, of which the path is limited to 107 bytes, are some folders below this one.
        self.folder = Path(tempfile.mkdtemp(prefix="mutant-"))
        self.src = self.folder / "src"
        shutil.copytree(ROOT / "src", self.src, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        shutil.copy(lines.__file__, self.src / "sitecustomize.py")
        self._before: tuple[Path, bytes] | None = None

    def change(self, file: str, text: bytes) -> None:
        """Put other text into a file; :meth:`restore` first where one has been changed."""
        path = self.src / "finray" / file
        self._before = path, path.read_bytes()
        self._write(path, text)

    def restore(self) -> None:
        """Put the text back that a file had."""
        if self._before is not None:
            self._write(*self._before)
            self._before = None

    def _write(self, path: Path, text: bytes) -> None:
        path.write_bytes(text)
        # Bytecode is told apart by size and second, which two mutants can share.
        for old in path.parent.glob(f"__pycache__/{path.stem}.*"):
            old.unlink()

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class Selection:
    """A pytest plugin: only these tests, in this order, each with a time limit; and what became of them."""

    def __init__(self, wanted: Mapping[str, float] | None, between: Callable[[str | None], None]) -> None:
        self.wanted, self.between = wanted, between
        self.seconds: dict[str, float] = {}
        self.bad: dict[str, str] = {}
        self.passed: set[str] = set()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if self.wanted is None:
            return
        order = {name: place for place, name in enumerate(self.wanted)}
        # A name without its parameters, or a file, stands for all that it holds.
        known = {item: next((one for one in names_of(item.nodeid) if one in order), None) for item in items}
        items[:] = sorted((item for item in items if known[item]), key=lambda item: order[str(known[item])])
        for item in items:
            item.add_marker(pytest.mark.timeout(30 + 6 * self.wanted[str(known[item])]))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.between(None)
        start = time.monotonic()
        result = yield
        self.seconds[item.nodeid] = round(time.monotonic() - start, 3)
        self.between(item.nodeid)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.bad[report.nodeid] = str(report.longrepr).strip().rpartition("\n")[2][:200]
        elif report.when == "call" and report.passed:
            self.passed.add(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.bad[report.nodeid] = str(report.longrepr).strip().rpartition("\n")[2][:200]


def names_of(nodeid: str) -> tuple[str, str, str]:
    """A test, the same without its parameters, and its file."""
    return nodeid, nodeid.partition("[")[0], nodeid.partition("::")[0]


def fork(copy: Copy, files: list[str], wanted: Mapping[str, float] | None, *, trace: bool = False) -> int:
    """Start pytest in a child; what came of it will be in `outcome.json` in the copy's folder.

    Args:
        copy: of the source.
        files: test files to collect.
        wanted: seconds by test, in the order in which they are to run until one fails; None runs all of them.
        trace: note for every test which lines are run.
    """
    shutil.rmtree(copy.folder / "t", ignore_errors=True)
    (copy.folder / "t").mkdir()
    (copy.folder / "outcome.json").unlink(missing_ok=True)
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        os.setsid()
        out = os.open(copy.folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream, target in ((os.open(os.devnull, os.O_RDONLY), 0), (out, 1), (out, 2)):
            os.dup2(stream, target)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        sys.path[:] = [str(copy.src), str(ROOT), *(one for one in sys.path if not (Path(one) / "finray").is_dir())]
        os.environ.update(
            PYTHONPATH=f"{copy.src}:{ROOT}",
            TMPDIR=str(copy.folder / "t"),
            HYPOTHESIS_STORAGE_DIRECTORY=str(copy.folder / "t" / "hypothesis"),
            OMP_NUM_THREADS="1",
            **{MARK: str(copy.folder)},
        )
        tempfile.tempdir = None
        os.chdir(ROOT)
        code = _run(copy, files, wanted, trace)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _run(copy: Copy, files: list[str], wanted: Mapping[str, float] | None, trace: bool) -> int:
    seen: dict[str, list[str]] = {}
    noted, read = copy.folder / "t" / "lines", 0
    anew = lambda: None  # noqa: E731
    if trace:
        os.environ[lines.TARGET] = str(noted)
        anew = lines.start(str(noted))

    def between(name: str | None) -> None:
        """Before a test (None), and after it."""
        nonlocal read
        if not trace:
            return
        anew()
        text = noted.read_bytes()
        if name is not None:
            found = text[read:].decode().splitlines()
            seen[name] = sorted({one.partition("/src/finray/")[2] for one in found})
        read = len(text)

    selection = Selection(wanted, between)
    arguments = ["-p", "no:xdist", "-p", "no:cacheprovider", "-rN", f"--basetemp={copy.folder / 't' / 'pytest'}"]
    arguments += [
        "-W",
        "ignore:Module already imported:pytest.PytestAssertRewriteWarning",
        f"--rootdir={ROOT}",
        "--tb=short",
        *(["-x"] if wanted is not None else []),
        *files,
    ]
    code = int(pytest.main(arguments, plugins=[selection]))
    sys.settrace(None)
    import finray

    if not str(finray.__file__).startswith(str(copy.src)):
        selection.bad, code = {"": "another finray was tested"}, 70
    outcome: dict[str, Any] = {"code": code, "seconds": selection.seconds, "bad": selection.bad}
    outcome |= {"passed": sorted(selection.passed), "lines": seen}
    (copy.folder / "outcome.json").write_text(json.dumps(outcome))
    return code


def outcome(copy: Copy) -> dict[str, Any]:
    """What a child that has ended wrote; where it did not get that far, code 70 and what it printed last."""
    path = copy.folder / "outcome.json"
    if path.exists():
        return dict(json.loads(path.read_text()))
    said = (copy.folder / "log").read_text(errors="replace")[-500:]
    return {"code": 70, "bad": {"": said}, "passed": [], "lines": {}, "seconds": {}}


def sweep(copy: Copy, pid: int) -> None:
    """End whatever a child has left behind: its process group, and what carries its mark in the environment."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    mark = f"{MARK}={copy.folder}\0".encode()
    for other in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark in other.read_bytes() + b"\0":
                os.kill(int(other.parent.name), signal.SIGKILL)
