"""Write the tables of docs/guide/scaling.md: communication, memory and failures for 8, 64 and 1024 GPUs, by formulas.

Nothing is measured here; `tests/integration/test_volumes.py` compares the formulas for communication with bytes counted
on Gloo, and `benchmarks/run.py memory` those for memory with measured peaks.

    python -m tools.scaling_page            prints the tables
    python -m tools.scaling_page --write    writes them into the page
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from tools import goodput
from tools.volumes import Machines, exchanges, seconds

from finray.config.schema import AdapterConfig, ModelConfig
from finray.planning.blueprint import Blueprint, ModelShape, model_shape
from finray.planning.estimate import Setup, Workload, estimate
from finray.planning.flops import UTILIZATION, flops_per_token
from finray.planning.placement import GPUS
from finray.pretrained.bundled_configs import bundled_config

PAGE = Path(__file__).resolve().parents[1] / "docs" / "guide" / "scaling.md"
MARKS = ("<!-- tables: python -m tools.scaling_page --write -->", "<!-- end of tables -->")
FAILURES = ("<!-- failures: python -m tools.scaling_page --write -->", "<!-- end of failures -->")
MODELS = {"8B": "meta-llama/Llama-3.1-8B-Instruct", "70B": "meta-llama/Llama-3.1-70B-Instruct"}
GPU = GPUS["h100-80gb"]
# All assumptions.
PRICE = 2.5
TOKENS = 4096
MICRO_BATCHES = 4
ROW = 2048
INSIDE = 450e9
PER_MACHINE = 8
MARGIN = 0.05
RATES = (10, 400)
SIZES = (8, 64, 1024)
# Simplest first: an earlier strategy is chosen if it is nearly as fast.
STRATEGIES = {
    "ddp": Setup(strategy="ddp"),
    "fsdp": Setup(strategy="fsdp"),
    "hybrid": Setup(strategy="fsdp", shards=PER_MACHINE),
    "fsdp, kept": Setup(strategy="fsdp", reshard=False),
    "zero1": Setup(strategy="zero1"),
    "zero2": Setup(strategy="zero2"),
    "zero3": Setup(strategy="zero3"),
}
NEARLY = 0.97


@dataclass(frozen=True)
class Outcome:
    """The result for a strategy on a number of GPUs.

    Attributes:
        strategy: its name.
        memory: bytes needed per GPU.
        compute: seconds of computation per step.
        shown: seconds of communication that do not overlap with computation.
        rate: tokens/s of all GPUs.
    """

    strategy: str
    memory: int
    compute: float
    shown: float
    rate: float

    @property
    def cost(self) -> float:
        """Dollars per billion tokens, at the price per GPU."""
        return 1e9 / self.rate / 3600


@cache
def shape_of(model: str, method: str) -> ModelShape:
    """A model with all weights trained, or an adapter."""
    shipped = bundled_config(ModelConfig(name=MODELS[model]))
    assert shipped is not None
    return model_shape(shipped, AdapterConfig(method="lora" if method == "LoRA" else "none", rank=16), packs=True)


def blueprint(model: str, method: str) -> Blueprint:
    """The shape of a model with all weights trained, or an adapter."""
    return shape_of(model, method).blueprint


def outcome(model: str, method: str, strategy: str, gpus: int, rate: float) -> Outcome | None:
    """The result for a strategy; None if it does not fit into a GPU's memory."""
    shape = blueprint(model, method)
    setup = replace(STRATEGIES[strategy], workers=gpus, device="cuda", precision="bf16", checkpointing="full")
    layers = shape_of(model, method).probe.measure(setup.arithmetic)
    memory = estimate(shape, layers, setup, Workload((ROW,) * (TOKENS // ROW), TOKENS)).total
    if memory > (1 - MARGIN) * GPU.memory:
        return None
    per_machine = 1 if gpus <= PER_MACHINE else PER_MACHINE
    if setup.shards is not None and (gpus <= setup.shards or per_machine == 1):
        return None
    machines = Machines(per_machine, rate * 1e9 / 8, INSIDE)
    flops = flops_per_token(shape, row=ROW, learned=1.0, checkpointing=True).total
    assert GPU.tflops is not None
    compute = TOKENS * MICRO_BATCHES * flops / (UTILIZATION * GPU.tflops * 1e12)
    hidden = shown = 0.0
    for one in exchanges(shape, setup, micro_batches=MICRO_BATCHES):
        took = seconds(one, machines)
        hidden, shown = (hidden + took, shown) if one.hidden else (hidden, shown + took)
    shown += max(0.0, hidden - compute)
    return Outcome(strategy, memory, compute, shown, gpus * TOKENS * MICRO_BATCHES / (compute + shown))


def volume_table() -> list[str]:
    """GB that each GPU sends in a step of one micro-batch, in the limit of many GPUs, where (w - 1) / w is 1."""
    heads = [f"{model}, {how}" for model in MODELS for how in ("all weights", "LoRA")]
    lines = [f"| sent per GPU and step, GB | {' | '.join(heads)} |", "| --- |" + " ---: |" * len(heads)]
    for strategy, base in STRATEGIES.items():
        cells = []
        for model in MODELS:
            for method in ("full", "LoRA"):
                setup = replace(base, workers=1024, device="cuda", precision="bf16")
                found = exchanges(blueprint(model, method), setup, micro_batches=1)
                cells.append(f"{sum(one.sent for one in found) / 1e9:,.2f}")
        lines.append(f"| {strategy} | {' | '.join(cells)} |")
    return lines


def choice_table(model: str, method: str) -> list[str]:
    """For each number of GPUs and network, the simplest strategy that is nearly as fast as the fastest."""
    lines = [
        f"**{model}, {'LoRA' if method == 'LoRA' else 'all weights'}**",
        "",
        "| GPUs | network, Gb/s | strategy | memory, GiB | tokens/s | waiting for the network | $ per 10^9 tokens |",
        "| ---: | ---: | --- | ---: | ---: | ---: | ---: |",
    ]
    for gpus in SIZES:
        for rate in RATES:
            found = [outcome(model, method, strategy, gpus, rate) for strategy in STRATEGIES]
            fitting = [one for one in found if one is not None]
            if not fitting:
                lines.append(f"| {gpus} | {rate} | none fits | | | | |")
                continue
            fastest = max(one.rate for one in fitting)
            best = next(one for one in fitting if one.rate >= NEARLY * fastest)
            waits = best.shown / (best.compute + best.shown)
            dollars = gpus * PRICE * best.cost
            lines.append(
                f"| {gpus} | {rate} | {best.strategy} | {best.memory / 2**30:.0f} | {best.rate:,.0f} | {waits:.0%} "
                f"| {dollars:,.0f} |"
            )
    return [*lines, ""]


def tables() -> str:
    """All tables, as Markdown."""
    lines = [*volume_table(), ""]
    for model in MODELS:
        for method in ("full", "LoRA"):
            lines += choice_table(model, method)
    return "\n".join(lines).rstrip()


def main() -> int:
    """Print the tables, and write them into the page."""
    for marks, found in ((MARKS, tables()), (FAILURES, goodput.tables())):
        print(found)
        if "--write" in sys.argv:
            text = PAGE.read_text(encoding="utf-8")
            begin, end = map(re.escape, marks)
            put = f"{marks[0]}\n\n{found}\n\n{marks[1]}"
            text = re.sub(f"{begin}.*{end}", lambda _, put=put: put, text, flags=re.DOTALL)  # type: ignore[misc]
            PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
