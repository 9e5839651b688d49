"""Eight steps in two epochs on a real chat model against a plain Transformers + PEFT loop: padded, full logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from finray.data.sampling.order import permutation
from tests.support import runs
from tests.support.adapted import save_adapter

BATCH = 4
PEAK = 1e-3

QUESTIONS = [
    ("What is the capital of France?", "Paris."),
    ("Name a colour.", "Blue, like the sky on a clear day."),
    ("2 + 3 =", "5"),
    ("Translate to German: good morning", "Guten Morgen"),
    ("Give me a synonym of fast.", "Quick, rapid, swift."),
    ("Who wrote Faust?", "Johann Wolfgang von Goethe wrote it, in two parts."),
    ("Is water wet?", "Yes."),
]


def conversations() -> list[dict[str, Any]]:
    rows = []
    for number in range(24):
        question, answer = QUESTIONS[number % len(QUESTIONS)]
        messages = [{"role": "user", "content": f"({number}) {question}"}, {"role": "assistant", "content": answer}]
        rows.append({"messages": [{"role": "system", "content": "Be brief."}, *messages]})
    return rows


def naive_rows(tokenizer: Any, rows: list[dict[str, Any]]) -> list[tuple[list[int], list[int]]]:
    """Ids and labels by hand for this model's ChatML: the answer and its <|im_end|> are learned, -100 elsewhere."""
    made = []
    for row in rows:
        *prompt, answer = row["messages"]
        head = (
            "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in prompt) + "<|im_start|>assistant\n"
        )
        parts = [
            tokenizer(text, add_special_tokens=False)["input_ids"]
            for text in (head, answer["content"], "<|im_end|>", "\n")
        ]
        labels = [-100] * len(parts[0]) + parts[1] + parts[2] + [-100] * len(parts[3])
        made.append(([token for part in parts for token in part], labels))
    return made


def plain_loop(
    model_dir: Path,
    rows: list[dict[str, Any]],
    start: dict[str, torch.Tensor],
    seed: int,
    *,
    steps: int,
    device: torch.device,
) -> tuple[list[float], list[float], Any]:
    """The loop anybody would write: padded batches, full logits, a naive loss. Losses, norms, and the model."""
    tokenizer = AutoTokenizer.from_pretrained(str(model_dir))
    data = naive_rows(tokenizer, rows)
    model = AutoModelForCausalLM.from_pretrained(str(model_dir), dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules="all-linear"))
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in start.items():
            named[name.replace(".weight", ".default.weight")].copy_(tensor)
    model.to(device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=PEAK, weight_decay=0.0)
    model.train()
    losses, norms = [], []
    order = [int(index) for epoch in range(4) for index in permutation(len(data), "epoch", seed, epoch)]
    for step in range(steps):
        batch = [data[index] for index in order[step * BATCH : (step + 1) * BATCH]]
        longest = max(len(ids) for ids, _ in batch)
        ids = torch.tensor([ids + [2] * (longest - len(ids)) for ids, _ in batch], device=device)
        labels = torch.tensor([marks + [-100] * (longest - len(marks)) for _, marks in batch], device=device)
        mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in batch], device=device)
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1].float()
        loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1), ignore_index=-100)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(trained, 1.0).item())
        for group in optimizer.param_groups:
            group["lr"] = PEAK * (1 - step / steps)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, norms, model


def check_against_a_plain_loop(
    model_dir: Path, rows: list[dict[str, Any]], folder: Path, *, steps: int, device: torch.device
) -> None:
    """Train by finray and by the loop, from the same adapter."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    train = {"max_steps": steps, "global_batch_size": BATCH, "micro_batch_size": 2, "liger": False}
    train |= {"learning_rate": PEAK, "schedule": "linear", "warmup_steps": 0}
    changes = {"adapter": {"rank": 8, "alpha": 16}, "data": {"max_length": 256, "packing": False}, "train": train}
    own = {"checkpoint.every_steps": 100, "model.attention": "packed"}
    plain = runs.tiny_run(model_dir, folder / "rows.jsonl", folder, {**changes, **own})
    run_dir = folder / "run"
    loop = runs.assemble_alone(plain, run_dir, device=device).loop
    save_adapter(loop.task.model, folder)
    start = runs.adapter_weights(folder)
    loop.run()
    loop.trackers.finish()
    losses, norms, model = plain_loop(model_dir, rows, start, plain["run"]["seed"], steps=steps, device=device)
    # Of rows that are known by heart little is left but rounding, which differs between CPUs.
    assert runs.values(run_dir, "loss") == pytest.approx(losses, rel=1e-4, abs=1e-4)
    assert runs.values(run_dir, "grad_norm") == pytest.approx(norms, rel=1e-3)
    theirs, ours = get_peft_model_state_dict(model), runs.adapter_weights(run_dir / f"checkpoint-{steps:06d}")
    assert runs.relative_difference({name: theirs[name].detach().cpu() for name in ours}, ours) < 1e-3
    assert runs.relative_difference(start, ours) > 1e-2, "the comparison must run over weights that move"


@pytest.mark.nightly
def test_eight_steps_agree_with_a_plain_loop(smollm2_dir: Path, tmp_path: Path) -> None:
    check_against_a_plain_loop(smollm2_dir, conversations(), tmp_path, steps=8, device=torch.device("cpu"))
    losses = runs.values(tmp_path / "run", "loss")
    assert losses[-1] < 0.5 * losses[0], "the comparison must run over a loss that moves"
