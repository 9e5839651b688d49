"""``finray doctor``: check this machine or all nodes of a cluster, and write bug reports."""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from finray.cli import show
from finray.config.paths import absolute, cache_dir
from finray.config.redact import redact, redact_text
from finray.config.trust import require_trusted
from finray.errors import FinrayError
from finray.files import require_writable_file

_LINES = 60


def doctor(
    config: Annotated[
        str | None, typer.Argument(help="Config whose storage and cluster are checked.", show_default=False)
    ] = None,
    overrides: show.Overrides = None,
    cluster: Annotated[bool, typer.Option("--cluster", help="Check all nodes of the cluster.")] = False,
    address: Annotated[
        str | None, typer.Option(help="Address of the cluster's head (default: this machine's).")
    ] = None,
    storage: Annotated[str | None, typer.Option(help="Where runs are written (default: run.output_dir).")] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write what a bug report needs to this file, with secrets masked.")
    ] = None,
    trust_run: show.TrustRun = False,
) -> None:
    """Look at Python, GPUs, storage, disks and ports; with --cluster also at network and clocks. Exit code 2 where
    something keeps a run from working."""
    if report is not None:
        require_writable_file(report)
    settings = None if config is None else show.load(config, overrides, trusted=trust_run)
    if settings is not None:
        require_trusted(settings, "run.output_dir", "cluster.address")
    where = storage or ("runs" if settings is None else settings.run.output_dir)
    if cluster or address is not None:
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    from finray.runtime import doctor as look

    if cluster or address is not None:
        from finray.runtime.status import cluster_here

        # Each node has a working directory of its own.
        where = absolute(where)
        named = address or (None if settings is None else settings.cluster.address)
        examined = look.cluster(where, cluster_here(named), notify=show.remark)
    else:
        examined = look.machine(where)
    show.result(examined)
    if report is not None:
        plain = None if settings is None else settings.model_dump(mode="json")
        report.write_text(_report(examined.plain(), plain), encoding="utf-8")
        show.note(f"wrote {report}; read it before you send it")
    if not examined.is_fit:
        raise typer.Exit(FinrayError.exit_code)


def _report(examined: dict[str, Any], config: dict[str, Any] | None) -> str:
    """A bug report: what the machine is, the config, and the last lines of logs, without secrets."""
    parts = [
        "# finray: report",
        f"Python {sys.version}\n{platform.platform()}",
        "## Doctor\n```json\n" + json.dumps(redact(examined), indent=1) + "\n```",
    ]
    if config is not None:
        parts.append("## Config\n```yaml\n" + yaml.safe_dump(redact(config), sort_keys=False) + "```")
    logs = sorted(cache_dir("defects").glob("finray-*.txt"), key=lambda file: file.stat().st_mtime)[-2:]
    logs += (Path(tempfile.gettempdir()) / f"finray-cluster-{os.getuid()}").glob("*.log")
    if config is not None:
        run = Path(config["run"]["output_dir"]).expanduser() / config["run"]["name"]
        logs += [file for file in (run / "failures.jsonl", run / "metrics.jsonl") if file.is_file()]
    for file in logs:
        last = file.read_text(encoding="utf-8", errors="replace").splitlines()[-_LINES:]
        parts.append(f"## Last lines of {file.name}\n```\n" + "\n".join(last) + "\n```")
    # Whatever it came through: what looks like a secret, and values of variables that do.
    return redact_text("\n\n".join(parts)) + "\n"
