"""finray's packer by itself: how long it takes to plan the packs of many documents on one core, and how full they are.

Lengths are drawn, with replacement, from those of the rows given, rendered and tokenized. Every plan is checked: each
document is in it once and no pack holds more than its capacity. Needs finray. Example:

    python finray_pack.py --model DIR --rows rows.jsonl --documents 10000 1000000
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import numpy.typing as npt
from tokenizer_alone import read_texts
from transformers import AutoTokenizer

from finray.data.sampling.packing import PackPlan, plan_packs

Lengths = npt.NDArray[np.int64]


def row_lengths(options: argparse.Namespace) -> Lengths:
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    texts = list(read_texts(options.rows, tokenizer))
    encodings = tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
    return np.minimum([len(encoding) for encoding in encodings], options.max_length).astype(np.int64)


def require_whole(plan: PackPlan, lengths: Lengths) -> None:
    """Raise unless the plan holds every document once, in packs that are not too full."""
    if not np.array_equal(np.sort(plan.rows), np.arange(len(lengths))):
        raise RuntimeError("the plan does not hold every document once")
    if int(np.add.reduceat(lengths[plan.rows], plan.starts[:-1]).max()) > plan.capacity:
        raise RuntimeError("a pack holds more than its capacity")


def measure(lengths: Lengths, capacity: int, runs: int) -> dict[str, Any]:
    seconds = []
    for _ in range(runs):
        began = time.perf_counter()
        plan = plan_packs(lengths, capacity)
        seconds.append(time.perf_counter() - began)
    require_whole(plan, lengths)
    return {"documents": len(lengths), "packs": len(plan), "fill": plan.fill, "seconds": seconds}


def run(options: argparse.Namespace) -> dict[str, Any]:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    lengths = row_lengths(options)
    source = np.random.default_rng(options.seed)
    plans = [
        measure(source.choice(lengths, size=count), options.max_length, options.runs) for count in options.documents
    ]
    shape = {"least": int(lengths.min()), "median": float(np.median(lengths)), "most": int(lengths.max())}
    return {"lengths": {**shape, "mean": float(lengths.mean())}, "plans": plans}


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="finray's packer over many documents, timed.")
    parser.add_argument("--model", type=Path, required=True, help="directory of the model")
    parser.add_argument("--rows", type=Path, required=True, help="JSON lines with `prompt` and `completion`")
    parser.add_argument("--documents", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--max-length", type=int, default=1024)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=17)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    print(json.dumps(run(parse_options(argv))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
