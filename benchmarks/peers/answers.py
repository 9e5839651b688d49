"""Generate answers with finray's engine, or with Transformers' `generate` in static batches sorted by length."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path

import measuring
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


@dataclass(frozen=True)
class Answering:
    """The prompts to answer, and the settings."""

    model: str  # directory
    prompts: str  # JSON Lines, each a conversation up to the answer
    engine: str  # `finray` or `generate`
    batch_size: int
    max_new_tokens: int
    precision: str  # `fp32` or `bf16`
    threads: int


def main() -> None:
    """Answer, and print tokens per second and a digest of the answers."""
    job = measuring.job(Answering)
    torch.set_num_threads(job.threads)
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    dtype = torch.float32 if job.precision == "fp32" else torch.bfloat16
    rows = [json.loads(line) for line in Path(job.prompts).read_text(encoding="utf-8").splitlines()]
    prompts = [
        list(tokenizer.apply_chat_template(row, add_generation_prompt=True, return_dict=True)["input_ids"])
        for row in rows
    ]
    if job.engine == "finray":
        from finray.evaluation.artifacts import artifact_of
        from finray.evaluation.engines import Sampling, make_engine

        engine = make_engine("transformers", artifact_of(job.model), dtype=dtype, batch_size=job.batch_size)
        next(engine.generate(prompts[:1], Sampling(2)))
        began, cpu = time.perf_counter(), measuring.cpu_seconds()
        found = {one.row: list(one.tokens) for one in engine.generate(prompts, Sampling(job.max_new_tokens))}
    else:
        model = AutoModelForCausalLM.from_pretrained(job.model, dtype=dtype).eval()
        generate(model, tokenizer, prompts[:1], 1, 2)
        began, cpu = time.perf_counter(), measuring.cpu_seconds()
        found = generate(model, tokenizer, prompts, job.batch_size, job.max_new_tokens)
    seconds, cpu = time.perf_counter() - began, measuring.cpu_seconds() - cpu
    answers = [found[row] for row in range(len(prompts))]
    tokens = sum(map(len, answers))
    result = {"tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds}
    result |= {"tokens_per_cpu_second": tokens / cpu, "resident": measuring.peak_rss_bytes()}
    print(json.dumps({**result, "digests": [hashlib.sha256(str(one).encode()).hexdigest()[:8] for one in answers]}))


@torch.inference_mode()
def generate(
    model: torch.nn.Module, tokenizer: object, prompts: list[list[int]], size: int, new: int
) -> dict[int, list[int]]:
    """Greedy answers in batches of rows of similar length, padded on the left."""
    order, found = sorted(range(len(prompts)), key=lambda row: -len(prompts[row])), {}
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    for start in range(0, len(order), size):
        batch = order[start : start + size]
        longest = len(prompts[batch[0]])
        tokens_BT = torch.full((len(batch), longest), pad)
        mask_BT = torch.zeros_like(tokens_BT)
        for place, row in enumerate(batch):
            tokens_BT[place, longest - len(prompts[row]) :] = torch.tensor(prompts[row])
            mask_BT[place, longest - len(prompts[row]) :] = 1
        output = model.generate(
            tokens_BT, attention_mask=mask_BT, max_new_tokens=new, do_sample=False, pad_token_id=pad
        )
        for place, row in enumerate(batch):
            said = output[place, longest:].tolist()
            found[row] = said[: said.index(end)] if end in said else said
    return found


if __name__ == "__main__":
    main()
