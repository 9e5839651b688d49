"""Python code of the user's own that a config names (``package.module:Name``), and what of it a job can take along."""

from __future__ import annotations

import os
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

from finray.config.redact import holds_token
from finray.config.schema import Config
from finray.errors import ConfigError
from finray.files import FileKind

_MOST_FILES, _MOST_BYTES = 2000, 10 * 2**20
_CODE = FileKind(
    ConfigError,
    repair="the directory is sent to the cluster: leave the file out of it, or put a copy in its place",
    limit=_MOST_BYTES,
)


def own_code(config: Config) -> list[tuple[str, str]]:
    """The fields that name code of the user's own, each with the name."""
    scoring = config.evaluation.scoring
    named = [
        ("model.task", config.model.task),
        ("train.objective", config.train.objective or ""),
        ("adapter.method", config.adapter.method),
        ("parallel.strategy", config.parallel.strategy),
        ("data.converter", config.data.converter or ""),
        *(("tracking.trackers", name) for name in config.tracking.trackers),
        *(("evaluation.metrics", name) for name in config.evaluation.metrics),
        ("evaluation.scoring.checker", (scoring and scoring.checker) or ""),
    ]
    return [(field, name) for field, name in named if ":" in name]


def top_level(name: str) -> str:
    """The top-level package of ``package.module:Name``: ``package``."""
    return name.partition(":")[0].partition(".")[0]


def lies_in(name: str, folder: Path) -> bool:
    """Whether the module of ``package.module:Name`` is a file in this directory, and not of an installed package."""
    return (folder / f"{top_level(name)}.py").is_file() or (folder / top_level(name)).is_dir()


def _is_environment(folder: Path) -> bool:
    return (folder / "pyvenv.cfg").exists() or (folder / "conda-meta").exists()


def python_files(folder: Path, config: Config) -> tuple[dict[str, str], tuple[str, ...]]:
    """The Python files of a directory by path, and what is left out because an installed package has its name.

    On the cluster the directory comes first in Python's path: its ``datasets`` would replace that of Hugging Face.
    Nothing else is taken: no data, no hidden directories, no virtual environments.

    Args:
        folder: where the modules are imported from.
        config: modules that it names are taken in any case.

    Raises:
        ConfigError: there are none, too many, or one holds a token.
    """
    where = f"--code {folder}"
    named = {top_level(name) for _, name in own_code(config)}
    installed = (sys.stdlib_module_names | packages_distributions().keys()) - named
    texts: dict[str, str] = {}
    left_out, size = [], 0
    for root, folders, files in os.walk(folder):
        here = Path(root)
        names = [name for name in folders if not name.startswith(".") and not _is_environment(here / name)]
        modules = [name for name in files if name.endswith(".py") and not name.startswith(".")]
        if here == folder:
            left_out = [name for name in modules if name.removesuffix(".py") in installed]
            left_out += [name for name in names if name in installed and any((here / name).rglob("*.py"))]
            names = [name for name in names if name not in installed]
        folders[:] = sorted(names)
        for path in sorted(here / name for name in modules if name not in left_out or here != folder):
            text = _CODE.text(path, folder)
            if holds_token(text, environ=os.environ):
                raise ConfigError(
                    "the file holds a token, but it would be written to files of the cluster",
                    where=str(path),
                    repair="read it from the environment, where `--env NAME` puts it",
                )
            texts[str(path.relative_to(folder))] = text
            size += len(text)
            if len(texts) > _MOST_FILES or size > _MOST_BYTES:
                raise ConfigError(
                    f"there are more than {_MOST_FILES} Python files, or {_MOST_BYTES >> 20} MB of them",
                    where=where,
                    repair="give the directory with your own modules only",
                )
    if not texts:
        raise ConfigError("there are no Python files", where=where, repair="give the directory of your modules")
    return texts, tuple(sorted(left_out))
