"""Peak memory of a step where the vocabulary is large: finray's loss and full logits."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cpu.plan import PEERS, Plan, Result
from finray.planning.placement import ALLOCATOR
from harness.processes import environment, run_script
from harness.report import Spread, say, table

VOCABULARY = PEERS / "vocabulary.py"
WORDS = 128_256
TARGET = 0.40
MODES = {"finray": "finray", "full logits (Transformers' own loss)": "full"}


def measure_vocabulary(plan: Plan) -> dict[str, list[Result]]:
    """Both, in turn; the memory hardly differs between runs, so three are enough."""
    results: dict[str, list[Result]] = {name: [] for name in MODES}
    env = environment(threads=plan.threads, allocator=ALLOCATOR)
    for number in range(min(plan.pairs, 3)):
        for name, mode in MODES.items():
            options = ["--mode", mode, "--vocabulary", str(WORDS), *(["--length", "128"] if plan.quick else [])]
            result = run_script(sys.executable, VOCABULARY, options, env=env)
            results[name].append(result)
            say(f"vocabulary {number + 1} {name}: {result['step_bytes'] / 2**30:.2f} GiB, loss {result['loss']:.4f}")
        _require_same_work([runs[-1] for runs in results.values()])
    return results


def _require_same_work(runs: Sequence[Result]) -> None:
    ours, theirs = runs
    apart = [abs(ours[name] / theirs[name] - 1) for name in ("loss", "grad_norm")]
    if ours["targets"] != theirs["targets"] or max(apart) > 0.02:
        raise RuntimeError(f"loss and gradient are apart by {apart}; targets {ours['targets']}, {theirs['targets']}")


def show_vocabulary(results: dict[str, list[Result]]) -> str:
    """Peaks, the step's own memory, seconds, and the ratios."""
    measures = (("step_bytes", 2**30, 3), ("peak_rss_bytes", 2**30, 2), ("seconds", 1, 2))
    rows = [
        [name, *(Spread.of([run[key] / unit for run in runs]).show(digits) for key, unit, digits in measures)]
        for name, runs in results.items()
    ]
    ours, theirs = results.values()
    ratios = {key: Spread.of_ratios([run[key] for run in ours], [run[key] for run in theirs]) for key, _, _ in measures}
    rows.append(["finray ÷ full logits", *(ratios[key].show(2, "×") for key, _, _ in measures)])
    verdict = "met" if ratios["step_bytes"].median <= TARGET else "missed"
    head = ["", "the step's memory, GiB", "the process's peak, GiB", "a step, s"]
    return (
        f"{table(head, rows)}\n\nA Llama of width 256 and two layers with {WORDS:,} words, LoRA, bf16, "
        f"{ours[0]['targets']:,} targets in rows of one length; loss and gradient norm of both are equal to 2 %. The "
        f"step's memory is what the process grew by. Aim: at most {TARGET:.0%} of full logits'; {verdict}."
    )
