"""The peers' half of the preparation benchmark: a file of rows made ready with `datasets`, and with TRL's packing.

Three ways, from the same file of JSON lines with `prompt` and `completion` as lists of messages, to columns in the
Arrow files of `datasets`' cache:

* `map`: `Dataset.map`, batched, in `--processes` processes: the chat template and the tokenizer, token ids only. No
  mask of what is learned, no packing.
* `map-pack`: the same, then TRL's `pack_dataset`, which packs batches of 1,000 rows each by best fit.
* `trl`: all that TRL's `SFTTrainer` does to such rows with `packing=True`: its own conversion, tokenizing of prompt and
  whole, mask and labels, packing. It is the trainer's own method, called without a trainer, so that no model is loaded.

What it measures: the seconds from the file to the finished columns, without imports and without loading the tokenizer,
and the seconds since this process began. Tokens, fill and learned tokens are counted afterwards. What it does not
measure: memory (the caller does), training, or a second run, which would find everything cached: the caller gives each
run a cache directory of its own in HF_DATASETS_CACHE.

Needs datasets and transformers, and TRL but for `map`; tried with TRL 1.16.0. Example:

    HF_DATASETS_CACHE=/tmp/fresh python datasets_prepare.py --model DIR --rows rows.jsonl --way map-pack
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import pyarrow.compute as pc
from datasets import Dataset, disable_progress_bars
from transformers import AutoTokenizer

IGNORED = -100


def _seconds_since_process_start() -> float:
    fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def tokenize(batch: dict[str, list[Any]], tokenizer: Any, max_length: int) -> dict[str, list[list[int]]]:
    """A batch as token ids, the way that is fastest in Python: one call of the tokenizer for all rows."""
    whole = [prompt + completion for prompt, completion in zip(batch["prompt"], batch["completion"], strict=True)]
    texts = tokenizer.apply_chat_template(whole, tokenize=False)
    encoded = tokenizer(
        texts, add_special_tokens=False, truncation=True, max_length=max_length, return_attention_mask=False
    )
    return {"input_ids": encoded["input_ids"]}


def map_only(rows: Dataset, tokenizer: Any, options: argparse.Namespace) -> Dataset:
    return rows.map(
        tokenize,
        batched=True,
        num_proc=options.processes,
        remove_columns=rows.column_names,
        fn_kwargs={"tokenizer": tokenizer, "max_length": options.max_length},
    )


def map_and_pack(rows: Dataset, tokenizer: Any, options: argparse.Namespace) -> Dataset:
    from trl import pack_dataset

    tokenized = map_only(rows, tokenizer, options)
    return pack_dataset(tokenized, options.max_length, "bfd", {"num_proc": options.processes})


def prepare_as_trl(rows: Dataset, tokenizer: Any, options: argparse.Namespace) -> Dataset:
    from trl import SFTConfig, SFTTrainer

    with tempfile.TemporaryDirectory(prefix="trl_prepare_") as folder:
        settings = SFTConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            report_to="none",
            packing=True,
            max_length=options.max_length,
            dataset_num_proc=options.processes,
        )
        # The three attributes that the method reads; what the trainer sets for rows of prompt and completion.
        trainer = SimpleNamespace(_tokenizer=tokenizer, chat_template=None, completion_only_loss=True)
        return SFTTrainer._prepare_dataset(trainer, rows, tokenizer, settings, True, None, "train")


WAYS = {"map": map_only, "map-pack": map_and_pack, "trl": prepare_as_trl}


def _column_sum(dataset: Dataset, column: str, count: Any) -> int:
    return sum(int(count(chunk)) for chunk in dataset.data.column(column).chunks)


def _tokens(chunk: Any) -> int:
    return pc.sum(pc.list_value_length(chunk)).as_py() or 0


def _learned(chunk: Any) -> int:
    """Labels that count. The first of a row is predicted by nothing, but a prompt comes first, so it never counts."""
    return np.count_nonzero(chunk.flatten().to_numpy() != IGNORED)


def summarize(options: argparse.Namespace, dataset: Dataset, seconds: dict[str, float]) -> dict[str, Any]:
    tokens = _column_sum(dataset, "input_ids", _tokens)
    packed = "seq_lengths" in dataset.column_names
    rows = _column_sum(dataset, "seq_lengths", lambda chunk: len(chunk.flatten())) if packed else len(dataset)
    names = ("datasets", "transformers", "tokenizers", *(() if options.way == "map" else ("trl",)))
    return {
        "rows": rows,
        "tokens": tokens,
        "fill": tokens / (len(dataset) * options.max_length) if packed else None,
        "learned": _column_sum(dataset, "labels", _learned) if "labels" in dataset.column_names else None,
        "seconds": seconds["work"],
        "reading_seconds": seconds["reading"],
        "process_seconds": seconds["process"],
        "versions": {name: version(name) for name in names},
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    if options.way != "map":
        import trl

        # TRL loads its parts when they are first named; that belongs to the imports.
        _ = trl.pack_dataset, trl.SFTConfig, trl.SFTTrainer
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    disable_progress_bars()
    began = time.perf_counter()
    rows = Dataset.from_json(str(options.rows))
    read = time.perf_counter()
    dataset = WAYS[options.way](rows, tokenizer, options)
    ended = time.perf_counter()
    seconds = {"work": ended - began, "reading": read - began, "process": _seconds_since_process_start()}
    return summarize(options, dataset, seconds)


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Rows made ready for training with datasets and TRL, timed.")
    parser.add_argument("--model", type=Path, required=True, help="directory of the model")
    parser.add_argument("--rows", type=Path, required=True, help="JSON lines with `prompt` and `completion`")
    parser.add_argument("--way", choices=tuple(WAYS), required=True)
    parser.add_argument("--max-length", type=int, default=1024)
    parser.add_argument("--processes", type=int, default=2)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    print(json.dumps(run(parse_options(argv))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
