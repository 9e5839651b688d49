"""LoRA fine-tuning on one GPU: how fast finray's training step is, and how much of the machine it uses.

Per model, in one process, without Ray, network or downloads. The models have the shapes of SmolLM2-135M and of
Llama 3.1 8B and random weights, which costs the same time as trained ones. LoRA of rank 16 on all linear layers, frozen
weights in bf16, AdamW, clipping at 1.0; packs of up to 4096 tokens of rows that have Alpaca's lengths (without a chat
template), laid out by finray's own packing, with random token ids; one pack per forward pass.

What is measured: `--steps` optimizer steps of `finray.training.step.train_step` after `--warmup` others, from a state
in which the GPU is idle to the next: moving the batch, forward, loss, backward, clipping, AdamW, and the one wait for
the GPU that every step has. Tokens are real ones; packs are never padded. Beside that:

- peak memory: of torch's allocator in the timed steps, weights included (on a CPU the process's resident memory);
- model FLOPs per token, counted as 4N + 6P + 3A: N = weights of the frozen matrices that a token meets, without the
  input embedding, and of the head the share of positions that have a target; P = adapter parameters; A = attention's
  forward FLOPs per token, 2 * layers * heads * head width * sum(s^2) / sum(s) over rows of s tokens, which is causal.
  The gradient of frozen weights is not worked out and not counted; nor is what is done twice (checkpointing, and
  attention's scores in the backward pass);
- the peak: the best rate of a square bf16 matrix product on this machine in the same run, and the share of it that the
  counted FLOPs reach;
- GPU-busy share: the time of all kernels (torch.profiler, in a second pass over the first timed steps) over the
  seconds that the same steps took when nothing watched them. Copies and fills of memory are no kernels.

Not measured: reading and tokenizing data (batches are laid out before the clock starts; in training a thread does it
beside the step), start-up, evaluation, checkpoints, several GPUs, or how good a model comes out.

The result is printed and written to `--out` as JSON; with `--quick` (a trial of the script, whose numbers mean
nothing) it is written only where `--out` is given. On a CPU the model is a tiny one.

    python benchmarks/gpu.py [--model smollm2-135m llama-3.1-8b] [--steps 20] [--out gpu.json]
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from finray.config.schema import AdapterConfig, ModelConfig, TrainConfig
from finray.data.collate import Batch, collate
from finray.data.packing import PackPlan, plan_packs
from finray.models import adapters, attention, fused_lora
from finray.models.causal_lm import CausalLM
from finray.models.loading import choose_attention
from finray.models.tokenizers import quiet
from finray.parallel.ddp import DataParallel
from finray.training.feed import StepData
from finray.training.loop import peak_memory
from finray.training.optimizer import Optimizer
from finray.training.state import TrainState
from finray.training.step import train_step
from finray.training.watch import Watch
from harness.report import machine
from harness.rows import make_rows

HERE = Path(__file__).resolve().parent
RANK = 16
Shape = dict[str, Any]
Rows = list[tuple[Any, Any]]
SHAPES: dict[str, Shape] = {
    "smollm2-135m": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
}


@dataclass(frozen=True, slots=True)
class Work:
    """FLOPs of a token and what they are counted from; the letters are those of the formula above.

    Attributes:
        body: weights of the frozen matrices but for the head.
        head: weights of the head.
        share_with_logits: share of the positions that have a target.
        adapters: P.
        attention: A.
    """

    body: int
    head: int
    share_with_logits: float
    adapters: int
    attention: float

    @property
    def flops(self) -> float:
        """Counted FLOPs per token."""
        frozen = self.body + self.share_with_logits * self.head
        return 4 * frozen + 6 * self.adapters + 3 * self.attention

    def plain(self) -> dict[str, float]:
        """As JSON types."""
        return {
            "body_weights": self.body,
            "head_weights": self.head,
            "share_with_logits": self.share_with_logits,
            "adapter_parameters": self.adapters,
            "attention_flops_per_token": self.attention,
            "flops_per_token": self.flops,
        }


def synchronize(device: torch.device) -> None:
    """Wait until the device has done everything."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def build_task(shape: Shape, device: torch.device, *, seed: int, checkpointing: bool) -> CausalLM:
    """As `CausalLM.build` makes it, with weights drawn on the device in the place of those of a file."""
    from transformers import AutoConfig, AutoModelForCausalLM

    quiet()
    attention.register()
    name = choose_attention(ModelConfig(name="random"), device, precision="bf16")
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model("llama", **shape), dtype=torch.bfloat16, attn_implementation=name
        )
    model.eval().requires_grad_(False)
    model = adapters.add_lora(model, AdapterConfig(rank=RANK, alpha=2 * RANK, dropout=0.0), seed=seed)
    fused_lora.fuse(model)
    model.config.use_cache = False
    task = CausalLM(model.to(device), precision="bf16", attention_name=name, device=device)
    if checkpointing:
        task.checkpoint_activations()
    task.model.train()
    return task


def count_pieces(text: str) -> int:
    """Words and full stops, which the made-up rows count as a token each."""
    return len(re.findall(r"\w+|\.", text))


def draw_rows(count: int, vocabulary: int, longest: int, *, seed: int) -> Rows:
    """Rows of random token ids with the lengths of Alpaca's prompts and answers; the answers are learned."""
    generator = np.random.default_rng(seed)
    rows: Rows = []
    for row in make_rows(count, seed=seed):
        prompt, answer = (count_pieces(message["content"]) for message in row["messages"])
        # One more token for the end of the answer.
        mask = np.repeat(np.array([0, 1], dtype=np.uint8), [prompt, answer + 1])[:longest]
        rows.append((generator.integers(0, vocabulary, len(mask), dtype=np.int32), mask))
    return rows


def make_steps(rows: Rows, plan: PackPlan, *, steps: int, packs: int, seed: int) -> list[StepData]:
    """Optimizer steps of so many packs each, drawn without replacement as long as there are any left."""
    generator = np.random.default_rng(seed)
    rounds = -(-steps * packs // len(plan))
    order = np.concatenate([generator.permutation(len(plan)) for _ in range(rounds)]).tolist()
    return [
        make_step([(plan.pack(pack), rows) for pack in order[at * packs : (at + 1) * packs]]) for at in range(steps)
    ]


def make_step(packs: Sequence[tuple[tuple[int, ...], Rows]]) -> StepData:
    """The data of an optimizer step, a micro-batch per pack."""
    batches = [collate([rows[number] for number in numbers], numbers) for numbers, rows in packs]
    return StepData(
        shares=list(enumerate(batches)),
        supervised=sum(len(batch.targets_K) for batch in batches),
        tokens=sum(batch.tokens for batch in batches),
        samples=tuple(number for numbers, _ in packs for number in numbers),
        items=len(batches),
    )


def count_work(task: CausalLM, shape: Shape, data: Sequence[StepData]) -> Work:
    """What a token of these steps costs."""
    named = dict(task.model.named_parameters())
    frozen = {name: tensor for name, tensor in named.items() if not tensor.requires_grad and tensor.ndim == 2}
    outside = ("embed_tokens.weight", "lm_head.weight")
    batches: list[Batch] = [batch for step in data for _, batch in step.shares]
    lengths = np.array([length for batch in batches for length in batch.lengths], dtype=np.float64)
    width = shape["num_attention_heads"] * shape["head_dim"]
    return Work(
        body=sum(tensor.numel() for name, tensor in frozen.items() if not name.endswith(outside)),
        head=shape["vocab_size"] * shape["hidden_size"],
        share_with_logits=sum(step.supervised for step in data) / sum(step.tokens for step in data),
        adapters=task.parameter_counts()[0],
        attention=2 * shape["num_hidden_layers"] * width * float((lengths**2).sum() / lengths.sum()),
    )


def measure_peak(device: torch.device, *, quick: bool) -> tuple[float, int]:
    """FLOPs a second of a square bf16 matrix product, the best of five goes, and its size."""
    size = 8192 if device.type == "cuda" else 512 if quick else 2048
    repeats = 20 if device.type == "cuda" else 2
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(left)

    def go() -> float:
        synchronize(device)
        started = time.perf_counter()
        for _ in range(repeats):
            torch.mm(left, right, out=product)
        synchronize(device)
        return time.perf_counter() - started

    go()
    return 2 * size**3 * repeats / min(go() for _ in range(5)), size


Step = Callable[[StepData], float]


def stepper(task: CausalLM, device: torch.device) -> Step:
    """finray's optimizer step on a process of its own; gives the loss."""
    strategy = DataParallel(device)
    train = TrainConfig(learning_rate=1e-4)
    optimizer = Optimizer(task.trainable(), train)
    state = TrainState(random_key=1)
    watch = Watch(state, device, scaled=False)

    def step(data: StepData) -> float:
        result = train_step(
            task,
            strategy,
            optimizer,
            data,
            state,
            watch,
            learning_rate=train.learning_rate,
            max_grad_norm=train.max_grad_norm,
        )
        state.step += 1
        return float(result.loss)

    return step


def time_steps(step: Step, data: Sequence[StepData], device: torch.device) -> tuple[list[float], list[float]]:
    """Seconds and loss of each step. A step reads its loss, so that it ends when the GPU is all but done with it."""
    seconds, losses = [], []
    synchronize(device)
    for item in data:
        started = time.perf_counter()
        losses.append(step(item))
        if item is data[-1]:
            synchronize(device)
        seconds.append(time.perf_counter() - started)
    return seconds, losses


def kernel_seconds(step: Step, data: Sequence[StepData], device: torch.device) -> float | None:
    """Time of all kernels of some steps; None without a GPU."""
    if device.type != "cuda":
        return None
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for item in data:
            step(item)
        synchronize(device)
    events = profiler.events() or []
    return 1e-6 * float(sum(event.time_range.elapsed_us() for event in events if is_kernel(event)))


def is_kernel(event: Any) -> bool:
    """Whether an event of the profiler is a kernel: on the device, and no copy, fill, or named range."""
    on_device = event.device_type.name == "CUDA" and not event.is_user_annotation
    return on_device and not event.name.startswith(("Memcpy", "Memset"))


def measure(model: str, options: argparse.Namespace, device: torch.device, peak: float) -> dict[str, Any]:
    """Build a model, train it for some steps, and count."""
    shape = SHAPES[model]
    task = build_task(shape, device, seed=options.seed, checkpointing=options.checkpointing)
    total = options.warmup + options.steps
    # Alpaca's rows have some 170 tokens on average.
    count = total * options.packs * options.capacity // 150 + 1
    rows = draw_rows(count, shape["vocab_size"], options.capacity, seed=options.seed)
    plan = plan_packs([len(ids) for ids, _ in rows], options.capacity)
    data = make_steps(rows, plan, steps=total, packs=options.packs, seed=options.seed)
    step = stepper(task, device)
    time_steps(step, data[: options.warmup], device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    timed = data[options.warmup :]
    seconds, losses = time_steps(step, timed, device)
    memory = peak_memory(device)
    watched = timed[: options.profiled]
    kernels = kernel_seconds(step, watched, device)
    work = count_work(task, shape, timed)
    rate = sum(item.tokens for item in timed) / sum(seconds)
    return {
        "model": model,
        "attention": task.model.config._attn_implementation,
        "tokens_per_s": rate,
        "peak_memory_bytes": memory,
        "share_of_gemm_peak": work.flops * rate / peak,
        "gpu_busy_share": None if kernels is None else kernels / sum(seconds[: len(watched)]),
        "work": work.plain(),
        "tokens": sum(item.tokens for item in timed),
        "rows_per_pack": len(plan.rows) / len(plan),
        "fill": plan.fill,
        "step_seconds": seconds,
        "losses": losses,
    }


def show(result: dict[str, Any], peak: float) -> str:
    """A result in a few lines."""
    work, busy = result["work"], result["gpu_busy_share"]
    steps = result["step_seconds"]
    return "\n".join(
        [
            f"{result['model']} ({result['attention']})",
            f"  tokens/s            {result['tokens_per_s']:.0f}  (steps of {min(steps):.3f} to {max(steps):.3f} s)",
            f"  peak memory         {result['peak_memory_bytes'] / 2**30:.2f} GiB",
            f"  FLOPs per token     {work['flops_per_token']:.4g}  ({work['body_weights']} body and "
            f"{work['share_with_logits']:.2f} x {work['head_weights']} head weights, {work['adapter_parameters']} in "
            f"adapters, attention {work['attention_flops_per_token']:.3g})",
            f"  share of GEMM peak  {result['share_of_gemm_peak']:.1%} of {peak / 1e12:.4g} TFLOP/s",
            f"  GPU busy            {'not measured on a CPU' if busy is None else f'{busy:.1%}'}",
        ]
    )


def describe(options: argparse.Namespace, device: torch.device, peak: float, size: int) -> dict[str, Any]:
    """The machine and the settings."""
    settings = ("steps", "warmup", "packs", "capacity", "profiled", "checkpointing", "seed", "quick")
    return {
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "cuda": torch.version.cuda,
        "versions": {name: version(name) for name in ("finray", "torch", "transformers", "peft")},
        "gemm_peak_flops_per_s": peak,
        "gemm_size": size,
        "lora_rank": RANK,
        "precision": "bf16",
        **{name: getattr(options, name) for name in settings},
    }


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="LoRA fine-tuning with finray on one GPU, timed and counted.")
    available = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=available)
    parser.add_argument("--model", nargs="+", choices=tuple(SHAPES), help="default: both large ones; on a CPU: tiny")
    parser.add_argument("--steps", type=int, help="timed optimizer steps (default 20)")
    parser.add_argument("--warmup", type=int, help="optimizer steps before those (default 5)")
    parser.add_argument("--packs", type=int, help="packs per optimizer step, one per forward pass (default 4)")
    parser.add_argument("--capacity", type=int, help="most tokens in a pack (default 4096)")
    parser.add_argument("--profiled", type=int, default=3, help="timed steps that are done again under the profiler")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations in the backward pass")
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--out", type=Path, help="JSON file (default benchmarks/gpu.json; with --quick none)")
    parser.add_argument("--quick", action="store_true", help="two steps of two short packs, to try the script")
    options = parser.parse_args(argv)
    _fill_in(options)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no GPU; use --device cpu to try the script")
    if min(options.steps, options.warmup, options.packs, options.profiled) < 1 or options.capacity < 8:
        parser.error("--steps, --warmup, --packs and --profiled must be at least 1, --capacity at least 8")
    return options


def _fill_in(options: argparse.Namespace) -> None:
    """Defaults that depend on other options."""
    large = ["smollm2-135m"] if options.quick else ["smollm2-135m", "llama-3.1-8b"]
    options.model = options.model or (large if options.device == "cuda" else ["tiny"])
    for name, usual, quick in (("steps", 20, 2), ("warmup", 5, 1), ("packs", 4, 2), ("capacity", 4096, 1024)):
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else usual)
    if options.out is None and not options.quick:
        options.out = HERE / "gpu.json"


def main(argv: list[str] | None = None) -> int:
    options = parse_options(argv)
    device = torch.device(options.device)
    peak, size = measure_peak(device, quick=options.quick)
    report: dict[str, Any] = {**describe(options, device, peak, size), "results": []}
    print(f"{report['device']}; {report['machine']}\nbf16 product of {size}^3: {peak / 1e12:.4g} TFLOP/s", flush=True)
    for model in options.model:
        result = measure(model, options, device, peak)
        report["results"].append(result)
        print(show(result, peak), flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
