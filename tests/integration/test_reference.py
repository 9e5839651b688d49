"""Eight steps in two epochs on a real chat model against a plain Transformers + PEFT loop: padded, full logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from finray.data.sampling.order import permutation
from tests.support import runs

pytestmark = pytest.mark.nightly

STEPS = 8
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
    model_dir: Path, rows: list[dict[str, Any]], start: dict[str, torch.Tensor], seed: int
) -> tuple[list[float], list[float], Any]:
    """The loop anybody would write."""
    tokenizer = AutoTokenizer.from_pretrained(str(model_dir))
    data = naive_rows(tokenizer, rows)
    model = AutoModelForCausalLM.from_pretrained(str(model_dir), dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules="all-linear"))
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in start.items():
            named[name.replace(".weight", ".default.weight")].copy_(tensor)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=PEAK, weight_decay=0.0)
    model.train()
    losses, norms = [], []
    order = [int(index) for epoch in range(3) for index in permutation(len(data), "epoch", seed, epoch)]
    for step in range(STEPS):
        batch = [data[index] for index in order[step * BATCH : (step + 1) * BATCH]]
        longest = max(len(ids) for ids, _ in batch)
        ids = torch.tensor([ids + [2] * (longest - len(ids)) for ids, _ in batch])
        labels = torch.tensor([marks + [-100] * (longest - len(marks)) for _, marks in batch])
        mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in batch])
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1].float()
        loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1), ignore_index=-100)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(trained, 1.0).item())
        for group in optimizer.param_groups:
            group["lr"] = PEAK * (1 - step / STEPS)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, norms, model


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory, smollm2_dir: Path
) -> tuple[Path, dict[str, Any], dict[str, torch.Tensor]]:
    """finray's eight steps, and the adapter it started from."""
    from finray.models.saved_layout import WEIGHTS

    folder = tmp_path_factory.mktemp("reference")
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in conversations()), encoding="utf-8")
    train = {"max_steps": STEPS, "global_batch_size": BATCH, "micro_batch_size": 2}
    rate = {"learning_rate": PEAK, "schedule": "linear", "warmup_steps": 0}
    sections = {"data": {"max_length": 128, "packing": False}, "checkpoint.every_steps": 100, "train": train | rate}
    plain = runs.tiny_run(smollm2_dir, rows, folder, {"adapter": {"rank": 8, "alpha": 16}, **sections})
    assembled = runs.assemble_alone(plain, folder / "run")
    save_file(assembled.loop.task.layout.tensors(), folder / WEIGHTS)
    start = runs.adapter_weights(folder)
    assembled.loop.run()
    assembled.loop.trackers.finish()
    return folder / "run", plain, start


def test_eight_steps_agree_with_a_plain_loop(
    trained: tuple[Path, dict[str, Any], dict[str, torch.Tensor]], smollm2_dir: Path, tmp_path: Path
) -> None:
    run_dir, plain, start = trained
    losses, norms, model = plain_loop(smollm2_dir, conversations(), start, plain["run"]["seed"])
    # Of rows that are known by heart little is left but rounding, which differs between CPUs.
    assert runs.values(run_dir, "loss") == pytest.approx(losses, rel=1e-4, abs=1e-4)
    assert runs.values(run_dir, "grad_norm") == pytest.approx(norms, rel=1e-3)
    assert losses[-1] < 0.5 * losses[0], "the comparison must run over a loss that moves"

    from peft import get_peft_model_state_dict

    theirs = get_peft_model_state_dict(model)
    ours = runs.adapter_weights(run_dir / "checkpoint-000008")
    assert runs.relative_difference({name: theirs[name].detach() for name in ours}, ours) < 1e-3


def test_the_merged_export_has_the_logits_of_base_and_adapter(
    trained: tuple[Path, dict[str, Any], dict[str, torch.Tensor]], smollm2_dir: Path, tmp_path: Path
) -> None:
    from peft import PeftModel

    from finray import export

    run_dir, _, _ = trained
    export(run_dir / "checkpoint-000008", tmp_path / "merged", merge=True, dtype="fp32")
    merged = AutoModelForCausalLM.from_pretrained(str(tmp_path / "merged"), dtype=torch.float32).eval()
    base = AutoModelForCausalLM.from_pretrained(str(smollm2_dir), dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, str(run_dir / "checkpoint-000008")).eval()
    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path / "merged"))
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(str(smollm2_dir)).chat_template
    ids = tokenizer("Tell me what the capital of France is, and nothing more.", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        expected = adapted(input_ids=ids).logits
        torch.testing.assert_close(merged(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4 * float(expected.std()))
        with adapted.disable_adapter():
            assert not torch.allclose(base(input_ids=ids).logits, expected, rtol=1e-2, atol=1e-2), (
                "the adapter must matter"
            )
