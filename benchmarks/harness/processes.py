"""Each measurement is a process of its own, with the threads and the allocator that it is to have."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TIMEOUT_S = 3600.0
# What would tell one side more than the other; each run is given its own.
_CLEARED = ("GLIBC_TUNABLES", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAY_ADDRESS", "LD_PRELOAD", "PYTHONPATH")


class BenchmarkError(Exception):
    """A measurement failed."""


def environment(*, threads: int, allocator: str | None = None) -> dict[str, str]:
    """This process's environment with a number of threads, and glibc's allocator set up or left as it is."""
    kept = {name: value for name, value in os.environ.items() if name not in _CLEARED}
    added = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**kept, **added, **({} if allocator is None else {"GLIBC_TUNABLES": allocator})}


def run_command(command: Sequence[str], *, env: Mapping[str, str]) -> str:
    """Run a command to its end; returns what it printed.

    Raises:
        BenchmarkError: it failed; the end of its error output is in the message.
    """
    done = subprocess.run(command, env=dict(env), capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-15:])
        raise BenchmarkError(f"{' '.join(command)}\nended with {done.returncode}:\n{tail}")
    return done.stdout


def run_script(python: str, script: Path, options: Sequence[str], *, env: Mapping[str, str]) -> dict[str, Any]:
    """Run a script that prints its result as one line of JSON, the last one."""
    output = run_command([python, str(script), *options], env=env)
    result: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return result
