"""The tokenizer by itself: `encode_batch` of the Rust library over texts that are in memory already.

Timed are the calls, in as many threads as RAYON_NUM_THREADS says; not reading, rendering the chat template, masks,
packing, or writing anything. It is as fast as a preparation could be that does nothing but tokenize. Texts go in
`CHUNK` at a time, because encodings take some 80 bytes a token and those of a million rows would not fit in memory.

    RAYON_NUM_THREADS=2 python tokenizer_alone.py '{"model": "DIR", "rows": "rows.jsonl", "steps": []}'
"""

from __future__ import annotations

import json
import os
import time
from functools import cache
from pathlib import Path

import measuring

os.environ["TOKENIZERS_PARALLELISM"] = "true"

from transformers import AutoTokenizer

CHUNK = 10_000

job: measuring.Job = measuring.job(measuring.Job)
tokenizer = AutoTokenizer.from_pretrained(job.model)
backend = tokenizer.backend_tokenizer
backend.no_padding()
backend.no_truncation()


@cache
def rendered(line: str) -> str:
    """A row by the chat template; one that is repeated is rendered once."""
    row = json.loads(line)
    return str(tokenizer.apply_chat_template(row["prompt"] + row["completion"], tokenize=False))


with Path(job.rows).open(encoding="utf-8") as lines:
    texts = [rendered(line) for line in lines]
seconds = 0.0
tokens = 0
for at in range(0, len(texts), CHUNK):
    began = time.perf_counter()
    encodings = backend.encode_batch(texts[at : at + CHUNK], add_special_tokens=False)
    seconds += time.perf_counter() - began
    tokens += sum(min(len(encoding), job.max_length) for encoding in encodings)
measuring.emit({"rows": len(texts), "tokens": tokens, "seconds": seconds}, "transformers", "tokenizers")
