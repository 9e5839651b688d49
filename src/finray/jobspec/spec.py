"""The content of every job specification, for any scheduler: machines, files, names of secrets; with checks."""

from __future__ import annotations

import math
import os
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import yaml

from finray.config.load import build_config, preset_names
from finray.config.own_code import own_code
from finray.config.paths import is_template, is_url
from finray.config.redact import holds_secret, holds_token, is_secret_name, redact_text
from finray.config.replicas import legal_name
from finray.config.requests import Option
from finray.config.schema import CheckpointConfig, Config
from finray.errors import ConfigError, did_you_mean
from finray.limits import shown

# The version pinned in constraints.txt, with which images are built.
RAY_VERSION = "2.60.0"
IMAGE = "finray:latest"
# Where containers find the job's config, and the small files that come with it.
MOUNT = "/etc/finray"
# In total. `kubectl apply` keeps what it applied in an annotation of at most 256 KiB, as JSON, with escapes.
_MOST_BYTES = 128 * 2**10
# Until the first step of a job: its workers, the model, the data.
_START_S = 300.0
# Short names, for `--model llama3 --dataset alpaca`.
MODELS = {
    "llama3": "llama3-8b-lora",
    "llama3-8b": "llama3-8b-lora",
    "llama3-70b": "llama3-70b-fsdp",
    "mistral": "mistral-7b-qlora",
    "qwen3": "qwen3-8b-lora",
    "phi3": "phi3-medium-lora",
    "bloomz": "bloomz-zero3",
    "bert": "bert-sst2-lora",
    "codegen": "rust-coder",
    "smollm2": "smollm2-lora",
}
DATASETS: dict[str, dict[str, str]] = {
    "alpaca": {"source": "yahma/alpaca-cleaned"},
    "dolly": {"source": "databricks/databricks-dolly-15k"},
    "gsm8k": {"source": "openai/gsm8k", "subset": "main"},
    "imdb": {"source": "stanfordnlp/imdb"},
    "sst2": {"source": "nyu-mll/glue", "subset": "sst2"},
}
_NAME = re.compile(r"[^a-z0-9]+")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# What options may be, which stand in scripts and files of others: one word, which no shell, YAML or scheduler expands.
_OPTIONS: dict[str, tuple[str, str]] = {
    "image": (r"[A-Za-z0-9][\w.:/@-]*", "the name of an image, such as registry/finray:1.0"),
    "gpu_type": (r"[A-Za-z0-9][\w.-]*", "letters, digits, `.`, `_` and `-`"),
    "queue": (r"[A-Za-z0-9][\w.,-]*", "letters, digits, `.`, `_`, `-`, and `,` between several"),
    "claim": (r"[A-Za-z0-9][\w.-]*", "letters, digits, `.`, `_` and `-`"),
    "shared": (
        r"/[^\x00-\x1f\x7f-\x9f\u2028\u2029:$`\\]*",
        "an absolute path without `:`, `$`, backslash and control characters",
    ),
    "storage": (r"(?!-)[^\s\x00-\x1f\x7f-\x9f\u2028\u2029$&|;'\"`\\<>(){}#]+", "a URL, such as s3://bucket/runs"),
    "hosts": (r"[A-Za-z0-9\[:][\w.:%\]-]*", "a host name or an address"),
    "user": (r"[A-Za-z_][\w.@-]*", "the name of a user"),
    "secret": (r"[A-Za-z0-9][\w.-]*", "letters, digits, `.`, `_` and `-`"),
}


@dataclass(frozen=True)
class Machines:
    """What the user requests in addition to the config: the options of ``finray jobspec``; None is derived from it."""

    nodes: Annotated[int | None, Option("Number of machines with workers.", min=1, max=100_000)] = None
    gpus_per_node: Annotated[int | None, Option("GPUs of each machine.", min=0, max=1024)] = None
    cpus_per_node: Annotated[int | None, Option("CPUs of each machine.", min=1, max=100_000)] = None
    memory_gb: Annotated[
        int | None, Option("Memory of each machine, in GB.", flags=("--memory",), min=1, max=1_000_000)
    ] = None
    min_nodes: Annotated[
        int | None, Option("Fewest machines to run on, where workers may come and go.", min=1, max=100_000)
    ] = None
    max_nodes: Annotated[int | None, Option("Most machines.", min=1, max=100_000)] = None
    gpu_type: Annotated[str | None, Option("Kind of GPU, as the scheduler calls it.")] = None
    image: Annotated[str, Option("Container image.")] = IMAGE
    shared: Annotated[str, Option("Directory that all machines share.")] = "/shared"
    claim: Annotated[
        str | None,
        Option(
            "rayjob: PersistentVolumeClaim to mount there; `none` for none.",
            parse=lambda claim: None if claim == "none" else claim,
        ),
    ] = "finray-shared"
    storage: Annotated[str | None, Option("URL for runs and prepared data, such as s3://bucket/runs.")] = None
    queue: Annotated[str | None, Option("Kueue's local queue, or Slurm's partition.")] = None
    hours: Annotated[float | None, Option("Time limit.", min=0.01, max=87_600)] = None
    secrets: Annotated[
        tuple[str, ...],
        Option("Name of an environment variable that holds a secret; may be repeated.", flags=("--secret",)),
    ] = ("HF_TOKEN",)
    # The Kubernetes Secret that holds them.
    secret: str = "finray-secrets"
    hosts: Annotated[
        tuple[str, ...],
        Option("ray-cluster: address of a machine, the head first; may be repeated.", flags=("--host",)),
    ] = ()
    user: Annotated[str, Option("ray-cluster: user name to log in with.")] = "ubuntu"


@dataclass(frozen=True)
class JobSpec:
    """A run and its machines; the input of every template.

    Attributes:
        name: of the job: lower case, digits and hyphens.
        config: of the run.
        machines: the request.
        nodes: number of machines with workers.
        min_nodes: minimum.
        max_nodes: maximum.
        gpus_per_node: 0 for CPUs only.
        cpus_per_node: CPUs per machine.
        memory_gb: memory per machine.
        files: small files of this machine that come with the config, by their name in :data:`MOUNT`.
        notes: things for the user to check.
    """

    name: str
    config: Config
    machines: Machines
    nodes: int
    min_nodes: int
    max_nodes: int
    gpus_per_node: int
    cpus_per_node: int
    memory_gb: int
    files: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def run_dir(self) -> str:
        """The run directory, on the shared volume."""
        return posixpath.join(self.output_dir, self.config.run.name)

    @property
    def output_dir(self) -> str:
        """``run.output_dir`` of the job: a URL, or a directory; a relative one is on the shared volume."""
        place = (self.machines.storage or self.config.run.output_dir).removeprefix("file://")
        # What `~` is depends on the machine.
        if is_url(place) or place.startswith("~"):
            return place
        return posixpath.normpath(posixpath.join(self.machines.shared, place))

    @property
    def environment(self) -> dict[str, str]:
        """Variables of all containers."""
        code = any(name.endswith(".py") for name in self.files)
        return {"HF_HOME": f"{self.machines.shared}/huggingface", **({"PYTHONPATH": MOUNT} if code else {})}

    @property
    def config_text(self) -> str:
        """The job's config file: the fields that were set, with directories on the shared volume."""
        plain = self.config.model_dump(mode="json", exclude_unset=True)
        plain.setdefault("run", {})["output_dir"] = self.output_dir
        # The scheduler sets the address of the cluster: RAY_ADDRESS.
        plain.get("cluster", {}).pop("address", None)
        return to_yaml(plain)


def overrides_for(model: str | None, dataset: str | None) -> tuple[str | None, list[str]]:
    """The preset and the overrides for `--model llama3 --dataset alpaca`.
    Raises ConfigError: there is no preset for this model."""
    preset = None
    if model is not None:
        preset = MODELS.get(model.lower(), model)
        if preset not in preset_names():
            names = [*MODELS, *preset_names()]
            raise ConfigError(
                f"there is no preset for `{model}`{did_you_mean(model, names)}",
                where="--model",
                repair=f"use one of {', '.join(names)}, or give a config file with model.name",
            )
    fields = DATASETS.get((dataset or "").lower(), {"source": dataset} if dataset else {})
    changes = [f"data.{name}={value}" for name, value in fields.items()]
    if model is not None:
        named = "-".join(legal_name(text) for text in (model, dataset) if text)
        changes.append(f"run.name={named[:60]}")
    return preset, changes


def make_spec(config: Config, machines: Machines, *, takes_files: bool = False) -> JobSpec:
    """Derive the machines of a run.

    Args:
        config: of the run.
        machines: the request.
        takes_files: the job can take along small text files, in :data:`MOUNT`.

    Raises:
        ConfigError: impossible request: GPUs that no worker would use, or too few; too few machines for the fewest
            workers; a secret given by value; runs that would stay in a container.
    """
    _require_words(machines)
    fewest, workers = config.cluster.min_workers, config.cluster.max_workers
    nodes, each = _machines_of(config, machines)
    sharded = config.parallel.shard_size
    if sharded is not None and workers % sharded:
        raise ConfigError(
            f"parallel.shard_size {sharded} does not divide {workers} workers", where="parallel.shard_size"
        )
    for name in machines.secrets:
        if not _VARIABLE.fullmatch(name) or holds_secret(name):
            raise ConfigError(
                "give the name of an environment variable, not the secret itself",
                where="--secret",
                repair="name the variable, such as --secret HF_TOKEN; its value is read from the environment or a "
                "Secret",
            )
    on_each = math.ceil(workers / nodes)
    cpus = machines.cpus_per_node or on_each * (config.cluster.cpus_per_worker or (8 if each else 4))
    if cpus < on_each * (config.cluster.cpus_per_worker or 1):
        raise ConfigError(
            f"{on_each} workers on each machine need {on_each * (config.cluster.cpus_per_worker or 1)} CPUs, but it "
            f"has {cpus}",
            where="--cpus-per-node",
            repair="ask for more, or lower cluster.cpus_per_worker",
        )
    memory = machines.memory_gb or max(16, 64 * (each or 0))
    low = machines.min_nodes or math.ceil(fewest / on_each)
    # A machine may have GPUs left over.
    fit = min(each * _shares(config), cpus // (config.cluster.cpus_per_worker or 1)) if each else on_each
    if low < (needed := math.ceil(fewest / fit)):
        raise ConfigError(
            f"{fewest} workers need at least {needed} machines: each has room for {fit}",
            where="--min-nodes",
            repair=f"ask for {needed} or more, or let the run begin with fewer workers: cluster.num_workers="
            f"{{min: {low * fit}, max: {workers}}}",
        )
    high = machines.max_nodes or nodes
    if not low <= nodes <= high:
        raise ConfigError(
            f"{nodes} nodes are not between {low} and {high}", where="--min-nodes", repair="change the bounds"
        )
    if high > nodes:
        raise ConfigError(
            f"the run has at most {workers} workers, which fit on {nodes} nodes: {high} nodes would not all be used",
            where="--max-nodes",
            repair="set cluster.num_workers to more, or leave the option out",
        )
    name = _NAME.sub("-", config.run.name.lower()).strip("-") or "finray"
    # KubeRay makes a Service of it, whose name begins with a letter.
    name = (name if name[0].isalpha() else f"run-{name}")[:40].strip("-")
    config, files = _with_files(config, machines) if takes_files else (config, {})
    notes = _notes(config, machines, files)
    spec = JobSpec(name, config, machines, nodes, low, high, each or 0, cpus, memory, files)
    if not is_url(spec.output_dir) and not _is_in(spec.output_dir, machines.shared):
        # The forms that take files along are those of containers, which have nothing else of their host.
        if takes_files:
            raise ConfigError(
                f"checkpoints would stay in the container: only {machines.shared} is mounted there",
                where="--storage" if machines.storage else f"run.output_dir={config.run.output_dir}",
                repair=f"name a relative directory, or one in {machines.shared} (--shared), or a URL",
            )
        notes.append(
            f"run.output_dir {spec.output_dir} is not in {machines.shared}: all machines must share it at this path"
        )
    return replace(spec, notes=tuple(notes))


def _require_words(machines: Machines) -> None:
    """Check that no option becomes a line or a word of its own in what is written.
    Raises ConfigError: an option would."""
    for name, (form, described) in _OPTIONS.items():
        value = getattr(machines, name)
        for text in value if isinstance(value, tuple) else [] if value is None else [value]:
            where = f"--{name.removesuffix('s').replace('_', '-')}"
            if holds_secret(text):
                raise ConfigError(
                    "the option holds a secret, which would be written to the job's file",
                    where=where,
                    repair="export it, and name its variable with --secret",
                )
            if not re.fullmatch(form, text, re.ASCII) or len(text) > 1000:
                raise ConfigError(
                    f"{shown(redact_text(text))} cannot stand in a job specification",
                    where=where,
                    repair=f"give {described}",
                )
    if machines.hours is not None and not 0 < machines.hours <= 87_600:
        raise ConfigError(f"{machines.hours} is no time limit", where="--hours", repair="give a number of hours")


def _machines_of(config: Config, machines: Machines) -> tuple[int, int | None]:
    """Number of machines, and of GPUs on each; None without GPUs.
    Raises ConfigError: GPUs that no worker would use, or too few."""
    workers = config.cluster.max_workers
    wants_gpu = config.cluster.use_gpu
    # `auto` requests GPUs if the user gave a number.
    gpu = wants_gpu is True or (wants_gpu == "auto" and bool(machines.gpus_per_node))
    total = config.cluster.max_gpus if gpu else 0
    nodes, each = machines.nodes, machines.gpus_per_node
    if each and not gpu:
        raise ConfigError(
            f"{each} GPUs on each machine, but with cluster.use_gpu: false no worker uses one",
            where="--gpus-per-node",
            repair="set cluster.use_gpu to true, or leave the option out",
        )
    if nodes is None:
        nodes = math.ceil(total / (each or 8)) if gpu else 1
    if gpu and each is None:
        # Alike on all machines; some may be left over on the last.
        each = math.ceil(total / nodes)
        if nodes > math.ceil(total / each):
            raise ConfigError(
                f"{workers} workers use {total} GPUs, and {nodes} machines would not all be used",
                where="--nodes",
                repair=f"ask for {math.ceil(total / each)} or fewer, or set cluster.num_workers to more",
            )
    elif gpu and each and nodes * each > total:
        raise ConfigError(
            f"{nodes} x {each} are {nodes * each} GPUs, and {workers} worker{'s' if workers > 1 else ''} of "
            f"parallel.strategy {config.parallel.strategy} use {total}: the others would be idle",
            where="--gpus-per-node",
            repair=f"set cluster.num_workers to {nodes * each * _shares(config)}, or ask for {total} GPUs",
        )
    if gpu and each and nodes * each < total:
        raise ConfigError(
            f"{workers} workers use {total} GPUs, and {nodes} x {each} are {nodes * each}",
            where="--nodes",
            repair=f"ask for {math.ceil(total / each)} nodes, or set cluster.num_workers to "
            f"{nodes * each * _shares(config)}",
        )
    return nodes, each


def _shares(config: Config) -> int:
    """How many workers share a GPU; Ray counts in ten-thousandths."""
    return 10_000 // round(config.cluster.gpus_per_worker * 10_000)


def _with_files(config: Config, machines: Machines) -> tuple[Config, dict[str, str]]:
    """The config with small text files moved to :data:`MOUNT`, and these files by name: data, and modules of the
    user's own that are one file."""
    plain = config.model_dump(mode="json", exclude_unset=True)
    files: dict[str, str] = {}

    def taken(path: Path, name: str) -> bool:
        try:
            if path.stat().st_size > _MOST_BYTES:
                return False
            # Not `read_text`, which would replace the ends of lines.
            text = path.read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError):
            return False
        total = sum(len(content.encode()) for content in (text, *files.values()))
        if "\0" in text or holds_token(text, environ=os.environ) or total > _MOST_BYTES or name in files:
            return False
        files[name] = text
        return True

    data = plain.get("data", {})
    places = [(data, "source"), (data, "eval_source"), *((entry, "source") for entry in data.get("mix", []))]
    for place, key in places:
        value = place.get(key)
        if value and not _is_in(value, machines.shared):
            name = f"{len(files)}-{re.sub(r'[^A-Za-z0-9._-]+', '-', Path(value).name)}"
            if taken(Path(value).expanduser(), name):
                place[key] = f"{MOUNT}/{name}"
    for _, path in own_code(config):
        module = path.partition(":")[0]
        if f"{module}.py" not in files:
            taken(Path(f"{module}.py"), f"{module}.py")
    return build_config(plain, source="the config of the job"), files


def _notes(config: Config, machines: Machines, taken: Mapping[str, str]) -> list[str]:
    notes = [f"{name} is part of the job" + ", what it imports is not" * name.endswith(".py") for name in taken]
    there = (machines.shared, MOUNT)
    sources = [config.data.source, config.data.eval_source, *(entry.source for entry in config.data.mix)]
    for source in sources:
        if source and not is_url(source) and not _is_in(source, *there) and _is_file(source):
            notes.append(f"data.source {source} is a file: it must be at this path on every machine")
    for name, model in (("model.name", config.model.name), ("preference.reference", config.preference.reference)):
        if model.startswith((".", "/")) and not _is_in(model, machines.shared):
            notes.append(f"{name} {model} is a directory: it must be at this path on every machine")
    scoring, given, template = config.evaluation.scoring, config.parallel.deepspeed_config, config.model.chat_template
    files = {
        "parallel.deepspeed_config": given if isinstance(given, str) else None,
        "model.chat_template": None if is_template(template or "") else template,
        "adapter.start_from": config.adapter.start_from,
        "evaluation.scoring.encoder": scoring.encoder if scoring and _is_file(scoring.encoder or "") else None,
    }
    for name, path in files.items():
        if path and not is_url(path) and not _is_in(path, *there):
            notes.append(f"{name} {path} is not part of the job: it must be at this path on every machine")
    notes += [
        f"{name} {code} is your own code: its module must be installed on every machine, or be in PYTHONPATH there"
        for name, code in own_code(config)
        if f"{code.partition(':')[0]}.py" not in taken
    ]
    for name in config.cluster.env:
        if is_secret_name(name):
            notes.append(f"cluster.env.{name} is a secret: name it with --secret")
    if config.cluster.use_gpu == "auto" and machines.gpus_per_node is None:
        notes.append("no GPU is requested: cluster.use_gpu is auto; set it to true, or give --gpus-per-node")
    if config.cluster.address is not None:
        notes.append("cluster.address is left out: the job has a cluster of its own")
    return notes


def _is_in(path: str, *folders: str) -> bool:
    """Whether a path is one of these directories, or inside."""
    plain = PurePosixPath(posixpath.normpath(path.removeprefix("file://")))
    return any(plain.is_relative_to(folder) for folder in folders)


def _is_file(source: str) -> bool:
    """Whether a source can only be a path, not a dataset on the Hub."""
    return source.startswith((".", "/", "~", "file://")) or bool(
        re.search(r"\.(jsonl?|parquet|csv|tsv|txt|arrow)(\.gz)?$", source)
    )


def limit_notes(
    checkpoint: CheckpointConfig, hours: float | None, seconds_per_step: float | None, *, is_given: bool = True
) -> list[str]:
    """Messages about a job's time limit: whether it ends before the first checkpoint, if that is known.

    Args:
        checkpoint: when checkpoints are saved.
        hours: the time limit; None if there is none.
        seconds_per_step: measured or estimated; None if unknown.
        is_given: whether the user has given the limit, and not the scheduler's default.
    """
    if hours is None:
        return []
    if checkpoint.every_epochs is not None:
        return [
            "the time between checkpoints is unknown with checkpoint.every_epochs: make sure that it fits into the "
            "time limit"
        ]
    if seconds_per_step is None:
        unknown = (
            f"the time limit was not compared with the {checkpoint.every_steps} steps between checkpoints, because the "
            "time of a step is unknown: --step-seconds gives it, and --gpu estimates it"
        )
        return [unknown] if is_given else []
    interval, limit = seconds_per_step * checkpoint.every_steps, hours * 3600
    if interval + _START_S <= limit:
        return []
    fit = int((limit - _START_S) / seconds_per_step)
    repair = f"set checkpoint.every_steps to {fit} or less" if fit >= 1 else "ask for more time"
    return [
        f"warning: the time limit of {_clock(limit)} is shorter than the {_clock(interval)} between checkpoints "
        f"({checkpoint.every_steps} steps of {seconds_per_step:.1f} s, after some {_clock(_START_S)} to start); "
        f"{repair}, or a job that is ended by its limit without a signal starts over each time"
    ]


def _clock(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02} min"


class _Dumper(yaml.SafeDumper):
    """Without aliases, and with multi-line text as literal blocks where every reader finds the same text in them."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


def _represented(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # PyYAML writes these as they are, and a reader takes them for the end of a line. In double quotes they are escaped.
    is_quoted = any(mark in text for mark in "\x85\u2028\u2029")
    style = '"' if is_quoted else "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represented)


def to_yaml(*documents: Any) -> str:
    """YAML documents, readable for people."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
