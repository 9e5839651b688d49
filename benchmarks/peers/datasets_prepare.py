"""The peers' half of the preparation benchmark: a file of rows prepared with `datasets`, and with TRL's packing.

Three modes, from the same JSON Lines file with `prompt` and `completion` as lists of messages to columns in the Arrow
files of the cache of `datasets`:

* `map`: `Dataset.map`, batched, in `processes` processes: the chat template, the tokenizer, and labels of the answer.
  No packing.
* `map-pack`: the same, then TRL's `pack_dataset`, which packs batches of 1,000 rows each with best fit.
* `trl`: everything that TRL's `SFTTrainer` does with such rows with `packing=True`: conversion, tokenizing the prompt
  and the whole text, mask and labels, packing. The trainer's method is called without a trainer, so that no model is
  loaded.

The time is measured from the file to the finished columns, without imports and without loading the tokenizer. The
caller gives each run its own cache in HF_DATASETS_CACHE.

    HF_DATASETS_CACHE=/tmp/fresh python datasets_prepare.py '{"model": "DIR", "rows": "rows.jsonl", "mode": "map",
        "steps": []}'
"""

from __future__ import annotations

import tempfile
import time
from types import SimpleNamespace
from typing import Any

import measuring
import numpy as np
import pyarrow.compute as pc
from datasets import Dataset, disable_progress_bars
from transformers import AutoTokenizer

IGNORED = -100


def tokenize(batch: dict[str, list[Any]], tokenizer: Any, max_length: int) -> dict[str, list[list[int]]]:
    """A batch as token ids and labels, in the fastest way in Python: one call of the tokenizer for all rows."""
    whole = [prompt + completion for prompt, completion in zip(batch["prompt"], batch["completion"], strict=True)]
    texts = tokenizer.apply_chat_template(whole, tokenize=False)
    prompts = tokenizer.apply_chat_template(batch["prompt"], tokenize=False, add_generation_prompt=True)
    encoded = tokenizer(
        texts, add_special_tokens=False, truncation=True, max_length=max_length, return_attention_mask=False
    )
    labels = []
    for row, (ids, prompt) in enumerate(zip(encoded["input_ids"], prompts, strict=True)):
        first = encoded.char_to_token(row, len(prompt))
        first = len(ids) if first is None else first
        labels.append([IGNORED] * first + ids[first:])
    return {"input_ids": encoded["input_ids"], "labels": labels}


def map_only(rows: Dataset, tokenizer: Any, job: measuring.Job) -> Dataset:
    return rows.map(
        tokenize,
        batched=True,
        num_proc=job.processes,
        remove_columns=rows.column_names,
        fn_kwargs={"tokenizer": tokenizer, "max_length": job.max_length},
    )


def map_and_pack(rows: Dataset, tokenizer: Any, job: measuring.Job) -> Dataset:
    from trl import pack_dataset

    return pack_dataset(map_only(rows, tokenizer, job), job.max_length, "bfd", {"num_proc": job.processes})


def prepare_as_trl(rows: Dataset, tokenizer: Any, job: measuring.Job) -> Dataset:
    from trl import SFTConfig, SFTTrainer

    with tempfile.TemporaryDirectory(prefix="trl_prepare_") as folder:
        settings = SFTConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            report_to="none",
            packing=True,
            max_length=job.max_length,
            dataset_num_proc=job.processes,
        )
        # The three attributes that the method reads, as the trainer sets them for rows of prompt and completion.
        trainer = SimpleNamespace(_tokenizer=tokenizer, chat_template=None, completion_only_loss=True)
        return SFTTrainer._prepare_dataset(trainer, rows, tokenizer, settings, True, None, "train")


WAYS = {"map": map_only, "map-pack": map_and_pack, "trl": prepare_as_trl}


def column_sum(dataset: Dataset, column: str, count: Any) -> int:
    return sum(int(count(chunk)) for chunk in dataset.data.column(column).chunks)


def main() -> None:
    job: measuring.Job = measuring.job(measuring.Job)
    if job.mode != "map":
        import trl

        # TRL loads its submodules on first access; that counts as import time.
        _ = trl.pack_dataset, trl.SFTConfig, trl.SFTTrainer
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    disable_progress_bars()
    began = time.perf_counter()
    dataset = WAYS[job.mode](Dataset.from_json(job.rows), tokenizer, job)
    seconds = time.perf_counter() - began
    process_seconds = measuring.seconds_since_process_start()
    tokens = column_sum(dataset, "input_ids", lambda chunk: pc.sum(pc.list_value_length(chunk)).as_py() or 0)
    packed = "seq_lengths" in dataset.column_names
    labelled = "labels" in dataset.column_names
    result = {
        "rows": column_sum(dataset, "seq_lengths", lambda chunk: len(chunk.flatten())) if packed else len(dataset),
        "tokens": tokens,
        "fill": tokens / (len(dataset) * job.max_length) if packed else None,
        # The first label of a row is never predicted; here it is part of the prompt, so it never counts.
        "learned": column_sum(dataset, "labels", lambda chunk: np.count_nonzero(chunk.flatten().to_numpy() != IGNORED))
        if labelled
        else None,
        "seconds": seconds,
        "process_seconds": process_seconds,
    }
    measuring.emit(result, "datasets", "transformers", "tokenizers", *(() if job.mode == "map" else ("trl",)))


if __name__ == "__main__":
    main()
