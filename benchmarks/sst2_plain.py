"""Fine-tune a classifier in a plain Transformers + PEFT loop: the reference for finray's accuracy.

    python benchmarks/sst2_plain.py --model .models/MiniLM-L6 --train sst2_train.jsonl --dev sst2_dev.jsonl

Random batches, padded to their longest row; torch's AdamW; a schedule with warm-up. Rows: `sentence`, `label`.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, TaskType, get_peft_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer, get_scheduler


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def inputs_of(tokenizer: Any, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    texts = [row["sentence"] for row in rows]
    found: dict[str, torch.Tensor] = tokenizer(
        texts, padding=True, truncation=True, max_length=128, return_tensors="pt"
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="A plain loop on SST-2; prints its accuracy.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--dev", type=Path, required=True)
    parser.add_argument("--alpha", type=float, default=16)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--schedule", choices=["linear", "constant"], default="linear")
    parser.add_argument("--warmup", type=float, default=0.03, help="fraction of the steps")
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(given.seed)
    rows, dev = read(given.train), read(given.dev)
    random.Random(given.seed).shuffle(rows)
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    plain = AutoModelForSequenceClassification.from_pretrained(given.model, num_labels=2)
    lora = {"r": 8, "lora_alpha": given.alpha, "lora_dropout": given.dropout, "target_modules": ["query", "value"]}
    model = get_peft_model(plain, LoraConfig(task_type=TaskType.SEQ_CLS, **lora))
    model.print_trainable_parameters()
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.0)
    steps = -(-len(rows) // 64)
    shape = "linear" if given.schedule == "linear" else "constant_with_warmup"
    schedule = get_scheduler(shape, optimizer, round(given.warmup * steps), steps)
    for step in range(steps):
        batch = rows[step * 64 : step * 64 + 64]
        labels = torch.tensor([row["label"] for row in batch])
        loss = model(**inputs_of(tokenizer, batch), labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step + 1}/{steps}  loss {loss.item():.4f}", flush=True)
    model.eval()
    right, lost = 0, 0.0
    with torch.no_grad():
        for start in range(0, len(dev), 64):
            part = dev[start : start + 64]
            labels = torch.tensor([row["label"] for row in part])
            logits = model(**inputs_of(tokenizer, part)).logits
            right += int((logits.argmax(-1) == labels).sum())
            lost += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
    share = sum(one.numel() for one in trained) / sum(one.numel() for one in model.parameters())
    print(json.dumps({"accuracy": right / len(dev), "loss": lost / len(dev), "share": share, "seed": given.seed}))


if __name__ == "__main__":
    main()
