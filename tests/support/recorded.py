"""Run directories that no training has written: as many steps, runs and answers as a test of who reads them needs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock

from finray.records import EvalRecord, Note, RunHeader, RunSummary, SystemRecord, TrainRecord
from finray.tracking.starts import Start

CONFIG: dict[str, dict[str, Any]] = {
    "run": {"name": "run", "seed": 5},
    "model": {"name": "models/tiny"},
    "adapter": {"method": "lora", "rank": 4},
    "data": {"source": "rows.jsonl"},
    "train": {"learning_rate": 0.01, "max_steps": 40},
    "evaluation": {},
}
LABELS = ["animal", "plant", "stone"]


def header(step: int = 0, *, world_size: int = 2, total_steps: int = 40) -> RunHeader:
    return RunHeader(
        step=step,
        total_steps=total_steps,
        model="models/tiny",
        parameters=1_000_000,
        trainable=10_000,
        precision="fp32",
        rows=100,
        tokens=5_000,
        supervised=2_000,
        eval_rows=10,
        held_out=10,
        packing=True,
        packs=50,
        fill=0.9,
        world_size=world_size,
        device="CPU",
        threads=1,
        global_batch_size=4,
        micro_batch_size=1,
        accumulation=2,
        method="lora of rank 4",
        workers=["RANK=0 on here"],
    )


def train(step: int, *, shift: float = 0.0) -> TrainRecord:
    """A record whose numbers follow from its step."""
    return TrainRecord(
        step=step,
        epoch=step / 40,
        loss=2.0 / math.sqrt(step) + 0.1 * math.sin(step) ** 2 + shift,
        grad_norm=None if step == 3 else 1.0 + 0.5 * math.cos(step),
        lr=0.01 * (1 - step / 10_000),
        tokens=100 * step,
        supervised=40,
        samples_digest=f"{step:016x}",
        tokens_per_s=900.0 + 10 * math.sin(step / 3),
        data_wait_s=0.001,
        peak_memory_bytes=2**30 + step * 2**16,
        seconds=0.1 * step,
    )


def machine(step: int, *, gpus: int = 2) -> SystemRecord:
    """A sample whose numbers follow from its step."""
    numbers: dict[str, float] = {
        "cpu_percent": 50 + 40 * math.sin(step),
        "process_cpu_percent": 150.0,
        "rss_bytes": 2**30 + step * 2**20,
        "memory_percent": 40.0,
        "disk_percent": 70.0,
        **{f"network_{name}_bytes_per_s": 2**20 for name in ("sent", "received")},
        **{f"disk_{name}_bytes_per_s": step * 2**20 for name in ("read", "written")},
    }
    for at in range(gpus):
        numbers |= {f"gpu{at}_percent": 80 + 10 * at, f"gpu{at}_memory_bytes": (4 + at) * 2**30, f"gpu{at}_celsius": 60}
        numbers |= {f"gpu{at}_power_watts": 300.0 + at}
    return SystemRecord(step, 1_700_000_000.0 + step, numbers)


def write_run(
    folder: Path,
    *,
    steps: int = 40,
    config: Mapping[str, Mapping[str, Any]] | None = None,
    starts: Sequence[tuple[int, int]] = ((0, 2),),
    finished: bool = True,
    shift: float = 0.0,
    notes: Sequence[Note] = (),
    samples: Sequence[SystemRecord] = (),
    lines: Sequence[str] = (),
) -> Path:
    """A run directory.

    Args:
        folder: of the run.
        steps: with a record each, and an evaluation every tenth.
        config: sections that take the place of those of `CONFIG`.
        starts: step and number of workers of each start of the workers.
        finished: whether the run has its summary.
        shift: of the loss.
        notes: further records.
        samples: of the machine.
        lines: of `metrics.jsonl`, at its end, as they are.
    """
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({**CONFIG, **(config or {})}, sort_keys=False))
    (folder / "run_id").write_text("ab" * 16)
    found = [
        Start(1_700_000_000.0 + 600 * at, {"python": "3.11.7", "torch": "2.13.0"}, header(step, world_size=workers))
        for at, (step, workers) in enumerate(starts)
    ]
    (folder / "starts.jsonl").write_text("".join(json.dumps(asdict(one)) + "\n" for one in found))
    records: list[Any] = []
    for step in range(1, steps + 1):
        records.append(train(step, shift=shift))
        if step % 10 == 0:
            loss = 2.1 / math.sqrt(step) + shift
            records.append(EvalRecord(step, {"eval_loss": loss, "perplexity": math.exp(loss)}, 100, 0.5))
    records += [*notes, *samples]
    text = "".join(json.dumps(one.json()) + "\n" for one in records) + "".join(lines)
    (folder / "metrics.jsonl").write_text(text)
    if finished:
        phases = {"start_ray": 3.0, "prepare": 2.0, "start_workers": 5.0, "load": 4.0, "train": 0.1 * steps}
        phases |= {"evaluate": 2.0, "checkpoint": 1.0, "data_wait": 0.001 * steps, "total": 25.0 + 0.1 * steps}
        best = min((one.metrics["eval_loss"] for one in records if isinstance(one, EvalRecord)), default=None)
        summary = RunSummary(
            step=steps,
            total_steps=steps,
            tokens=100 * steps,
            supervised=40 * steps,
            train_seconds=0.1 * steps,
            tokens_per_s=1000.0,
            first_loss=2.0,
            final_loss=1.0,
            best_metric="eval_loss",
            best=best,
            phases=phases,
            peak_memory_bytes=(2**30, 2**30),
        )
        content = {"chosen_step": steps, "summary": summary.json()}
        (folder / "summary.json").write_text(json.dumps(content, indent=2) + "\n")
    return folder


def prediction(row: int, *, base: int, tuned: int, **changes: Any) -> dict[str, Any]:
    """A line of ``predictions.jsonl``."""
    return {
        "row": row,
        "where": f"eval.jsonl:{row + 1}",
        "prompt": f"<|user|>question {row}<|assistant|>",
        "reference": f"answer {row}",
        "answers": {"base": f"base says {row}", "tuned": f"tuned says {row}"},
        "scores": {"base": {"exact_match": float(base)}, "tuned": {"exact_match": float(tuned)}},
        **changes,
    }


def write_evaluation(run: Path, rows: Sequence[Mapping[str, Any]], *, name: str = "", confusion: bool = False) -> Path:
    """What `finray evaluate` leaves; the scores are those of the rows."""
    folder = run / "evaluation" / name
    folder.mkdir(parents=True)
    models = list(rows[0]["answers"])
    means = {one: sum(row["scores"][one]["exact_match"] for row in rows) / len(rows) for one in models}
    scores = {
        one: {
            "exact_match": {
                **{"value": mean, "low": max(0.0, mean - 0.1), "high": min(1.0, mean + 0.1)},
                **{"interval": "Wilson", "share": True},
            },
            "loss": {"value": 1.5 - mean, "low": 1.4 - mean, "high": 1.6 - mean, "interval": "BCa"},
            "perplexity": math.exp(1.5 - mean),
        }
        for one, mean in means.items()
    }
    first, last = models[0], models[-1]
    compared = {"model": last, "score": "exact_match", "baseline": first, "rows": len(rows)}
    compared |= {"difference": means[last] - means[first], "low": 0.1, "high": 0.9, "p": 0.0004, "test": "McNemar"}
    content: dict[str, Any] = {
        "format_version": 1,
        "rows": len(rows),
        "models": scores,
        "comparisons": [compared],
        "says": [f"{last} is better than {first}"],
        "in_training_data": None,
        "without_training_rows": None,
        "notes": ["a note of the evaluation"],
        "made_by": {"versions": {"python": "3.11.7"}},
    }
    if confusion:
        content |= {"classes": LABELS, "confusion": {last: [[8, 1, 0], [2, 9, 1], [0, 0, 4]]}}
    (folder / "metrics.json").write_text(json.dumps(content, indent=2) + "\n")
    (folder / "predictions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def answers(rows: int, **changes: Any) -> list[dict[str, Any]]:
    """Rows of which the tuned model wins two of three and loses every fifth of the others."""
    return [
        prediction(row, base=int(row % 3 == 0), tuned=int(row % 3 != 0 or row % 5 != 0), **changes)
        for row in range(rows)
    ]


def write_large(folder: Path) -> list[Path]:
    """20 runs of 10,000 steps, two of them with answers to 5,000 rows."""
    rows = answers(5000, prompt="<|user|>" + "a question of some length, " * 30 + "<|assistant|>")
    samples = [machine(step) for step in range(1, 10_000, 5)]
    runs = [write_run(folder / "run-00", steps=10_000, samples=samples)]
    runs += [write_run(folder / f"run-{number:02d}", steps=0) for number in range(1, 20)]
    records = (runs[0] / "metrics.jsonl").read_bytes()
    for run in runs[1:]:
        (run / "metrics.jsonl").write_bytes(records)
    for number, run in enumerate(runs[:2]):
        said = [{"base": "I cannot say", "tuned": f"{number}: {row} said"} for row in range(5000)]
        write_evaluation(run, [{**one, "answers": own} for one, own in zip(rows, said, strict=True)])
    return runs


@contextmanager
def at_work(run: Path) -> Iterator[None]:
    """As if a `finray train` worked on a run."""
    with FileLock(run.parent / f".{run.name}.lock"):
        yield
