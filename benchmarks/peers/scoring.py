"""Log-likelihoods of continuations, with finray's engine, or with Transformers one row at a time."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

import measuring
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


@dataclass(frozen=True)
class Scoring:
    """The scoring job."""

    model: str  # directory
    rows: str  # JSON Lines, each a context and its continuations
    engine: str  # `finray` or `plain`
    precision: str  # `fp32` or `bf16`
    threads: int


def main() -> None:
    """Score, and print rows per second, the likelihoods, and the growth of the process's memory."""
    job = measuring.job(Scoring)
    torch.set_num_threads(job.threads)
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    dtype = torch.float32 if job.precision == "fp32" else torch.bfloat16
    asked = [json.loads(line) for line in Path(job.rows).read_text(encoding="utf-8").splitlines()]
    rows = [
        (tokenizer(context)["input_ids"], tokenizer(one, add_special_tokens=False)["input_ids"])
        for context, continuations in asked
        for one in continuations
    ]
    if job.engine == "finray":
        from finray.evaluation.artifacts import artifact_of
        from finray.evaluation.engines import Continuation, make_engine

        engine = make_engine("transformers", artifact_of(job.model), dtype=dtype)
        continuations = [Continuation(context, tokens) for context, tokens in rows]
        list(engine.log_likelihood(continuations[:1]))
        before, began = measuring.peak_rss_bytes(), time.perf_counter()
        found = {one.row: sum(one.logprobs) for one in engine.log_likelihood(continuations)}
        likelihoods = [found[number] for number in range(len(rows))]
    else:
        model = AutoModelForCausalLM.from_pretrained(job.model, dtype=dtype).eval()
        likelihood(model, *rows[0])
        before, began = measuring.peak_rss_bytes(), time.perf_counter()
        likelihoods = [likelihood(model, *row) for row in rows]
    seconds, grown = time.perf_counter() - began, measuring.peak_rss_bytes() - before
    result = {"rows_per_second": len(rows) / seconds, "seconds": seconds, "grown": grown}
    print(json.dumps({**result, "rows": len(rows), "likelihoods": likelihoods}))


@torch.inference_mode()
def likelihood(model: torch.nn.Module, context: list[int], tokens: list[int]) -> float:
    """Likelihood of one row, as a user would compute it: with logits only where they are needed."""
    ids = torch.tensor([[*context, *tokens[:-1]]])
    logits = model(ids, logits_to_keep=len(tokens), use_cache=False).logits[0].float()
    return float(logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None]).sum())


if __name__ == "__main__":
    main()
