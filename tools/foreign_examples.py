"""Convert and plan the published example configs of LLaMA-Factory or Axolotl, and count what is lost.

Nothing is downloaded, and this repository contains none of their files: pass checkouts of these projects.

    python -m tools.foreign_examples ../LLaMA-Factory ../axolotl [--model DIRECTORY] [--table]

Plans are made with `--offline` for GPUs with 80 GB: settings are checked, but not models and datasets on the Hub. With
`--model`, this model replaces all of theirs, so that its tokenizer can process the data in the checkout. `--table`
prints the table of examples in docs/guide/peer-examples.md.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from finray.config.convert import Converted, convert
from finray.config.load import build_config
from finray.errors import FinrayError
from finray.planning.plan import make_plan
from finray.planning.result import Plan

GPU, WORKERS = "h100-80gb", 8
LLAMA, LLAMA_70B = "meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-70B-Instruct"
QWEN, MISTRAL, SMOL = "Qwen/Qwen3-8B", "mistralai/Mistral-7B-Instruct-v0.3", "HuggingFaceTB/SmolLM2-135M-Instruct"
PHI = "microsoft/Phi-3-medium-4k-instruct"
# The examples of the table, each with the model whose config is bundled and that is planned in place of theirs.
CHOSEN = {
    "train_full/qwen3_full_sft.yaml": QWEN,
    "train_lora/qwen3_lora_sft.yaml": QWEN,
    "train_lora/qwen3_lora_sft_ray.yaml": QWEN,
    "train_lora/qwen3_lora_pretrain.yaml": QWEN,
    "train_qlora/qwen3_lora_sft_bnb_npu.yaml": QWEN,
    "extras/fsdp_qlora/llama3_lora_sft.yaml": LLAMA,
    "extras/loraplus/llama3_lora_sft.yaml": LLAMA,
    "extras/pissa/llama3_lora_sft.yaml": LLAMA,
    "extras/muon/qwen2_full_sft.yaml": QWEN,
    "extras/fp8/llama3_fp8_fsdp_sft.yaml": LLAMA,
    "llama-3/lora-1b.yml": LLAMA,
    "llama-3/lora-1b-deduplicate-sft.yml": LLAMA,
    "llama-3/lora-1b-ray.yml": LLAMA,
    "llama-3/instruct-lora-8b.yml": LLAMA,
    "llama-3/fft-8b-liger-fsdp.yaml": LLAMA,
    "llama-3/qlora-fsdp-70b.yaml": LLAMA_70B,
    "mistral/qlora.yml": MISTRAL,
    "qwen3/32b-qlora.yaml": QWEN,
    "phi/phi3-ft.yml": PHI,
    "streaming/pretrain.yaml": SMOL,
}


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


def read(file: Path, checkout: Path) -> Converted:
    """Convert an example, with the table of datasets of its checkout if there is one."""
    table = checkout / "data" / "dataset_info.json"
    return convert(file, workers=WORKERS, dataset_info=table if table.is_file() else None)


def plan_of(made: Converted, model: str | None) -> Plan:
    """The plan of a converted example, with a model in place of its own if one is given."""
    if model is not None:
        made.plain["model"]["name"] = model
    # A plan keeps digests of local data beside the runs.
    with tempfile.TemporaryDirectory() as folder:
        made.plain["run"]["output_dir"] = folder
        return make_plan(build_config(made.plain, source="example"), gpu=GPU, environ={}, offline=True)


def in_words(plain: dict[str, Any]) -> str:
    """What a converted example is, in a few words."""
    model, adapter, data, train = (plain.get(name, {}) for name in ("model", "adapter", "data", "train"))
    parallel, names = plain.get("parallel", {}), {"none": "full", "lora": "LoRA", "pissa": "PiSSA"}
    words = [names.get(adapter["method"], adapter["method"])]
    words += [f"{model['quantization']} base"] if "quantization" in model else []
    words += [f"LoRA+ {adapter['lora_plus_ratio']:g}"] if "lora_plus_ratio" in adapter else []
    words += [f"also trains {', '.join(adapter['modules_to_save'])}"] if "modules_to_save" in adapter else []
    stage = f"DeepSpeed ZeRO {parallel.get('zero_stage')}"
    words += [{"deepspeed": stage, "fsdp": "FSDP", "auto": "DDP or FSDP"}.get(parallel.get("strategy"), "DDP")]
    words += ["offload"] if parallel.get("cpu_offload") else []
    sources = data.get("mix") or [data]
    words += [f"{len(sources)} sources"] if len(sources) > 1 else []
    words += [" and ".join(sorted({one.get("format", "auto") for one in sources}))]
    words += ["packing"] if data.get("packing") else []
    words += [train["optimizer"]] if train.get("optimizer", "adamw") != "adamw" else []
    words += ["evaluation"] if {"eval_ratio", "eval_source"} & set(data) else []
    words += ["early stopping"] if "early_stopping" in plain.get("evaluation", {}) else []
    return ", ".join([*words, *plain.get("tracking", {}).get("trackers", [])])


def table(checkout: Path, chosen: Mapping[str, str] = CHOSEN, *, model: str | None = None) -> list[str]:
    """A Markdown table of chosen examples; with a model also of their data."""
    rows = [f"| example | becomes | lost | not needed | plan |{' data |' if model else ''}"]
    rows.append(f"|---|---|---|---|---|{'---|' if model else ''}")
    for name, stand_in in chosen.items():
        if not (file := checkout / "examples" / name).is_file():
            continue
        made = read(file, checkout)
        lost: dict[bool, list[str]] = {True: [], False: []}
        for one in made.lost:
            lost[one.why.startswith("not needed")].append(f"`{one.key.partition(':')[0]}`")
        cells = [f"`{name}`", in_words(made.plain), ", ".join(lost[False]), ", ".join(lost[True])]
        plan = plan_of(made, stand_in)
        need = f"{plan.memory.total / 2**30:.1f} GiB" if plan.memory is not None else "nothing known"
        said = plan.problems[0].message if plan.problems else f"no problem, {need}"
        cells.append(f"{said} ({stand_in.rpartition('/')[2]})")
        if model is not None:
            plan = plan_of(made, model)
            data = None if plan.data is None else f"{plan.data.rows:,} rows, {plan.data.steps:,} steps"
            cells.append(data or "not here")
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def look_at(checkout: Path, *, model: str | None = None) -> Found:
    """Convert and plan every example of a checkout."""
    found = Found()
    for file in sorted(one for one in (checkout / "examples").rglob("*") if one.suffix in (".yaml", ".yml")):
        found.files += 1
        try:
            made = read(file, checkout)
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
        plan = plan_of(made, model)
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
    parser.add_argument("--table", action="store_true", help="print the table of chosen examples only")
    given = parser.parse_args()
    for checkout in given.checkouts:
        if given.table:
            print(f"{checkout.name}, commit {commit_of(checkout) or 'unknown'}:\n")
            print(*table(checkout, model=given.model), "", sep="\n")
            continue
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
