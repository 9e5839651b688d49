"""The learning rate where the config leaves it to finray, and remarks on settings of the steps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from finray.config.adapter_files import read_notes, read_settings
from finray.config.objectives import objective_spec
from finray.config.paths import is_url
from finray.config.resolved import Execution, Steps
from finray.config.schema import Config, TrainConfig
from finray.config.tasks import task_spec
from finray.data.dataset.run_data import decide_steps
from finray.data.sources.resolve import TABLES, TEXTS
from finray.data.storage import file_suffix
from finray.errors import DataError, FinrayError, ModelError

# Methods for which a rate was fitted, and the rate of others and of other optimizers than AdamW.
_FITTED_METHODS, _PLAIN_RATE = ("none", "lora", "dora"), 2e-4
# Above it, full fine-tuning forgets more than it learns.
_FULL_RATE = 1e-4
# Below it, an update is lost in the rounding of a weight of usual size in fp32.
_SMALLEST_RATE = 1e-9
_LARGEST_EPSILON = 1e-2
# AdamW's epsilon is more than what a gradient is after such a cut.
_SMALLEST_NORM = 1e-5
_ANOTHER = " in a run of another run.name"


def choose_learning_rate(config: Config, *, hidden_size: int | None, before: Execution | None = None) -> float:
    """The peak learning rate, where ``train.learning_rate`` leaves it to finray. A continued run keeps its own.

    For AdamW it is ``5e-5 * (2000 / hidden_size) ** 0.78`` for all weights and ten times that for LoRA: the fit of
    Schulman et al., "LoRA Without Regret" (2025), to 14 Llama and Qwen models with alpha 32. A classifier takes 0.4 of
    it, because its new layer is trained in full at the same rate, and a run that learns from pairs a tenth.
    docs/guide/lora.md has what small models learned at these and other rates.

    Args:
        config: of the run.
        hidden_size: width of the model; None where it is unknown.
        before: what the run began with, if it is continued.

    Returns:
        The rate, with two digits.
    """
    train, adapter = config.train, config.adapter
    if train.learning_rate != "auto":
        return train.learning_rate
    if before is not None:
        return before.learning_rate
    if "adamw" not in train.optimizer or adapter.method not in _FITTED_METHODS:
        return _PLAIN_RATE
    rate = 5e-5 * (2000 / (hidden_size or 2000)) ** 0.78
    if adapter.method != "none":
        # What an update adds to a layer is proportional to alpha.
        rate *= 10 * min(1.0, 32 / adapter.alpha)
    if task_spec(config.model.task).reads_labels:
        rate *= 0.4
    elif (objective := objective_spec(config)).in_groups or objective.counts_rows:
        rate *= 0.1
    return float(f"{rate:.1e}")


def step_warnings(
    config: Config, steps: Steps, *, total: int, packs: int | None, continued: bool
) -> Iterator[tuple[str, str, str | None]]:
    """Warnings about steps of this many packs (or rows): message, field and repair.

    Args:
        steps: how the packs form steps.
        total: steps of the run.
        packs: to train on; None where not all of the data were read.
        continued: whether the run began before, with steps of this size: only another run has others.
    """
    workers, where = config.cluster.max_workers, "train.global_batch_size"
    size = steps.global_batch_size
    objective = objective_spec(config)
    in_packs = config.data.packing and not objective.counts_rows
    unit = "pairs" if objective.in_groups else "packs" if in_packs else "rows"
    another = _ANOTHER if continued else ""
    if packs is not None and size > packs:
        what = "the run is a single step" if total == 1 else "it sees some of them again"
        smaller = decide_steps(TrainConfig(), packs=packs).global_batch_size
        text = f"a step takes {size} {unit} and there are {packs}: {what}"
        yield text, where, f"{where}={smaller}, or auto{another}"
    shares = -(-size // steps.micro_batch_size)
    if shares < workers:
        text = f"a step has {shares} micro-batch{'es' if shares > 1 else ''} for {workers} workers: the rest do nothing"
        larger = f"{where}={workers * steps.micro_batch_size} or more{another}"
        fewer = f"cluster.num_workers{'.max' * config.cluster.is_elastic}={shares}"
        yield text, where, f"{fewer}, or {larger}" if continued else f"{larger}, or {fewer}"
    yield from unlikely(config, total, continued=continued)


def unlikely(config: Config, steps: int, *, continued: bool = False) -> Iterator[tuple[str, str, str | None]]:
    """Settings that are valid, but probably not intended: the effect, the field, and the usual value.

    Args:
        config: the run's.
        steps: of the whole run.
        continued: whether the run began before.
    """
    train, evaluation, data = config.train, config.evaluation, config.data
    if train.learning_rate == "auto":
        pass
    elif train.learning_rate > 0.1:
        yield (
            f"{train.learning_rate:g} is far more than models learn with",
            "train.learning_rate",
            "1e-5 to 1e-3 is usual",
        )
    elif config.adapter.method == "none" and "adamw" in train.optimizer and train.learning_rate > _FULL_RATE:
        yield (
            f"{train.learning_rate:g} is a learning rate for adapters; with adapter.method=none all weights are "
            "trained, usually with 1e-5 to 5e-5",
            "train.learning_rate",
            "train.learning_rate=2e-5" + (_ANOTHER if continued else ""),
        )
    yield from _without_effect(config)
    for where, at, consequence in (
        ("train.warmup_steps", train.warmup_steps, "the learning rate never reaches its peak"),
        ("evaluation.every_steps", evaluation.every_steps, "it is evaluated at the end only"),
        ("train.profile", None if train.profile is None else train.profile.steps[1], "not all of them are profiled"),
    ):
        if at is not None and at > steps:
            yield f"step {at:,} is past the end: the run has {steps:,}, so {consequence}", where, f"{steps:,} or less"
    holds_out = data.eval_ratio or data.eval_split or data.eval_source or data.test_ratio or data.test_split
    if evaluation.max_rows is not None and not holds_out:
        yield "nothing is held out to evaluate on", "evaluation.max_rows", "set data.eval_ratio, or leave it out"
    if config.adapter.start_from is not None and (base := _other_base(config)) is not None:
        yield (
            f"the adapter to continue from was trained on {base}: on the weights of another model it means nothing",
            "model.name",
            f"{base}, unless this is a copy of it",
        )
    named = [("data.train_split", data.source, data.train_split), ("data.test_split", data.source, data.test_split)]
    named += [("data.eval_split", data.eval_source or data.source, data.eval_split)]
    named += [(f"data.mix.{number}.split", source.source, source.split) for number, source in enumerate(data.mix)]
    for where, source, split in named:
        wanted = re.match(r"[^\[]*", split or "train")
        if source is not None and _is_of_files(str(source)) and wanted is not None and wanted[0] != "train":
            yield (
                f"a file has no splits: all of {Path(str(source)).name} is taken for `{wanted[0]}`",
                where,
                "leave it out, or write a slice of train, such as train[:10%]",
            )


def _without_effect(config: Config) -> Iterator[tuple[str, str, str | None]]:
    """Values with which hardly anything is learned, or is unlearned again; as :func:`unlikely`."""
    train, adapter = config.train, config.adapter
    is_adam = "adamw" in train.optimizer
    # What finray chooses is about this.
    rate = 1e-3 if train.learning_rate == "auto" else train.learning_rate
    if rate < _SMALLEST_RATE:
        text = f"with {rate:g} the updates are smaller than what a weight can hold: nothing is learned"
        yield text, "train.learning_rate", "1e-5 to 1e-3 is usual"
    if train.max_grad_norm is not None and train.max_grad_norm <= _SMALLEST_NORM:
        text = f"gradients are cut to a norm of {train.max_grad_norm:g}, so small that next to nothing is learned"
        yield text, "train.max_grad_norm", "1 is usual"
    if is_adam and train.adam_epsilon > _LARGEST_EPSILON:
        text = f"{train.adam_epsilon:g} is more than gradients are, so updates are far smaller than the learning rate"
        yield text, "train.adam_epsilon", "1e-8 is usual"
    if is_adam and train.adam_beta1 > train.adam_beta2:
        text = f"{train.adam_beta1:g} is more than train.adam_beta2={train.adam_beta2:g}; they may be interchanged"
        yield text, "train.adam_beta1", "0.9, with train.adam_beta2=0.999"
    if (taken := rate * train.weight_decay) > 0.1:
        yield f"each step takes {taken:.0%} of every weight away", "train.weight_decay", "0 to 0.1 is usual"
    if train.warmup_steps is None and train.warmup_ratio > 0.5:
        yield f"{train.warmup_ratio:.0%} of the run is warm-up", "train.warmup_ratio", "0.03 to 0.1 is usual"
    if config.classification.label_smoothing > 0.5:
        text = f"{config.classification.label_smoothing:.0%} of each target is spread over all classes"
        yield text, "classification.label_smoothing", "0 to 0.1 is usual"
    if adapter.method == "none":
        return
    if adapter.dropout > 0.8:
        yield f"{adapter.dropout:.0%} of the adapter's input is dropped", "adapter.dropout", "0 to 0.1 is usual"
    scale = adapter.alpha / (adapter.rank**0.5 if adapter.method == "rslora" else adapter.rank)
    if adapter.start_from is None and scale < 1e-3:
        text = f"the adapter is scaled by {scale:.1g} (alpha / rank), so small that it has next to no effect"
        yield text, "adapter.alpha", "once or twice the rank is usual"
    if adapter.lora_plus_ratio > 1 and adapter.lora_plus_ratio * rate > 1:
        text = f"the B matrices get a learning rate of {adapter.lora_plus_ratio * rate:g}"
        yield text, "adapter.lora_plus_ratio", "2 to 16 is usual"


def _is_of_files(source: str) -> bool:
    """Whether a source is a file, a pattern, or the URL of a file: neither a directory nor a dataset of the Hub."""
    if is_url(source) or set(source) & set("*?["):
        return file_suffix(source) in (*TABLES, *TEXTS)
    return Path(source).expanduser().is_file()


def _other_base(config: Config) -> str | None:
    """The base model named by the adapter to continue from, if it is another one (copies share the last part)."""
    folder, names = Path(str(config.adapter.start_from)), set()
    try:
        names = {read_settings(folder).base_model_name_or_path, read_notes(folder).get("base_model")} - {None, ""}
    except FinrayError:
        # Others say what is wrong with it.
        return None
    same = any(Path(str(name)).name.lower() == Path(config.model.name).name.lower() for name in names)
    return None if same or not names else str(min(names, key=str))


def require_prompts(config: Config, kind: str) -> None:
    """Check that rows of this kind have prompts, if ``evaluation.generate_rows`` asks for answers.
    Raises DataError: the rows have no prompts."""
    if config.evaluation.generate_rows is not None and kind not in ("chat", "completion", "preference", "unpaired"):
        raise DataError(
            f"the rows are {kind}, which has no prompts to answer",
            where="evaluation.generate_rows",
            repair="leave it out, or give rows with prompts and answers",
        )


def beyond_positions(positions: int, longest: int) -> ModelError:
    """The problem of rows with more tokens than the model has learned positions."""
    return ModelError(
        f"the longest row has {longest:,} tokens, but the model has {positions:,} positions",
        where="data.max_length",
        repair=f"data.max_length={positions}",
    )


def chosen_notes(train: TrainConfig, steps: Steps, rate: float) -> Iterator[str]:
    """What to say of what finray chose: smaller steps and more passes over little data, and the learning rate."""
    if (note := step_note(train, steps)) is not None:
        yield note
    if train.learning_rate == "auto":
        yield f"finray chose train.learning_rate={rate:g}; set it to choose yourself"


def step_note(train: TrainConfig, steps: Steps) -> str | None:
    """What to say where little data made steps smaller, or passes more."""
    unit = "" if steps.pack_length is None else f", with packs of {steps.pack_length:,} tokens,"
    chosen = [f"train.global_batch_size={steps.global_batch_size}{unit}"] if train.global_batch_size == "auto" else []
    chosen += [f"train.epochs={steps.epochs:g}"] if train.epochs is None and train.max_steps is None else []
    usual = decide_steps(train, packs=None)
    is_longer = steps.epochs != usual.epochs and train.max_steps is None
    if not chosen or (steps.global_batch_size == usual.global_batch_size and not is_longer):
        return None
    pronoun = "it" if len(chosen) == 1 else "them"
    return f"there is little data, so finray chose {' and '.join(chosen).rstrip(',')}; set {pronoun} to choose yourself"
