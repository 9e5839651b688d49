"""Preferences: finray beside TRL's trainers, equal losses and gradients, and speed."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import case
from case import Bench, BenchmarkError, Result, Run, Runs
from cpu import finray_config
from finray.config.objectives import OBJECTIVES
from finray.data.sampling.order import Order
from finray.planning.placement import ALLOCATOR
from processes import environment, in_turn, run_group
from rows import WORDS, Row, count_tokens, text, write_rows

PAIRS = 100
BETA, SMOOTHING, WEIGHT = 0.37, 0.21, 0.7
# How far losses and gradients may be apart, relative.
LOSS, GRADIENT = 1e-6, 1e-5
# Of SmolLM2: the difference of log-probabilities of 100 nats, after 30 layers in fp32, has fewer digits.
REAL_PAIRS, REAL_LOSS = 4, 1e-5
SWAPPED, DROPPED = "control: sigmoid, pairs swapped for TRL", "control: sigmoid, finray without its reference"
DPO = {"beta": BETA}
WEIGHTS = DPO | {"desirable_weight": 1.3, "undesirable_weight": 0.7}
# By name: finray's objective and section, TRL's trainer and settings, and words in a prompt.
LOSSES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "sigmoid": ("dpo", DPO, "dpo", DPO),
    "sigmoid, per token": ("dpo", DPO | {"length_normalized": True}, "dpo", DPO | {"loss_type": ["sigmoid_norm"]}),
    "ipo": ("dpo", DPO | {"loss": "ipo"}, "dpo", DPO | {"loss_type": ["ipo"]}),
    "hinge": ("dpo", DPO | {"loss": "hinge"}, "dpo", DPO | {"loss_type": ["hinge"]}),
    "robust": (
        "dpo",
        DPO | {"loss": "robust", "label_smoothing": SMOOTHING},
        "dpo",
        DPO | {"loss_type": ["robust"], "label_smoothing": SMOOTHING},
    ),
    # TRL 1.16 has it as a sum: (1 - e) a + e b, where a is `sigmoid` and `robust` is ((1 - e) a - e b) / (1 - 2e).
    "sigmoid, label smoothing": (
        "dpo",
        DPO | {"label_smoothing": SMOOTHING},
        "dpo",
        DPO
        | {"loss_type": ["sigmoid", "robust"], "label_smoothing": SMOOTHING}
        | {"loss_weights": [2 * (1 - SMOOTHING), 2 * SMOOTHING - 1]},
    ),
    "sigmoid + the chosen answer's loss": (
        "dpo",
        DPO | {"chosen_weight": WEIGHT},
        "dpo",
        DPO | {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, WEIGHT]},
    ),
    "orpo": ("orpo", DPO, "orpo", DPO),
    "simpo": (
        "simpo",
        {"beta": 2.3, "gamma": 0.6},
        "cpo",
        {"beta": 2.3, "simpo_gamma": 0.6, "loss_type": "simpo", "cpo_alpha": 0.0},
    ),
    "simpo, label smoothing + the chosen answer's loss": (
        "simpo",
        {"beta": 2.3, "gamma": 0.6, "label_smoothing": SMOOTHING, "chosen_weight": WEIGHT},
        "cpo",
        {"beta": 2.3, "simpo_gamma": 0.6, "loss_type": "simpo", "cpo_alpha": WEIGHT, "label_smoothing": SMOOTHING},
    ),
    "reward, margins and centring": (
        "reward",
        {"margins": True, "centering": 0.13},
        "reward",
        {"center_rewards_coefficient": 0.13},
    ),
    "kto": ("kto", WEIGHTS, "kto", WEIGHTS),
}


def pairs(count: int, *, seed: int, prompt: tuple[int, int], answer: tuple[int, int], margin: bool) -> list[Row]:
    """Pairs of texts with so many tokens."""
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        chosen, rejected = (f" {text(draw, draw.randint(*answer))}" for _ in range(2))
        row: Row = {"prompt": text(draw, draw.randint(*prompt)), "chosen": chosen, "rejected": rejected}
        made.append(row | ({"margin": round(draw.uniform(0.1, 2), 2)} if margin else {}))
    return made


def tiny_models(bench: Bench) -> dict[bool, Path]:
    """A random Llama of two layers and a few hundred words; with a head for rewards, and without."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig
    from transformers import PreTrainedTokenizerFast as Fast

    torch.manual_seed(bench.seed)
    words = {word: at for at, word in enumerate(["<pad>", "<eos>", "<unk>", ".", *dict.fromkeys(WORDS)])}
    tokens = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    shape = {"vocab_size": len(words), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True, "num_labels": 1}
    config = LlamaConfig(**shape, pad_token_id=0, eos_token_id=1, bos_token_id=None)
    found = {}
    for rewards, kind in ((False, AutoModelForCausalLM), (True, AutoModelForSequenceClassification)):
        found[rewards] = bench.folder / f"tiny_{rewards}"
        kind.from_config(config, dtype=torch.float32).save_pretrained(found[rewards])
        Fast(tokenizer_object=tokens, pad_token="<pad>", eos_token="<eos>").save_pretrained(found[rewards])
    return found


def compared(bench: Bench, models: Mapping[bool, Path], names: list[str], lora: bool, count: int) -> dict[str, Result]:
    """Loss and gradients of finray and of TRL, by the names of losses and of controls."""
    from safetensors.numpy import load_file

    folder = bench.empty_folder()
    ours: list[dict[str, Any]] = []
    theirs: list[dict[str, Any]] = []
    spread = 0.02 if len(models) > 1 else 0.002
    for name in names:
        objective, section, trainer, settings = LOSSES[name if name in LOSSES else "sigmoid"]
        # TRL's ORPO learns the prompt too: of one token there is nothing to learn.
        words = (1, 1) if objective == "orpo" else (5, 20)
        rewards = objective == "reward"
        rows = pairs(count, seed=bench.seed, prompt=words, answer=(4, 24), margin=rewards)
        if objective == "kto":
            answers = [{"completion": row["chosen" if at % 2 else "rejected"]} for at, row in enumerate(rows)]
            rows = [{"prompt": row["prompt"], "label": at % 3 > 0, **answers[at]} for at, row in enumerate(rows)]
        model, file = str(models[rewards]), write_rows(folder / f"rows{len(ours)}.jsonl", rows)
        config = finray_config(bench, file, folder, steps=1, seed=bench.seed)
        config["run"]["name"], config["preference"] = f"run{len(ours)}", section
        config["model"], config["checkpoint"] = {"name": model}, {"every_steps": 2}
        config["data"] = {"source": str(file), "format": "prompt_completion", "max_length": 1024, "packing": True}
        config["train"] |= {"objective": objective, "global_batch_size": count, "max_grad_norm": None}
        config["train"] |= {"precision": "fp32", "learning_rate": 1e-9}
        if not lora:
            config["adapter"] = {"method": "none"}
        ours.append({"name": name, "config": config, "spread": spread, "keeps_reference": name != DROPPED})
        if name == SWAPPED:
            rows = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in rows]
            file = write_rows(folder / f"swapped{len(ours)}.jsonl", rows)
        run = {"name": name, "trainer": trainer, "model": model, "rows": str(file), "settings": settings, "lora": lora}
        theirs.append({**run, "spread": spread, "count": count})
    # More threads only wait for each other in a tiny model.
    env = environment(threads=1 if len(models) > 1 else bench.threads, allocator=ALLOCATOR)
    files = [folder / "ours.json", folder / "theirs.json"]
    for file, runs in zip(files, (ours, theirs), strict=True):
        file.write_text(json.dumps(runs), encoding="utf-8")
    (found,) = run_group("finray_preferences.py", {"runs": str(files[0])}, env=env)
    (reference,) = run_group("trl_preferences.py", {"runs": str(files[1])}, env=env, python=bench.peer_python)
    results = {}
    for one, other in zip(found["runs"], reference["runs"], strict=True):
        mine, other_gradients = (load_file(folder / f"{one['name']}.{side}.safetensors") for side in ("ours", "theirs"))
        if set(mine) != set(other_gradients):
            raise BenchmarkError(f"not the same weights: {sorted(set(mine) ^ set(other_gradients))[:6]}")
        square = sum(float(((mine[name] - of) ** 2).sum()) for name, of in other_gradients.items())
        size = sum(float((of.astype("float64") ** 2).sum()) for of in other_gradients.values())
        results[one["name"]] = {
            "loss": one["loss"],
            "their_loss": other["loss"],
            "loss_apart": abs(one["loss"] / other["loss"] - 1),
            "gradient_apart": (square / size) ** 0.5,
            "versions": reference["versions"],
        }
    return results


def picked(results: Callable[[int], Mapping[str, Result]], name: str) -> Run:
    """A contender's part of the results of all."""
    return lambda _, pair: results(pair)[name]


def equal_blocks(real: bool) -> Callable[[Bench], dict[str, dict[str, Run]]]:
    """Each loss, or with the bench's own model a few, by what is trained."""

    def blocks(bench: Bench) -> dict[str, dict[str, Run]]:
        models = {False: bench.model} if real else tiny_models(bench)
        every = [name for name, (objective, *_) in LOSSES.items() if objective in OBJECTIVES]
        names = ["sigmoid", "sigmoid + the chosen answer's loss"] if real else [*every, DROPPED]
        found = {}
        for lora, trained in ((True, "LoRA"), (False, "all weights")):
            results = cache(
                lambda _, lora=lora: compared(bench, models, [*names, SWAPPED], lora, REAL_PAIRS if real else PAIRS)
            )
            found[trained] = {name: picked(results, name) for name in [*names, SWAPPED]}
        return found

    return blocks


def within_bounds(block: str, runs: Runs, loss: float = LOSS) -> None:
    """Check the bounds, and that a control breaks them.

    Raises:
        BenchmarkError: a loss or a gradient is too far away, or a control is not.
    """
    for name, (*_, run) in runs.items():
        near = run["loss_apart"] <= loss and run["gradient_apart"] <= GRADIENT
        if near == (name in (SWAPPED, DROPPED)):
            raise BenchmarkError(f"{block}: {name}: {run}")


EQUAL = case.Case(
    group="preferences",
    name="equal",
    title="Equal losses and gradients",
    what="One step in fp32 over all pairs: finray packed, with the prompt computed once for both answers and the "
    "reference from its pass before training; TRL 1.16 one pair at a time. Weights are moved away from the "
    f"reference's by the same noise; beta is {BETA}, for simpo 2.3. Losses may differ by {LOSS:g} of theirs, "
    f"gradients (all of them, by their norm) by {GRADIENT:g}; a control has to differ by more. TRL has orpo and "
    "simpo (its CPO trainer) as experimental; its orpo learns the prompt too, which is one token there.",
    blocks=equal_blocks(real=False),
    measures=(
        case.Measure("loss, finray", "loss", 7, None),
        case.Measure("loss, TRL", "their_loss", 7, None),
        case.Measure("apart by, 1e-6", "loss_apart", 3, None, scale=1e6),
        case.Measure("gradients apart by, 1e-5", "gradient_apart", 3, None, scale=1e5),
    ),
    check=within_bounds,
    most_pairs=1,
    setup=lambda bench: (
        f"{PAIRS} pairs, prompts of 5 to 20 tokens, answers of 4 to 24; a random Llama; LoRA of rank 8 on all "
        "linear layers"
    ),
)
REAL = replace(
    EQUAL,
    name="equal-real",
    title="Equal losses and gradients of SmolLM2",
    what=f"As above, but losses may differ by {REAL_LOSS:g} of theirs: the log-probability of an answer is some 100 "
    "nats here, of which fp32 keeps six digits after 30 layers, and a loss is made of their differences.",
    blocks=equal_blocks(real=True),
    check=partial(within_bounds, loss=REAL_LOSS),
    setup=lambda bench: f"{REAL_PAIRS} pairs, prompts of 5 to 20 tokens, answers of 4 to 24; `{bench.model.name}`",
)

# UltraFeedback's prompts have 185 tokens on average, and its answers 305 (Cui et al. 2023). How they spread is not
# published: here their logarithms are normal with these deviations, and two answers to a prompt vary half together.
PROMPT, ANSWER, ROW = (185, 0.8), (305, 0.6), 1024
IN_STEP, BEFORE, DEFAULTS = "TRL, best", "TRL, best, reference before training", "TRL, defaults"
# Pairs of the data, of which a run takes the first steps.
DATA, PAIRS_IN_STEP, WARMUP = 32, 2, 1
EPOCHS = 3  # TRL's default; the reference's pass is needed once


def ultra_pairs(bench: Bench, count: int, *, seed: int) -> tuple[list[Row], list[int]]:
    """Pairs with UltraFeedback's lengths, none cut off, and their tokens as two rows, from short to long."""
    draw = random.Random(seed)

    def length(of: tuple[int, float], normal: float) -> int:
        mean = of[0] / 20 if bench.quick else of[0]
        return max(4, round(mean * math.exp(of[1] * normal - of[1] ** 2 / 2)))

    found: list[Row] = []
    while len(found) < count:
        prompt, shared = length(PROMPT, draw.gauss(0, 1)), draw.gauss(0, 1)
        answers = [length(ANSWER, (shared + draw.gauss(0, 1)) / math.sqrt(2)) for _ in range(2)]
        if prompt + max(answers) < ROW - 8:
            chosen, rejected = (f" {text(draw, answer)}" for answer in answers)
            found.append({"prompt": text(draw, prompt), "chosen": chosen, "rejected": rejected})
    sides = [{"prompt": row["prompt"], "completion": row[side]} for row in found for side in ("chosen", "rejected")]
    counted = count_tokens(sides, bench.model, max_length=ROW)
    tokens = [sum(counted[at : at + 2]) for at in range(0, len(counted), 2)]
    by_length = sorted(range(count), key=tokens.__getitem__)
    return [found[at] for at in by_length], [tokens[at] for at in by_length]


def speed_runs(bench: Bench, pair: int, peer: str) -> dict[str, Result]:
    """finray and a peer on the same pairs, step by step in turn."""
    folder, steps = bench.empty_folder(), WARMUP + bench.steps
    count = max(DATA, steps * PAIRS_IN_STEP)
    rows, tokens = ultra_pairs(bench, count, seed=bench.seed + pair)
    # Each step has pairs of similar length, as after sorting: finray's order is known, and rows lie in the file so.
    order = Order(count, seed=bench.seed).batch(0, count)
    groups = [list(range(at, at + PAIRS_IN_STEP)) for at in range(0, count, PAIRS_IN_STEP)]
    random.Random(bench.seed + pair).shuffle(groups)
    place = dict(zip(order, [one for group in groups for one in group], strict=True))
    rows, tokens = ([of[place[at]] for at in range(count)] for of in (rows, tokens))
    order = order[: steps * PAIRS_IN_STEP]
    file = write_rows(folder / "rows.jsonl", rows)
    config = finray_config(bench, file, folder, steps=steps, seed=bench.seed)
    config["data"] = {"source": str(file), "format": "prompt_completion", "max_length": ROW, "packing": True}
    config["train"] |= {"objective": "dpo", "global_batch_size": PAIRS_IN_STEP}
    best = {"bf16": True, "gradient_checkpointing": False, "model_init_kwargs": {"dtype": "bfloat16"}}

    def ours(turns: list[str]) -> Result:
        runs = folder / "finray.json"
        runs.write_text(json.dumps([{"config": config, "turns": turns}]), encoding="utf-8")
        env = environment(threads=bench.threads, allocator=ALLOCATOR)
        (found,) = run_group("finray_preferences.py", {"runs": str(runs)}, env=env)
        return dict(found["runs"][0])

    def theirs(name: str, settings: dict[str, Any], allocator: str | None, batch: int) -> Any:
        def run(turns: list[str]) -> Result:
            batches = [order[at : at + batch] for at in range(0, len(order), batch)]
            options = {"max_steps": steps, "per_device_train_batch_size": batch, "learning_rate": 1e-4}
            options |= {"gradient_accumulation_steps": PAIRS_IN_STEP // batch, "max_grad_norm": 1.0}
            job = {"trainer": "dpo", "model": str(bench.model), "rows": str(file), "settings": settings, "lora": True}
            runs = folder / f"{name}.json"
            runs.write_text(json.dumps([{**job, "options": options, "batches": batches, "turns": turns}]))
            env = environment(threads=bench.threads, allocator=allocator)
            (found,) = run_group("trl_preferences.py", {"runs": str(runs)}, env=env, python=bench.peer_python)
            return dict(found["runs"][0] | {"versions": found["versions"]})

        return run

    peers = {
        IN_STEP: theirs("in_step", best, ALLOCATOR, 1),
        BEFORE: theirs("before", best | {"precompute_ref_log_probs": True}, ALLOCATOR, 1),
        DEFAULTS: theirs("defaults", {}, None, PAIRS_IN_STEP),
    }
    results = in_turn(folder, {"finray": ours, peer: peers[peer]})
    for result in results.values():
        timed = order[WARMUP * PAIRS_IN_STEP :]
        # Of the pass over all pairs, the share of those in the steps that are timed.
        result["reference"] = result["seconds"][0] * len(timed) / count
        result["in_steps"] = sum(result["seconds"][1 + WARMUP :])
        in_rows = sum(tokens[at] for at in timed)
        result["tokens_per_s"] = in_rows / (result["reference"] + result["in_steps"])
        result["over_epochs"] = EPOCHS * in_rows / (result["reference"] + EPOCHS * result["in_steps"])
        result["loss"] = sum(result["losses"]) / steps
    return results


def speed_blocks(bench: Bench) -> dict[str, dict[str, Run]]:
    """finray beside each of TRL's; all at once need too much memory."""
    found = {}
    for peer in (IN_STEP, BEFORE, DEFAULTS):
        results = cache(lambda pair, peer=peer: speed_runs(bench, pair, peer))
        found[peer] = {name: picked(results, name) for name in ("finray", peer)}
    return found


def same_losses(block: str, runs: Runs) -> None:
    """Check that all learned about the same: in bf16, and from other first adapters, losses of a step differ.

    Raises:
        BenchmarkError: the first loss is not log 2, or the mean losses differ.
    """
    losses = [results[-1]["losses"] for results in runs.values()]
    means = [sum(each) / len(each) for each in losses]
    if any(abs(each[0] - math.log(2)) > 0.02 for each in losses) or max(means) - min(means) > 0.1:
        raise BenchmarkError(f"the losses are apart: {losses}")


def over(key: str, *peers: str) -> case.Value:
    """The smallest ratio of finray to one of these peers."""
    return lambda blocks: min(case.quotient("finray", peer, key)({peer: blocks[peer]}) or 0.0 for peer in peers)


SPEED = case.Case(
    group="preferences",
    name="speed",
    title="Speed of DPO beside TRL",
    what="DPO with LoRA on pairs with UltraFeedback's mean lengths (prompts of 185 tokens, answers of 305), of random "
    "words, 2 pairs of similar length in a step, the same for all; two contenders take their steps in turn. "
    "Tokens are those of a pair as two rows, each with its prompt, without padding. The pass of the reference "
    f"counts, once for the data: in the first rate beside one epoch, in the second beside {EPOCHS}, which is TRL's "
    "default. TRL's other runs compute it in the step. finray: bf16, packed, its defaults. "
    "TRL, best: bf16 weights, no checkpointing, one pair at a time, finray's allocator settings. TRL, defaults: "
    "bf16 autocast over fp32 weights, checkpointing, the system's allocator. Memory is resident.",
    blocks=speed_blocks,
    measures=(
        case.Measure("tokens/s", "tokens_per_s"),
        case.Measure(f"tokens/s, {EPOCHS} epochs", "over_epochs"),
        case.Measure("reference, s", "reference", 1, None),
        case.Measure("steps, s", "in_steps", 1, None),
        case.Measure("peak memory, GiB", "peak_rss_bytes", 2, scale=2**-30),
        case.Measure("loss", "loss", 4, None),
    ),
    ratios=case.over_others,
    aims=(
        case.Aim("DPO: tokens/s, finray ÷ TRL at its best", over("tokens_per_s", IN_STEP, BEFORE), least=2.0),
        case.Aim(f"DPO: tokens/s, finray ÷ TRL's defaults, {EPOCHS} epochs", over("over_epochs", DEFAULTS), least=3.5),
        case.Aim("DPO: memory, finray ÷ TRL at its best", over("peak_rss_bytes", IN_STEP, BEFORE), most=0.5),
    ),
    check=same_losses,
    setup=lambda bench: (
        f"`{bench.model.name}`, LoRA of rank 8 on all linear layers; threads: {bench.threads}; "
        f"{DATA} pairs, {bench.steps} steps after one to warm up"
    ),
)


CASES = [EQUAL, REAL, SPEED]
