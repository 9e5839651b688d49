"""Where a config's files are: local paths made absolute, because workers have another working directory.

`finray evaluate` and later starts read the config of a run again, from any directory. The price: files that were moved
make another configuration.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, TypeVar

from finray.config.resume_adapter import with_start
from finray.config.schema import Config, Section
from finray.errors import ConfigError
from finray.files import FileKind

PREPARED = ".prepared"
# A job's specification has a limit of its own: Kubernetes keeps at most 256 KiB of what is applied.
_MOST_BYTES = 64 * 2**10
_FILES = FileKind(
    ConfigError, repair="give a text file in UTF-8; DeepSpeed's is a JSON object", limit=_MOST_BYTES, links=True
)


def is_url(name: str) -> bool:
    """Whether a name has a scheme: `s3://bucket/key`, but not a local path."""
    return "://" in name and not name.startswith("file://")


def is_template(value: str) -> bool:
    """Whether ``model.chat_template`` is the template itself, and not the name of its file."""
    return "{{" in value or "{%" in value


def cache_dir(name: str) -> Path:
    """A directory of finray's in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "finray" / name


def run_url(config: Config) -> str | None:
    """The URL of a config's run; None if it is a local directory."""
    if not is_url(config.run.output_dir):
        return None
    return f"{config.run.output_dir.rstrip('/')}/{config.run.name}"


def run_path(config: Config) -> Path:
    """The directory of a config's run; for a URL, of its copy on this machine."""
    url = run_url(config)
    if url is not None:
        return copy_path(url, config.run.local_dir)
    return (_local(config.run.output_dir) / config.run.name).resolve()


def copy_path(url: str, local_dir: str | None = None) -> Path:
    """Where a machine keeps its copy of the run behind a URL: in ``local_dir``, or in the user's cache."""
    return _copy_in(cache_dir("runs") if local_dir is None else _local(local_dir), url)


def read_path(url: str) -> Path:
    """Where commands that read the run behind a URL keep what they download.

    It is not the copy that the workers write: nothing may be replaced or removed in that while they do.
    """
    return _copy_in(cache_dir("read"), url)


def _copy_in(root: Path, url: str) -> Path:
    parent, _, name = url.rstrip("/").rpartition("/")
    # Runs of one name in two buckets are two runs.
    return (root / hashlib.sha256(parent.encode()).hexdigest()[:12] / name).resolve()


def prepared_dir(config: Config) -> str:
    """Where prepared datasets of a config's runs are kept: a directory, or a URL."""
    if config.prepare.dir is not None and is_url(config.prepare.dir):
        return config.prepare.dir.rstrip("/")
    if config.prepare.dir is None and is_url(config.run.output_dir):
        return f"{config.run.output_dir.rstrip('/')}/{PREPARED}"
    folder = _local(config.run.output_dir) / PREPARED if config.prepare.dir is None else _local(config.prepare.dir)
    return str(folder.resolve())


def local_dir_of(config: Config) -> Path | None:
    """Where files of a remote prepared dataset are kept, if the config says so."""
    return None if config.prepare.local_dir is None else _local(config.prepare.local_dir)


def with_absolute_paths(config: Config) -> Config:
    """The config with every local path made absolute; what is not there keeps its name (it may be on the Hub).
    Raises ConfigError: ``adapter.start_from`` cannot be continued with this config (:func:`with_start`)."""
    config = with_start(config)
    data = _absolute(config.data, "source", "eval_source")
    data = data.model_copy(update={"mix": [_absolute(entry, "source") for entry in data.mix]})
    prepare = config.prepare.model_copy(
        update={name: absolute(getattr(config.prepare, name)) for name in ("dir", "local_dir")}
    )
    scoring = config.evaluation.scoring and _absolute(config.evaluation.scoring, "encoder")
    return config.model_copy(
        update={
            "data": data,
            "evaluation": config.evaluation.model_copy(update={"scoring": scoring}),
            "model": _absolute(config.model, "name", "chat_template"),
            "preference": _absolute(config.preference, *(["reference"] if config.preference.names_model else [])),
            "parallel": config.parallel.model_copy(
                update={"deepspeed_config": absolute(config.parallel.deepspeed_config)}
            ),
            "prepare": prepare,
            "run": config.run.model_copy(
                update={
                    "output_dir": config.run.output_dir if run_url(config) else str(run_path(config).parent),
                    "local_dir": absolute(config.run.local_dir),
                }
            ),
        }
    )


def with_contents(config: Config) -> Config:
    """The config with its chat template and DeepSpeed's JSON in place of the names of their files.

    A job's config is then complete, for all its machines and for what reads it after the run. A file that is not on
    this machine, or has more than 64 kB, keeps its name. Raises ConfigError: a file cannot be read.
    """

    def small_file(name: object) -> Path | None:
        path = Path(name).expanduser() if isinstance(name, str) and not is_template(name) else None
        return path if path is not None and path.is_file() and path.stat().st_size <= _MOST_BYTES else None

    changes: dict[str, Section] = {}
    template, given = config.model.chat_template, config.parallel.deepspeed_config
    if (path := small_file(template)) is not None and is_template(text := _FILES.text(path)):
        changes["model"] = config.model.model_copy(update={"chat_template": text})
    if (path := small_file(given)) is not None:
        read = _FILES.json(path, dict[str, Any])
        changes["parallel"] = config.parallel.model_copy(update={"deepspeed_config": read})
    return config.model_copy(update=changes)


def sent_by_name(config: Config) -> list[str]:
    """What :func:`with_contents` has left as the name of a file of this machine, by its field: a job that runs
    elsewhere needs the file there."""
    given = {
        "model.chat_template": config.model.chat_template,
        "parallel.deepspeed_config": config.parallel.deepspeed_config,
    }
    names = {field: name for field, name in given.items() if isinstance(name, str) and not is_template(name)}
    return [f"{field} {name}" for field, name in names.items() if Path(name).expanduser().is_file()]


S = TypeVar("S", bound=Section)
V = TypeVar("V")


def _absolute(section: S, *fields: str) -> S:
    """The section with paths made absolute in fields that may name something else, if they exist."""
    changed = {}
    for name in fields:
        value = getattr(section, name)
        if value is not None and not is_url(value) and not is_template(value):
            path = Path(value).expanduser()
            # `directory:inside` and globs are paths too.
            parent = value.rpartition(":")[0]
            if path.exists() or set("*?[") & set(value) or (parent and Path(parent).expanduser().is_dir()):
                changed[name] = str(path.absolute())
    return section.model_copy(update=changed)


def absolute(value: V) -> V | str:
    """A local path made absolute; URLs and names that are not paths stay."""
    return str(_local(value).absolute()) if isinstance(value, str) and not is_url(value) else value


def _local(name: str) -> Path:
    """A directory of this machine, which may be written as a URL (``file:///data``)."""
    return Path(name.removeprefix("file://")).expanduser()
