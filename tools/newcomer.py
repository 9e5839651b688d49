"""Follow the pages "The first hour" and "Coming from another system" literally in a fresh clone, as a new user would.

    python -m tools.newcomer [--into DIRECTORY] [--steps N]

Clones this repository, runs `make quickstart` in it with its own environment (about 10 minutes), puts rows where the
page expects them, and runs every command of the pages in order, including those that other tests skip because they need
a network. Stops at the first failure. `--into` continues with an existing clone.

Substitutes: the repository for `URL`, the quickstart's model for its Hub id, its rows for the reader's own, and a file
in this script for a LLaMA-Factory config. Blocks that need hosts or a GPU are skipped and listed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.support.documents import ROOT, Block, blocks

PAGES = ("first-hour.md", "coming-from.md")
HUB, LOCAL = "HuggingFaceTB/SmolLM2-135M-Instruct", ".models/SmolLM2-135M-Instruct"
MISSING = {"hosts", "gpu", "server"}
THEIRS = """\
model_name_or_path: {model}
stage: sft
finetuning_type: lora
lora_rank: 8
dataset: mine
cutoff_len: 512
output_dir: runs/theirs
per_device_train_batch_size: 2
"""
TABLE = '{"mine": {"file_name": "train.jsonl", "formatting": "sharegpt", "columns": {"messages": "messages"}, \
"tags": {"role_tag": "role", "content_tag": "content"}}}'


def commands_of(page: Sequence[Block], steps: int) -> list[tuple[str, str]]:
    """The location of each command, and the command to run for it."""
    found = []
    for block in page:
        for command in block.commands:
            typed = command.replace(HUB, LOCAL).split("  #")[0]
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
    (folder / "data" / "dataset_info.json").write_text(TABLE)
    (folder / "their-file.yaml").write_text(THEIRS.format(model=LOCAL))
    # `python` and `finray` are those of the clone; the environment of this process is not used.
    own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environ = own | {"PATH": f"{folder / '.venv' / 'bin'}{os.pathsep}{own['PATH']}"}
    for page in PAGES:
        for where, command in commands_of(blocks(folder / "docs" / "guide" / page), steps):
            if "init" in command.split()[:2] or " -o " in command:
                (folder / "my-run.yaml").unlink(missing_ok=True)
            started = time.monotonic()
            done = subprocess.run(["bash", "-c", command], cwd=folder, env=environ, check=False)
            print(f"== {where}: {command}: {done.returncode}, {time.monotonic() - started:.0f} s", flush=True)
            if done.returncode:
                return 1
    return 0


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
