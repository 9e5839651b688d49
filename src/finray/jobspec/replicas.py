"""A run in the form of job platforms: `replicas`, `resources`, `config_map`, `shared_volume`, and finray's sections.

:mod:`finray.config.replicas` reads it: the same run, on as many workers.
"""

from __future__ import annotations

from typing import Any

import yaml

from finray.config.load import build_config
from finray.config.replicas import RESULT, RUN_NAME, from_replicas
from finray.jobspec.spec import JobSpec, to_yaml

_SHARED_GB = 50


def replicas(spec: JobSpec) -> str:
    """The file. Settings that the platform's keys express are not repeated in `cluster`, so there is one place to
    change."""
    machines = spec.machines
    resources: dict[str, Any] = {"memory": spec.memory_gb, "cpu": spec.cpus_per_node}
    if not spec.gpus_per_node:
        resources["cpu"] = max(1, spec.cpus_per_node * spec.nodes // spec.config.cluster.max_workers)
    if spec.gpus_per_node:
        gpu: dict[str, Any] = {"accelerator_count": spec.gpus_per_node}
        resources = {"gpu": gpu | ({"accelerator": machines.gpu_type} if machines.gpu_type else {}), **resources}
    variables = {name: f"<{name}>" for name in machines.secrets}
    others: dict[str, Any] = yaml.safe_load(spec.config_text)
    cluster = dict(others.pop("cluster", {}))
    # In config_map, this name asks for a push.
    environment = {name: text for name, text in cluster.pop("env", {}).items() if name != RESULT}
    plain: dict[str, Any] = {
        # On CPUs a replica is one worker.
        "replicas": spec.nodes if spec.gpus_per_node else spec.config.cluster.max_workers,
        "resources": resources,
        "config_map": {**variables, RUN_NAME: spec.config.run.name, **environment},
        **({"shared_volume": {"size": _SHARED_GB}} if machines.claim else {}),
        **others,
    }
    wanted = build_config(yaml.safe_load(spec.config_text), source=spec.name).cluster.model_dump(mode="json")
    sections, _ = from_replicas(plain, {})
    defaults = build_config(sections, source=spec.name).cluster.model_dump(mode="json")
    rest = {name: value for name, value in wanted.items() if defaults[name] != value}
    if rest:
        plain["cluster"] = rest
    about = (
        "# Made by `finray jobspec --to replicas`. Secrets in <brackets> are the platform's to fill in.\n"
        f"# The job runs: finray train THIS_FILE    (the shared volume is mounted at {machines.shared})\n"
        "# With several replicas it runs on the first one, on a cluster of all: docs/guide/jobs.md\n"
    )
    return about + to_yaml(plain)
