"""Names in a config that stand for code: of finray, of an installed package, or of the user's own.

A name is looked up in a table of finray's, then among the entry points of installed packages (group ``finray.tasks``
and so on), and else it is written ``package.module:Name``, where the working directory is searched too.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from finray.errors import ConfigError


def load_named(name: str, table: Mapping[str, str], *, group: str, where: str) -> Any:
    """The object that a name in a config stands for.

    Args:
        name: an entry of the table, of an entry point, or ``package.module:Name``.
        table: finray's own, name to ``package.module:Name``.
        group: of the entry points, such as ``finray.trackers``.
        where: dotted config path, for the error.

    Raises:
        ConfigError: there is no such thing, or importing it fails.
    """
    if name in table:
        return _import(table[name], where=where)
    if ":" in name:
        return _import(name, where=f"{where}={name}")
    installed = {point.name: point.value for point in entry_points(group=group)}
    if name in installed:
        return _import(installed[name], where=f"{where}={name}")
    known = [*table, *installed]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    raise ConfigError(
        f"unknown name `{name}`" + (f" (did you mean `{close[0]}`?)" if close else ""),
        where=where,
        repair=f"use one of {', '.join(known)}, or your own class as package.module:Class",
    )


def _import(path: str, *, where: str) -> Any:
    module_name, _, attribute = path.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"`{path}` cannot be imported: {error}",
            where=where,
            repair="write package.module:Name, and run finray where that module can be imported",
        ) from None
