"""What packing gives to tiny models of several families, beside rows of one length in a batch."""

from __future__ import annotations

import case
from case import Bench, Blocks, Result, Run
from finray.hardware import cpu_has_bf16
from finray.planning.placement import ALLOCATOR
from processes import environment, run_group
from rows import count_tokens

FAMILIES = ("qwen3_5", "nemotron_h", "gpt_oss", "lfm2", "llama")
ROWS = 1000
# What `train.precision: auto` takes: without instructions for bf16, their emulation would be measured.
PRECISION = "bf16" if cpu_has_bf16() else "fp32"


def _run(family: str) -> Run:
    def one(bench: Bench, pair: int) -> Result:
        lengths = count_tokens(bench.pool[:ROWS], bench.model, max_length=bench.max_length)
        job = {
            "family": family,
            "lengths": lengths,
            "precision": PRECISION,
            "rounds": 1 if bench.quick else 7,
            "warmup": 1 if bench.quick else 4,
        }
        return run_group("packed.py", job, env=environment(threads=1, allocator=ALLOCATOR))[0]

    return one


def _ratio(family: str) -> case.Value:
    def value(blocks: Blocks) -> float | None:
        return case.middle(family, "ratio")(blocks) if family in blocks[""] else None

    return value


PACKED = case.Case(
    group="families",
    name="packed",
    title="Packed rows and rows of one length, by family",
    what="Models of width 128 and four to six layers with random weights: forward and backward pass, all weights "
    "trained, on the steps that a run takes: eight packs of 1,024 tokens. Beside them the same steps "
    "of a model which cannot be packed: passes over rows of one length, with all rows of the step that have "
    "it. As packs hold rows of nearly one length, so do these; with `data.packing: false` such a model has "
    "steps of rows in random order, here 64. All are in one process with one thread and step in turn, with "
    "the allocator's settings of a run; rates are per CPU second, after four steps in which the heap grows. "
    "Losses of the same steps agree.",
    blocks=case.alone({family: _run(family) for family in FAMILIES}),
    measures=(
        case.Measure("packed, tokens/s", "packed", 0),
        case.Measure("rows of one length, tokens/s", "alike", 0),
        case.Measure("÷", "ratio", 2),
        case.Measure("rows in a step", "rows", 0),
        case.Measure("passes", "passes", 0),
        case.Measure("of 64 rows, tokens/s", "drawn", 0),
        case.Measure("÷", "drawn_ratio", 2),
        case.Measure("passes", "drawn_passes", 0),
    ),
    aims=[
        case.Aim(f"{family}: packed ÷ rows of one length", _ratio(family), least=1.5)
        for family in ("qwen3_5", "nemotron_h", "gpt_oss")
    ],
    most_pairs=3,
    setup=lambda bench: (
        f"{ROWS:,} rows with the lengths of {'Alpaca' if bench.data is None else 'GSM8K and Alpaca'}; {PRECISION}"
    ),
)

CASES = (PACKED,)
