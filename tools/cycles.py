"""Finds circles of imports between the files of finray: ``python -m tools.cycles``. ``make check`` runs it.

import-linter checks that rooms import one way; this checks the files inside a room. Imports inside functions and under
TYPE_CHECKING count too: a circle hidden there is still two files that cannot be read one after the other.
"""

from __future__ import annotations

import ast
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src"

Graph = Mapping[str, frozenset[str]]


def import_graph(source: Path) -> dict[str, frozenset[str]]:
    """Each module below a directory, by dotted name, with the modules below it that its file imports anywhere."""
    files = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return {
        name: frozenset(imported for imported in _imports(path, files) if imported != name)
        for name, path in files.items()
    }


def _imports(path: Path, files: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in files)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                # `from package import name`: a module of the package, or what its __init__ defines.
                module = f"{node.module}.{alias.name}"
                if module in files:
                    yield module
                elif node.module in files:
                    yield node.module


def circles(graph: Graph) -> list[list[str]]:
    """Circles of imports, one for each group of modules that reach each other: the shortest through its first module.

    The last module of a circle is the first again.
    """
    found: list[list[str]] = []
    seen: set[str] = set()
    for start in sorted(graph):
        if start in seen:
            continue
        circle = _way_back(graph, start)
        if circle is not None:
            found.append(circle)
            forward = _reached(graph, start)
            seen |= {name for name in forward if start in _reached(graph, name)}
    return found


def _reached(graph: Graph, start: str) -> dict[str, str]:
    """All modules that are reached from one, each with the module before it on a shortest way."""
    before: dict[str, str] = {}
    queue = deque([start])
    while queue:
        name = queue.popleft()
        for imported in sorted(graph[name]):
            if imported not in before:
                before[imported] = name
                queue.append(imported)
    return before


def _way_back(graph: Graph, start: str) -> list[str] | None:
    before = _reached(graph, start)
    if start not in before:
        return None
    way = [start]
    while len(way) == 1 or way[-1] != start:
        way.append(before[way[-1]])
    return way[::-1]


def main() -> int:
    """Prints each circle; 1 if there is any."""
    found = circles(import_graph(SOURCE))
    for circle in found:
        print("circle of imports: " + " -> ".join(circle))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
