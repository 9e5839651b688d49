"""Preparation of data on the cluster's CPUs, before any training worker is held."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finray.config.load import build_config
from finray.config.schema import Config
from finray.data.prepared import Preparation, PreparedDataset, plan_sources, prepare, tokenizer_digest
from finray.data.tokenize import Tokenizer
from finray.errors import FinrayError, from_dict
from finray.models.loading import check_exists, load_tokenizer
from finray.runtime.rundir import prepared_dir


def prepare_here(config: Config, *, cache_dir: Path | None = None) -> Path:
    """Prepare the data of a config in this process; returns the directory.

    Raises:
        FinrayError: the data, the tokenizer or the storage is not right.
    """
    sources = plan_sources(config.data)
    tokenizer = load_tokenizer(config.model)
    preparation = Preparation(sources, config.data, tokenizer_digest(tokenizer))
    encoder = Tokenizer(
        tokenizer,
        train_on=config.data.train_on,
        max_length=config.data.max_length,
        on_too_long=config.data.on_too_long,
    )
    return prepare(preparation, encoder, cache_dir or prepared_dir(config))


def check_inputs(config: Config) -> None:
    """What can be known to be wrong before Ray is started.

    Raises:
        FinrayError: a data file or the model does not exist.
    """
    check_exists(config.model.name)
    plan_sources(config.data)


def prepare_on_ray(ray: Any, config: Config, *, env: dict[str, str]) -> Path:
    """Prepare the data of a config in a task of the cluster; returns the directory.

    Raises:
        FinrayError: the data, the tokenizer or the storage is not right.
    """
    task = ray.remote(num_cpus=1, max_retries=1, runtime_env={"env_vars": env})(_prepare_task)
    outcome = ray.get(task.remote(config.plain()))
    if "error" in outcome:
        raise from_dict(outcome["error"])
    return Path(outcome["path"])


def _prepare_task(plain: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"path": str(prepare_here(build_config(plain, source="driver")))}
    except FinrayError as error:
        return {"error": error.to_dict()}


def preparation_report(path: Path) -> list[str]:
    """What was prepared, a line per split, and warnings about rows that lost something."""
    lines = []
    for split, stats in PreparedDataset(path).manifest["splits"].items():
        lines.append(
            f"{split}: {stats['rows']:,} rows, {stats['tokens']:,} tokens, "
            f"{stats['supervised'] / max(1, stats['tokens']):.0%} supervised, longest {stats['longest']:,}"
        )
        for key, text in (
            ("truncated", "cut off at data.max_length"),
            ("dropped_too_long", "dropped: longer than data.max_length"),
            ("unlearnable", "dropped: no token to learn"),
        ):
            if stats[key]:
                lines.append(f"warning: {split}: {stats[key]:,} of {stats['source_rows']:,} rows {text}")
    return lines
