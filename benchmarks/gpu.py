"""Fine-tuning on one GPU: how fast finray's training step is, how much of the machine it uses, and Trainer beside it.

In one process, without Ray, network or downloads. The models have the shapes of Llama 3.1 8B and of Qwen3 1.7B and
random weights, which cost the same time as trained ones; rows have Alpaca's lengths (without a chat template) and
random tokens, and are laid out by finray's own packing. LoRA is of rank 16 on all linear layers over frozen weights in
bf16 (QLoRA: in four bits); full fine-tuning keeps weights in fp32 and computes in bf16; AdamW, clipping at 1.0. A step
is 16,384 tokens or more, whatever the length of a pack. The parts, which `--only` chooses from:

* lengths: LoRA with packs of 512, 2048, 4096 and 8192 tokens.
* methods: LoRA and QLoRA at 8192 tokens a micro-batch, and the small model in full.
* switches: LoRA at 4096 with one of finray's optimisations off (packing, fused LoRA, chunked loss) or on (selective
  and full activation checkpointing, `torch.compile` by block).
* peers: finray's LoRA at 4096, and Transformers' Trainer with PEFT on the same rows, in batches of one length of as
  many rows as a pack holds on average, and as many of them to a step as finray has packs; bf16, SDPA, no checkpointing;
  and the Trainer with Liger's kernels where they are installed. Out of memory, it gets half the batch and twice the
  number.
* head: projection and loss with a frozen head, 16,384 tokens, 248,320 words, width 2048; full logits beside it.

Per case: tokens/s (real tokens, never padding) from an idle GPU to an idle GPU over `--steps` steps after `--warmup`
others; peak memory of torch's allocator in them, weights included; the share that the counted FLOPs
(`harness/flops.py`) reach of the best rate of a square bf16 product in the same run; and the GPU's busy share: the time
of all kernels of two steps (torch.profiler, in a second pass) over what those steps took unwatched.

Not measured: reading and tokenizing data (batches are laid out before the clock starts; in training a thread does it
beside the step), start-up, evaluation, checkpoints, several GPUs, or how good a model comes out.

Each part is printed, and written to `--out` as JSON when it is done; on an H100 a part is planned to take 2 to 6
minutes, all of them 20. `--show gpu.json` writes such a file into RESULTS.md. `--tiny` tries the script, on a CPU too:
tiny models, whose numbers mean nothing.

Needs finray's dependencies but Ray (pydantic and what it needs may be missing where PyTorch is installed), and
bitsandbytes for QLoRA.

    PYTHONPATH=src python benchmarks/gpu.py [--only lengths,methods] [--out gpu.json]
    PYTHONPATH=src python benchmarks/gpu.py --show gpu.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from harness.report import machine, replace_section, say
from one_gpu.head import measure_head
from one_gpu.measure import Result, bf16_peak, time_steps, unless_full
from one_gpu.models import LLAMA, QWEN, SHAPES, TINY, Setup, Shape, build_task
from one_gpu.rows import draw_rows, loose_steps, packed_steps
from one_gpu.show import show
from one_gpu.trainer import has_liger, measure_trainer

HERE = Path(__file__).resolve().parent
TITLE = "One GPU: finray's training step, and Trainer"
SEED = 17


class Bench:
    """What is measured, and on what."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device = torch.device(options.device)
        self.tiny = options.tiny
        self.steps, self.warmup = options.steps, options.warmup
        self.models = [name for name in (QWEN, LLAMA) if name in options.models]
        self.peak, self.gemm_size = bf16_peak(self.device)
        # Tokens of a step, and the lengths of packs.
        self.step_tokens = 256 if options.tiny else 16384
        self.lengths = (64, 128) if options.tiny else (512, 2048, 4096, 8192)
        self.usual, self.long = (128, 256) if options.tiny else (4096, 8192)

    def shape(self, model: str) -> Shape:
        """The model's, or that of what stands in for it."""
        return (TINY if self.tiny else SHAPES)[model]

    def train(self, setup: Setup, *capacities: int) -> dict[int, Result]:
        """A model of a setup, trained with packs of each capacity."""
        shape = self.shape(setup.model)
        results: dict[int, Result] = {}
        task = None

        def build() -> Result:
            nonlocal task
            task = build_task(shape, setup, self.device, seed=SEED)
            return {}

        failed = unless_full(build, self.device)
        for capacity in capacities:
            results[capacity] = failed or unless_full(lambda c=capacity: self._time(task, setup, c), self.device)  # type: ignore[misc]
        return results

    def _time(self, task: Any, setup: Setup, capacity: int) -> Result:
        shape = self.shape(setup.model)
        # The compiler meets packs of other lengths for a while.
        warmup = self.warmup * (3 if setup.compiled else 1)
        count = warmup + self.steps
        rows = draw_rows(count * self.step_tokens, shape["vocab_size"], min(capacity, self.usual), seed=SEED)
        if setup.packing:
            data = packed_steps(rows, capacity, steps=count, packs=self.step_tokens // capacity, seed=SEED)
        else:
            data = loose_steps(rows, steps=count, tokens=self.step_tokens)
        return time_steps(task, data, self.device, warmup=warmup, peak=self.peak)

    def trainer(self, model: str, *, liger: bool) -> Result:
        """Transformers' Trainer on such rows; with smaller batches where the memory is too small."""
        shape = self.shape(model)
        packs = self.step_tokens // self.usual
        rows = draw_rows((self.warmup + self.steps) * self.step_tokens, shape["vocab_size"], self.usual, seed=SEED)
        batch = max(1, round(self.usual * len(rows) / sum(len(ids) for ids, _ in rows)))
        result: Result = {}
        while batch:
            accumulation = packs
            result = unless_full(
                lambda b=batch, a=accumulation: measure_trainer(  # type: ignore[misc]
                    shape,
                    rows,
                    self.device,
                    batch=b,
                    accumulation=a,
                    steps=self.steps,
                    warmup=self.warmup,
                    liger=liger,
                    seed=SEED,
                    peak=self.peak,
                ),
                self.device,
            )
            if "error" not in result:
                return result
            batch, packs = batch // 2, packs * 2
        return result


def entry(model: str, name: str, capacity: int, result: Result) -> Result:
    """A row of the report."""
    found = {"model": model, "name": name, "capacity": capacity, **result}
    rate = result.get("error") or f"{result['tokens_per_s']:,.0f} tokens/s"
    say(f"{model}, {name}, {capacity}: {rate}")
    return found


def lengths(bench: Bench) -> Iterator[Result]:
    """LoRA with packs of several lengths."""
    for model in bench.models:
        for capacity, result in bench.train(Setup(model), *bench.lengths).items():
            yield entry(model, "lora", capacity, result)


def methods(bench: Bench) -> Iterator[Result]:
    """LoRA, QLoRA, and the small model in full."""
    for model in bench.models:
        for method in ("lora", "qlora", *(["full"] if model == QWEN else [])):
            if method == "qlora" and find_spec("bitsandbytes") is None:
                yield entry(model, method, bench.long, {"error": "bitsandbytes is not installed"})
                continue
            for capacity, result in bench.train(Setup(model, method), bench.long).items():
                yield entry(model, method, capacity, result)


def switches(bench: Bench) -> Iterator[Result]:
    """One optimisation at a time, off or on."""
    for model in bench.models:
        setups = [Setup(model)]
        setups += [Setup(model, **{name: False}) for name in ("packing", "fused", "chunked")]  # type: ignore[arg-type]
        setups += [Setup(model, checkpointing=kind) for kind in ("selective", "full")] + [Setup(model, compiled=True)]
        for setup in setups:
            for capacity, result in bench.train(setup, bench.usual).items():
                yield entry(model, setup.name, capacity, result)


def peers(bench: Bench) -> Iterator[Result]:
    """finray and the Trainer."""
    for model in bench.models:
        for capacity, result in bench.train(Setup(model), bench.usual).items():
            yield entry(model, "finray", capacity, result)
        for liger in (False, True) if has_liger() else (False,):
            name = "Trainer + Liger" if liger else "Trainer"
            yield entry(model, name, bench.usual, bench.trainer(model, liger=liger))


def head(bench: Bench) -> Iterator[Result]:
    """Projection and loss."""
    sizes = (
        {"tokens": 64, "vocabulary": 640, "width": 32}
        if bench.tiny
        else {"tokens": 16384, "vocabulary": 248_320, "width": 2048}
    )
    for name, result in measure_head(bench.device, **sizes, repeats=2 if bench.tiny else 10).items():
        say(f"head, {name}: {result}")
        yield {"name": name, **sizes, **result}


PARTS: dict[str, Callable[[Bench], Iterator[Result]]] = {
    "lengths": lengths,
    "methods": methods,
    "switches": switches,
    "peers": peers,
    "head": head,
}


def describe(bench: Bench) -> dict[str, Any]:
    """The machine and the settings."""
    return {
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "device": torch.cuda.get_device_name(bench.device) if bench.device.type == "cuda" else "CPU",
        "versions": {name: _version(name) for name in ("torch", "transformers", "peft", "bitsandbytes", "triton")},
        "cuda": torch.version.cuda,
        "gemm_peak_flops_per_s": bench.peak,
        "gemm_size": bench.gemm_size,
        "steps": bench.steps,
        "warmup": bench.warmup,
        "tiny": bench.tiny,
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _parts(value: str) -> list[str]:
    names = value.split(",")
    unknown = sorted(set(names) - set(PARTS))
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is no part; there are {', '.join(PARTS)}")
    return names


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tuning with finray on one GPU, timed and counted.")
    available = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--only", type=_parts, default=list(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--models", nargs="+", choices=(QWEN, LLAMA), default=[QWEN, LLAMA])
    parser.add_argument("--device", choices=("cuda", "cpu"), default=available)
    parser.add_argument("--steps", type=int, help="timed optimizer steps (default 8)")
    parser.add_argument("--warmup", type=int, help="optimizer steps before those (default 3)")
    parser.add_argument("--out", type=Path, help="JSON file; results of parts that are in it already are kept")
    parser.add_argument("--tiny", action="store_true", help="tiny models and few steps, to try the script")
    parser.add_argument("--show", type=Path, help="write such a JSON file into RESULTS.md, and measure nothing")
    parser.add_argument("--results", type=Path, default=HERE / "RESULTS.md")
    options = parser.parse_args(argv)
    options.steps = options.steps or (2 if options.tiny else 8)
    options.warmup = options.warmup or (1 if options.tiny else 3)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no GPU; use --tiny --device cpu to try the script")
    if options.device == "cpu" and not options.tiny and options.show is None:
        parser.error("on a CPU only --tiny makes sense")
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse_options(argv)
    if options.show is not None:
        replace_section(options.results, TITLE, show(json.loads(options.show.read_text(encoding="utf-8"))))
        return 0
    bench = Bench(options)
    report: dict[str, Any] = {"parts": {}}
    if options.out is not None and options.out.is_file():
        report = json.loads(options.out.read_text(encoding="utf-8"))
    report |= describe(bench)
    say(
        f"{report['device']}; {report['machine']}; bf16 product of {bench.gemm_size}^3: {bench.peak / 1e12:.4g} TFLOP/s"
    )
    for part in options.only:
        report["parts"][part] = []
        for result in PARTS[part](bench):
            report["parts"][part].append(result)
            if options.out is not None:
                options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(show(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
