"""Whole runs, their settings at values that are no defaults, against a loop in plain torch, Transformers and PEFT.

The loop shares nothing with finray but the first values of the adapter (`test_first_values` is about these) and the
numbers of the rows of each step. It reads the rows, writes the chat by hand, and takes one row at a time.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from finray.config.resume_adapter import with_start
from finray.data.sampling.splits import sample
from finray.training.assemble import Assembled
from tests.support import runs, tiny
from tests.support.runs import Plain

STEPS, BATCH, SEED = 7, 3, 5
# Every third step, and the last one.
EVALUATED = (3, 6, 7)
ADAM = {"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-2, "weight_decay": 0.3}
LINEAR = {"schedule": "linear", "learning_rate": 0.02, "min_learning_rate": 0.004, "warmup_steps": 3}
COSINE = {"schedule": "cosine", "learning_rate": 0.02, "min_learning_rate": 0.006, "warmup_ratio": 0.2}
CONSTANT = {"schedule": "constant", "learning_rate": 0.005, "warmup_steps": 0}
FULL = {"adapter.method": "none"}

# What is trained: finray's settings, and those of PEFT that mean the same; None trains all weights.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "lora": (
        {"adapter": {"rank": 5, "alpha": 3.0}, "train": {**ADAM, **LINEAR, "max_grad_norm": 0.2}},
        {"r": 5, "lora_alpha": 3.0},
    ),
    "rslora": (
        {"adapter": {"method": "rslora", "alpha": 3.0}, "train": {**ADAM, **COSINE, "max_grad_norm": None}},
        {"lora_alpha": 3.0, "use_rslora": True},
    ),
    "dora": ({"adapter": {"method": "dora", "alpha": 3.0}, "train": ADAM}, {"lora_alpha": 3.0, "use_dora": True}),
    "pissa": (
        {"adapter": {"method": "pissa", "alpha": 3.0}, "train": {**ADAM, **CONSTANT}},
        {"lora_alpha": 3.0, "init_lora_weights": "pissa"},
    ),
    "lora+": ({"adapter.lora_plus_ratio": 3.0, "train": {**ADAM, **LINEAR}}, {}),
    "modules to save": (
        {"adapter": {"modules_to_save": ["lm_head"], "target_modules": ["q_proj", "down_proj"]}, "train": ADAM},
        {"modules_to_save": ["lm_head"], "target_modules": ["q_proj", "down_proj"]},
    ),
    "pattern": (
        {"adapter.target_modules": r".*\.0\.self_attn\.[qv]_proj", "train": ADAM},
        {"target_modules": r".*\.0\.self_attn\.[qv]_proj"},
    ),
    "dropout": ({"adapter.dropout": 0.4, "train": ADAM}, {"lora_dropout": 0.4}),
    "full": ({**FULL, "train": {**ADAM, **COSINE, "max_grad_norm": 0.5}}, None),
    "adafactor": ({**FULL, "train": {**LINEAR, "optimizer": "adafactor", "weight_decay": 0.3}}, None),
    "muon": ({**FULL, "train": {**ADAM, **CONSTANT, "optimizer": "muon"}}, None),
    "bf16": ({"adapter.alpha": 3.0, "train": {**ADAM, **LINEAR, "precision": "bf16"}}, {"lora_alpha": 3.0}),
    "fp16": ({"adapter.alpha": 3.0, "train": {**ADAM, **LINEAR, "precision": "fp16"}}, {"lora_alpha": 3.0}),
    "bf16 full": ({**FULL, "train": {**ADAM, **COSINE, "precision": "bf16"}}, None),
}
# Muon's matrices are rounded to bf16, PiSSA's are decomposed by two algorithms, and the plain loop is in fp32.
TOLERANCE = {"muon": 5e-3, "pissa": 1e-3, "bf16": 1e-3, "fp16": 2e-4, "bf16 full": 1e-3}


def drawn(seed: int, *parts: object) -> int:
    """The first eight bytes of a SHA-256, as docs/formats.md says of finray's keys."""
    text = "/".join(map(str, (seed, *parts)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def rate(train: dict[str, Any], step: int) -> float:
    """The learning rate of a step, by the description of the config's fields."""
    peak, low = train["learning_rate"], train.get("min_learning_rate", 0.0)
    warm = train["warmup_steps"] if train["warmup_steps"] is not None else math.ceil(train["warmup_ratio"] * STEPS)
    if step < warm:
        return float(peak * (step + 1) / warm)
    share = (step - warm) / (STEPS - warm)
    kept = {"linear": 1 - share, "cosine": (1 + math.cos(math.pi * share)) / 2, "constant": 1.0}
    return float(low + (peak - low) * kept[train.get("schedule", "cosine")])


def tokens_of(tokenizer: Any, row: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Ids, and the places of those that are learned: the answer and its end."""
    question, answer = (message["content"] for message in row["messages"])
    parts = (f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n", answer, "<|im_end|>", "\n")
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in parts]
    start = len(ids[0])
    return [one for part in ids for one in part], list(range(start, start + len(ids[1]) + 1))


def loss_sum(model: Any, ids: list[int], learned: list[int]) -> torch.Tensor:
    tokens = torch.tensor(ids)
    logits = model(input_ids=tokens[None], use_cache=False).logits[0].float()
    return F.cross_entropy(logits[[place - 1 for place in learned]], tokens[learned], reduction="sum")


def optimizers(model: Any, plain: Plain) -> list[tuple[torch.optim.Optimizer, list[float]]]:
    """torch's own, with the factor of the learning rate of each group."""
    train, ratio = plain["train"], plain["adapter"].get("lora_plus_ratio", 1.0)
    kinds: dict[tuple[bool, float, bool], list[torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            hidden = train.get("optimizer") == "muon" and parameter.ndim == 2 and name.startswith("model.layers.")
            fast = ratio if "lora_B" in name else 1.0
            kinds.setdefault((hidden, fast, parameter.ndim >= 2), []).append(parameter)
    decay = train.get("weight_decay", 0.0)
    found: list[tuple[torch.optim.Optimizer, list[float]]] = []
    for hidden in {key[0] for key in kinds}:
        own = [(fast, decays, held) for (muon, fast, decays), held in kinds.items() if muon == hidden]
        groups = [{"params": held, "weight_decay": decay if decays else 0.0} for _, decays, held in own]
        if hidden:
            made: torch.optim.Optimizer = torch.optim.Muon(groups, adjust_lr_fn="match_rms_adamw")
        elif train.get("optimizer") == "adafactor":
            made = torch.optim.Adafactor(groups)
        else:
            betas = (train["adam_beta1"], train["adam_beta2"])
            made = torch.optim.AdamW(groups, betas=betas, eps=train["adam_epsilon"])
        found.append((made, [fast for fast, _, _ in own]))
    return found


class Drawn(torch.nn.Dropout):
    """Dropout by a byte of NumPy's SFC64 for each element, lowest first: the smallest are dropped. One more draw rounds
    the probability up or down, so that it is right on average."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return input
        bits = np.random.SFC64(int(torch.empty((), dtype=torch.int64).random_()))
        words = [int(bits.random_raw()) for _ in range(-(-input.numel() // 8))]
        numbers = [number for word in words for number in word.to_bytes(8, "little")][: input.numel()]
        below = math.floor(self.p * 256 + (int(bits.random_raw()) >> 32) / 2**32)
        return input * torch.tensor([number >= below for number in numbers]).view(input.shape) / (1 - below / 256)


class Reference:
    """The loop anybody would write: losses, norms and rates by step, the model at its end, and its evaluation."""

    def __init__(self, plain: Plain, model: Any) -> None:
        self.plain, self.model = plain, model
        self.tokenizer = AutoTokenizer.from_pretrained(plain["model"]["name"])
        self.evaluations: list[tuple[float, int]] = []
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.rates: list[float] = []

    def rows(self, path: str) -> list[tuple[list[int], list[int]]]:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        return [tokens_of(self.tokenizer, json.loads(line)) for line in lines]

    def train(self, steps: list[list[int]]) -> None:
        for module in self.model.modules():
            if type(module) is torch.nn.Dropout:
                module.__class__ = Drawn
        rows, train = self.rows(self.plain["data"]["source"]), self.plain["train"]
        self.tokens = [sum(len(rows[row][0]) for row in own) for own in steps]
        self.targets = [sum(len(rows[row][1]) for row in own) for own in steps]
        trained = [one for one in self.model.parameters() if one.requires_grad]
        made = optimizers(self.model, self.plain)
        self.model.train()
        for step, own in enumerate(steps):
            total = 0.0
            for number, row in enumerate(own):
                # A micro-batch is a row here.
                torch.manual_seed(drawn(drawn(SEED, "dropout"), step, number))
                loss = loss_sum(self.model, *rows[row]) / self.targets[step]
                loss.backward()
                total += float(loss.detach())
            most = train.get("max_grad_norm", 1.0)
            norm = torch.nn.utils.clip_grad_norm_(trained, math.inf if most is None else most)
            for optimizer, factors in made:
                for group, factor in zip(optimizer.param_groups, factors, strict=True):
                    group["lr"] = rate(train, step) * factor
                optimizer.step()
                optimizer.zero_grad()
            self.losses.append(total)
            self.norms.append(float(norm))
            self.rates.append(rate(train, step))
            if step + 1 in EVALUATED:
                self.evaluations.append(self.evaluate())
                self.model.train()

    @torch.no_grad()
    def evaluate(self) -> tuple[float, int]:
        """Loss per target of the held-out rows, and the number of targets."""
        self.model.eval()
        rows = self.rows(self.plain["data"]["eval_source"])
        rows = [rows[row] for row in sample(len(rows), self.plain["evaluation"]["max_rows"], seed=SEED)]
        targets = sum(len(learned) for _, learned in rows)
        return sum(float(loss_sum(self.model, *row)) for row in rows) / targets, targets

    def weights(self) -> dict[str, torch.Tensor]:
        state = self.model.state_dict() if self.plain["adapter"]["method"] == "none" else None
        found = get_peft_model_state_dict(self.model) if state is None else state
        return {name: tensor.detach() for name, tensor in found.items()}


@pytest.fixture(scope="module")
def plain(tiny_run: Callable[..., Plain], tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """Rows one at a time, and eight other rows of which five are evaluated; their answers are of many lengths."""
    held_out = tiny.write_chat_rows(tmp_path_factory.mktemp("held-out"), 8, start=100)
    settings = {"max_steps": STEPS, "global_batch_size": BATCH, "warmup_steps": 2, "warmup_ratio": 0.03}
    changes = {
        "train": settings,
        "run.seed": SEED,
        "adapter.method": "lora",
        "data": {"packing": False, "max_length": 128, "eval_source": str(held_out)},
        "evaluation": {"every_steps": 3, "max_rows": 5, "on_start": True},
        "checkpoint.every_steps": 100,
    }
    return tiny_run(changes, rows=30)


def base_of(plain: Plain) -> Any:
    return AutoModelForCausalLM.from_pretrained(plain["model"]["name"], dtype=torch.float32)


def model_of(plain: Plain, peft: dict[str, Any], start: dict[str, torch.Tensor]) -> Any:
    """PEFT's model with the first values that finray drew; PiSSA's and DoRA's magnitudes are PEFT's own."""
    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **peft}
    model = get_peft_model(base_of(plain), LoraConfig(**settings))
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in start.items() if "init_lora_weights" not in peft else ():
            if ".lora_" in name and "magnitude" not in name:
                named[name.replace(".weight", ".default.weight")].copy_(tensor)
    return model


def fitted(plain: Plain, changes: dict[str, Any]) -> Plain:
    """`warmup_ratio` counts where there are no steps."""
    found = runs.changed(plain, changes)
    if "warmup_ratio" in changes["train"]:
        found["train"]["warmup_steps"] = None
    return found


def ran(settings: Plain, run_dir: Path) -> tuple[Assembled, dict[str, torch.Tensor]]:
    """A finished run, and what it began with."""
    assembled = runs.assemble_alone(settings, run_dir)
    start = {name: tensor.detach().clone() for name, tensor in assembled.loop.task.layout.tensors().items()}
    assembled.loop.run()
    assembled.loop.trackers.finish()
    return assembled, start


def assert_same(assembled: Assembled, run_dir: Path, expected: Reference, *, rel: float) -> dict[str, torch.Tensor]:
    """What a run says of itself is what the plain loop finds; returns the saved weights."""
    steps = runs.values(run_dir, "samples")
    assert [len(own) for own in steps] == [BATCH] * STEPS
    before, _ = expected.evaluate()
    expected.train(steps)
    assert runs.values(run_dir, "lr") == pytest.approx(expected.rates, rel=1e-12)
    assert runs.values(run_dir, "loss") == pytest.approx(expected.losses, rel=rel)
    assert runs.values(run_dir, "grad_norm") == pytest.approx(expected.norms, rel=20 * rel)
    assert runs.values(run_dir, "supervised") == expected.targets
    assert runs.values(run_dir, "epoch") == pytest.approx([(step + 1) * BATCH / 30 for step in range(STEPS)], abs=1e-6)
    assert runs.values(run_dir, "tokens") == [sum(expected.tokens[: step + 1]) for step in range(STEPS)]

    evaluated = {record["step"]: record for record in runs.records(run_dir, "eval")}
    for step, (loss, targets) in zip(EVALUATED, expected.evaluations, strict=True):
        assert evaluated[step]["eval_loss"] == pytest.approx(loss, rel=rel)
        assert evaluated[step]["perplexity"] == pytest.approx(math.exp(loss), rel=10 * rel)
        assert evaluated[step]["eval_targets"] == targets
    assert set(evaluated) - {0} == set(EVALUATED)
    assert abs(loss / before - 1) > 10 * rel, "what is learned must be more than what is tolerated"

    summary, header = assembled.loop.summary(), assembled.header
    assert (summary.step, summary.tokens, summary.supervised) == (STEPS, sum(expected.tokens), sum(expected.targets))
    ends = [expected.losses[0], expected.losses[-1], min(loss for loss, _ in expected.evaluations)]
    assert [summary.first_loss, summary.final_loss, summary.best] == pytest.approx(ends, rel=rel)
    rows = expected.rows(expected.plain["data"]["source"])
    counted = (len(rows), sum(len(ids) for ids, _ in rows), sum(len(learned) for _, learned in rows), 5)
    assert (header.rows, header.tokens, header.supervised, header.eval_rows) == counted

    stem = "adapter_model" if hasattr(expected.model, "peft_config") else "model"
    return load_file(run_dir / f"checkpoint-{STEPS:06d}" / f"{stem}.safetensors")


@pytest.mark.parametrize("case", CASES)
def test_a_run_is_that_of_a_plain_loop(case: str, plain: Plain, tmp_path: Path) -> None:
    changes, peft = CASES[case]
    settings, rel = fitted(plain, changes), TOLERANCE.get(case, 2e-5)
    assembled, start = ran(settings, tmp_path)
    expected = Reference(settings, base_of(settings) if peft is None else model_of(settings, peft, start))
    found = assert_same(assembled, tmp_path, expected, rel=rel)
    theirs = expected.weights()
    checkpoint = tmp_path / f"checkpoint-{STEPS:06d}"
    if case == "pissa":
        # Saved on the untouched base: twice the rank, and so twice as many are held.
        assert {name: one.numel() for name, one in found.items()} == {
            name: 2 * one.numel() for name, one in theirs.items()
        }
    else:
        assert runs.relative_difference(theirs, found) < 10 * rel
        parameters = list(expected.model.parameters())
        counts = tuple(sum(one.numel() for one in parameters if one.requires_grad or every) for every in (False, True))
        assert (assembled.header.trainable, assembled.header.parameters) == counts
        written = {} if peft is None else json.loads((checkpoint / "adapter_config.json").read_text())
        for field, value in (peft or {}).items():
            same = sorted(written[field]) == sorted(value) if isinstance(value, list) else written[field] == value
            assert same, field
    (state,) = (checkpoint / "training_state").glob("optimizer-*")
    hidden = {name.removesuffix("/momentum_buffer") for name in load_file(state) if "/momentum_buffer" in name}
    matrices = {name for name, one in theirs.items() if name.startswith("model.layers.") and one.ndim == 2}
    assert hidden == (matrices if case == "muon" else set())


def test_a_run_that_goes_on_from_an_adapter_is_that_of_a_plain_loop(plain: Plain, tmp_path: Path) -> None:
    """An adapter that PEFT has written, with a scaling of its own; the dropout is the run's."""
    torch.manual_seed(1)
    settings = LoraConfig(
        task_type="CAUSAL_LM", r=3, lora_alpha=7, use_rslora=True, target_modules=["q_proj", "up_proj"]
    )
    made = get_peft_model(base_of(plain), settings)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.add_(0.1 if "lora_B" in name else 0.0)
    made.save_pretrained(str(tmp_path / "adapter"))

    asked = runs.changed(plain, {"train": ADAM})
    asked["adapter"] = {"start_from": str(tmp_path / "adapter"), "dropout": 0.4}
    asked = with_start(runs.config_of(asked)).plain()
    assembled, _ = ran(asked, tmp_path / "run")
    settings = LoraConfig.from_pretrained(str(tmp_path / "adapter"))
    settings.lora_dropout, settings.inference_mode = 0.4, False
    model = PeftModel.from_pretrained(base_of(plain), str(tmp_path / "adapter"), is_trainable=True, config=settings)
    expected = Reference(asked, model)
    found = assert_same(assembled, tmp_path / "run", expected, rel=2e-5)
    assert runs.relative_difference(expected.weights(), found) < 2e-4
    written = json.loads((tmp_path / "run" / f"checkpoint-{STEPS:06d}" / "adapter_config.json").read_text())
    assert (written["r"], written["lora_alpha"], written["use_rslora"], written["lora_dropout"]) == (3, 7, True, 0.4)
