"""The tokenizer alone: `encode_batch` of the Rust library on texts in memory.

Only the calls are timed, in RAYON_NUM_THREADS threads; not reading, rendering the chat template, masks, packing or
writing. This is the upper limit for the speed of any preparation. Texts are encoded `CHUNK` at a time, because
encodings take about 80 bytes per token, and those of a million rows would not fit in memory.

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
    """A row rendered with the chat template; repeated rows are rendered once."""
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
