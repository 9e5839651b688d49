"""Generation and log-likelihoods on a CPU: finray's engine compared with Transformers.

Generation is compared with `generate` in its best static batch, likelihoods with one forward pass per row.

Prompts are GSM8K's questions (made ones without `--data`), answered with greedy decoding by the same model in the same
set-up. `generate` gets them sorted by length; a batch runs until its last row is finished. Both use the memory
allocator settings of finray's workers. In fp32, the answers must be the same.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Mapping
from itertools import product

import case
from case import Bench, BenchmarkError, Blocks, Result, Run, Runs
from finray.planning.placement import ALLOCATOR
from processes import PEERS, environment, run
from rows import Row, read_rows

OURS = "finray"
STATIC = (8, 16, 32, 64)
SLOTS = 32
PROMPTS, NEW = 96, 192
# Greedy answers diverge where two tokens are equally likely up to the order of a sum.
MOST_APART = 0.02


def questions(bench: Bench) -> list[Row]:
    """Rows whose questions are asked."""
    count = 8 if bench.quick else PROMPTS
    if bench.data is None:
        return bench.pool[:count]
    return random.Random(bench.seed).sample(read_rows(bench.data / "gsm8k_train.jsonl"), count)


def runner(engine: str, size: int, precision: str) -> Run:
    def measure(bench: Bench, pair: int) -> Result:
        folder = bench.empty_folder()
        rows = [row["messages"][:-1] for row in questions(bench)]
        file = folder / "prompts.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        job = {"model": str(bench.model), "prompts": str(file), "engine": engine, "batch_size": size}
        job |= {"max_new_tokens": 8 if bench.quick else NEW, "precision": precision, "threads": bench.threads}
        command = [sys.executable, PEERS / "answers.py", json.dumps(job)]
        return run(command, env=environment(threads=bench.threads, allocator=ALLOCATOR)).result

    return measure


def blocks(precision: str) -> Callable[[Bench], Mapping[str, Mapping[str, Run]]]:
    contenders = {OURS: runner("finray", SLOTS, precision)}
    contenders |= {f"generate, batches of {size}": runner("generate", size, precision) for size in STATIC}
    return lambda bench: {precision: contenders}


def setup(bench: Bench) -> str:
    source = "made questions" if bench.data is None else "GSM8K's questions"
    return f"`{bench.model.name}`; threads: {bench.threads}; {source}"


def same_answers(block: str, runs: Runs) -> None:
    """Raise an error unless the answers in fp32 are the same."""
    first, *others = [results[-1]["digests"] for results in runs.values()]
    for name, digests in zip(list(runs)[1:], others, strict=True):
        apart = sum(one != other for one, other in zip(first, digests, strict=True)) / len(first)
        if block == "fp32" and apart > MOST_APART:
            raise BenchmarkError(f"{apart:.0%} of the answers of {name} are not those of {OURS}")


ALONE, ONCE, FOUR_TIMES = "one row at a time", "finray, plain malloc", "finray, plain malloc, four times the rows"
CHOICES, WHOLE = "questions with four answers each", "whole rows"
# Enough that some forward passes are full of long rows; the memory for four times the rows is compared with theirs.
SCORED = {CHOICES: 128, WHOLE: 96}


def scorer(engine: str, block: str, times: int = 1, allocator: str | None = ALLOCATOR) -> Run:
    """Scores the rows; ``times`` them, with a number before the question so that no context is shared."""

    def measure(bench: Bench, pair: int) -> Result:
        asked = []
        for number, row in product(range(times), bench.pool[: 4 if bench.quick else SCORED[block]]):
            *_, question, answer = (one["content"] for one in row["messages"])
            words = answer.split()
            parts = [" ".join(words[at::4][:6]) or "no" for at in range(4)] if block == CHOICES else [answer]
            asked.append([f"{number} {question}", [f" {one}" for one in parts]])
        file = bench.empty_folder() / "rows.jsonl"
        file.write_text("".join(json.dumps(one) + "\n" for one in asked), encoding="utf-8")
        job = {"model": str(bench.model), "rows": str(file), "engine": engine, "precision": "fp32"}
        command = [sys.executable, PEERS / "scoring.py", json.dumps(job | {"threads": bench.threads})]
        return run(command, env=environment(threads=bench.threads, allocator=allocator)).result

    return measure


def scoring_blocks(bench: Bench) -> Mapping[str, Mapping[str, Run]]:
    return {
        block: {
            OURS: scorer("finray", block),
            ALONE: scorer("plain", block),
            # As `finray evaluate` runs: a heap that keeps freed memory has holes, whose size says little of the rows.
            ONCE: scorer("finray", block, allocator=None),
            FOUR_TIMES: scorer("finray", block, 4, allocator=None),
        }
        for block in (CHOICES, WHOLE)
    }


def same_likelihoods(block: str, runs: Runs) -> None:
    """Raise an error unless the likelihoods are the same."""
    ours, theirs = (runs[name][-1]["likelihoods"] for name in (OURS, ALONE))
    worst = max(abs(one - other) / max(1.0, abs(other)) for one, other in zip(ours, theirs, strict=True))
    if worst > 1e-3:
        raise BenchmarkError(f"likelihoods of {block} are apart by {worst:.1e}")


def in_block(block: str, above: str, below: str, key: str) -> case.Value:
    """A ratio within a block."""

    def value(found: Blocks) -> float | None:
        return case.quotient(above, below, key)({block: found[block]}) if block in found else None

    return value


CASES = [
    *(
        case.Case(
            group="answers",
            name=f"answers-{precision}",
            title=f"Answers to prompts in {precision}",
            what=f"{PROMPTS} questions, at most {NEW} tokens each, greedy; finray has {SLOTS} slots.",
            blocks=blocks(precision),
            measures=[
                case.Measure("tokens/s", "tokens_per_second"),
                case.Measure("tokens per CPU second", "tokens_per_cpu_second"),
                case.Measure("tokens", "tokens", 0, None),
                case.Measure("peak GiB", "resident", 2, None, 2.0**-30),
            ],
            ratios=case.over_others,
            aims=[
                case.Aim(
                    f"answers, {precision}: finray ÷ `generate` at its best",
                    case.least_quotient("tokens_per_second"),
                    least=1.5,
                )
            ],
            check=same_answers,
            setup=setup,
        )
        for precision in ("fp32", "bf16")
    ),
    case.Case(
        group="answers",
        name="scoring",
        title="Likelihoods of given answers",
        what=f"Likelihoods in fp32 of {SCORED[CHOICES]} questions and {SCORED[WHOLE]} whole rows; and, for the memory "
        "that the process grows by, of the same rows once and four times without settings of the allocator, as "
        "`finray evaluate` runs.",
        blocks=scoring_blocks,
        measures=[
            case.Measure("rows/s", "rows_per_second", 2),
            case.Measure("rows", "rows", 0, None),
            case.Measure("grew by, MiB", "grown", 0, 2, 2.0**-20),
        ],
        ratios=lambda runs: [(OURS, ALONE), (FOUR_TIMES, ONCE)],
        aims=[
            case.Aim(
                f"likelihoods, {block}: finray ÷ one row at a time",
                in_block(block, OURS, ALONE, "rows_per_second"),
                least=3.0,
            )
            for block in (CHOICES, WHOLE)
        ]
        + [
            case.Aim(
                f"likelihoods, {block}: memory of four times the rows ÷ of once",
                in_block(block, FOUR_TIMES, ONCE, "grown"),
                most=1.25,
            )
            for block in (CHOICES, WHOLE)
        ],
        check=same_likelihoods,
    ),
]
