"""The report of gpu.py as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.report import table
from one_gpu.models import LLAMA, QWEN

Result = dict[str, Any]
TITLES = {
    "lengths": "LoRA with packs of several lengths",
    "methods": "LoRA, QLoRA and full fine-tuning at 8192 tokens a micro-batch",
    "switches": "One optimisation at a time",
    "peers": "finray and Trainer on rows of Alpaca's lengths",
}


def show(report: dict[str, Any]) -> str:
    """The section of a report."""
    versions = ", ".join(f"{name} {value}" for name, value in report["versions"].items() if value)
    lines = [
        f"- {report['date']}; {report['device']}; {report['machine']}; CUDA {report['cuda']}; {versions}\n"
        f"- bf16 product of {report['gemm_size']}^3: {report['gemm_peak_flops_per_s'] / 1e12:.4g} TFLOP/s; "
        f"{report['steps']} timed steps after {report['warmup']}",
        "```\nPYTHONPATH=src python benchmarks/gpu.py\n```",
    ]
    if report["tiny"]:
        lines.append("A trial with tiny models: the numbers mean nothing.")
    parts = report["parts"]
    for name, title in TITLES.items():
        if name in parts:
            lines.append(f"**{title}**\n\n{_cases(parts[name])}")
    if "head" in parts:
        lines.append(f"**Projection and loss with a frozen head**\n\n{_head(parts['head'])}")
    if not report["tiny"]:
        lines.append(f"**Aims**\n\n{_aims(parts)}")
    return "\n\n".join(lines)


def _cases(results: Sequence[Result]) -> str:
    rows = []
    first: dict[str, float] = {}
    for result in results:
        start = [result["model"], result["name"], f"{result['capacity']:,}"]
        if "error" in result:
            rows.append([*start, result["error"], "–", "–", "–", "–"])
            continue
        rate = result["tokens_per_s"]
        first.setdefault(result["model"], rate)
        busy = result.get("busy_share")
        rows.append(
            [
                *start,
                f"{rate:,.0f}",
                f"{rate / first[result['model']]:.2f}×",
                f"{result['share_of_peak']:.1%}",
                "–" if busy is None else f"{busy:.1%}",
                f"{result['peak_memory_bytes'] / 2**30:.2f}",
            ]
        )
    head = ["model", "", "pack", "tokens/s", "÷ the first", "share of the peak", "GPU busy", "peak memory, GiB"]
    return table(head, rows)


def _head(results: Sequence[Result]) -> str:
    rows = [
        [result["name"], result["error"], "–"]
        if "error" in result
        else [
            result["name"],
            f"{result['milliseconds']:.1f}",
            "–" if result["peak_memory_bytes"] is None else f"{result['peak_memory_bytes'] / 1e9:.2f}",
        ]
        for result in results
    ]
    sizes = ", ".join(f"{results[0][name]:,} {word}" for name, word in (("tokens", "tokens"), ("vocabulary", "words")))
    return f"{sizes}, width {results[0]['width']:,}\n\n{table(['', 'ms', 'peak memory, GB'], rows)}"


def _rate(results: Sequence[Result], **wanted: Any) -> float | None:
    """Tokens a second of the first case that has these values and did not fail."""
    return next(
        (
            float(result["tokens_per_s"])
            for result in results
            if "error" not in result and all(result[name] == value for name, value in wanted.items())
        ),
        None,
    )


def _aims(parts: dict[str, list[Result]]) -> str:
    peers, methods, lengths = (parts.get(name, []) for name in ("peers", "methods", "lengths"))
    rows: list[list[str]] = []

    def add(name: str, value: float | None, shown: str, aim: str, met: bool) -> None:
        if value is not None:
            rows.append([name, shown, aim, "met" if met else "missed"])

    rate = _rate(lengths, model=LLAMA, capacity=4096)
    add("8B, LoRA, 4096: tokens/s", rate, f"{rate or 0:,.0f}", "≥ 15,000", (rate or 0) >= 15_000)
    for model in (QWEN, LLAMA):
        ratio = _over(_rate(peers, model=model, name="finray"), _rate(peers, model=model, name="Trainer"))
        add(f"{model}: finray ÷ Trainer", ratio, f"{ratio or 0:.2f}×", "≥ 2×", (ratio or 0) >= 2)
        slower = _over(_rate(methods, model=model, name="lora"), _rate(methods, model=model, name="qlora"))
        add(f"{model}: LoRA ÷ QLoRA", slower, f"{slower or 0:.2f}×", "≤ 1.06×", (slower or 9) <= 1.06)
    busy = [one["busy_share"] for one in lengths if one["model"] == QWEN and one.get("busy_share") is not None]
    least = min(busy, default=None)
    add("the small model: GPU busy, at least", least, f"{least or 0:.1%}", "≥ 95 %", (least or 0) >= 0.95)
    ours = next((one for one in parts.get("head", []) if one["name"] == "finray" and "error" not in one), None)
    if ours is not None:
        spent, held = ours["milliseconds"], ours["peak_memory_bytes"]
        add("projection and loss, ms", spent, f"{spent:.1f}", "≤ 60", spent <= 60)
        add("projection and loss, GB", held, f"{(held or 0) / 1e9:.2f}", "≤ 3.5", (held or 0) <= 3.5e9)
    return table(["", "measured", "aim", ""], rows) if rows else "None of what was measured has one."


def _over(above: float | None, below: float | None) -> float | None:
    return above / below if above and below else None
