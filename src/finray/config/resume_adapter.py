"""What an adapter to go on from says of itself, in the place of what the configuration leaves open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from finray.config.schema import Config
from finray.errors import ConfigError

# As in finray.models, which would import torch.
_SETTINGS = "adapter_config.json"
_NOTES = "finray.json"
# Ways to begin an adapter that change the base weights too.
_CHANGES_BASE = ("pissa", "olora", "loftq", "corda")


def with_start(config: Config) -> Config:
    """The config with method, rank, alpha, targets and new tokens of ``adapter.start_from``.

    Raises:
        ConfigError: there is no such adapter, it is of a kind that cannot be continued, or the configuration says
            something else than it does.
    """
    if config.adapter.start_from is None:
        return config
    folder = _folder(Path(config.adapter.start_from))
    settings = _read(folder / _SETTINGS)
    _require_plain(settings, folder)
    notes = _read(folder / _NOTES) if (folder / _NOTES).is_file() else {}
    theirs = {
        "method": _method(settings),
        "rank": settings["r"],
        "alpha": float(settings["lora_alpha"]),
        "target_modules": _sorted(settings["target_modules"]),
        "modules_to_save": settings.get("modules_to_save") or [],
    }
    problems = [
        _contradiction(f"adapter.{name}", getattr(config.adapter, name), value, folder / _SETTINGS)
        for name, value in theirs.items()
        if name in config.adapter.model_fields_set and not _agree(getattr(config.adapter, name), value)
    ]
    words = list(notes.get("new_tokens") or [])
    if "new_tokens" in config.model.model_fields_set and config.model.new_tokens != words:
        problems.append(_contradiction("model.new_tokens", config.model.new_tokens, words, folder / _NOTES))
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise ConfigError(
            f"{len(problems)} fields contradict the adapter to go on from",
            problems=tuple(str(problem) for problem in problems),
        )
    adapter = config.adapter.model_copy(update={**theirs, "start_from": str(folder)})
    return config.model_copy(
        update={"adapter": adapter, "model": config.model.model_copy(update={"new_tokens": words})}
    )


def _folder(path: Path) -> Path:
    path = path.expanduser().absolute()
    for folder in (path, path / "final"):
        if (folder / _SETTINGS).is_file():
            return folder
    raise ConfigError(
        "there is no adapter",
        where=f"adapter.start_from={path}",
        repair=f"name a directory with `{_SETTINGS}`, or a finished run",
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the adapter's settings cannot be read: {error}", where=str(path)) from None
    return content


def _require_plain(settings: dict[str, Any], folder: Path) -> None:
    where = f"adapter.start_from={folder}"
    if settings.get("peft_type") != "LORA":
        raise ConfigError(f"an adapter of kind {settings.get('peft_type')} cannot be continued", where=where)
    begun = settings.get("init_lora_weights")
    if isinstance(begun, str) and begun.startswith(_CHANGES_BASE):
        raise ConfigError(
            f"the adapter belongs to base weights that {begun} has changed",
            where=where,
            repair="convert it to a plain LoRA (PEFT: save_pretrained with path_initial_model_for_weight_conversion)",
        )
    if settings.get("bias", "none") != "none":
        raise ConfigError("an adapter that trains biases cannot be continued", where=where)


def _method(settings: dict[str, Any]) -> str:
    if settings.get("use_dora"):
        return "dora"
    return "rslora" if settings.get("use_rslora") else "lora"


def _sorted(targets: str | list[str]) -> str | list[str]:
    return targets if isinstance(targets, str) else sorted(targets)


def _agree(ours: Any, theirs: Any) -> bool:
    if ours == "all-linear":
        # PEFT writes down the names that this came to.
        return True
    return sorted(ours) == sorted(theirs) if isinstance(ours, list) and isinstance(theirs, list) else ours == theirs


def _contradiction(path: str, ours: Any, theirs: Any, file: Path) -> ConfigError:
    return ConfigError(
        f"the configuration says {ours}, the adapter to go on from says {theirs}",
        where=f"{path}, {file}",
        repair=f"leave out {path}, or begin a new adapter",
    )
