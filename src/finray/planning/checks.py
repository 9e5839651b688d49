"""Quick checks of a run, without torch, Transformers or Ray; all problems are reported at once.

`finray train` runs these checks first, `finray plan` runs them among others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from finray.checkpoint import manifest
from finray.checkpoint.rundir import check_output
from finray.config.adapter_files import WEIGHTS as ADAPTER_WEIGHTS
from finray.config.adapter_files import matching_none, read_settings
from finray.config.evaluation import ScoringConfig
from finray.config.extensions import TABLES, load_named
from finray.config.objectives import objective_spec, reference_run, spec_of
from finray.config.paths import is_url
from finray.config.schema import Config
from finray.config.tasks import CAUSAL_LM, task_spec
from finray.data.dataset.prepare import check_inputs
from finray.errors import ConfigError, FinrayError, ModelError, explained, unmatched
from finray.evaluation.scores.base import score_named
from finray.files import FileKind
from finray.models.packing_cache import packing_of
from finray.parallel.deepspeed import config as deepspeed_config
from finray.planning.findings import refuse
from finray.pretrained.tokenizers import check_exists, load_tokenizer
from finray.pretrained.weights import stored_weights
from finray.publishing.hub import Hub, Target, public_name

# Scheme of a URL to the package that reads it, and the extra that brings that.
_STORAGE = {
    "s3": ("s3fs", "s3"),
    "gs": ("gcsfs", "gcs"),
    "gcs": ("gcsfs", "gcs"),
    "az": ("adlfs", "azure"),
    "abfs": ("adlfs", "azure"),
}


def require_startable(config: Config) -> None:
    """Run the quick checks. Raises FinrayError: a single problem, or a :class:`ConfigError` that lists several."""
    check_task(config)
    problems = quick_problems(config)
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise ConfigError(
            f"{len(problems)} problems prevent the run from starting",
            problems=tuple(str(problem) for problem in problems),
        )


def quick_problems(config: Config, *, missing: Callable[[ConfigError], None] = refuse) -> list[FinrayError]:
    """All problems that the quick checks find; paths in the config must be absolute. ``missing``: see
    :func:`check_extras`."""
    problems: list[FinrayError] = []
    for check in (
        check_extensions,
        check_inputs,
        partial(check_extras, missing=missing),
        check_output,
        check_stored_model,
        check_start,
        check_reference,
        deepspeed_config.check,
        check_quantization,
        check_shards,
        check_sources,
        check_evaluation,
        check_export,
    ):
        try:
            check(config)
        except (FinrayError, OSError) as error:
            # The operating system has its own view of some paths: one that is too long, or somebody else's.
            problem = explained(error)
            assert problem is not None
            problems.append(problem)
    return problems


# Types of models that read text in both directions, beside those with `bert` in their names.
_ENCODERS = frozenset(
    ("electra", "mpnet", "ernie", "funnel", "nystromformer", "longformer", "big_bird", "canine", "esm")
)
_HEADS_THAT_WRITE = ("LMHeadModel", "ForCausalLM", "Decoder")
_HEADS_THAT_READ = ("ForMaskedLM", "ForPreTraining", "ForSequenceClassification", "ForTokenClassification")


def check_task(config: Config) -> None:
    """Check that a causal language model is wanted from a model that can write text.
    Raises ConfigError: a directory holds an encoder or a classifier."""
    file, settings = Path(config.model.name).expanduser() / "config.json", dict[str, Any]()
    # What is wrong with the file itself is for those to say who need it.
    with suppress(FinrayError):
        settings = FileKind(ModelError).json(file, dict[str, Any])
    if (error := not_a_writer(config, settings)) is not None:
        raise error


def not_a_writer(config: Config, settings: Mapping[str, Any]) -> ConfigError | None:
    """The error of an encoder or a classifier, by its ``config.json``, that is to be trained as a language model; None
    for others."""
    kind, architectures = str(settings.get("model_type")), settings.get("architectures")
    names = [str(architecture) for architecture in architectures] if isinstance(architectures, list) else []
    writes = "decoder" in kind or any(name.endswith(_HEADS_THAT_WRITE) for name in names)
    reads = any(name.endswith(_HEADS_THAT_READ) for name in names) or (
        ("bert" in kind or kind in _ENCODERS) and not writes
    )
    if config.model.task != CAUSAL_LM.name or not reads or settings.get("is_decoder"):
        return None
    return ConfigError(
        f"{', '.join(names) or kind} reads text and writes none, and model.task is {CAUSAL_LM.name}",
        where=f"model.name={config.model.name}",
        repair="for rows with a text and a label set model.task=sequence_classification; or take one that writes text",
    )


def check_shards(config: Config) -> None:
    """Check that ``parallel.shard_size`` has an effect.
    Raises ConfigError: it has none, or does not divide the workers."""
    parallel, workers = config.parallel, config.cluster.max_workers
    if parallel.strategy == "ddp" and (parallel.cpu_offload or parallel.shard_size is not None):
        name = "cpu_offload" if parallel.cpu_offload else "shard_size"
        raise ConfigError(
            "has no effect with parallel.strategy ddp",
            where=f"parallel.{name}",
            repair=f"leave it out, or set parallel.strategy to {'deepspeed' if parallel.cpu_offload else 'fsdp'}",
        )
    if parallel.shard_size is not None and workers % parallel.shard_size:
        raise ConfigError(f"{parallel.shard_size} does not divide {workers} workers", where="parallel.shard_size")


def check_sources(config: Config) -> None:
    """Check that fields for datasets of the Hub are set for one.
    Raises ConfigError: they are set for a mix, whose sources have their own."""
    for name in ("subset", "revision"):
        if config.data.mix and getattr(config.data, name) is not None:
            repair = "write it into the entries that it is meant for"
            raise ConfigError("has no effect on data.mix", where=f"data.{name}", repair=repair)


def check_extensions(config: Config) -> None:
    """Import the extensions that the config names, so that errors in them are found before workers start.
    Raises ConfigError: an extension cannot be imported."""
    wanted = [
        ("finray.tasks", "model.task", config.model.task),
        *[("finray.objectives", "train.objective", name) for name in (config.train.objective,) if name],
        ("finray.adapter_methods", "adapter.method", config.adapter.method),
        ("finray.strategies", "parallel.strategy", config.parallel.strategy),
        *(("finray.trackers", "tracking.trackers", name) for name in config.tracking.trackers),
        *(("finray.metrics", "evaluation.metrics", name) for name in config.evaluation.metrics),
    ]
    for group, where, name in wanted:
        # finray's own exist, and importing them would import torch.
        if name not in TABLES[group] and name not in ("none", "auto"):
            load_named(group, name, where=where)


def check_extras(
    config: Config,
    *,
    installed: Callable[[str], bool] = lambda name: find_spec(name) is not None,
    missing: Callable[[ConfigError], None] = refuse,
) -> None:
    """Check that the optional packages that the config needs are installed.

    Args:
        config: the run's.
        installed: whether a package is installed.
        missing: called for those that are not.

    Raises:
        ConfigError: some are missing; the repair is the command that installs them all.
    """
    wanted: dict[str, tuple[str, str]] = {}
    if Path(config.model.name).suffix == ".gguf":
        wanted["gguf"] = ("gguf", "model.name")
    if config.train.optimizer.endswith("8bit"):
        wanted["quantization"] = ("bitsandbytes", "train.optimizer")
    if config.parallel.strategy == "deepspeed":
        wanted["deepspeed"] = ("deepspeed", "parallel.strategy")
    if config.model.quantization in ("4bit", "8bit"):
        wanted.setdefault("quantization", ("bitsandbytes", "model.quantization"))
    if config.train.liger is True:
        wanted["liger"] = ("liger_kernel", "train.liger")
    for name, package in (("wandb", "wandb"), ("mlflow", "mlflow")):
        if name in config.tracking.trackers:
            wanted[name] = (package, "tracking.trackers")
    data = config.data
    urls = [("data.source", data.source), ("data.eval_source", data.eval_source), ("prepare.dir", config.prepare.dir)]
    urls.append(("run.output_dir", config.run.output_dir))
    urls += [(f"data.mix.{index}.source", source.source) for index, source in enumerate(data.mix)]
    for where, url in urls:
        if url is not None and is_url(url) and url.split("://", 1)[0] in _STORAGE:
            package, extra = _STORAGE[url.split("://", 1)[0]]
            wanted.setdefault(extra, (package, where))
    absent = {extra: where for extra, (package, where) in wanted.items() if not installed(package)}
    if absent:
        missing(
            ConfigError(
                f"{'packages' if len(absent) > 1 else 'a package'} for {', '.join(sorted(absent))} "
                f"{'are' if len(absent) > 1 else 'is'} not installed",
                where=", ".join(sorted(set(absent.values()))),
                repair=f"pip install 'finray[{','.join(sorted(absent))}]'",
            )
        )


def check_evaluation(config: Config) -> None:
    """Check that the task has the metric that selects checkpoints, and supports answers if they are requested.
    Raises ConfigError: it does not."""
    spec, evaluation = spec_of(config), config.evaluation
    spec.chosen(evaluation)
    name = "generate_rows" if evaluation.generate_rows is not None else "metrics"
    asks = spec.rows & {"chat", "completion", "preference", "unpaired"} and not objective_spec(config).is_reward
    if getattr(evaluation, name) != getattr(type(evaluation)(), name) and not asks:
        raise ConfigError(
            f"a run with the objective {spec.objective} of the task {spec.name} does not answer prompts",
            where=f"evaluation.{name}",
            repair=f"leave it out; the task has its own metrics: {', '.join(spec.metrics or spec.best[:1])}",
        )
    for name in evaluation.metrics if evaluation.generate_rows is not None else ():
        metric = load_named("finray.metrics", name, where="evaluation.metrics")
        if more := sorted(getattr(metric, "needs", frozenset()) - {"answers"}):
            raise ConfigError(
                f"`{name}` needs {', '.join(more)}, but during training only answers are available",
                where="evaluation.metrics",
                repair="remove it from the config, and compute it with `finray evaluate` after the run",
            )
        # Reports missing packages.
        score_named(name, evaluation.scoring or ScoringConfig())


def check_export(config: Config) -> None:
    """Check that what is pushed can be loaded by others. Raises ModelError: it cannot."""
    export = config.export
    if export.push_to_hub is not None:
        base = None if config.adapter.method == "none" else config.model.name
        public_name(base, export.base_model, merged=export.merged)


def check_push(config: Config, *, login: Callable[[], Hub] = Hub.login) -> Target | None:
    """Check that the Hub will accept the push; None if nothing is to be pushed. Raises HubError: it will not."""
    if config.export.push_to_hub is None:
        return None
    return login().check(config.export.push_to_hub, public=config.export.public)


def check_quantization(config: Config) -> None:
    """Check that the base model can be quantized.
    Raises ConfigError: its file, or DeepSpeed's stage, does not allow that."""
    if config.model.quantization == "none" or config.adapter.method == "none":
        return
    where = f"model.quantization={config.model.quantization}"
    if Path(config.model.name).suffix == ".gguf":
        raise ConfigError(
            "a GGUF file is dequantized when it is loaded, and cannot be quantized again",
            where=where,
            repair="convert it with `finray import-gguf`; the model directory can be quantized",
        )
    if config.parallel.strategy == "deepspeed" and deepspeed_config.stage(deepspeed_config.load(config), config) == 3:
        raise ConfigError(
            "ZeRO-3 cannot shard quantized weights",
            where=f"{where}, parallel.strategy=deepspeed",
            repair="parallel.strategy=fsdp, or parallel.zero_stage=2, or model.quantization=none",
        )


def check_stored_model(config: Config) -> None:
    """Check that a model directory has its weights, and that each listed target module exists.

    Regular expressions are left to `finray plan`, which knows the names that modules have when the model is built; so
    are models with experts, whose tensors Transformers joins on the way. Raises ModelError: weights are missing or cut
    off, or target modules match nothing.
    """
    folder = Path(config.model.name)
    if not (folder / "config.json").is_file():
        return
    stored = stored_weights(folder)
    plain = stored is not None and not any("experts" in name for name in stored.tensors)
    if stored is not None and plain:
        # A tied head is in no file.
        names = [*stored.modules, "lm_head"]
        if isinstance(config.adapter.target_modules, list):
            check_targets(config, names)
        if task_spec(config.model.task).auto_class == CAUSAL_LM.auto_class:
            # Other tasks may add heads of any name.
            check_saved_modules(config, names)


def check_start(config: Config) -> None:
    """Check that the weights of the adapter to continue from exist, and are intact if there is a manifest.
    Raises FinrayError: they are missing or damaged, or of an unsupported kind."""
    if config.adapter.start_from is None or config.adapter.method == "none":
        return
    folder = Path(config.adapter.start_from)
    if (folder / manifest.NAME).exists():
        manifest.verify(folder)
    if not (folder / ADAPTER_WEIGHTS).exists():
        raise ModelError(
            f"the adapter to continue from has no `{ADAPTER_WEIGHTS}`",
            where=f"adapter.start_from={folder}",
            repair="save it as safetensors (PEFT: save_pretrained with safe_serialization=True)",
        )
    stored = stored_weights(folder, Path(ADAPTER_WEIGHTS).stem)
    saved = [f".{name}." for name in read_settings(folder).modules_to_save or []]
    names = () if stored is None else stored.tensors
    of_base = [weight for weight in names if weight.endswith(".weight") and ".lora_" not in weight]
    of_base = [weight for weight in of_base if ".base_layer." in weight or not any(name in weight for name in saved)]
    if of_base:
        raise ModelError(
            f"beside the adapter, the file holds weights of its base model, such as {of_base[0]}",
            where=f"adapter.start_from={folder}",
            repair="save it without them if they are the base's (PEFT: `save_embedding_layers=False`)",
        )


def check_reference(config: Config) -> None:
    """Check that a reference that is named takes the run's rows: it has the same tokens, and is of the same family.
    Raises FinrayError: it does not, or cannot be loaded."""
    named, where = reference_run(config), f"preference.reference={config.preference.reference}"
    if named is None or not config.preference.names_model:
        return
    if named.adapter.start_from is not None:
        check_start(named)
        return
    try:
        check_exists(named.model.name)
        ours, theirs = (load_tokenizer(model).get_vocab() for model in (config.model, named.model))
        family, other = (packing_of(model).family for model in (config.model, named.model))
    except FinrayError as error:
        own = error.where == f"model.name={config.model.name}"
        raise error if own else ModelError(error.message, where=where, repair=error.repair) from None
    odd = [token for token, number in ours.items() if theirs.get(token) != number]
    if odd or family != other:
        text = f"{len(odd):,} of {len(ours):,} tokens are others in the reference, such as `{min(odd, default=None)}`"
        raise ModelError(
            text if odd else f"the reference is a {other}, and the model a {family}",
            where=where,
            repair="take one of the same family with the same tokenizer",
        )


def check_saved_modules(config: Config, names: list[str]) -> None:
    """Check that each of ``adapter.modules_to_save`` matches a module by PEFT's rules; PEFT ignores those that do not.

    Args:
        config: the run's.
        names: names of modules of the model; those that hold them are known by these.

    Raises:
        ModelError: some match none.
    """
    if config.adapter.method == "none":
        return
    above = {".".join(name.split(".")[:depth]) for name in names for depth in range(1, name.count(".") + 2)}
    missing = [module for module in config.adapter.modules_to_save if not any(name.endswith(module) for name in above)]
    if missing:
        raise unmatched(missing, [name.rpartition(".")[2] for name in names], where="adapter.modules_to_save")


def check_targets(config: Config, names: list[str]) -> None:
    """Check that ``adapter.target_modules`` matches modules by PEFT's rules.

    Args:
        config: the run's.
        names: names of the model's modules.

    Raises:
        ModelError: an entry of a list, or the regular expression, matches none.
    """
    targets = config.adapter.target_modules
    if config.adapter.method == "none" or targets == "all-linear":
        return
    endings = sorted({name.rpartition(".")[2] for name in names if "norm" not in name} - {""})
    if isinstance(targets, str):
        if not any(re.fullmatch(targets, name) for name in names):
            example = max(names, key=lambda name: (name.count("."), name), default="model.layers.0.self_attn.q_proj")
            raise ModelError(
                f"the regular expression `{targets}` matches no module",
                where="adapter.target_modules",
                repair="write several names as a list: ["
                + ", ".join(target.strip() for target in targets.split(","))
                + "]"
                if "," in targets
                else f"it must match a whole name, such as {example}",
            )
        return
    if missing := matching_none(targets, names):
        raise unmatched(missing, endings, where="adapter.target_modules")
