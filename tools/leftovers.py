"""Run a selection of tests, and say what it leaves on the machine: processes, mounts, files in the home directory or in
the directory of temporary files.

    python -m tools.leftovers tests/faults/test_signals.py

The tests have a home and a directory of temporary files of their own here, and their processes carry a mark in their
environment: what others do on the machine at the same time does not count. Options of pytest follow after `--`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

MARK = "FINRAY_TEST_RUN"
# Processes that were told to end may take a while.
PATIENCE_S = 30.0


def processes(mark: str) -> dict[int, str]:
    """Command lines of the processes that carry a mark, by process id."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
    return found


def mounts() -> set[str]:
    """Where something is mounted."""
    return {line.split()[1] for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()}


def files(folder: Path) -> list[Path]:
    """What lies in a directory, but for what pytest keeps of tests that failed."""
    return [path for path in sorted(folder.iterdir()) if not path.name.startswith("pytest-of-")]


def run(words: list[str]) -> list[str]:
    """Run the tests; one line for each thing that they left."""
    before, mark = mounts(), uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="left-") as folder:
        home, temporary = Path(folder, "home"), Path(folder, "tmp")
        home.mkdir()
        temporary.mkdir()
        env = {**os.environ, MARK: mark, "HOME": str(home), "TMPDIR": str(temporary)}
        subprocess.run([sys.executable, "-m", "pytest", "-n", "0", *words], env=env, check=False)
        until = time.monotonic() + PATIENCE_S
        while (left := processes(mark)) and time.monotonic() < until:
            time.sleep(0.2)
        return [
            *(f"process {pid}: {command}" for pid, command in left.items()),
            *(f"mount {place}" for place in sorted(mounts() - before)),
            *(f"file {path}" for path in [*files(home), *files(temporary)]),
        ]


def main() -> None:
    """Exit 1 where something is left."""
    left = run([word for word in sys.argv[1:] if word != "--"])
    print("\n".join(left) or "nothing is left")
    sys.exit(bool(left))


if __name__ == "__main__":
    main()
