"""Files that say where a job runs, by `replicas`, `resources`, `config_map`, `shared_volume`, as job platforms do.

They become sections of finray's config, and name a preset or a model as well. Only for such files the environment
variables `RUN_NAME` and `RESULT_MODEL_ID` are read: elsewhere they belong to other programs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, MutableMapping
from typing import Any

from finray.config.environment import set_default
from finray.config.redact import is_secret_name
from finray.errors import ConfigError
from finray.limits import shown

KEYS = frozenset(("replicas", "resources", "config_map", "shared_volume"))
RESULT, RUN_NAME = "RESULT_MODEL_ID", "RUN_NAME"
_NO_NAME = re.compile(r"[^A-Za-z0-9._]+")


def legal_name(text: str) -> str:
    """A text turned into a directory name; empty if no character remains."""
    return _NO_NAME.sub("-", text).strip("-._")[:128]


def from_replicas(
    raw: Mapping[str, Any], environ: MutableMapping[str, str] = os.environ, *, given: Collection[str] = ()
) -> tuple[dict[str, Any], list[str]]:
    """The content of a config file as sections of finray, and notes for the user; other files stay as they are.

    Secrets of the config map go into the environment of this process, where nothing of that name is, and nowhere else.

    Args:
        raw: the content of a config.
        environ: environment variables.
        given: fields that overrides set.

    Raises:
        ConfigError: a value is invalid, or no model is named.
    """
    if KEYS.isdisjoint(raw):
        return dict(raw), []
    sections = {key: value for key, value in raw.items() if key not in KEYS}
    resources, variables = _mapping(raw, "resources"), _mapping(raw, "config_map")
    gpu = _mapping(resources, "gpu", "resources.")
    replicas, each = _count(raw, "replicas", 1), _count(gpu, "accelerator_count", 1 if gpu else 0, "resources.gpu.")
    workers = replicas * max(1, each)
    cluster: dict[str, Any] = {"num_workers": workers, "use_gpu": bool(each)}
    if cpus := _count(resources, "cpu", 0, "resources."):
        cluster["cpus_per_worker"] = max(1, cpus // max(1, each))
    notes = [f"{replicas} replicas with {each or 'no'} GPU{'' if each == 1 else 's'} each are {workers} workers"]
    if gpu.get("accelerator"):
        notes.append(f"GPUs are taken as the cluster has them, also where they are no {shown(gpu['accelerator'])}")
    if "memory" in resources:
        notes.append("resources.memory is not reserved; `finray plan` says what a worker needs")
    if "shared_volume" in raw:
        notes.append("shared_volume: set run.output_dir to a directory on it, the same on all nodes")
    kept: dict[str, str] = {}
    for name, value in variables.items():
        text = str(value)
        if re.fullmatch(r"\s*<.*>\s*|\s*", text):
            notes.append(f"config_map.{name} holds a place-holder, and is left out")
        elif is_secret_name(str(name)):
            set_default(str(name), text, environ)
            notes.append(f"{name} is taken from config_map; an exported variable keeps it out of files")
        elif name == RUN_NAME:
            environ_name(sections, text, notes, where=f"config_map.{RUN_NAME}")
        elif name == RESULT:
            environ_result(sections, text, notes, where=f"config_map.{RESULT}")
        else:
            kept[str(name)] = text
    if kept:
        cluster["env"] = kept
    if not {"preset", "model"} & set(sections) and not {"model", "model.name"} & set(given):
        raise ConfigError(
            "this file says where a job runs, but names no model",
            where="replicas",
            repair="add `preset: bert-sst2-lora` (`finray config presets` lists them all), or `model` and `data`",
        )
    written = _mapping(sections, "cluster")
    if kept:
        written["env"] = kept | _mapping(written, "env", "cluster.")
    sections["cluster"] = {**cluster, **written}
    # What the file says wins.
    if environ.get(RUN_NAME, "").strip() and not {"run", "run.name"} & set(given):
        environ_name(sections, environ[RUN_NAME], notes, where=RUN_NAME)
    if (result := environ.get(RESULT, "").strip()) and not {"export", "export.push_to_hub"} & set(given):
        environ_result(sections, result, notes, where=RESULT)
    return sections, notes


def environ_result(raw: dict[str, Any], text: str, notes: list[str], *, where: str) -> None:
    """Sets the Hub model to which the result is pushed, unless the config names one."""
    export = raw.get("export")
    # A `null` says that nothing is pushed.
    if (export is not None and not isinstance(export, Mapping)) or "push_to_hub" in (export or {}):
        return
    raw["export"] = {**(export or {}), "push_to_hub": text}
    notes.append(f"{where}: the finished model is pushed to {text}, unless export.push_to_hub says otherwise")


def environ_name(raw: dict[str, Any], text: str, notes: list[str], *, where: str) -> None:
    """Sets the name of the run, unless the config has one."""
    run = raw.get("run")
    if (run is not None and not isinstance(run, Mapping)) or (run or {}).get("name") is not None:
        return
    if name := legal_name(text):
        raw["run"] = {**(run or {}), "name": name}
        notes.append(f"the run is called {name}, from {where}" + ("" if name == text else f" ({shown(text)})"))
    else:
        notes.append(f"{where} is {shown(text)}, which cannot be used as a directory name and is ignored")


def _mapping(raw: Mapping[str, Any], key: str, above: str = "") -> dict[str, Any]:
    value = raw.get(key) or {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"must be a section with fields; got {shown(value)}", where=f"{above}{key}")
    return dict(value)


def _count(raw: Mapping[str, Any], key: str, default: int, above: str = "") -> int:
    value = raw.get(key, default)
    least = 1 if key == "replicas" else 0
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**20:
        raise ConfigError(f"must be a whole number, got {shown(value)}", where=f"{above}{key}")
    return value
