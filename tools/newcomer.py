"""Follow the pages "The first hour" and "Coming from another system" literally in a fresh clone, as a new user would.

    make newcomer ARGS="--into DIRECTORY --steps N"

Clones this repository, runs `make quickstart` in it with its own environment (about 10 minutes), puts rows where the
page expects them, and runs every command of the pages in order, including those that other tests skip because they need
a network. A server is started, asked with the page's own `curl`, and stopped. Stops at the first failure. `--into`
continues with an existing clone. docs/release.md has the date of the last walk.

Substitutes: the repository for `URL`, the quickstart's model for its Hub id, its rows for the reader's own, and a file
of tests/support/documents.py for a LLaMA-Factory config. Blocks that need hosts or a GPU are skipped and listed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.documents import FILE, FOREIGN, MODEL, ROOT, Block, blocks

PAGES = ("first-hour.md", "coming-from.md")
LOCAL = ".models/SmolLM2-135M-Instruct"
MISSING = {"hosts", "gpu"}
CURL = re.compile(r"^curl (?:.*\\\n)*.*$", re.MULTILINE)


def commands_of(page: Sequence[Block], steps: int) -> list[tuple[str, str]]:
    """The location of each command, and the command to run for it."""
    found = []
    for block in page:
        for command in block.commands:
            typed = command.replace(MODEL, LOCAL).split("  #")[0]
            if missing := block.needs & MISSING:
                print(f"== {block}: {command}: left out, it needs {', '.join(sorted(missing))}")
            if missing or typed.startswith("make "):
                continue
            if " train " in typed:
                typed += f" train.epochs=null train.max_steps={steps} train.global_batch_size=4"
            if " evaluate " in typed:
                typed += " --max-rows 4 --max-new-tokens 16"
            found.append((str(block), typed))
    return found


def follow(folder: Path, steps: int) -> int:
    """Run the commands of the pages in a clone that `make quickstart` has set up; return the number of failures."""
    shutil.copytree(folder / "examples" / "quickstart", folder / "data", dirs_exist_ok=True)
    for name, text in FOREIGN.items():
        (folder / name).write_text(text.replace(MODEL, LOCAL))
    # `python` and `finray` are those of the clone; the environment of this process is not used.
    own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environ = own | {"PATH": f"{folder / '.venv' / 'bin'}{os.pathsep}{own['PATH']}"}
    for name in PAGES:
        page = folder / "docs" / "guide" / name
        for file, text in FILE.findall(page.read_text(encoding="utf-8")):
            (folder / file).write_text(text.replace(MODEL, LOCAL))
        for where, command in commands_of(blocks(page), steps):
            for written in re.findall(r" (?:init|-o) (\S+\.yaml)", command):
                (folder / written).unlink(missing_ok=True)
            started = time.monotonic()
            if " serve " in command:
                code = serve(command, page.read_text(encoding="utf-8"), folder, environ)
            else:
                code = subprocess.run(["bash", "-c", command], cwd=folder, env=environ, check=False).returncode
            print(f"== {where}: {command}: {code}, {time.monotonic() - started:.0f} s", flush=True)
            if code:
                return 1
    return 0


def serve(command: str, page: str, folder: Path, environ: Mapping[str, str]) -> int:
    """Start a server, ask it as the page does, and stop it; 0 if it answered and stopped as it should."""
    with subprocess.Popen(
        ["bash", "-c", f"exec {command}"], cwd=folder, env=environ, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        ready = any(line.startswith("serving ") for line in server.stdout)
        asked = CURL.search(page)
        answer = ""
        if ready and asked is not None:
            done = subprocess.run(["bash", "-c", asked[0]], stdout=subprocess.PIPE, text=True, timeout=300, check=False)
            answer = done.stdout
            print(f"{asked[0]}\n{answer}")
        server.send_signal(signal.SIGTERM)
        code = server.wait(120)
    return 0 if '"choices"' in answer and code == 128 + signal.SIGTERM else 1


def main() -> int:
    """Clone, set up, follow."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, help="an existing clone, or where to create one")
    parser.add_argument("--steps", type=int, default=3, help="steps per training (default: 3); few rows are evaluated")
    given = parser.parse_args()
    folder: Path = (given.into or Path(tempfile.mkdtemp(prefix="newcomer-")) / "finray").resolve()
    if not folder.exists():
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    if not (folder / "runs" / "quickstart" / "report.html").exists():
        environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        subprocess.run(["make", "quickstart"], cwd=folder, env=environ, check=True)
    return follow(folder, given.steps)


if __name__ == "__main__":
    sys.exit(main())
