"""Tests that failed once without a cause in the product: `tests/QUARANTINE.toml`, and the rules for it.

A test in quarantine is marked `nightly`, so it is not part of the gate. It has a week to be mended: `make check` fails
on an entry that is older, and on one that names a test which is not there.

    python -m tools.quarantine
"""

from __future__ import annotations

import sys
import tomllib
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILE = ROOT / "tests" / "QUARANTINE.toml"
AT_MOST = timedelta(days=7)
_FIELDS = {"id": str, "date": date, "seen": str, "why": str}


@dataclass(frozen=True, slots=True)
class Entry:
    """A test in quarantine.

    Attributes:
        id: of the test, as pytest prints it; without the brackets it stands for all cases of a test.
        date: of the failure.
        seen: what the failure said.
        why: what is known of the cause.
    """

    id: str
    date: date
    seen: str
    why: str


def read(file: Path = FILE) -> list[Entry]:
    """The entries of a file.

    Raises:
        ValueError: an entry does not have the fields of :class:`Entry`.
    """
    found = []
    for entry in tomllib.loads(file.read_text(encoding="utf-8")).get("test", []):
        if {name: type(value) for name, value in entry.items()} != _FIELDS:
            raise ValueError(f"{file.name}: an entry has {', '.join(_FIELDS)}, and not {entry}")
        found.append(Entry(**entry))
    return found


def problems(entries: list[Entry], today: date, root: Path = ROOT) -> list[str]:
    """What is wrong with the entries on this day."""
    found = []
    for entry in entries:
        file, _, name = entry.id.partition("::")
        path, function = root / file, name.partition("[")[0].rpartition("::")[2]
        if not path.is_file() or f"def {function}(" not in path.read_text(encoding="utf-8"):
            found.append(f"{entry.id}: there is no such test")
        if today - entry.date > AT_MOST:
            found.append(f"{entry.id}: in quarantine since {entry.date}, and {AT_MOST.days} days are the limit")
    return found


def mark(items: list[pytest.Item], entries: list[Entry]) -> None:
    """Mark the tests that are in quarantine as `nightly`."""
    ids = {entry.id for entry in entries}
    for item in items:
        if {item.nodeid, item.nodeid.partition("[")[0]} & ids:
            item.add_marker(pytest.mark.nightly)


def main() -> None:
    """Print what is wrong; exit 1 if anything is."""
    found = problems(read(), date.today())
    print("\n".join(found), end="\n" if found else "")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
