"""What `finray convert` makes of a file: a config, and each line that is not in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import yaml

from finray.config import foreign, names
from finray.errors import did_you_mean


@dataclass(frozen=True)
class Lost:
    """A line that was not carried over.

    Attributes:
        line: in the file, from 1.
        key: with its value, as it was.
        why: a sentence; empty for an unknown key.
    """

    line: int
    key: str
    why: str

    def __str__(self) -> str:
        if self.why:
            return f"line {self.line}, `{self.key}`: {self.why}"
        near = did_you_mean(self.key.partition(":")[0], [*names.NAMES, *foreign.NOT_OURS, *foreign.SENTENCES])
        return f"line {self.line}, `{self.key}`: finray does not know this key{near}"


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
        comments = "".join(f"# {' '.join(line.split()) if line[0] != ' ' else line.rstrip()}\n" for line in head)
        return comments + yaml.safe_dump(self.plain, sort_keys=False, allow_unicode=True)
