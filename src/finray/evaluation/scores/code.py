"""pass@k: whether one of k answers passes the user's check, each in a process with limits of time and memory."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from finray.config.evaluation import ScoringConfig
from finray.config.extensions import load_named
from finray.errors import ConfigError
from finray.evaluation.scores.base import Answered, FloatArray, SummedScore

# The child process: set limits, run the checker, then write the result to a file descriptor that only it knows. Exit
# codes are not used, because the checked code may call `exit`.
_CHILD = """
import importlib, json, os, resource, sys
told, limit, seconds = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
word, path, answer, row = json.load(sys.stdin)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
resource.setrlimit(resource.RLIMIT_FSIZE, (2**26, 2**26))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
sys.path += json.loads(os.environ.pop("FINRAY_CHECKER_PATH"))
module, _, name = path.partition(":")
verdict = getattr(importlib.import_module(module), name)(answer, row)
os.write(told, f"{word} {bool(verdict)}".encode())
os._exit(0)
"""


def pass_at_k(right: int, tries: int, k: int) -> float:
    """Probability that one of ``k`` tries, drawn without replacement, is right: ``1 - C(n-c, k) / C(n, k)``.

    The unbiased estimator of Chen et al. 2021, "Evaluating Large Language Models Trained on Code", section 2.1.
    """
    return 1.0 - math.comb(tries - right, k) / math.comb(tries, k)


def passes(checker: str, answer: str, row: Mapping[str, Any], *, seconds: float, memory_mb: int) -> bool:
    """Whether a checker accepts an answer, in a separate process with a time limit.

    The checked code can read and write whatever this user can: limits protect the machine from overload; they are not a
    sandbox. The environment holds no secret, and the working directory is empty.

    Args:
        checker: ``package.module:function`` of the answer and the row.
        answer: what the model wrote.
        row: the source row.
        seconds: limit of wall-clock time, and of CPU time.
        memory_mb: limit of address space.
    """
    word = os.urandom(16).hex()
    reading, writing = os.pipe()
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            "PATH": os.environ.get("PATH", ""),
            "HOME": folder,
            "TMPDIR": folder,
            "OMP_NUM_THREADS": "1",
            "FINRAY_CHECKER_PATH": json.dumps([str(Path.cwd()), *(one for one in sys.path if one)]),
        }
        limits = [str(writing), str(memory_mb * 2**20), str(math.ceil(seconds) + 1)]
        child = subprocess.Popen(
            [sys.executable, "-I", "-c", _CHILD, *limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env=environment,
            pass_fds=(writing,),
            start_new_session=True,
        )
        os.close(writing)
        try:
            with suppress(subprocess.TimeoutExpired, BrokenPipeError):
                child.communicate(json.dumps([word, checker, answer, row], default=str).encode(), timeout=seconds)
        finally:
            # Including its child processes.
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        with os.fdopen(reading, "rb") as told:
            os.set_blocking(reading, False)
            return told.read(64) == f"{word} True".encode()


class PassAtK(SummedScore):
    """Mean of :func:`pass_at_k` over the rows."""

    needs = frozenset({"answers", "columns"})

    def __init__(self, settings: ScoringConfig | None = None) -> None:
        super().__init__(settings)
        own = self.settings
        if own.checker is None:
            raise ConfigError(
                "`pass_at_k` needs a function of yours that checks an answer",
                where="evaluation.scoring.checker",
                repair="evaluation.scoring.checker=my_module:passes",
            )
        if not own.run_code:
            raise ConfigError(
                "`pass_at_k` runs code that a model wrote, which must be allowed explicitly",
                where="evaluation.scoring.run_code",
                repair="evaluation.scoring.run_code=true, on a machine where it can do no harm",
            )
        if own.attempts < own.k:
            raise ConfigError(
                f"attempts ({own.attempts}) must be at least k ({own.k})",
                where="evaluation.scoring.attempts",
                repair=f"evaluation.scoring.attempts={own.k} or more",
            )
        # Only to check that it exists, before answers are generated.
        load_named("finray.metrics", own.checker, where="evaluation.scoring.checker")

    def statistics(self, rows: Sequence[Answered]) -> FloatArray:
        """pass@k of each row (N, 1)."""
        own = self.settings
        assert own.checker is not None

        def check(row: Answered, answer: str) -> bool:
            return passes(str(own.checker), answer, row.columns, seconds=own.seconds, memory_mb=own.memory_mb)

        with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
            futures = [[pool.submit(check, row, answer) for answer in row.answers] for row in rows]
            right = [sum(one.result() for one in own_tries) for own_tries in futures]
        return np.array([[pass_at_k(count, len(row.answers), own.k)] for count, row in zip(right, rows, strict=True)])
