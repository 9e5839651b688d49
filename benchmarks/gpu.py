"""Fine-tuning on one GPU: speed and GPU utilization of finray's training step, compared with Transformers' Trainer.

Runs in one process, without Ray, network or downloads. The models have the shapes of Llama 3.1 8B and Qwen3 1.7B and
random weights, which take the same time as trained ones; rows have Alpaca's lengths (without a chat template) and
random tokens, and are packed by finray. LoRA has rank 16 on all linear layers, with frozen weights in bf16 (QLoRA: in 4
bits); full fine-tuning keeps weights in fp32 and computes in bf16; AdamW, gradient clipping at 1.0. A step has 16,384
tokens or more, for any pack length.

Not measured: reading and tokenizing data (batches are built before timing starts; in training, a background thread does
this), start-up, evaluation, checkpoints, several GPUs, or model quality. With `--quick`, tiny models try the script,
also on a CPU.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import case
import flops
from case import Bench, Blocks, Result, Run, Value
from finray.config.schema import AdapterConfig, TrainConfig
from finray.data.sampling.collate import collate
from finray.data.sampling.packing import plan_packs
from finray.models import adapters, attention, fused_lora, liger
from finray.models.blocks import compile_blocks, wrap_blocks
from finray.models.head import Head, loss_sum
from finray.models.quantized import QuantizedLinear, quantize_layers
from finray.parallel.ddp import DDPStrategy
from finray.planning import estimate as planned
from finray.planning.blueprint import draw_blueprint
from finray.planning.layers import LayerProbe
from finray.pretrained.tokenizers import silence_transformers
from finray.tasks.causal_lm import CausalLM
from finray.training.loader import StepData
from finray.training.loop import peak_memory
from finray.training.nonfinite import NonFiniteGuard
from finray.training.optim.optimizer import Optimizer
from finray.training.state import TrainState
from finray.training.step import train_step
from rows import make_rows

SEED, RANK = 17, 16
# Rows of a batch that is not packed.
LOOSE_ROWS = 8
WARMUP, STEPS = 3, 8
# (ids, mask) of a row; the mask is 1 for tokens that are trained on.
Row = tuple[Any, Any]


LLAMA, QWEN, SMALL, ONE_B = "llama-3.1-8b", "qwen3-1.7b", "smollm2-135m", "llama-3.2-1b"
FIELDS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
FIELDS += ("num_key_value_heads", "head_dim", "tie_word_embeddings")
# The kind and these fields; a trial uses `TINY` for all.
SHAPES = {
    LLAMA: ("llama", 128256, 4096, 14336, 32, 32, 8, 128, False),
    QWEN: ("qwen3", 151936, 2048, 6144, 28, 16, 8, 128, True),
    SMALL: ("llama", 49152, 576, 1536, 30, 9, 3, 64, True),
    ONE_B: ("llama", 128256, 2048, 8192, 16, 32, 8, 64, True),
}
TINY = ("qwen3", 640, 64, 192, 2, 4, 2, 16, True)


@dataclass(frozen=True, slots=True)
class Setup:
    """How a model is trained; the switches are finray's optimizations."""

    method: str = "lora"  # or `qlora` (NF4 with double quantization), or `full`
    length: int = -2  # index of the pack length
    rank: int = RANK
    packing: bool = True  # or batches of concatenated rows
    fused: bool = True  # each LoRA layer as one operation
    liger: bool = True  # Liger's layers, on a GPU where they are installed
    chunked: bool = True  # loss in chunks, or full logits at the positions with a target
    checkpointing: str = "none"  # gradient checkpointing: `none`, `selective` or `full`
    compiled: bool = False  # `torch.compile` for every block


LENGTHS = {"512": Setup(length=0), "2,048": Setup(length=1), "4,096": Setup(), "8,192": Setup(length=3)}
METHODS = {"lora": Setup(length=3), "qlora": Setup("qlora", length=3), "full": Setup("full", length=3)}
SWITCHES = {
    "lora": Setup(),
    "not packed": Setup(packing=False),
    "not fused": Setup(fused=False),
    "no Liger": Setup(liger=False),
    "loss not in chunks": Setup(chunked=False),
    "selective checkpointing": Setup(checkpointing="selective"),
    "full checkpointing": Setup(checkpointing="full"),
    "compiled": Setup(compiled=True),
}
# A setup of finray, or whether the Trainer uses Liger's kernels.
PEERS: dict[str, Setup | bool] = {"finray": Setup(), "Trainer": False, "Trainer + Liger": True}
MEMORY = {
    SMALL: {"lora": Setup(rank=8), "full": Setup("full")},
    ONE_B: {
        "lora, full checkpointing": Setup(length=3, rank=8, checkpointing="full"),
        "lora, not packed": Setup(rank=8, packing=False),
    },
}


def random_model(config: Any, dtype: torch.dtype, implementation: str, device: torch.device) -> Any:
    """A causal language model with random weights, created on the device."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(SEED)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=implementation)
    model.config.use_cache = False
    return model.to(device)


def build_task(config: Any, setup: Setup, device: torch.device) -> CausalLM:
    """The task as `CausalLM.build` makes it, except for the weights."""
    silence_transformers()
    attention.register()
    flash = device.type == "cuda" and find_spec("flash_attn") is not None
    name = "flash_attention_2" if flash else attention.NAME
    model = random_model(config, torch.float32 if setup.method == "full" else torch.bfloat16, name, device)
    if setup.method != "full":
        model.eval().requires_grad_(False)
        if setup.method == "qlora":
            _quantize(model)
        adapter = AdapterConfig(rank=setup.rank, alpha=2 * setup.rank, dropout=0.0, target_modules="all-linear")
        model = adapters.add_lora(model, adapter, seed=SEED)
        if setup.fused:
            fused_lora.fuse(model)
    task = CausalLM(model.to(device), precision="bf16", attention_name=name, device=device)
    if setup.liger and device.type == "cuda" and find_spec("liger_kernel") is not None:
        liger.apply(task.model, checkpointing=setup.checkpointing)
    if not setup.chunked:
        # As for a head that finray does not support.
        task.packed._has_plain_head = False
    if setup.compiled:
        # A trial on a CPU does not compile, which would take minutes.
        compile_blocks(task.model, backend="inductor" if device.type == "cuda" else "aot_eager")
    if setup.checkpointing != "none":
        wrap_blocks(task.model, checkpointing=setup.checkpointing)
    task.model.train()
    return task


def _quantize(model: Any) -> None:
    """Quantize all linear layers except the head to 4 bits, one after the other."""
    weights = {name: layer.weight.detach() for name, layer in model.named_modules() if type(layer) is torch.nn.Linear}
    quantize_layers(model, 4, dtype=torch.bfloat16)
    for name, layer in model.named_modules():
        if isinstance(layer, QuantizedLinear):
            layer.weight = torch.nn.Parameter(layer.pack(weights.pop(name)), requires_grad=False)


def draw_rows(tokens: int, vocabulary: int, longest: int) -> list[Row]:
    """Rows with at least this many tokens in total; prompts and answers have Alpaca's lengths."""
    generator = np.random.default_rng(SEED)
    found: list[Row] = []
    total = 0
    # Alpaca's rows have about 170 tokens on average.
    for row in make_rows(50 + tokens // min(100, longest // 3), seed=SEED):
        # Each word and full stop counts as a token, and the end of the answer as one more.
        prompt, answer = (len(message["content"].replace(".", " .").split()) for message in row["messages"])
        mask = np.repeat(np.array([0, 1], dtype=np.uint8), [prompt, answer + 1])[:longest]
        found.append((generator.integers(0, vocabulary, len(mask), dtype=np.int32), mask))
        total += len(mask)
        if total >= tokens:
            return found
    raise ValueError(f"too few rows were made for {tokens} tokens")


def groups_of(rows: Sequence[Row], capacity: int, *, steps: int, tokens: int, packing: bool) -> list[Any]:
    """The rows of each batch of each step of about this many tokens, drawn without replacement while any are left.

    A batch is a pack, or a number of rows.
    """
    lengths = [len(ids) for ids, _ in rows]
    if not packing:
        count = max(1, round(tokens / (LOOSE_ROWS * sum(lengths) / len(rows))))
        numbers = iter(list(range(len(rows))) * 3)
        return [[tuple(next(numbers) for _ in range(LOOSE_ROWS)) for _ in range(count)] for _ in range(steps)]
    plan, packs = plan_packs(lengths, capacity), tokens // capacity
    generator = np.random.default_rng(SEED)
    rounds = -(-steps * packs // len(plan))
    order = np.concatenate([generator.permutation(len(plan)) for _ in range(rounds)]).tolist()
    return [[plan.pack(pack) for pack in order[at * packs : (at + 1) * packs]] for at in range(steps)]


def step_data(rows: Sequence[Row], groups: Sequence[tuple[int, ...]]) -> StepData:
    """A step with one batch per group of rows."""
    batches = [collate([rows[number] for number in numbers], numbers) for numbers in groups]
    targets = sum(len(batch.targets_K) for batch in batches)
    return StepData(
        micro_batches=list(enumerate(batches)),
        weight=targets,
        supervised=targets,
        tokens=sum(batch.tokens for batch in batches),
        samples=tuple(number for numbers in groups for number in numbers),
        items=len(batches),
    )


def stepper(task: CausalLM, device: torch.device) -> Callable[[StepData], torch.Tensor]:
    """finray's optimizer step in its own process; returns the loss as a tensor."""
    strategy, train, state = DDPStrategy(device), TrainConfig(learning_rate=1e-4), TrainState(random_key=1)
    optimizer, guard = Optimizer(task.trainable(), train), NonFiniteGuard(state, device, scaled=False)

    def step(data: StepData) -> torch.Tensor:
        rates = {"learning_rate": train.learning_rate, "max_grad_norm": train.max_grad_norm}
        result = train_step(task, strategy, optimizer, data, state, guard, **rates)  # type: ignore[arg-type]
        state.step += 1
        return result.loss

    return step


def estimated(config: Any, setup: Setup, batches: Sequence[Any]) -> int | None:
    """Bytes that `finray plan` estimates for the largest of some batches; None if it has no estimate."""
    from transformers import AutoModelForCausalLM

    if setup.method == "qlora" or setup.compiled or not (setup.fused and setup.chunked):
        return None
    dtype = torch.float32 if setup.method == "full" else torch.bfloat16
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    method = "none" if setup.method == "full" else "lora"
    blueprint = draw_blueprint(model, AdapterConfig(method=method, rank=setup.rank, alpha=2 * setup.rank))
    how = planned.Setup(device="cuda", precision="bf16", checkpointing=setup.checkpointing, ray=False)
    layers = LayerProbe(model).measure(how.arithmetic)
    heaviest = max(batches, key=lambda one: layers.kept(one.lengths))
    found = planned.estimate(blueprint, layers, how, planned.Workload(heaviest.lengths, len(heaviest.targets_K)))
    # Memory allocated by torch: without the process itself or fragmentation.
    return found.total - sum(found.parts.get(part, 0) for part in ("process", "heap holes"))


def forget(device: torch.device) -> None:
    """Free the memory of the last case, and reset the peak counters."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def unless_full(action: Callable[[], Result], device: torch.device) -> Result:
    """The result of a case, or that the device ran out of memory."""
    forget(device)
    try:
        return action()
    except torch.OutOfMemoryError:
        return {"error": "out of memory"}
    finally:
        forget(device)


def kernel_seconds(action: Callable[[], Any], device: torch.device) -> float | None:
    """Time of all kernels of an action (without copies, fills or named ranges); None without a GPU."""
    if device.type != "cuda":
        return None
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        action()
        flops.wait(device)
    kernels = [
        event
        for event in profiler.events() or []
        if event.device_type.name == "CUDA"
        and not event.is_user_annotation
        and not event.name.startswith(("Memcpy", "Memset"))
    ]
    return 1e-6 * float(sum(event.time_range.elapsed_us() for event in kernels))


def _result(config: Any, rank: int | None, lengths: Sequence[int], targets: int, seconds: float, peak: float) -> Result:
    """The figures from all timings: tokens/s without padding, and the counted FLOPs as a share of the peak rate."""
    tokens = sum(lengths)
    cost = flops.flops_per_token(config, lengths, share_with_target=targets / tokens, rank=rank)
    rate = tokens / seconds
    return {"tokens": tokens, "seconds": seconds, "tokens_per_s": rate, "share": cost * rate / peak}


@dataclass(frozen=True)
class Gpu:
    """The measurements on a model and a device."""

    device: torch.device
    tiny: bool

    @property
    def step_tokens(self) -> int:
        """Tokens of a step."""
        return 256 if self.tiny else 16384

    def lengths(self) -> tuple[int, ...]:
        """Pack lengths; the last but one is the default."""
        return (32, 64, 128, 256) if self.tiny else (512, 2048, 4096, 8192)

    def config(self, model: str) -> Any:
        """The config of the model, or of its tiny replacement in a trial."""
        from transformers import AutoConfig

        kind, *values = TINY if self.tiny else SHAPES[model]
        return AutoConfig.for_model(kind, max_position_embeddings=131072, **dict(zip(FIELDS, values, strict=True)))

    def peak(self) -> float:
        """Peak FLOP/s."""
        return bf16_peak(self.device, 512 if self.tiny else 8192)

    def train(self, model: str, setup: Setup) -> Result:
        """finray's steps: warmed up, timed from an idle device to an idle device; two of them are profiled.

        No value is read from the device in between, as in a run between two records.
        """
        device, capacity = self.device, self.lengths()[setup.length]
        if setup.method == "qlora" and find_spec("bitsandbytes") is None:
            return {"error": "bitsandbytes is not installed"}

        def timed() -> Result:
            config = self.config(model)
            task = build_task(config, setup, device)
            # For a while, the compiler still sees packs of new lengths.
            warmup = WARMUP * (3 if setup.compiled else 1)
            count = warmup + STEPS
            rows = draw_rows(count * self.step_tokens, config.vocab_size, min(capacity, self.lengths()[-2]))
            groups = groups_of(rows, capacity, steps=count, tokens=self.step_tokens, packing=setup.packing)
            data = [step_data(rows, group) for group in groups]
            step = stepper(task, device)
            for item in data[:warmup]:
                step(item)
            flops.wait(device)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            started = time.perf_counter()
            losses = [step(item) for item in data[warmup:]]
            flops.wait(device)
            seconds = time.perf_counter() - started
            memory = peak_memory(device)
            two = data[warmup : warmup + 2]
            kernels = kernel_seconds(lambda: [step(item) for item in two], device)
            lengths = [length for item in data[warmup:] for _, batch in item.micro_batches for length in batch.lengths]
            targets = sum(item.weight for item in data[warmup:])
            rank = None if setup.method == "full" else setup.rank
            result = _result(config, rank, lengths, targets, seconds, self.peak())
            unwatched = seconds * sum(item.tokens for item in two) / sum(lengths)
            busy = None if kernels is None else kernels / unwatched
            guess = estimated(config, setup, [batch for item in data[warmup:] for _, batch in item.micro_batches])
            result |= {"memory": memory, "busy": busy, "losses": [float(loss) for loss in losses]}
            return result | {"estimate": guess, "off": guess / memory if guess else None}

        return unless_full(timed, device)

    def trainer(self, model: str, *, liger: bool) -> Result:
        """Transformers' Trainer on such rows; when out of memory, half the batch size and twice the batches."""
        if liger and find_spec("liger_kernel") is None:
            return {"error": "Liger is not installed"}
        config, usual = self.config(model), self.lengths()[-2]
        packs = self.step_tokens // usual
        rows = draw_rows((WARMUP + STEPS) * self.step_tokens, config.vocab_size, usual)
        # As many rows as a pack has on average.
        batch = max(1, round(usual * len(rows) / sum(len(ids) for ids, _ in rows)))
        result: Result = {"error": "out of memory"}
        while batch and "error" in result:
            result = unless_full(partial(_time_trainer, self, config, rows, batch, packs, liger), self.device)
            batch, packs = batch // 2, packs * 2
        return result

    def head(self, way: str) -> Result:
        """Projection and loss with a frozen head, forward and backward: milliseconds and total peak memory."""
        device = self.device
        tokens, words, width = (64, 640, 32) if self.tiny else (16384, 248_320, 2048)
        torch.manual_seed(1)
        weight = (0.02 * torch.randn(words, width)).to(device, torch.bfloat16)
        hidden = torch.randn(tokens, width).to(device, torch.bfloat16).requires_grad_()
        targets = torch.randint(0, words, (tokens,)).to(device)

        def once() -> None:
            hidden.grad = None
            HEADS[way](hidden, weight, targets).backward()

        def timed() -> Result:
            seconds = median(flops.timings(once, device, count=2 if self.tiny else 10))
            memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
            return {"milliseconds": 1e3 * seconds, "memory": memory}

        try:
            return unless_full(timed, device)
        except (TypeError, NotImplementedError, AttributeError) as error:
            return {"error": str(error).splitlines()[0]}


HEADS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]] = {
    "finray": lambda hidden, weight, targets: loss_sum(Head(weight), hidden, targets),
    "full logits": lambda hidden, weight, targets: F.cross_entropy(
        (hidden @ weight.T).float(), targets, reduction="sum"
    ),
    "torch's linear_cross_entropy": lambda hidden, weight, targets: F.linear_cross_entropy(  # type: ignore[attr-defined]
        hidden, weight, targets, reduction="sum"
    ),
}


@cache
def bf16_peak(device: torch.device, size: int) -> float:
    """FLOP/s of the fastest of many square bf16 matrix products."""
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(left)
    return 2 * size**3 / min(flops.timings(lambda: torch.mm(left, right, out=product), device, count=100))


def _time_trainer(gpu: Gpu, config: Any, rows: Sequence[Row], batch: int, accumulation: int, liger: bool) -> Result:
    """Steps of `accumulation` batches of rows of similar length: bf16 weights, autocast, no checkpointing, SDPA."""
    sys.path.append(str(Path(__file__).resolve().parent / "peers"))
    import hf
    import measuring
    from peft import get_peft_model
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    device = gpu.device
    marks: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step in (WARMUP, WARMUP + STEPS):
                flops.wait(device)
                if device.type == "cuda" and not marks:
                    torch.cuda.reset_peak_memory_stats(device)
                marks.append(time.perf_counter())

    # Batches of rows of similar length, as after sorting a large dataset, in random order; the longest first, for
    # memory.
    ordered = sorted(rows, key=lambda row: len(row[0]))
    batches = [ordered[at : at + batch] for at in range(0, len(ordered) - batch + 1, batch)]
    picked = [len(batches) - 1, *np.random.default_rng(SEED).permutation(len(batches) - 1).tolist()]
    needed = (WARMUP + STEPS) * accumulation
    seen = [row for at in range(needed) for row in batches[picked[at % len(picked)]]]
    labels = [np.where(mask.astype(bool), ids, hf.IGNORED) for ids, mask in seen]
    data = [{"input_ids": ids.tolist(), "labels": row.tolist()} for (ids, _), row in zip(seen, labels, strict=True)]
    with tempfile.TemporaryDirectory(prefix="gpu_trainer_") as folder:
        common = hf.arguments(measuring.Job("", "", [[0]] * (WARMUP + STEPS), seed=SEED), folder) | {
            "use_cpu": device.type == "cpu",
            "logging_steps": 10_000,
            "per_device_train_batch_size": batch,
            "gradient_accumulation_steps": accumulation,
        }
        arguments = TrainingArguments(
            **common,
            bf16=True,
            use_liger_kernel=liger,
            train_sampling_strategy="sequential",
            remove_unused_columns=False,
            label_names=["labels"],
            dataloader_num_workers=0 if device.type == "cpu" else 2,
        )
        trainer = Trainer(
            model=get_peft_model(random_model(config, torch.bfloat16, "sdpa", device), hf.lora_config(RANK)),
            args=arguments,
            train_dataset=data,
            data_collator=partial(hf.pad, padding=0),
            callbacks=[Clock()],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    timed = seen[WARMUP * accumulation * batch :]
    lengths = [len(ids) for ids, _ in timed]
    targets = sum(int(mask[1:].sum()) for _, mask in timed)
    result = _result(config, RANK, lengths, targets, marks[1] - marks[0], gpu.peak())
    return result | {"memory": peak_memory(device), "busy": None, "rows of a batch": batch}


def _gpu(bench: Bench) -> Gpu:
    """The device of this process.

    Raises:
        SystemExit: there is none, and this is not a trial.
    """
    if not torch.cuda.is_available() and not bench.quick:
        raise SystemExit("torch finds no GPU; --quick tries the script on a CPU")
    return Gpu(torch.device("cuda" if torch.cuda.is_available() else "cpu"), bench.quick)


def _bound(model: str, setup: Setup | bool) -> Run:
    if isinstance(setup, bool):
        return lambda bench, pair: _gpu(bench).trainer(model, liger=setup)
    return lambda bench, pair: _gpu(bench).train(model, setup)


def _case(name: str, title: str, table: Mapping[str, Mapping[str, Setup | bool]], *aims: case.Aim) -> case.Case:
    return case.Case(
        group="gpu",
        name=name,
        title=title,
        what=NOTE,
        blocks=lambda bench: {
            model: {name: _bound(model, setup) for name, setup in setups.items()} for model, setups in table.items()
        },
        measures=MEASURES,
        ratios=lambda runs: [(name, next(iter(runs))) for name in list(runs)[1:]],
        aims=aims,
        most_pairs=1,
    )


def _both(setups: Mapping[str, Setup | bool]) -> dict[str, Mapping[str, Setup | bool]]:
    """The same setups for both models; full fine-tuning of the large one does not fit on any single GPU."""
    return {QWEN: setups, LLAMA: {name: setup for name, setup in setups.items() if name != "full"}}


def _head(way: str) -> Run:
    return lambda bench, pair: _gpu(bench).head(way)


def _of(model: str, value: Value) -> Value:
    """A figure from the block of a model."""
    return lambda blocks: value({model: blocks[model]})


def _over(model: str, name: str, above: str, below: str, **bound: float) -> case.Aim:
    return case.Aim(f"{model}: {name}", _of(model, case.quotient(above, below, "tokens_per_s")), **bound)


def _least_busy(blocks: Blocks) -> float | None:
    busy = [run["busy"] for runs in blocks[QWEN].values() for run in runs if run.get("busy") is not None]
    return min(busy, default=None)


def _first(name: str, key: str) -> Value:
    return lambda blocks: list(blocks.values())[-1][name][0].get(key)


NOTE = (
    "Real tokens a second from an idle GPU to an idle GPU; the share that the counted FLOPs reach of the best rate of "
    "a square bf16 product in the same run; the time of all kernels of two steps over what those took unwatched; and "
    "the peak of torch's allocator, weights included (the CUDA context is outside of it), with the estimate of finray "
    "plan for it."
)
MEASURES = (
    case.Measure("tokens/s", "tokens_per_s", 0),
    case.Measure("share of the peak, %", "share", 1, None, scale=100),
    case.Measure("GPU busy, %", "busy", 1, None, scale=100),
    case.Measure("peak memory, GiB", "memory", 2, scale=2**-30),
    case.Measure("estimate ÷ it", "off", 3, None),
)


CASES = [
    _case(
        "lengths",
        "LoRA with packs of several lengths",
        _both(LENGTHS),
        case.Aim(
            "8B, LoRA, packs of 4,096", _of(LLAMA, _first("4,096", "tokens_per_s")), 15_000, form="{:,.0f} tokens/s"
        ),
        case.Aim("1.7B: GPU busy, at least", _least_busy, 0.95, form="{:.1%}"),
    ),
    _case(
        "methods",
        "LoRA, QLoRA and full fine-tuning, 8,192 tokens a micro-batch",
        _both(METHODS),
        *(_over(model, "LoRA ÷ QLoRA", "lora", "qlora", most=1.06) for model in (QWEN, LLAMA)),
    ),
    _case("switches", "One optimization at a time, packs of 4,096", _both(SWITCHES)),
    _case(
        "peers",
        "finray and Trainer on rows of Alpaca's lengths",
        _both(PEERS),
        *(_over(model, "finray ÷ Trainer", "finray", "Trainer", least=2.0) for model in (QWEN, LLAMA)),
    ),
    _case("memory", "The estimate of memory and the allocator's peak", MEMORY),
    case.Case(
        group="gpu",
        name="head",
        title="Projection and loss with a frozen head",
        what="16,384 tokens, 248,320 words, width 2,048; forward and backward.",
        blocks=lambda bench: {"": {way: _head(way) for way in HEADS}},
        measures=(case.Measure("ms", "milliseconds"), case.Measure("peak memory, GB", "memory", 2, scale=1e-9)),
        aims=(
            case.Aim("Projection and loss", _first("finray", "milliseconds"), most=60, form="{:.1f} ms"),
            case.Aim("Memory of projection and loss", _first("finray", "memory"), most=3.5e9, form="{:,.0f} bytes"),
        ),
        most_pairs=1,
    ),
]
