"""Which of the dear groups of tests must run again: those whose files have changed since they last passed.

    python -m tools.passed stale engines services   prints those of these groups that must run; on stderr, why
    python -m tools.passed note engines             the group has passed with the files as they are
    python -m tools.passed list                     each group, when it last passed, and whether that still holds

`tests/passed.toml` names the groups and the files that each depends on, and is committed. So what a change must run is
decided by content, the same on every machine, and without the history of a checkout.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LEDGER = ROOT / "tests" / "passed.toml"


def digest(patterns: list[str], *, root: Path = ROOT) -> str:
    """Of the names and contents of all files that the patterns match.

    Raises:
        SystemExit: a pattern matches nothing.
    """
    files: set[Path] = set()
    for pattern in patterns:
        matches = {path for path in root.glob(pattern) if path.is_file() and "__pycache__" not in path.parts}
        if not matches:
            sys.exit(f"tests/passed.toml: no file matches {pattern}: correct the pattern")
        files |= matches
    result = hashlib.sha256()
    for path in sorted(files):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        result.update(f"{path.relative_to(root).as_posix()} {content}\n".encode())
    return result.hexdigest()[:16]


def why(group: dict[str, Any], *, root: Path = ROOT) -> str:
    """Why a group must run; empty where it has passed with these files."""
    if "digest" not in group:
        return "it has not passed yet"
    if group["digest"] != digest(group["files"], root=root):
        return f"its files have changed since it passed on {group['date']} ({group['commit']})"
    return ""


def noted(text: str, name: str, values: dict[str, str]) -> str:
    """The ledger with a group's values in place of those that it had."""
    head, table, rest = text.partition(f"[{name}]\n")
    body, following, tail = rest.partition("\n[")
    kept = [line for line in body.rstrip("\n").split("\n") if line.partition(" = ")[0] not in values]
    lines = [f'{key} = "{value}"' for key, value in values.items()]
    return head + table + "\n".join([*kept, *lines]) + "\n" + (following and "\n[") + tail


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["stale", "note", "list"])
    parser.add_argument("groups", nargs="*")
    arguments = parser.parse_args()
    text = LEDGER.read_text(encoding="utf-8")
    groups = tomllib.loads(text)
    if arguments.command == "list":
        for name, group in groups.items():
            print(f"{name}: {why(group) or 'passed on ' + group['date'] + ' with these files'}")
        return 0
    if unknown := set(arguments.groups) - set(groups):
        parser.error(f"no group {min(unknown)!r}; known: {', '.join(groups)}")
    if arguments.command == "stale":
        for name in arguments.groups:
            if reason := why(groups[name]):
                print(name)
                print(f"{name}: {reason}", file=sys.stderr)
        return 0
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    for name in arguments.groups:
        values = {
            "digest": digest(groups[name]["files"]),
            "date": datetime.date.today().isoformat(),
            "commit": commit or "unknown",
        }
        text = noted(text, name, values)
    LEDGER.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
