"""LoRA fine-tuning on a CPU: finray compared with TRL, Transformers' Trainer and Accelerate's FSDP2 on the same rows.

All use the same model, adapter, optimizer and rows: batches of four, from a sample with the length distribution of the
whole dataset. Tokens never include padding, and are counted by one function (`rows.count_tokens`) from the rows that a
contender saw; the contender's own count must agree. For peers, a batch has rows of similar length, as after sorting a
large dataset (better than their own grouping on few rows). finray packs the rows, and is timed over as many packs as
are needed for all of them; because two warm-up steps come first, the epoch wraps around, so a few rows may be counted
twice and as many not at all.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from operator import le, mul
from pathlib import Path
from statistics import mean, median
from typing import Any

import case
import flops
from case import Bench, BenchmarkError, Blocks, Result, Run, Runs
from finray.data.sampling.packing import plan_packs
from finray.planning.placement import ALLOCATOR
from processes import SOURCE, environment, run_group
from rows import Row, as_text_rows, count_tokens, long_rows, uniform_rows, write_rows

GIB = 2**30
TRL_DEFAULTS, TRL_BEST, TRAINER = "TRL, defaults", "TRL, best", "Trainer"
ONE, DDP, FSDP = "finray, 1 worker", "finray, 2 workers, ddp", "finray, 2 workers, fsdp"
FSDP2 = "Accelerate FSDP2, 2 processes"
IN_FP32, AS_TIMED, IN_TEXT = (
    "In fp32, 4 rows in a step, finray unpacked, rows of plain text",
    "As it is timed: bf16, finray packed, chat rows",
    "As it is timed, but for rows of plain text",
)
# Maximum differences from finray: loss of the first step; relative: mean loss, and first gradient.
EXACT, ROUNDED = (1e-3, 1e-3, 1e-3), (1e-2, 5e-3, 2e-2)


def finray_config(bench: Bench, rows: Path, folder: Path, *, steps: int, seed: int) -> dict[str, Any]:
    """A config with the same optimizer, schedule, clipping, adapter and masking as the peers."""
    return {
        "run": {"name": "run", "output_dir": str(folder), "seed": seed},
        "model": {"name": str(bench.model)},
        "adapter": {"rank": 8, "alpha": 16.0, "target_modules": "all-linear"},
        "data": {"source": str(rows), "train_on": "last_assistant", "max_length": bench.max_length, "packing": True},
        "train": {
            "max_steps": steps,
            "global_batch_size": 1,
            "micro_batch_size": 1,
            "learning_rate": 1e-4,
            "schedule": "linear",
            "warmup_steps": 0,
            "max_grad_norm": 1.0,
            "precision": "bf16",
        },
        "checkpoint": {"every_steps": steps + 1},
        "parallel": {"strategy": "ddp"},
        "tracking": {"record_samples": True},
        "cluster": {"num_workers": 1, "cpus_per_worker": bench.threads, "use_gpu": False, "max_failures": 0},
    }


def run_finray(
    bench: Bench,
    pair: int,
    *,
    rows: Sequence[Row] | None = None,
    workers: int = 1,
    threads: int | None = None,
    packs: int = 1,
    steps: int | None = None,
    change: dict[str, dict[str, Any]] | None = None,
    source: Path = SOURCE,
    **job: Any,
) -> Result:
    """Run finray on rows, packed and in bf16 unless `change` differs; by default for the warm-up and one epoch."""
    rows = bench.rows if rows is None else rows
    folder = bench.empty_folder()
    file = write_rows(folder / "rows.jsonl", rows)
    lengths = count_tokens(rows, bench.model, max_length=bench.max_length)
    epoch = -(-len(plan_packs(lengths, bench.max_length)) // packs)
    config = finray_config(bench, file, folder, steps=steps or bench.warmup + epoch, seed=bench.seed + pair)
    # Pairs of strings stay plain text; `auto` would turn them into chat messages.
    if isinstance(rows[0].get("prompt"), str):
        config["data"]["format"] = "prompt_completion"
    config["train"]["global_batch_size"] = packs
    config["cluster"] |= {"num_workers": workers, "cpus_per_worker": threads or bench.threads}
    for section, fields in (change or {}).items():
        # A start adapter has its own settings, and no adapter has none.
        config[section] = fields if {"start_from", "method"} & fields.keys() else {**config.get(section, {}), **fields}
    env = environment(threads=threads or bench.threads, allocator=ALLOCATOR, source=source)
    whole = {"config": config, "warmup": bench.warmup, **job}
    ranks = run_group("finray_train.py", whole, env=env, processes=workers)
    inside = {"seconds_in_steps": _span(ranks[0]["step_seconds"], bench.warmup)}
    return figures(bench, ranks[0] | _summed(bench, ranks) | inside, lengths)


def run_peer(
    bench: Bench,
    pair: int,
    script: str,
    *,
    steps: list[list[int]] | None = None,
    rows: Sequence[Row] | None = None,
    batch: int = 4,
    allocator: str | None = ALLOCATOR,
    **job: Any,
) -> Result:
    """Run a peer, by default on batches of similar length in random order; the longest are the warm-up, for memory."""
    rows = bench.rows if rows is None else rows
    if steps is None:
        batches = [list(range(at, at + batch)) for at in range(0, len(rows), batch)]
        order = random.Random(bench.seed + pair)
        steps = [*batches[-bench.warmup :], *order.sample(batches, len(batches))]
    processes, threads = (2, 1) if script == "accelerate_train.py" else (1, bench.threads)
    file = write_rows(bench.empty_folder() / "rows.jsonl", rows)
    whole = {"model": str(bench.model), "rows": str(file), "steps": steps, "warmup": bench.warmup, **job}
    whole |= {"seed": bench.seed + pair, "max_length": bench.max_length}
    env = environment(threads=threads, allocator=allocator)
    ranks = run_group(script, whole, env=env, processes=processes, python=bench.peer_python)
    summed = _summed(bench, ranks) | {
        # Each rank of a peer has its own rows and its share of the loss.
        "rows": [
            [row for each in step for row in each] for step in zip(*(rank["rows"] for rank in ranks), strict=True)
        ],
        **{
            name: [sum(step) for step in zip(*(rank[name] for rank in ranks), strict=True)]
            for name in ("own_tokens", "padded_tokens", "targets", "losses")
        },
    }
    lengths = count_tokens(rows, bench.model, max_length=bench.max_length)
    if sorted(map(sorted, summed["rows"])) != sorted(map(sorted, steps)):
        raise BenchmarkError(f"{script} did not see the rows that it was given")
    return figures(bench, ranks[0] | summed, lengths)


def _summed(bench: Bench, ranks: Sequence[Result]) -> Result:
    """CPU seconds, memory and matrix product rate, summed over all ranks of a run."""
    found: Result = {
        "cpu_seconds": sum(_span(rank["cpu_marks"], bench.warmup) for rank in ranks if rank["cpu_marks"]),
        "peak_rss_bytes": sum(rank["peak_rss_bytes"] for rank in ranks),
        "step_bytes": sum(rank["step_bytes"] for rank in ranks),
        "largest_rss_bytes": max(rank["peak_rss_bytes"] for rank in ranks),
        "startup_seconds": max(rank["startup_seconds"] for rank in ranks),
    }
    if "gemm_flops_per_s" in ranks[0]:
        found["gemm_flops_per_s"] = sum(rank["gemm_flops_per_s"] for rank in ranks)
    return found


def _span(marks: Sequence[float], warmup: int) -> float:
    """Seconds from the end of the last warm-up step to the end of the last step."""
    return marks[-1] - marks[warmup - 1]


def figures(bench: Bench, result: Result, lengths: Sequence[int]) -> Result:
    """A training's result with derived figures: tokens counted from the rows it saw, rates, FLOPs.

    Raises:
        BenchmarkError: the contender's own token count of a step differs.
    """
    counted = [sum(lengths[row] for row in step) for step in result["rows"]]
    if counted != result["own_tokens"]:
        raise BenchmarkError(
            f"tokens by the rows seen: {counted}; by the contender's own count: {result['own_tokens']}"
        )
    warm = bench.warmup
    tokens, seconds = sum(counted[warm:]), _span(result["marks"], warm)
    steps = [later - earlier for earlier, later in zip(result["marks"], result["marks"][1:], strict=False)]
    targets = result["targets"]
    found = {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "ms_per_token": 1e3 * result["cpu_seconds"] / tokens if result["cpu_marks"] else None,
        "median_step": median(steps[warm - 1 :]),
        "padding": sum(result["padded_tokens"][warm:]) - tokens,
        "first_loss": result["losses"][0],
        "all_targets": sum(targets),
        "mean_loss": sum(map(mul, result["losses"], targets)) / sum(targets),
    }
    if "gemm_flops_per_s" in result:
        timed = [lengths[row] for step in result["rows"][warm:] for row in step]
        share = sum(targets[warm:]) / tokens
        cost = flops.flops_per_token(_model_config(bench.model), timed, share_with_target=share, rank=8)
        limit = result["gemm_flops_per_s"] / cost
        found |= {"flops_per_token": cost, "limit": limit, "share": tokens / seconds / limit}
    return result | found


@cache
def _model_config(model: Path) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(str(model))


def _same_work(block: str, runs: Runs, *, losses_agree: bool = True) -> None:
    """Check that all trained the same number of parameters, peers saw the same tokens, and mean losses agree."""
    last = {name: results[-1] for name, results in runs.items()}
    tokens = {run["tokens"] for name, run in last.items() if not name.startswith("finray")}
    trainable = {run["trainable_parameters"] for run in last.values()}
    losses = [run["mean_loss"] for run in last.values()]
    if len(tokens) > 1 or len(trainable) > 1 or (losses_agree and max(losses) > 1.05 * min(losses)):
        raise BenchmarkError(f"the runs are not of equal work: {tokens} tokens, {trainable} parameters, {losses}")


TRAINING = (
    case.Measure("tokens/s", "tokens_per_s"),
    case.Measure("CPU ms/token", "ms_per_token", 2),
    case.Measure("peak memory, GiB", "peak_rss_bytes", 2, scale=1 / GIB),
    case.Measure("the largest process, GiB", "largest_rss_bytes", 2, None, scale=1 / GIB),
    case.Measure("start to first step, s", "startup_seconds"),
)
LIMIT = (
    case.Measure("MFLOPs a token", "flops_per_token", 0, None, scale=1e-6),
    case.Measure("matrix products, GFLOP/s", "gemm_flops_per_s", 0, None, scale=1e-9),
    case.Measure("limit, tokens/s", "limit", 0, None),
    case.Measure("share of the limit, %", "share", 0, None, scale=100),
)


def _share(name: str) -> case.Aim:
    return case.Aim(f"Share of the machine's limit, {name}", case.middle(name, "share"), least=0.55, form="{:.0%}")


def run_trl_defaults(bench: Bench, pair: int) -> Result:
    """TRL with its defaults, on the sample in random order."""
    shuffled = random.Random(bench.seed + pair).sample(range(len(bench.rows)), len(bench.rows))
    batches = [shuffled[at : at + 4] for at in range(0, len(shuffled), 4)]
    steps = [*batches[: bench.warmup], *batches]
    return run_peer(bench, pair, "trl_train.py", steps=steps, allocator=None, mode="defaults")


SPEED = case.Case(
    group="cpu",
    name="speed",
    title="Speed",
    what="finray: bf16, packed, without Ray. TRL, defaults: bf16 autocast over fp32 weights, gradient checkpointing, "
    "padded batches of 4 in random order, the system's allocator. TRL, best, and Trainer (Transformers' own, with "
    "PEFT): bf16 weights, no checkpointing, batches of 4 of one length, finray's allocator settings. Memory is "
    "resident. The limit is the rate of the model's matrix products, timed in the same process after its last step, "
    "over the FLOPs that a token costs (`benchmarks/flops.py`).",
    blocks=case.alone(
        {
            "finray": lambda bench, pair: run_finray(bench, pair, gemm=True),
            TRL_DEFAULTS: run_trl_defaults,
            TRL_BEST: lambda bench, pair: run_peer(bench, pair, "trl_train.py"),
            TRAINER: lambda bench, pair: run_peer(bench, pair, "trainer_train.py"),
        }
    ),
    measures=(*TRAINING, *LIMIT),
    ratios=case.over_others,
    aims=(
        case.Aim(
            "LoRA on a CPU: tokens/s, finray ÷ the best-tuned peer", case.least_quotient("tokens_per_s"), least=1.8
        ),
        _share("finray"),
    ),
    check=_same_work,
)


def _run_workers(workers: int, strategy: str) -> Run:
    return lambda bench, pair: run_finray(
        bench, pair, workers=workers, threads=1, packs=2, gemm=True, change={"parallel": {"strategy": strategy}}
    )


def _run_accelerate(bench: Bench, pair: int) -> Result:
    """Two batches of similar length per step, one for each process; steps are in random order."""
    dealt = [[at, at + 4] for at in range(0, len(bench.rows) - 4, 8)]
    steps = [[row for offset in range(4) for row in (first + offset, second + offset)] for first, second in dealt]
    shuffled = random.Random(bench.seed + pair).sample(steps, len(steps))
    return run_peer(bench, pair, "accelerate_train.py", steps=[*steps[-1:] * bench.warmup, *shuffled])


def _same_steps(block: str, runs: Runs) -> None:
    """Check that one worker and two have the same tokens, and the same loss at every step up to bf16 noise."""
    _same_work(block, runs)
    one, *others = (runs[name][-1] for name in (ONE, DDP, FSDP))
    apart = max(abs(a / b - 1) for other in others for a, b in zip(other["losses"], one["losses"], strict=True))
    if any(other["rows"] != one["rows"] for other in others) or apart > 0.01:
        raise BenchmarkError(f"one worker and two did not do the same: losses apart by {apart:.1e}")


SCALING = case.Case(
    group="scaling",
    name="workers",
    title="One worker and two",
    what="One thread to a process, two packs in every step of finray; Accelerate's processes have a batch of four rows "
    "of one length each. Memory of several processes is the sum of their peaks. Efficiency is the rate of two workers "
    "over twice that of one. Two processes that do nothing but the model's matrix products have one too: two cores may "
    "share what makes them fast.",
    blocks=case.alone(
        {
            ONE: _run_workers(1, "ddp"),
            DDP: _run_workers(2, "ddp"),
            FSDP: _run_workers(2, "fsdp"),
            FSDP2: _run_accelerate,
        }
    ),
    measures=(*TRAINING, *LIMIT),
    ratios=lambda runs: [(DDP, FSDP2), (FSDP, FSDP2), (DDP, ONE), (FSDP, ONE)],
    aims=(
        case.Aim("Efficiency of 2 workers, ddp", case.quotient(DDP, ONE, "tokens_per_s", 0.5), form="{:.2f}"),
        case.Aim("Efficiency of 2 workers, fsdp", case.quotient(FSDP, ONE, "tokens_per_s", 0.5), form="{:.2f}"),
        case.Aim(
            "Efficiency of 2 processes, matrix products alone",
            case.quotient(DDP, ONE, "gemm_flops_per_s", 0.5),
            form="{:.2f}",
        ),
        *(_share(name) for name in (ONE, DDP, FSDP)),
    ),
    check=_same_steps,
)


def start_adapter(bench: Bench, folder: Path) -> str:
    """An untrained adapter for the bench's model, initialized by PEFT, for all contenders to start from."""
    job = {"model": str(bench.model), "rows": "", "steps": [], "precision": "fp32", "save_start": str(folder)}
    run_group("start_adapter.py", job, env=environment(threads=bench.threads), python=bench.peer_python)
    return str(folder)


def equal_blocks(bench: Bench) -> dict[str, dict[str, Run]]:
    """finray, and then every contender on the rows of finray's steps, all starting from one adapter.

    In two of the blocks, rows are prompt and completion as plain text: with chat rows, TRL also trains on the newline
    after the end-of-turn token, so the loss of a step would be a mean over other targets.
    """
    start = start_adapter(bench, bench.folder / "start")
    count = min(bench.steps, 2 if bench.quick else 6)
    seen: dict[str, list[list[int]]] = {}

    def block(name: str, rows: list[Row], change: dict[str, Any], peers: dict[str, dict[str, Any]]) -> dict[str, Run]:
        def ours(bench: Bench, pair: int) -> Result:
            whole = {**change, "adapter": {"start_from": start}}
            result = run_finray(bench, pair, rows=rows, steps=count, change=whole)
            seen[name] = result["rows"]
            return result

        def bound(options: dict[str, Any]) -> Run:
            return lambda bench, pair: run_peer(bench, pair, rows=rows, steps=seen[name], start=start, **options)

        return {"finray": ours, **{peer: bound(options) for peer, options in peers.items()}}

    unpacked = {"global_batch_size": 4, "micro_batch_size": 4, "precision": "fp32"}
    exact = {"data": {"packing": False}, "train": unpacked}
    text = as_text_rows(bench.rows)
    trl, trainer = {"script": "trl_train.py"}, {"script": "trainer_train.py"}
    defaults = {**trl, "mode": "defaults", "allocator": None}
    fp32 = {"precision": "fp32"}
    return {
        IN_FP32: block(IN_FP32, text, exact, {TRL_BEST: {**trl, **fp32}, TRAINER: {**trainer, **fp32}}),
        AS_TIMED: block(AS_TIMED, bench.rows, {}, {TRAINER: trainer, FSDP2: {"script": "accelerate_train.py"}}),
        IN_TEXT: block(IN_TEXT, text, {}, {TRL_DEFAULTS: defaults, TRL_BEST: trl, TRAINER: trainer}),
    }


def equal_losses(block: str, runs: Runs) -> None:
    """Check that every contender had the same rows, targets and losses as finray in every step.

    Raises:
        BenchmarkError: one did not.
    """
    ours, *others = ((name, results[-1]) for name, results in runs.items())
    allowed = EXACT if block == IN_FP32 else ROUNDED
    for name, theirs in others:
        losses, norms = (list(zip(ours[1][key], theirs[key], strict=True)) for key in ("losses", "norms"))
        apart = (
            abs(losses[0][0] - losses[0][1]),
            abs(mean(a for a, _ in losses) / mean(b for _, b in losses) - 1),
            abs(norms[0][0] / norms[0][1] - 1),
        )
        theirs |= dict(zip(("first_apart", "mean_apart", "norm_apart"), apart, strict=True))
        if theirs["targets"] != ours[1]["targets"] or not all(map(le, apart, allowed)):
            raise BenchmarkError(
                f"finray and {name} did not do the same: first loss, mean loss and first gradient apart by {apart}, "
                f"allowed are {allowed}; losses {losses}; targets {ours[1]['targets']} and {theirs['targets']}"
            )


def _apart(block: str, most: float) -> case.Aim:
    def value(blocks: Blocks) -> float:
        _, *others = blocks[block].values()
        return max(run["mean_apart"] for runs in others for run in runs)

    return case.Aim(f"Equal losses ({block}): mean loss apart by", value, most=most, form="{:.1e}")


EQUAL = case.Case(
    group="cpu",
    name="equal",
    title="Equal loss",
    what="The same rows in the same steps from the same adapter: whether the contenders do equal work. TRL's rows are "
    "prompt and completion as plain text, because of chat rows it also learns the newline after the end-of-turn token. "
    "If targets differ, or losses by more than is allowed (of the first step, of the mean relatively, and of the first "
    f"gradient's norm relatively: {EXACT} in fp32, {ROUNDED} in bf16), the benchmark ends with an error.",
    blocks=equal_blocks,
    measures=(
        case.Measure("first loss", "first_loss", 6, None),
        case.Measure("mean loss", "mean_loss", 6, None),
        case.Measure("targets", "all_targets", 0, None),
        case.Measure("first loss, apart by", "first_apart", 7, None),
        case.Measure("mean loss, apart by", "mean_apart", 7, None),
        case.Measure("first gradient's norm, apart by", "norm_apart", 7, None),
    ),
    aims=(_apart(IN_FP32, EXACT[1]), _apart(AS_TIMED, ROUNDED[1]), _apart(IN_TEXT, ROUNDED[1])),
    check=equal_losses,
    most_pairs=1,
)


def uniform_blocks(bench: Bench) -> dict[str, dict[str, Run]]:
    """Batches of eight rows of 128 tokens each, chat template included: as many tokens as a pack has."""
    rows = uniform_rows(bench.model, count=8 * bench.steps, tokens=128, seed=bench.seed)
    return {
        "": {
            "finray": lambda bench, pair: run_finray(bench, pair, rows=rows),
            TRL_BEST: lambda bench, pair: run_peer(bench, pair, "trl_train.py", rows=rows, batch=8),
            TRAINER: lambda bench, pair: run_peer(bench, pair, "trainer_train.py", rows=rows, batch=8),
        }
    }


def _unpadded(block: str, runs: Runs) -> None:
    # An answer of a word is learned within these steps, of which the rows differ; TRL also learns the newline after it.
    _same_work(block, runs, losses_agree=False)
    if any(run["padding"] for results in runs.values() for run in results):
        raise BenchmarkError("the rows are not of one length: somebody padded")


UNIFORM = case.Case(
    group="cpu",
    name="uniform",
    title="Rows of one length",
    what="Every row has 128 tokens, of which an answer of a word or two is learned: packing has nothing to gain. The "
    "peers' batches are of 8 rows, finray's packs hold as many.",
    blocks=uniform_blocks,
    measures=TRAINING,
    ratios=case.over_others,
    aims=(
        case.Aim(
            "Rows of one length: tokens/s, finray ÷ the best peer", case.least_quotient("tokens_per_s"), least=0.98
        ),
    ),
    check=_unpadded,
)


FULL_LOGITS = "full logits"


def vocabulary_blocks(bench: Bench) -> dict[str, dict[str, Run]]:
    """A Llama with a small body and a large vocabulary, four rows of one length, two steps: finray and the Trainer."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    shape = {"vocab_size": 128_256, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    wide = bench.folder / "wide"
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **shape, **heads), dtype="bfloat16")
    model.save_pretrained(wide)
    AutoTokenizer.from_pretrained(str(bench.model)).save_pretrained(wide)
    length = 128 if bench.quick else 512
    narrow = replace(bench, model=wide, max_length=5 * length, warmup=1)
    rows = long_rows(4, length, seed=bench.seed)
    start = start_adapter(narrow, bench.folder / "wide_start")
    change = {"adapter": {"start_from": start}}
    return {
        "": {
            "finray": lambda _, pair: run_finray(narrow, 0, rows=rows, steps=2, change=change),
            FULL_LOGITS: lambda _, pair: run_peer(
                narrow, 0, "trainer_train.py", rows=rows, steps=[[0, 1, 2, 3]] * 2, start=start
            ),
        }
    }


def _same_gradient(block: str, runs: Runs) -> None:
    ours, theirs = (results[-1] for results in runs.values())
    apart = [abs(ours[name][0] / theirs[name][0] - 1) for name in ("losses", "norms")]
    if ours["targets"] != theirs["targets"] or max(apart) > 0.02:
        raise BenchmarkError(f"loss and gradient are apart by {apart}; targets {ours['targets']}, {theirs['targets']}")


VOCABULARY = case.Case(
    group="cpu",
    name="vocabulary",
    title="A vocabulary of 128 k",
    what="A training step of a Llama of width 256 and two layers with 128,256 words, LoRA, bf16, rows of one length; "
    "full logits are Transformers' own loss, in its Trainer. Loss and gradient of both are equal to 2 %. The step's "
    "memory is what the process grew by.",
    blocks=vocabulary_blocks,
    measures=(
        case.Measure("the step's memory, GiB", "step_bytes", 3, scale=1 / GIB),
        case.Measure("the process's peak, GiB", "peak_rss_bytes", 2, scale=1 / GIB),
        case.Measure("a step, s", "seconds", 2),
        case.Measure("targets of two steps", "all_targets", 0, None),
    ),
    ratios=case.over_others,
    aims=(case.Aim("Memory of a step with 128 k words ÷ full logits", case.least_quotient("step_bytes"), most=0.40),),
    check=_same_gradient,
    most_pairs=3,
)

ALONE, IN_RAY = "without Ray", "in a Ray Train worker"
RAY = case.Case(
    group="cpu",
    name="ray",
    title="What Ray adds to a step",
    what="The same run in a process of its own and in one Ray Train worker: the same packs in the same steps. Records "
    "travel to the driver meanwhile, as they do in every run.",
    blocks=case.alone(
        {
            IN_RAY: lambda bench, pair: run_finray(bench, 0, through_ray=True),
            ALONE: lambda bench, pair: run_finray(bench, 0),
        }
    ),
    measures=(
        case.Measure("median step, s", "median_step", 3, 3),
        case.Measure("timed steps together, s", "seconds", 2, 3),
        case.Measure("the same without logging, s", "seconds_in_steps", 2, 3),
        case.Measure("start to first step, s", "startup_seconds"),
    ),
    ratios=case.over_others,
    aims=(
        case.Aim(
            "A step in a Ray Train worker ÷ without Ray", case.least_quotient("median_step"), most=1.02, form="{:.3f}×"
        ),
    ),
)

LENGTH = 2048
# With all weights, the adapter's rate would be too high.
RATE = 1e-5


def long_blocks(bench: Bench) -> dict[str, dict[str, Run]]:
    """Steps of one row of nearly 2,048 tokens, of which most are learned."""
    long = replace(bench, max_length=LENGTH)
    rows = long_rows(bench.steps, LENGTH - 48, seed=bench.seed)
    return {
        "": {
            "finray": lambda _, pair: run_finray(long, pair, rows=rows),
            TRAINER: lambda _, pair: run_peer(long, pair, "trainer_train.py", rows=rows, batch=1),
        }
    }


LONG = case.Case(
    group="cpu",
    name="long",
    title="Rows of 2,048 tokens",
    what="As in Speed, LoRA in bf16, but every step has one row of nearly 2,048 tokens: nothing is padded, and packing "
    "has nothing to gain.",
    blocks=long_blocks,
    measures=TRAINING,
    ratios=case.over_others,
    aims=(case.Aim("Rows of 2,048 tokens: finray ÷ Trainer", case.least_quotient("tokens_per_s"), least=2.0),),
    check=_unpadded,
    setup=lambda bench: (
        f"`{bench.model.name}`; threads: {bench.threads}; {bench.steps} made rows of {LENGTH - 47:,} tokens; "
        f"{bench.warmup} warm-up steps in each"
    ),
)
WEIGHTS = case.Case(
    group="cpu",
    name="weights",
    title="All weights",
    what="As in Speed, but all weights are trained, in fp32 under autocast to bf16.",
    blocks=case.alone(
        {
            "finray": lambda bench, pair: run_finray(
                bench, pair, change={"adapter": {"method": "none"}, "train": {"learning_rate": RATE}}
            ),
            TRAINER: lambda bench, pair: run_peer(bench, pair, "trainer_train.py", rank=0, learning_rate=RATE),
        }
    ),
    measures=TRAINING,
    ratios=case.over_others,
    aims=(case.Aim("All weights: finray ÷ Trainer", case.least_quotient("tokens_per_s"), least=1.6),),
    check=_same_work,
)

CASES = [SPEED, SCALING, EQUAL, VOCABULARY, UNIFORM, RAY, LONG, WEIGHTS]
