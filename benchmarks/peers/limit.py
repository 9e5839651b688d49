"""What a token of a finished run of finray costs, and the rate of the same matrix products alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

# For `harness`.
sys.path.append(str(Path(__file__).resolve().parent.parent))

import torch

from finray.config.schema import Config
from finray.data.dataset.prepared import PreparedDataset
from finray.tracking.jsonl import FILE as METRICS_FILE
from finray.tracking.jsonl import read_records
from finray.training.assemble import Assembled
from harness.flops import count_work, gemm_rate


def limit_of(config: Config, prepared: str, assembled: Assembled, run_dir: Path, *, warmup: int) -> dict[str, Any]:
    """What a token of the timed steps costs, and the rate of this process's matrix products with all ranks at it."""
    records = [record for record in read_records(run_dir / METRICS_FILE) if record["kind"] == "train"]
    timed = records[warmup:]
    tokens = records[-1]["tokens"] - records[warmup - 1]["tokens"]
    supervised = sum(record["supervised"] for record in timed)
    lengths = PreparedDataset(prepared).splits(config.data, seed=config.run.seed).train.lengths
    rows = [int(lengths[row]) for record in timed for row in record["samples"]]
    if sum(rows) != tokens:
        raise RuntimeError(f"the rows of the timed steps have {sum(rows)} tokens, the records say {tokens}")
    model: Any = assembled.loop.task.model
    work = count_work(model, rows, share_with_logits=supervised / tokens)
    micro = len(timed) * (config.train.global_batch_size // config.train.micro_batch_size)
    dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
    device = torch.device("cpu")
    rate = gemm_rate(model, tokens=tokens // micro, targets=supervised // micro, dtype=dtype, device=device)
    return {**work.plain(), "gemm_flops_per_s": rate}
