"""pass@k: whether one of k answers passes the user's check, each in a process with limits of time and memory."""

from __future__ import annotations

import inspect
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from finray.config.evaluation import ScoringConfig
from finray.config.extensions import load_named
from finray.config.redact import redact_text
from finray.errors import ConfigError
from finray.evaluation.scores import checking
from finray.evaluation.scores.base import Answered, FloatArray, SummedScore
from finray.limits import cut

# What can become of a check besides `right` and `wrong`, and what is said of it. None of these answers has passed.
_UNDECIDED = {
    "failed": "failed",
    "time": "ran out of time",
    "memory": "ran out of memory",
    "ended": "ended without a verdict",
}
# Environment variable by which processes are found whose supervisor was killed.
_MARK = "FINRAY_CHECK"
# Seconds beyond the time limit, for starting and ending.
_SLACK_S = 30.0


@dataclass(frozen=True, slots=True)
class Checked:
    """What became of the check of an answer."""

    kind: str  # ``right``, ``wrong``, or a key of the table above
    text: str = ""  # the traceback of a checker that failed, or why a process ended
    left: tuple[str, ...] = ()  # what could not be removed or ended


def pass_at_k(right: int, tries: int, k: int) -> float:
    """Probability that one of ``k`` tries, drawn without replacement, is right: ``1 - C(n-c, k) / C(n, k)``.

    The unbiased estimator of Chen et al. 2021, "Evaluating Large Language Models Trained on Code", section 2.1.
    """
    return 1.0 - math.comb(tries - right, k) / math.comb(tries, k)


def check_answer(checker: str, answer: str, row: Mapping[str, Any], *, seconds: float, memory_mb: int) -> Checked:
    """Call a checker with an answer, in a separate process with a time limit.

    The checked code can read and write whatever this user can: limits protect the machine from overload; they are not a
    sandbox. The environment holds no secret, and the working directory is empty. On Linux, processes that the code
    starts are ended with it, in whatever session they are; where that is allowed, it sees no others.

    Args:
        checker: ``package.module:function`` of the answer and the row.
        answer: what the model wrote.
        row: the source row.
        seconds: limit of wall-clock time, and of CPU time of a process.
        memory_mb: limit of address space of a process.
    """
    word, mark, left = os.urandom(16).hex(), os.urandom(16).hex(), list[str]()
    reading, writing = os.pipe()
    folder = Path(tempfile.mkdtemp(prefix="finray-check-"))
    environment = {
        "PATH": os.environ.get("PATH", ""),
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "OMP_NUM_THREADS": "1",
        "FINRAY_CHECKER_PATH": json.dumps([str(Path.cwd()), *(folder for folder in sys.path if folder)]),
        _MARK: mark,
    }
    try:
        child = subprocess.Popen(
            [sys.executable, "-I", checking.__file__, str(writing), str(seconds), str(memory_mb * 2**20)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env=environment,
            pass_fds=(writing,),
            start_new_session=True,
        )
        try:
            with suppress(subprocess.TimeoutExpired, BrokenPipeError):
                given = json.dumps([word, checker, answer, row], default=str).encode()
                child.communicate(given, timeout=seconds + _SLACK_S)
        finally:
            child.kill()
            child.wait()
            # It ends all processes below it, but the code may have killed it.
            if (child.returncode < 0 or child.returncode == checking.LEFT) and not _all_ended(mark):
                left.append("processes")
        os.set_blocking(reading, False)
        report = b""
        with suppress(BlockingIOError):
            report = os.read(reading, 2**16)
    finally:
        os.close(writing)
        os.close(reading)
        if not _removed(folder):
            left.append(str(folder))
    return Checked(*_understood(report, word, child.returncode, seconds), tuple(left))


def _understood(report: bytes, word: str, code: int, seconds: float) -> tuple[str, str]:
    """Kind and text of what a check has told, and of how its process ended."""
    ready, verdict_text = report.startswith(checking.READY), report.removeprefix(checking.READY)
    for verdict, kind in ((True, "right"), (False, "wrong")):
        if verdict_text.startswith(f"{word} {verdict}".encode()):
            return kind, ""
    kind, text = "ended", "the process ended"
    if code == checking.LATE:
        kind, text = "time", f"it took more than {seconds:g} seconds"
    elif code == checking.CROWD:
        text = "there were too many processes"
    elif code > 128:
        text = f"the process ended with signal {code - 128}"
        # Of the limit on computing time.
        kind = "time" if code - 128 == signal.SIGXCPU else kind
    else:
        # Whatever the code may have written there.
        with suppress(ValueError, TypeError, RecursionError):
            given, detail = json.loads(verdict_text)
            if given in (*_UNDECIDED, "wrong"):
                kind, text = given, _shown(str(detail))
    return (kind, text) if ready or kind == "failed" else ("failed", f"before the checker was imported: {text}")


def _shown(text: str) -> str:
    """A traceback without secrets and control characters."""
    return redact_text("".join(character for character in text if character == "\n" or character.isprintable()).strip())


def _all_ended(mark: str) -> bool:
    """End the processes with this mark in their environment; False if some remain."""
    for _ in range(100):
        pids = list[int]()
        for folder in Path("/proc").glob("[0-9]*"):
            # Of another user, or ended meanwhile.
            with suppress(OSError):
                if f"{_MARK}={mark}".encode() in (folder / "environ").read_bytes():
                    pids.append(int(folder.name))
                    os.kill(pids[-1], signal.SIGKILL)
        if not pids:
            return True
        time.sleep(0.05)
    return False


def _removed(folder: Path) -> bool:
    """Remove what the code left: by programs that know directories of any depth, and then those that are locked."""
    with suppress(OSError):
        folder.rmdir()
    # What is no directory any more may lead elsewhere.
    commands = [["rm", "-f"]] if folder.is_symlink() else [["rm", "-rf"], ["chmod", "-R", "u+rwx"], ["rm", "-rf"]]
    with suppress(OSError, subprocess.TimeoutExpired):
        for command in commands:
            if os.path.lexists(folder):
                subprocess.run([*command, "--", folder], capture_output=True, timeout=_SLACK_S, check=False)
    return not os.path.lexists(folder)


class PassAtK(SummedScore):
    """Mean of :func:`pass_at_k` over the rows."""

    needs = frozenset({"answers", "columns"})

    def __init__(self, settings: ScoringConfig | None = None) -> None:
        super().__init__(settings)
        scoring = self.settings
        if scoring.checker is None:
            raise ConfigError(
                "`pass_at_k` needs a function of yours that checks an answer",
                where="evaluation.scoring.checker",
                repair="evaluation.scoring.checker=my_module:passes",
            )
        if not scoring.run_code:
            raise ConfigError(
                "`pass_at_k` runs code that a model wrote, which must be allowed explicitly",
                where="evaluation.scoring.run_code",
                repair="evaluation.scoring.run_code=true, on a machine where it can do no harm",
            )
        if scoring.attempts < scoring.k:
            raise ConfigError(
                f"attempts ({scoring.attempts}) must be at least k ({scoring.k})",
                where="evaluation.scoring.attempts",
                repair=f"evaluation.scoring.attempts={scoring.k} or more",
            )
        # Only to check it, before answers are generated.
        checker = load_named("finray.metrics", scoring.checker, where="evaluation.scoring.checker")
        if not callable(checker) or inspect.iscoroutinefunction(checker) or inspect.isgeneratorfunction(checker):
            what = "an async function" if inspect.iscoroutinefunction(checker) else "no function"
            raise ConfigError(
                f"`{scoring.checker}` is {what if not inspect.isgeneratorfunction(checker) else 'a generator'}",
                where="evaluation.scoring.checker",
                repair="name a plain function of an answer and a row that returns True or False",
            )

    def statistics(self, rows: Sequence[Answered]) -> FloatArray:
        """pass@k of each row (N, 1); ``counts`` and ``notes`` say how the checks ended.
        Raises ConfigError: the checker failed at every answer."""
        scoring = self.settings
        assert scoring.checker is not None

        def check(row: Answered, answer: str) -> Checked:
            return check_answer(
                str(scoring.checker), answer, row.columns, seconds=scoring.seconds, memory_mb=scoring.memory_mb
            )

        pool = ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2))
        try:
            futures = [[pool.submit(check, row, answer) for answer in row.answers] for row in rows]
            checked = [[future.result() for future in tries] for tries in futures]
        finally:
            # After Ctrl-C, only those that have begun.
            pool.shutdown(cancel_futures=True)
        self._account([check for tries in checked for check in tries])
        right = [sum(check.kind == "right" for check in tries) for tries in checked]
        return np.array(
            [[pass_at_k(count, len(row.answers), scoring.k)] for count, row in zip(right, rows, strict=True)]
        )

    def _account(self, checked: Sequence[Checked]) -> None:
        counts = Counter(check.kind for check in checked)
        self.counts = {kind: counts[kind] for kind in ("right", "wrong", *_UNDECIDED)}
        failure = next((check.text for check in checked if check.kind == "failed"), "")
        lines = failure.splitlines()
        if lines and counts["failed"] == len(checked):
            raise ConfigError(
                f"the checker failed at every answer ({len(checked)}): {cut(lines[-1])}",
                where=f"evaluation.scoring.checker={self.settings.checker}",
                repair="fix it; where the answer is to blame, it must return False",
                problems=tuple(lines[:-1]),
            )
        self.counts |= {"first_failure": failure} if failure else {}
        self.notes = []
        if undecided := [f"{counts[kind]} {what}" for kind, what in _UNDECIDED.items() if counts[kind]]:
            places = [line.strip() for line in lines if line.lstrip().startswith("File ")]
            first = f"; the first failure: {cut(lines[-1])} ({', '.join(places[-1:])})" if lines else ""
            self.notes.append(f"of {len(checked)} checks {', '.join(undecided)}: counted as not passed{first}")
        if left := list(dict.fromkeys(path for check in checked for path in check.left)):
            self.notes.append(f"the checked code left what cannot be removed or ended: {', '.join(left[:5])}")
