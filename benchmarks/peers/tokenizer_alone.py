"""The tokenizer by itself: `encode_batch` of the Rust library over texts that are in memory already.

What it measures: the seconds of the calls, in as many threads as RAYON_NUM_THREADS says. What it does not measure:
reading, rendering the chat template, masks, packing, or writing anything. It is as fast as a preparation could be that
does nothing but tokenize.

Texts go in `CHUNK` at a time, because encodings take some 80 bytes a token and those of a million rows would not fit in
memory; each call has work enough for all threads.

Needs transformers. Example:

    RAYON_NUM_THREADS=2 python tokenizer_alone.py --model DIR --rows rows.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["TOKENIZERS_PARALLELISM"] = "true"

from transformers import AutoTokenizer

CHUNK = 10_000


def read_texts(path: Path, tokenizer: Any) -> Iterator[str]:
    """The rendered rows; one that is repeated is rendered once, which is not timed."""
    render: Callable[[str], str] = lru_cache(maxsize=None)(lambda line: _render(json.loads(line), tokenizer))
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield render(line)


def _render(row: dict[str, Any], tokenizer: Any) -> str:
    return str(tokenizer.apply_chat_template(row["prompt"] + row["completion"], tokenize=False))


def run(options: argparse.Namespace) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    backend = tokenizer.backend_tokenizer
    backend.no_padding()
    backend.no_truncation()
    texts = list(read_texts(options.rows, tokenizer))
    seconds = 0.0
    lengths: list[int] = []
    for at in range(0, len(texts), CHUNK):
        part = texts[at : at + CHUNK]
        began = time.perf_counter()
        encodings = backend.encode_batch(part, add_special_tokens=False)
        seconds += time.perf_counter() - began
        lengths += [min(len(encoding), options.max_length) for encoding in encodings]
    return {
        "rows": len(texts),
        "tokens": sum(lengths),
        "fill": None,
        "learned": None,
        "seconds": seconds,
        "process_seconds": None,
        "versions": {name: version(name) for name in ("transformers", "tokenizers")},
    }


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The Rust tokenizer over texts in memory, timed.")
    parser.add_argument("--model", type=Path, required=True, help="directory of the model")
    parser.add_argument("--rows", type=Path, required=True, help="JSON lines with `prompt` and `completion`")
    parser.add_argument("--max-length", type=int, default=1024)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    print(json.dumps(run(parse_options(argv))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
