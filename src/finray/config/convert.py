"""Converts a YAML file of LLaMA-Factory or Axolotl to a config of finray, and reports what happened to each line.

Most keys are names for fields (:data:`finray.config.names.NAMES`); the other keys are read by ``convert_*.py``. What
both projects assume where a file says nothing is written out where finray assumes something else.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from finray.config import foreign, names
from finray.config.convert_data import read_data
from finray.config.convert_file import ForeignFile
from finray.config.convert_model import read_adapter, read_model
from finray.config.convert_preference import read_preference
from finray.config.convert_train import read_checkpoints, read_hub, read_machines, read_train
from finray.config.converted import Converted
from finray.config.foreign import number, words
from finray.config.load import build_config, read_yaml_lines
from finray.config.redact import redact
from finray.config.schema import NO_TEXT, Config, sections
from finray.errors import ConfigError, did_you_mean
from finray.limits import cut, shown

# Unknown keys of which it is said what they are like: to look for that takes a millisecond.
_LIKENESSES = 100


def convert(path: Path, *, workers: int | None = None, dataset_info: Path | None = None) -> Converted:
    """Read a file of LLaMA-Factory or Axolotl.

    Args:
        path: the YAML file.
        workers: number of processes that it was run with, if it does not say so.
        dataset_info: LLaMA-Factory's table of datasets, if it is not where the file says.

    Raises:
        ConfigError: it is of neither, or trains something that finray does not.
    """
    raw, lines = read_yaml_lines(path, repair="give a training config of LLaMA-Factory or Axolotl")
    for key, value in raw.items():
        raw[key] = _json(value)
        if odd := NO_TEXT.search(f"{key} {raw[key]}"):
            raise ConfigError(f"holds U+{ord(odd[0]):04X}, which is no character", where=f"{path}: line {lines[key]}")
    if "model_class" in raw or {"model", "train_dataset"} <= set(raw):
        raise ConfigError(
            "this config is in the form of LLaMA-Factory v1, which finray does not read",
            where=str(path),
            repair="convert a config with `model_name_or_path`, or write the run with `finray init`",
        )
    system = next((name for name, (sign, _) in names.SIGNS.items() if sign in raw), None)
    if system is None:
        wanted = ", or ".join(f"`{sign}`, as in a config of {name}" for name, (sign, _) in names.SIGNS.items())
        is_finray = any(isinstance(raw.get(name), Mapping) for name in sections())
        raise ConfigError(
            "this is already a finray config" if is_finray else f"the config names no model: {wanted} is missing",
            where=str(path),
            repair="run `finray plan` on it" if is_finray else "give a training config of LLaMA-Factory or Axolotl",
        )
    for key, purpose in foreign.ELSEWHERE.items():
        if raw.get(key) and not raw.get("do_train"):
            raise ConfigError(f"this config is not for training: {purpose}", where=f"{path}: {key}")
    for key in foreign.NUMBERS & set(raw):
        value = raw[key] = number(raw[key])
        if value is None:
            continue
        if value is False and key not in foreign.LEAST:
            # Off, as nothing.
            raw[key] = None
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            kind = "a number"
        elif key in foreign.LEAST and (not isinstance(value, int) or value < foreign.LEAST[key]):
            kind = f"a whole number of {foreign.LEAST[key]} or more"
        else:
            continue
        raise ConfigError(
            f"`{key}: {shown(value)}` is not {kind}",
            where=f"{path}: line {lines.get(key, 0)}",
            repair="correct it, or leave the key out",
        )
    file = ForeignFile(system, raw, lines, path, workers, dataset_info)
    _refuse(file)
    for read in (
        read_preference,
        read_model,
        read_adapter,
        read_data,
        read_train,
        read_checkpoints,
        read_hub,
        read_machines,
    ):
        read(file)
    for key, value in raw.items():
        if key not in file.used:
            file.plain(key, value)
    return _checked(file)


def _json(value: Any) -> Any:
    """YAML's values as JSON types: keys, dates and bytes become text."""
    if isinstance(value, Mapping):
        return {str(key): _json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [_json(item) for item in value]
    return value if isinstance(value, str | int | float | None) else str(value)


def _refuse(file: ForeignFile) -> None:
    """Refuse a file that would train something else in finray."""
    if (kind := file.get("finetuning_type")) not in (None, "lora", "full"):
        message = f"`finetuning_type: {cut(str(kind), 80)}` is not supported{did_you_mean(str(kind), ['lora'])}"
        raise file.refused("finetuning_type", message, "use lora or full")
    if file.get("process_reward_model"):
        message = "`process_reward_model` is not supported: finray has no rewards of steps"
        raise file.refused("process_reward_model", message, names.HERE_IS)
    if file.get("kd_trainer"):
        message = "`kd_trainer` is not supported: finray has no distillation yet"
        raise file.refused("kd_trainer", message, names.HERE_IS)
    started = words(file.raw.get("adapter_name_or_path"))
    if len(started) > 1:
        raise file.refused(
            "adapter_name_or_path",
            "the adapters before the last are merged into the model there, which finray does not do",
            f"merge them first (`finray export {started[0]} --output merged`), name the result as "
            f"`model_name_or_path`, and leave `adapter_name_or_path: {started[-1]}`",
        )
    if started and file.get("create_new_adapter"):
        raise file.refused(
            "create_new_adapter",
            "the adapter is merged into the model there, and a new one trained on top, which finray does not do",
            f"merge it first (`finray export {started[0]} --output merged`), name the result as "
            "`model_name_or_path`, and leave both keys out",
        )
    file.used.update(("do_train", "do_predict", "do_eval", "create_new_adapter"))


def _checked(file: ForeignFile) -> Converted:
    """The config without values that finray refuses; these are listed as lost."""
    for _ in range(sum(map(len, file.out.values())) + 1):
        try:
            build_config(file.out, source=str(file.path))
            break
        except ConfigError as error:
            fields = (re.match(r"([a-z]+\.\w+)", problem) for problem in error.problems if "." in problem[:40])
            place = next(fields, None)
            section, _, name = (place[1] if place else "").partition(".")
            if name not in file.out.get(section, {}) or f"{section}.{name}" in (
                "model.name",
                "data.source",
                "data.mix",
            ):
                raise
            value = file.out[section].pop(name)
            key = file.origin.get(f"{section}.{name}") or name
            why = error.problems[0].partition(": ")[2] or error.message
            # The message quotes the value as it is.
            secret = redact({key: value}) != {key: value}
            file.lose(key, "not supported here" if secret else f"not supported: {why}", value)
    ordered = {section: file.out[section] for section in Config.model_fields if file.out.get(section)}
    keys = [*names.NAMES, *foreign.NOT_OURS, *foreign.SENTENCES]
    lost = sorted(file.lost, key=lambda line: line.line)
    for at in [at for at, line in enumerate(lost) if not line.why][:_LIKENESSES]:
        lost[at] = replace(lost[at], near=did_you_mean(lost[at].key.partition(":")[0], keys))
    return Converted(file.system, ordered, lost, file.notes)
