"""The first hour and "coming from another system", followed word by word in a fresh clone: what a newcomer would see.

    python -m tools.newcomer [--into DIRECTORY] [--steps N]

Clones this repository, runs `make quickstart` in it with an environment of its own (some 10 minutes), puts rows where
the page asks for them, and runs every command of the pages in their order, those too that other tests leave out because
they need a network. Stops at the first that fails. `--into` goes on with a clone that is there already.

What stands in: the repository for `URL`, the quickstart's model for its name at the Hub, its rows for the reader's own,
and a file of this script's for one of LLaMA-Factory. Blocks that need hosts or a GPU are left out, and named.
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
    """Where each command stands, and what is typed for it."""
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
            found.append((str(block), typed))
    return found


def follow(folder: Path, steps: int) -> int:
    """Run the commands of the pages in a clone that `make quickstart` has set up; the number that failed."""
    shutil.copytree(folder / "examples" / "quickstart", folder / "data", dirs_exist_ok=True)
    (folder / "data" / "dataset_info.json").write_text(TABLE)
    (folder / "their-file.yaml").write_text(THEIRS.format(model=LOCAL))
    # `python` and `finray` are those of the clone, and nothing of this process is.
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
    parser.add_argument("--into", type=Path, help="a clone that is there already, or where it is put")
    parser.add_argument("--steps", type=int, default=3, help="of each training (default: 3)")
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
