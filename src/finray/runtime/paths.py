"""Local paths of a config made absolute, because workers have another working directory."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from finray.config.schema import Config, Section
from finray.data.storage import is_url
from finray.runtime.rundir import RunDir
from finray.runtime.starting import with_start


def with_absolute_paths(config: Config) -> Config:
    """The config with every local path made absolute; what is not there keeps its name (it may be on the Hub).

    Raises:
        ConfigError: ``adapter.start_from`` cannot be continued with this config (:func:`with_start`).
    """
    config = with_start(config)
    data = _absolute(config.data, "source", "eval_source")
    data = data.model_copy(update={"mix": [_absolute(one, "source") for one in data.mix]})
    prepare = config.prepare.model_copy(
        update={name: _resolved(getattr(config.prepare, name)) for name in ("dir", "local_dir")}
    )
    return config.model_copy(
        update={
            "data": data,
            "model": _absolute(config.model, "name", "chat_template"),
            "parallel": config.parallel.model_copy(
                update={"deepspeed_config": _resolved(config.parallel.deepspeed_config)}
            ),
            "prepare": prepare,
            "run": config.run.model_copy(update={"output_dir": str(RunDir.of(config).path.parent)}),
        }
    )


S = TypeVar("S", bound=Section)


def _absolute(section: S, *fields: str) -> S:
    return section.model_copy(update={name: _where_it_exists(getattr(section, name)) for name in fields})


def _where_it_exists(value: str | None) -> str | None:
    if value is None or is_url(value):
        return value
    # `directory:inside` and globs are paths too.
    path = Path(value).expanduser()
    parent = value.rpartition(":")[0]
    there = path.exists() or set("*?[") & set(value) or (parent and Path(parent).expanduser().is_dir())
    return str(path.absolute()) if there else value


def _resolved(value: str | None) -> str | None:
    return value if value is None or is_url(value) else str(Path(value).expanduser().absolute())
