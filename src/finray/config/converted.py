"""The result of `finray convert`: a config, and each line that is not in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import yaml


@dataclass(frozen=True)
class Lost:
    """A line that was not carried over."""

    line: int  # number in the file, from 1; 0 for a default of the other system
    key: str  # with its value, as it was
    why: str  # the reason; empty for an unknown key
    near: str = ""  # the suggestion for an unknown key, from :func:`finray.errors.did_you_mean`

    def __str__(self) -> str:
        where = f"line {self.line}, " if self.line else ""
        return f"{where}`{self.key}`: {self.why or f'finray does not know this key{self.near}'}"


@dataclass
class Converted:
    """A converted file."""

    system: str  # whose file it was
    plain: dict[str, Any]  # sections of finray
    lost: list[Lost] = field(default_factory=list)  # what was not carried over, by line
    notes: list[str] = field(default_factory=list)  # what the user should check

    @property
    def unknown(self) -> list[str]:
        """Unknown keys."""
        return [line.key.partition(":")[0] for line in self.lost if not line.why]

    def text(self, source: str) -> str:
        """The config file."""
        head = [f"Converted from {source} ({self.system})."]
        head += [f"Check this: {note}" for note in self.notes]
        if self.lost:
            head += ["Not carried over:", *(f"  {line}" for line in self.lost)]
        comments = "".join(f"# {line}\n" for line in map(_one_line, head))
        return comments + yaml.safe_dump(self.plain, sort_keys=False, allow_unicode=True)


def _one_line(text: str) -> str:
    """A text as one line of a comment; characters that YAML does not allow there become their codes."""
    return "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in text)
