"""Continuing from an adapter: its settings take the place of what the configuration leaves open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finray.config.adapter_files import NOTES, SETTINGS, AdapterSettings, lora_variant, read_notes, read_settings
from finray.config.schema import Config
from finray.config.tasks import TaskSpec, task_spec
from finray.errors import ConfigError

# Initializations of an adapter that change the base weights too.
_CHANGES_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")


def with_start(config: Config) -> Config:
    """The config with method, rank, alpha, targets and new tokens of ``adapter.start_from``, and its base's
    revision.
    Raises ConfigError: there is no such adapter, it is of a kind that cannot be continued, or the configuration says
    something else than it does."""
    if config.adapter.start_from is None:
        return config
    path = Path(config.adapter.start_from).expanduser().absolute()
    folder = next((place for place in (path, path / "final") if (place / SETTINGS).is_file()), None)
    if folder is None:
        raise ConfigError(
            "the directory holds no adapter",
            where=f"adapter.start_from={path}",
            repair=f"give a directory with `{SETTINGS}`, or a finished run",
        )
    settings, notes = read_settings(folder), read_notes(folder)
    where, initialized = f"adapter.start_from={folder}", settings.init_lora_weights
    if settings.peft_type != "LORA":
        raise ConfigError(f"an adapter of type {settings.peft_type} cannot be continued", where=where)
    if isinstance(initialized, str) and initialized.startswith(_CHANGES_BASE):
        raise ConfigError(
            f"the adapter was initialized by {initialized}, which changes the base weights",
            where=where,
            repair="convert it to a plain LoRA (PEFT: save_pretrained with path_initial_model_for_weight_conversion)",
        )
    if variant := lora_variant(folder):
        message = f"an adapter with `{variant}` is not plain LoRA and cannot be continued"
        raise ConfigError(message, where=f"{where}, {SETTINGS}", repair="start a new adapter")
    spec = task_spec(config.model.task)
    _require_task(settings, spec, where=where)
    if settings.bias != "none":
        raise ConfigError("an adapter that trains biases cannot be continued", where=where)
    targets, rank, alpha = settings.target_modules, settings.r, settings.lora_alpha
    if targets is None or rank is None or alpha is None:
        raise ConfigError(
            "the settings of the adapter lack r, lora_alpha or target_modules", where=str(folder / SETTINGS)
        )
    theirs: dict[str, Any] = {
        "method": "dora" if settings.use_dora else "rslora" if settings.use_rslora else "lora",
        "rank": rank,
        "alpha": float(alpha),
        "target_modules": targets if isinstance(targets, str) else sorted(targets),
        # PEFT adds the names that the head of a classifier may have.
        "modules_to_save": [
            module
            for module in settings.modules_to_save or []
            if not (spec.adds_head and module in ("classifier", "score"))
        ],
    }
    words = list(notes.get("new_tokens") or [])
    compared = [(f"adapter.{name}", getattr(config.adapter, name), theirs[name], SETTINGS) for name in theirs]
    compared.append(("model.new_tokens", config.model.new_tokens, words, NOTES))
    written = {f"adapter.{name}" for name in config.adapter.model_fields_set}
    written |= {f"model.{name}" for name in config.model.model_fields_set}
    base, revision = settings.base_model_name_or_path, settings.revision or notes.get("revision")
    if base != config.model.name or ("model.revision" in written and config.model.revision is None):
        # Another name may be another copy of it; and earlier versions wrote null and meant it.
        revision = config.model.revision
    compared.append(("model.revision", config.model.revision, revision, SETTINGS))
    problems = [
        ConfigError(
            f"the config says {ours}, but the adapter to continue from has {their}",
            where=f"{field}, {folder / file}",
            repair=f"leave out {field}, or start a new adapter",
        )
        for field, ours, their, file in compared
        # PEFT writes the names that `all-linear` came to.
        if field in written and ours != "all-linear" and _ordered(field, ours) != _ordered(field, their)
    ]
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise ConfigError(
            f"{len(problems)} fields differ from the adapter to continue from",
            problems=tuple(str(problem) for problem in problems),
        )
    adapter = config.adapter.model_copy(update={**theirs, "start_from": str(folder)})
    model = config.model.model_copy(update={"new_tokens": words, "revision": revision})
    return config.model_copy(update={"adapter": adapter, "model": model})


def _ordered(field: str, value: Any) -> Any:
    """The order of names of modules means nothing, that of new tokens does."""
    return sorted(value) if isinstance(value, list) and field != "model.new_tokens" else value


def _require_task(settings: AdapterSettings, spec: TaskSpec, *, where: str) -> None:
    """Refuse an adapter of another task, and one without a head for a task that needs one."""
    if settings.task_type != spec.peft_type and (settings.task_type is not None or spec.adds_head):
        raise ConfigError(
            f"the adapter is for {settings.task_type or 'no task that it names'}, and model.task {spec.name} needs "
            f"{spec.peft_type}",
            where=where,
            repair="start a new adapter, or set model.task to what the adapter was trained for",
        )
