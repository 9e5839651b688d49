"""Preparing data on a CPU: finray compared with `datasets` and TRL, and with the Rust tokenizer that all of them use.

From one file of rows (a prompt and a completion, as messages) to tokens on disk, for growing numbers of rows. All use
the same tokenizer and chat template, the same cores, and the same maximum length; every run starts with empty caches.
`Dataset.map` renders the chat template, tokenizes and makes labels, in batches and in as many processes as there are
cores; finray's tokenizer runs in as many threads, the default of its commands. Seconds are measured from the file to
the finished data. For the peers, imports and loading the tokenizer are not included; finray does both during its
measured seconds, in parallel with the rest. Starting Ray is not included either, but has its own column. Another
column, for all, is the time from the start of the process to its end. finray's seconds also include checksums and
packing; `Dataset.map` does neither.
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import yaml

import case
from case import Bench, BenchmarkError, Blocks, Result, Run, Value
from finray.data.sampling.packing import plan_packs
from finray.planning.placement import ALLOCATOR
from processes import PEERS, SOURCE, Ran, environment, run
from rows import count_tokens

GIB = 2**30
GROWTH = 4
# The peers' processes have one thread each, the default of `datasets` when it forks.
AS_COMMANDS_DO = {"TOKENIZERS_PARALLELISM": "true"}
MAP, MAP_PACK, TRL, TOKENIZER = "datasets.map", "datasets.map + TRL's packing", "TRL's trainer", "the tokenizer alone"


def rows_file(bench: Bench, count: int) -> Path:
    """A file of this many rows, repeating the available ones; it is read once, so that it is in the page cache."""
    path = bench.folder / f"rows_{count}.jsonl"
    if not path.is_file():
        pairs = [{"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in bench.pool]
        lines = [json.dumps(pair, ensure_ascii=False) + "\n" for pair in pairs]
        whole, rest = divmod(count, len(lines))
        with path.open("w", encoding="utf-8") as stream:
            for _ in range(whole):
                stream.writelines(lines)
            stream.writelines(lines[:rest])
    with path.open("rb") as stream:
        while stream.read(2**24):
            pass
    return path


@cache
def _tokens_of(bench: Bench, count: int) -> int:
    """Tokens of the file's rows, counted by the function used for all contenders."""
    lengths = count_tokens(bench.pool, bench.model, max_length=bench.max_length)
    whole, rest = divmod(count, len(lengths))
    return whole * sum(lengths) + sum(lengths[:rest])


def caches(bench: Bench, *, allocator: str | None = None, source: Path = SOURCE) -> dict[str, str]:
    """The environment variables of a run with empty caches."""
    folder = bench.empty_folder()
    env = environment(threads=bench.threads, allocator=allocator, source=source)
    return env | {"HF_DATASETS_CACHE": str(folder / "datasets_cache")}


def _prepared(bench: Bench, count: int, ran: Ran) -> Result:
    """The figures of a preparation.

    Raises:
        BenchmarkError: its numbers of tokens or rows differ from the file's.
    """
    result = ran.result
    if (result["rows"], result["tokens"]) != (count, _tokens_of(bench, count)):
        raise BenchmarkError(
            f"{count:,} rows have {_tokens_of(bench, count):,} tokens; made of them were {result['rows']:,} rows and "
            f"{result['tokens']:,} tokens"
        )
    memory = {"resident": ran.resident, "proportional": ran.proportional}
    return {**result, **memory, "rate": result["tokens"] / result["seconds"]}


def run_finray_prepare(bench: Bench, count: int, *, source: Path = SOURCE) -> Result:
    """finray, on Ray."""
    rows, env = rows_file(bench, count), caches(bench, source=source) | AS_COMMANDS_DO
    config: dict[str, Any] = {
        "run": {"name": "benchmark", "output_dir": str(bench.folder / "run"), "seed": bench.seed},
        "model": {"name": str(bench.model)},
        "data": {"source": str(rows), "max_length": bench.max_length, "packing": True},
        "train": {"global_batch_size": 16},
        "cluster": {"use_gpu": False},
    }
    # With all cores, finray chooses; Ray counts the machine's cores, even if this process may use fewer.
    if bench.threads != os.cpu_count():
        config["prepare"] = {"num_workers": bench.threads}
    command = [sys.executable, PEERS / "finray_prepare.py", json.dumps({"config": config})]
    return _prepared(bench, count, run(command, env=env, watch=True))


def _peer(script: str, count: int, **job: Any) -> Run:
    def one(bench: Bench, pair: int) -> Result:
        whole = {"model": str(bench.model), "rows": str(rows_file(bench, count)), "steps": []}
        whole |= {"max_length": bench.max_length, "processes": bench.threads}
        command = [bench.peer_python, PEERS / script, json.dumps({**whole, **job})]
        return _prepared(bench, count, run(command, env=caches(bench), watch=True))

    return one


def sizes(bench: Bench) -> list[int]:
    """Numbers of rows, each four times the previous one, and the maximum."""
    first = len(bench.pool)
    last = bench.most_rows or first * (GROWTH if bench.quick else GROWTH**2)
    found = [min(first, last)]
    while found[-1] * GROWTH < last:
        found.append(found[-1] * GROWTH)
    return found if found[-1] == last else [*found, last]


def speed_blocks(bench: Bench) -> dict[str, dict[str, Run]]:
    """Every contender for every number of rows."""
    return {
        f"{count:,} rows": {
            "finray": lambda bench, pair, count=count: run_finray_prepare(bench, count),  # type: ignore[misc]
            MAP: _peer("datasets_prepare.py", count, mode="map"),
            MAP_PACK: _peer("datasets_prepare.py", count, mode="map-pack"),
            TRL: _peer("datasets_prepare.py", count, mode="trl"),
            TOKENIZER: _peer("tokenizer_alone.py", count),
        }
        for count in sizes(bench)
    }


def _growth(blocks: Blocks) -> float | None:
    peaks = [median(run["proportional"] for run in runs["finray"]) for runs in blocks.values()]
    return peaks[-1] / peaks[0] if len(peaks) > 1 else None


def _fill(blocks: Blocks) -> float | None:
    fills = [run["fill"] for runs in blocks.values() for run in runs["finray"] if run["rows"] >= 10_000]
    return min(fills, default=None)


def _without_start(name: str) -> Value:
    """1,000 tokens/s without the start: the difference in tokens between most and fewest rows, over the difference in
    seconds.
    """

    def value(blocks: Blocks) -> float | None:
        first, *_, last = (runs[name] for runs in [*blocks.values()] * 2)
        seconds = median(run["seconds"] for run in last) - median(run["seconds"] for run in first)
        return (last[0]["tokens"] - first[0]["tokens"]) / seconds / 1e3 if seconds > 0 else None

    return value


SPEED = case.Case(
    group="prepare",
    name="prepare",
    title="Speed, memory and fill",
    what="Memory is summed over all processes of a contender, Ray's own included, and read every 0.2 s. All tokens are "
    "those that the benchmark counts itself. `Prepared already` is finray's way from the config to the first batch "
    "without Ray: found, opened and packs planned, first batch.",
    blocks=speed_blocks,
    measures=(
        case.Measure("seconds", "seconds"),
        case.Measure("1,000 tokens/s", "rate", scale=1e-3),
        case.Measure("Ray's start, s", "start_seconds", 1, None),
        case.Measure("process start to ready, s", "process_seconds"),
        case.Measure("peak memory, GiB", "resident", 2, scale=1 / GIB),
        case.Measure("the same, shared pages once", "proportional", 2, scale=1 / GIB),
        case.Measure("fill, %", "fill", 2, None, scale=100),
        case.Measure("learned tokens", "learned", 0, None),
        case.Measure("prepared already: found, s", "found", 3, None),
        case.Measure("opened, s", "opened", 3, None),
        case.Measure("first batch, s", "first_batch", 3, None),
    ),
    ratios=case.over_others,
    aims=(
        case.Aim("Preparing: tokens/s ÷ those of datasets.map", case.quotient("finray", MAP, "rate"), least=1.7),
        case.Aim(
            "Preparing: tokens/s ÷ those of the tokenizer alone", case.quotient("finray", TOKENIZER, "rate"), least=0.8
        ),
        case.Aim("Fill of the packs of 10,000 rows and more", _fill, least=0.98, form="{:.1%}"),
        case.Aim("Preparing: peak memory (shared pages once) of the most rows ÷ the fewest", _growth, most=1.25),
        case.Aim(
            "Prepared already: from the config to the first batch",
            case.middle("finray", "warm"),
            most=0.5,
            form="{:.2f} s",
        ),
        *(
            case.Aim(f"Preparing without what a start costs, {name}", _without_start(name), form="{:,.0f} k tokens/s")
            for name in ("finray", MAP, MAP_PACK, TRL, TOKENIZER)
        ),
    ),
    most_pairs=3,
)


def packer_blocks(bench: Bench) -> dict[str, dict[str, Run]]:
    """Growing numbers of documents."""
    lengths = np.array(count_tokens(bench.pool, bench.model, max_length=bench.max_length), dtype=np.int64)

    def packed(documents: int) -> Result:
        """Plan packs in this process, on one core.

        Raises:
            BenchmarkError: the plan does not contain each document once, or a pack exceeds its capacity.
        """
        drawn = np.random.default_rng(bench.seed).choice(lengths, size=documents)
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(cores)})
        began = time.perf_counter()
        plan = plan_packs(drawn, bench.max_length)
        seconds = time.perf_counter() - began
        os.sched_setaffinity(0, cores)
        fullest = int(np.add.reduceat(drawn[plan.rows], plan.starts[:-1]).max())
        if not np.array_equal(np.sort(plan.rows), np.arange(documents)) or fullest > bench.max_length:
            raise BenchmarkError(f"the plan of {documents:,} documents is wrong")
        shape = {"least": int(drawn.min()), "mean": float(drawn.mean()), "most": int(drawn.max())}
        return {"packs": len(plan), "fill": plan.fill, "seconds": seconds, **shape}

    counts = (10_000, 100_000) if bench.quick else (10_000, 100_000, 1_000_000)
    return {"": {f"{count:,} documents": lambda _, pair, count=count: packed(count) for count in counts}}  # type: ignore[misc]


def _least_fill(blocks: Blocks) -> float:
    return min(run["fill"] for runs in blocks[""].values() for run in runs)


def _million(blocks: Blocks) -> float | None:
    known = blocks[""].get("1,000,000 documents")
    return median(run["seconds"] for run in known) if known else None


PACKER = case.Case(
    group="prepare",
    name="packer",
    title="Planning packs",
    what="Planned in one process that is kept to one core; lengths are drawn from those of the rows. Every plan is "
    "checked to hold each document once and no pack above its capacity.",
    blocks=packer_blocks,
    measures=(
        case.Measure("packs", "packs", 0),
        case.Measure("fill, %", "fill", 3, scale=100),
        case.Measure("seconds", "seconds", 2),
        case.Measure("shortest", "least", 0),
        case.Measure("mean length", "mean", 0),
        case.Measure("longest", "most", 0),
    ),
    aims=(
        case.Aim("Fill of planned packs", _least_fill, least=0.98, form="{:.2%}"),
        case.Aim("Planning the packs of a million documents", _million, most=60, form="{:.1f} s"),
    ),
    most_pairs=3,
)


def _first_finray(bench: Bench, pair: int) -> Result:
    """The command line, unchanged; it is stopped when the first step's record exists."""
    rows, env = rows_file(bench, bench.first_rows), caches(bench) | AS_COMMANDS_DO
    folder = bench.folder / "run"
    config = {
        "run": {"name": "first", "output_dir": str(folder), "seed": bench.seed},
        "model": {"name": str(bench.model)},
        "adapter": {"rank": 8, "alpha": 16, "target_modules": "all-linear"},
        "data": {"source": str(rows), "max_length": bench.max_length, "packing": True},
        "train": {"epochs": 3, "global_batch_size": 1, "learning_rate": 1e-4, "precision": "bf16"},
        "checkpoint": {"every_steps": 1_000_000},
        "cluster": {"cpus_per_worker": bench.threads, "use_gpu": False},
    }
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    metrics = folder / "first" / "metrics.jsonl"
    ran = run(
        [sys.executable, "-m", "finray.cli.main", "train", file],
        until=lambda: metrics.is_file() and '"train"' in metrics.read_text(encoding="utf-8"),
        env=env,
        watch=True,
    )
    return {"seconds": ran.seconds, "resident": ran.resident}


def _first_trl(bench: Bench, pair: int) -> Result:
    rows = rows_file(bench, bench.first_rows)
    env = caches(bench, allocator=ALLOCATOR)
    done = bench.folder / "run" / "done"
    job = {"model": str(bench.model), "rows": str(rows), "done": str(done), "processes": bench.threads, "steps": []}
    job |= {"max_length": bench.max_length, "seed": bench.seed}
    command = [bench.peer_python, PEERS / "trl_train.py", json.dumps(job)]
    ran = run(command, until=done.is_file, env=env, watch=True)
    return {"seconds": ran.seconds, "resident": ran.resident}


FIRST_STEP = case.Case(
    group="start",
    name="first-step",
    title="From nothing to the first optimizer step",
    what="`finray train` (Ray started by it) and TRL's `SFTTrainer` from the command to the end of the first optimizer "
    "step, nothing cached but the files in the page cache. Both: the same model, LoRA rank 8 on all linear layers, "
    "bf16 weights, no checkpointing, packed, one pack in the step. TRL prepares in as many processes as there are "
    "cores, and has finray's allocator settings. Peak memory up to then, summed over the processes of each.",
    blocks=lambda bench: {f"{bench.first_rows:,} rows": {"finray": _first_finray, "TRL": _first_trl}},
    measures=(case.Measure("seconds", "seconds"), case.Measure("peak memory, GiB", "resident", 2, scale=1 / GIB)),
    ratios=case.over_others,
    aims=(
        case.Aim(
            "From nothing to the first step: seconds, finray ÷ TRL",
            case.quotient("finray", "TRL", "seconds"),
            most=0.25,
        ),
    ),
    most_pairs=3,
)

CASES = [SPEED, PACKER, FIRST_STEP]
