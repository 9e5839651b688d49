"""What `finray convert` makes of a file: a config, and each line that is not in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import yaml


@dataclass(frozen=True)
class Lost:
    """A line that was not carried over.

    Attributes:
        line: in the file, from 1; 0 for what the file does not say.
        key: with its value, as it was.
        why: a sentence; empty for an unknown key.
        near: what an unknown key is like, as :func:`finray.errors.did_you_mean` says it.
    """

    line: int
    key: str
    why: str
    near: str = ""

    def __str__(self) -> str:
        where = f"line {self.line}, " if self.line else ""
        return f"{where}`{self.key}`: {self.why or f'finray does not know this key{self.near}'}"


@dataclass
class Converted:
    """What a file came to.

    Attributes:
        system: whose it was.
        plain: sections of finray.
        lost: what was not carried over, by line.
        notes: what is to be looked at.
    """

    system: str
    plain: dict[str, Any]
    lost: list[Lost] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def unknown(self) -> list[str]:
        """Unknown keys."""
        return [one.key.partition(":")[0] for one in self.lost if not one.why]

    def text(self, source: str) -> str:
        """The config file."""
        head = [f"Converted from {source} ({self.system})."]
        head += [f"Check this: {note}" for note in self.notes]
        if self.lost:
            head += ["Not carried over:", *(f"  {one}" for one in self.lost)]
        comments = "".join(f"# {line}\n" for line in map(_one_line, head))
        return comments + yaml.safe_dump(self.plain, sort_keys=False, allow_unicode=True)


def _one_line(text: str) -> str:
    """A line of a comment: what ends a line in YAML, or may not be in it, as its code."""
    return "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in text)
