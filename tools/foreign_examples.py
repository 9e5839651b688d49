"""Convert and plan the published example configs of LLaMA-Factory or Axolotl, and count what is lost.

Nothing is downloaded, and this repository contains none of their files: pass checkouts of these projects.

    python -m tools.foreign_examples ../LLaMA-Factory ../axolotl [--model DIRECTORY]

Plans are made with `--offline` for GPUs with 80 GB: settings are checked, but not models and datasets on the Hub. With
`--model`, this model replaces all of theirs, so that its tokenizer can process the data in the checkout.
"""

from __future__ import annotations

import argparse
import os
import subprocess
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from finray.config.convert import convert
from finray.config.load import build_config
from finray.errors import FinrayError
from finray.planning.plan import make_plan

GPU, WORKERS = "h100-80gb", 8


@dataclass
class Found:
    """The results for the examples of one checkout.

    Attributes:
        files: YAML files below `examples`.
        foreign: files that are not training configs, such as those of Accelerate or of tools.
        refused: number of files, by reason.
        converted: files that could be converted.
        planned: converted files without a problem in what could be checked.
        problems: number of the other converted files, by problem.
        lost: keys without an equivalent, with the number of files and the reason.
        unknown: unknown keys, with the number of files.
    """

    files: int = 0
    foreign: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    converted: int = 0
    planned: int = 0
    problems: Counter[str] = field(default_factory=Counter)
    lost: Counter[tuple[str, str]] = field(default_factory=Counter)
    unknown: Counter[str] = field(default_factory=Counter)


def look_at(checkout: Path, *, model: str | None = None) -> Found:
    """Convert and plan every example of a checkout."""
    found = Found()
    table = checkout / "data" / "dataset_info.json"
    for file in sorted(one for one in (checkout / "examples").rglob("*") if one.suffix in (".yaml", ".yml")):
        found.files += 1
        try:
            made = convert(file, workers=WORKERS, dataset_info=table if table.is_file() else None)
        except FinrayError as error:
            if any(sign in error.message for sign in ("names no model", "is not for training")):
                found.foreign += 1
            else:
                found.refused[error.message] += 1
            continue
        found.converted += 1
        for key in {one.key.partition(":")[0] for one in made.lost if not one.why}:
            found.unknown[key] += 1
        for key, why in {one.key.partition(":")[0]: one.why for one in made.lost if one.why}.items():
            found.lost[key, why] += 1
        if model is not None:
            made.plain["model"]["name"] = model
        config = build_config(made.plain, source=str(file))
        plan = make_plan(config, gpu=GPU, environ={}, offline=True)
        if plan.starts is False:
            found.problems[f"{file.relative_to(checkout)}: {plan.problems[0].message}"] += 1
        else:
            found.planned += 1
    return found


def commit_of(checkout: Path) -> str:
    """The commit of a checkout and its date; empty if git finds none."""
    command = ["git", "-C", str(checkout), "log", "-1", "--format=%h of %cs"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def main() -> None:
    """Print the results for each checkout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="+", type=Path)
    parser.add_argument("--model", help="directory of a model that replaces all others")
    given = parser.parse_args()
    for checkout in given.checkouts:
        found = look_at(checkout, model=given.model)
        print(f"## {checkout.name}, commit {commit_of(checkout) or 'unknown'}\n")
        print(f"{found.files} files, {found.foreign} of them no training configs")
        print(f"{found.converted} converted, {found.planned} of them planned, {found.refused.total()} refused:")
        for title, counts in (("refused", found.refused), ("not planned", found.problems), ("unknown", found.unknown)):
            print(f"\n{title}:")
            for text, count in counts.most_common():
                print(f"  {count:4}  {text}")
        print("\nnot carried over:")
        for (key, why), count in found.lost.most_common():
            print(f"  {count:4}  {key}: {why}")
        print()


if __name__ == "__main__":
    main()
