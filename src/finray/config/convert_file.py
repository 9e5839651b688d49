"""A config of LLaMA-Factory or Axolotl while it is read: its keys, and the fields of finray that they become."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from finray.config import foreign, names
from finray.config.converted import Lost
from finray.config.redact import redact
from finray.config.schema import sections
from finray.errors import ConfigError
from finray.limits import cut


@dataclass
class ForeignFile:
    """A config of LLaMA-Factory or Axolotl while it is read."""

    system: str  # whose config it is
    raw: dict[str, Any]  # its keys and values
    lines: dict[str, int]  # the line of each key
    path: Path  # the file
    workers: int | None  # number of processes of the run, if it is known
    dataset_info: Path | None  # LLaMA-Factory's table of datasets, if it is not where the file says
    out: dict[str, Any] = field(default_factory=dict)  # sections of finray that were read so far
    lost: list[Lost] = field(default_factory=list)  # lines that are not carried over
    notes: list[str] = field(default_factory=list)  # what the user should check
    origin: dict[str, str] = field(default_factory=dict)  # the key that a field came from
    used: set[str] = field(default_factory=set)  # keys that need no further reading

    def get(self, *keys: str) -> Any:
        """The value of the first key that is set, else the system's default; marks all keys as used."""
        self.used.update(keys)
        for key in keys:
            if self.raw.get(key) not in (None, "", [], {}):
                return self.raw[key]
        return next((assumed for key in keys if (assumed := foreign.ASSUMED[self.system].get(key)) is not None), None)

    def put(self, path: str, value: Any, key: str = "") -> None:
        """Set a field, which a key gave."""
        section, _, name = path.partition(".")
        self.out.setdefault(section, {})[name] = value
        self.origin[path] = key or next((key for key in self.raw if names.NAMES.get(key) == path), name)

    def put_new(self, path: str, value: Any, key: str) -> None:
        """Set a field that no other key has set."""
        section, _, name = path.partition(".")
        if name not in self.out.get(section, {}):
            self.put(path, value, key)
        elif self.out[section][name] != value:
            self.lose(key, f"`{path}` says it")

    def lose(self, key: str, why: str, value: Any = None) -> None:
        """List a key as not carried over."""
        self.used.add(key)
        name = key.rpartition(".")[2]
        given = json.dumps(redact({name: self.raw.get(key, value)})[name], ensure_ascii=False)
        line = self.lines.get(key) or self.lines.get(key.partition(".")[0], 0)
        self.lost.append(Lost(line, cut(f"{key}: {given}"), why))

    def plain(self, key: str, value: Any) -> None:
        """A key that is only called something else here."""
        if value is None or value in ("", [], {}):
            return
        target = (names.OFF.get(key) if value is False else None) or foreign.SENTENCES.get(key)
        target = target or names.missing(key, value) or names.NAMES.get(key)
        owner = next((f"{section}.{key}" for section, kind in sections().items() if key in kind.model_fields), None)
        families = (reason for start, reason in foreign.FAMILIES.items() if key.startswith(start))
        if absent := foreign.NOT_OURS.get(key) or next(families, None):
            # A size of 1 asks for nothing.
            if value is not False and not (key in foreign.SIZES and value == 1):
                self.lose(key, f"not supported: {absent}")
        elif names.asks_nothing(key, value) and (target or key in names.OFF):
            return
        elif target is None and owner is not None:
            self.put_new(owner, value, key)
        elif target is None:
            if not (value is False and key.startswith(("use_", "do_", "eval_"))):
                self.lose(key, "")
        elif match := re.fullmatch(r"([a-z]+\.\w+): (\S+)", target):
            if value is True or value is False:
                self.put_new(match[1], yaml.safe_load(match[2]), key)
            else:
                self.lose(key, f"see {match[1]}")
        elif re.fullmatch(r"[a-z]+\.\w+", target):
            self.put_new(target, value, key)
        else:
            self.lose(key, target)

    def refused(self, key: str, message: str, repair: str) -> ConfigError:
        """The error of a key that makes it another training."""
        return ConfigError(message, where=f"{self.path}: line {self.lines.get(key, 0)}", repair=repair)

    def key(self, *keys: str) -> str:
        """The key of these that the file has."""
        return next((key for key in keys if key in self.raw), keys[0])

    def size(self, name: str) -> int:
        """The number of GPUs that a key names; 1 without it."""
        value = self.raw.get(name)
        return value if isinstance(value, int) and value >= 1 else 1

    def fsdp(self, name: str) -> Any:
        """A setting of `fsdp_config`, with or without its prefix."""
        settings = self.raw.get("fsdp_config")
        return settings.get(name, settings.get(f"fsdp_{name}")) if isinstance(settings, Mapping) else None
