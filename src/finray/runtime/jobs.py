"""Runs as jobs of a Ray cluster's job server: submit, follow, list, stop.

A job carries the config, the named secrets and, if asked for, Python files: data, models and runs must be where the
config says, also as seen from the cluster.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import posixpath
import re
import secrets
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import yaml
from rich.console import Console

from finray.config.paths import with_absolute_paths
from finray.config.redact import NAMED_BY_DATA, holds_secret, is_secret_name, redact_text, tokens_in, variable_in
from finray.config.schema import Config
from finray.errors import ClusterError, ConfigError
from finray.limits import cut
from finray.results import Result, Table
from finray.runtime.token import http_headers, refused, use_token

# Files of a job, in the directory that Ray unpacks for it.
CONFIG, SECRETS, CODE = "config.yaml", "secrets.json", "code"
DEFAULT_ADDRESS = "http://127.0.0.1:8265"
# In total less than the 15 s after which an unresponsive server is an error.
_CONNECT_S, _ANSWER_S = 4.0, 8.0
# A busy or restarted head is silent for less.
_SILENCE_S = 60.0
# Metadata of a job: its run, and a digest of what was sent.
_RUN, _SENT = "finray_run", "finray_sent"
_T = TypeVar("_T")
_ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
# What a job may be called, and errors of Python about answers of another shape.
_IDENTITY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")
_ODD = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError)
# The usual variable name for a value of this form.
_USUAL = {"hf_": "HF_TOKEN", "sk-": "OPENAI_API_KEY", "gh": "GITHUB_TOKEN", "AKIA": "AWS_ACCESS_KEY_ID"}


@dataclass(frozen=True)
class Job:
    """A training job, as the server knows it."""

    id: str  # for `finray jobs logs` and `stop`
    run: str  # directory or URL of the run
    status: str  # pending, running, succeeded, failed or stopped
    started: str | None = None  # start time in UTC; None before
    exit_code: int | None = None  # of `finray train`, once it has ended
    message: str | None = None  # the server's message about it

    @property
    def has_ended(self) -> bool:
        """Whether the job has ended."""
        return self.status.upper() in _ENDED


@dataclass(frozen=True)
class Jobs(Result):
    """All training jobs, newest first."""

    address: str
    jobs: tuple[Job, ...]

    def plain(self) -> dict[str, Any]:
        """As JSON types."""
        return {"address": self.address, "jobs": [asdict(job) for job in self.jobs]}

    def print(self, console: Console) -> None:
        """As a table."""
        if not self.jobs:
            console.print(f"no jobs of finray at {self.address}")
            return
        table = Table(box=None, pad_edge=False)
        for name in ("job", "status", "started (UTC)", "run"):
            table.add_column(name)
        for job in self.jobs:
            table.add_row(job.id, job.status, job.started or "", job.run)
        console.print(table)


def address_of(given: str | None, environ: Mapping[str, str] = os.environ) -> str:
    """The address of a job server: the given one, else that in the environment, else that of this machine."""
    server = given or environ.get("RAY_API_SERVER_ADDRESS")
    if not server and environ.get("RAY_ADDRESS", "").startswith(("http://", "https://")):
        server = environ["RAY_ADDRESS"]
    server = (server or DEFAULT_ADDRESS).rstrip("/")
    return server if re.match(r"https?://", server) else f"http://{server}"


class JobServer:
    """A job server that answers and accepts our token.

    Attributes:
        option: for commands in messages, if an address was given: ` --address ...`.
    """

    option = ""

    def __init__(self, address: str | None = None) -> None:
        """Raises ClusterError: the server there is not Ray's dashboard, or the token is missing or wrong."""
        self.address = address_of(address)
        if address is not None:
            self.option = f" --address {shlex.quote(redact_text(address))}"
        self._require_alive()
        from ray.job_submission import JobSubmissionClient

        # They would speak of packages and of connections, among what the job prints.
        for name in ("dashboard.modules.dashboard_sdk", "dashboard.modules.job.sdk", "_private.runtime_env"):
            logging.getLogger(f"ray.{name}").setLevel(logging.WARNING)
        self._client = JobSubmissionClient(self.address)

    def _internal(self, error: RuntimeError) -> ConnectionError:
        detail = redact_text(str(error))[:200]
        return ConnectionError(f"the job server at {self.address} reports an internal error: {detail}")

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """Ray's client raises a bare RuntimeError for an error of the server, and whatever Python raises for an answer
        that it does not understand."""
        try:
            yield
        except RuntimeError as error:
            raise self._internal(error) from None
        except _ODD as error:
            what = f"answers with something that is not about jobs ({type(error).__name__})"
            raise ConnectionError(f"the job server at {redact_text(self.address)} {what}") from None

    def _require_alive(self, *, again: bool = True) -> None:
        # Ray's own client has no timeout.
        import requests

        url, where = f"{self.address}/api/version", f"--address {redact_text(self.address)}"
        repair = "`finray cluster up` starts a cluster with this machine as its head; or give the address of a head's "
        repair += "dashboard, which it prints, with --address"
        try:
            answer = requests.get(
                url,
                headers=http_headers(),
                timeout=(_CONNECT_S, _ANSWER_S),
                allow_redirects=False,
            )
        except (requests.exceptions.RequestException, ValueError) as error:
            why = "it did not answer in time" if isinstance(error, requests.exceptions.Timeout) else "nobody listens"
            raise ClusterError(f"there is no job server: {why}", where=where, repair=repair) from None
        if answer.status_code in (401, 403):
            if again and use_token():
                self._require_alive(again=False)
                return
            raise refused("the job server", where=where)
        with suppress(ValueError, TypeError):
            if answer.ok and "ray_version" in answer.json():
                return
        raise ClusterError("the server there is not a Ray job server", where=where, repair=repair)

    def submit(
        self,
        config: Config,
        names: tuple[str, ...] = (),
        environ: Mapping[str, str] = os.environ,
        *,
        code: Mapping[str, str] | None = None,
        command: str = "finray submit",
        pause: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> Job:
        """Submit a run; an unfinished job of the same run, config, code and variables is returned instead.

        Args:
            config: of the run.
            names: environment variables that the job gets.
            environ: where their values come from.
            code: Python files that driver and workers can import, by path.
            command: command that continues the run, for the job's message when it is stopped.
            pause: waits for seconds.
            clock: seconds, monotonic.

        Raises:
            ConfigError: the config holds a secret, or a variable is not set.
            ClusterError: an unfinished job of the run has other content; or the cluster has had no agent to start the
                job for a minute.
        """
        require_no_secret(config, environ=environ)
        values = secrets_named(names, environ)
        config = with_absolute_paths(config)
        run = posixpath.join(config.run.output_dir, config.run.name)
        plain = config.model_dump(mode="json", exclude_unset=True)
        plain.setdefault("run", {})["output_dir"] = config.run.output_dir
        # Ray tells a job where its cluster is.
        plain.get("cluster", {}).pop("address", None)
        # Of the variables only the names: a digest of a short value would tell it.
        content = json.dumps([plain, dict(code or {}), sorted(set(names))], sort_keys=True)
        sent = hashlib.sha256(content.encode()).hexdigest()
        if (job := self._at_work(run, sent)) is not None:
            return job
        identity = f"finray-{config.run.name}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
        patience = round(config.checkpoint.grace_seconds) + 60
        with tempfile.TemporaryDirectory(prefix="finray-job-") as folder:
            # Ray caches what it has unpacked by its digest, and the secrets in it are deleted: so each upload is made
            # unique.
            # All but ASCII is escaped: PyYAML's reader takes U+0085 for the end of a line.
            text = f"# {identity}\n{yaml.safe_dump(plain, sort_keys=False)}"
            (Path(folder) / CONFIG).write_text(text, encoding="utf-8")
            (Path(folder) / SECRETS).touch(0o600)
            (Path(folder) / SECRETS).write_text(json.dumps(values), encoding="utf-8")
            for name, python in (code or {}).items():
                (Path(folder) / CODE / name).parent.mkdir(parents=True, exist_ok=True)
                (Path(folder) / CODE / name).write_bytes(python.encode())
            env = {"RAY_JOB_STOP_WAIT_TIME_S": str(patience), "PYTHONUNBUFFERED": "1"}
            env["FINRAY_COMMAND"] = redact_text(command)
            until = clock() + _SILENCE_S
            while True:
                try:
                    self._client.submit_job(
                        entrypoint="python -m finray.cli.job_entry",
                        submission_id=identity,
                        runtime_env={"working_dir": folder, "env_vars": env},
                        metadata={_RUN: run, _SENT: sent},
                    )
                    break
                except RuntimeError as error:
                    # The server of a Ray that has just started answers before its nodes' agents do.
                    if "No available agent" not in str(error):
                        raise self._internal(error) from None
                    if clock() >= until:
                        raise ClusterError(
                            f"no node of the cluster has accepted the job for {_SILENCE_S:.0f} s: its dashboard agents "
                            "do not answer",
                            where=self.address,
                            repair="look at dashboard_agent.log in Ray's log directory; Ray's head needs "
                            "`pip install 'ray[default]'`",
                        ) from None
                    pause(1.0)
        return self.job(identity)

    def _at_work(self, run: str, sent: str) -> Job | None:
        """The unfinished job of a run, if there is one. Raises ClusterError: something else was sent with it."""
        for info in self._infos():
            job = _job(info)
            if job.run != run or job.has_ended:
                continue
            # Jobs of earlier versions do not say what was sent.
            if info.metadata.get(_SENT, sent) != sent:
                raise ClusterError(
                    f"job {job.id} of the run {run} is at work with another config, other code or other variables",
                    where=self.address,
                    repair=f"`finray jobs stop {job.id}{self.option}` ends it with a checkpoint; then submit again; "
                    f"`finray jobs logs {job.id} --follow{self.option}` follows it as it is",
                )
            return job
        return None

    def job(self, identity: str) -> Job:
        """A job by its id.
        Raises ClusterError: there is no such job; OSError: the server does not answer, or answers with an error of
        its own."""
        missing = ClusterError(
            f"there is no job `{cut(identity, 100)}`",
            where=self.address,
            repair=f"`finray jobs list{self.option}` shows all jobs",
        )
        # It becomes a part of a URL: of an empty one, or `..`, the server would answer something else.
        if not _IDENTITY.fullmatch(identity):
            raise missing
        with self._answering():
            try:
                return _job(self._client.get_job_info(identity))
            except RuntimeError as error:
                # Ray's client wraps an answer as `Request failed with status code 404: ...`.
                if "status code 404" not in str(error):
                    raise
            raise missing

    def _infos(self) -> Sequence[Any]:
        """Training jobs as Ray knows them, newest first."""
        with self._answering():
            jobs = self._client.list_jobs()
            infos = [job for job in jobs if job.submission_id and _RUN in (job.metadata or {})]
            return sorted(infos, key=lambda job: job.start_time or 0, reverse=True)

    def list(self) -> tuple[Job, ...]:
        """Training jobs, newest first."""
        infos = self._infos()
        with self._answering():
            return tuple(_job(info) for info in infos)

    def logs(self, identity: str) -> str:
        """Everything that a job has printed, without secrets."""
        self.job(identity)
        return redact_text(self._log(identity))

    def _log(self, identity: str) -> str:
        with self._answering():
            return str(self._client.get_job_logs(identity))

    def follow(
        self,
        identity: str,
        write: Callable[[str], None],
        *,
        pause: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> Job:
        """Write what a job prints until it ends; returns the job in its final state.
        Raises ClusterError: there is no such job, or the server was silent for a minute; the job may continue."""
        import aiohttp

        written, held = 0, ""

        def show(text: str, *, end: bool = False) -> None:
            """Write whole lines: secrets are masked in them."""
            nonlocal held
            lines, mark, held = (held + text).rpartition("\n")
            if end:
                mark, held = mark + held, ""
            if lines + mark:
                write(redact_text(lines + mark))

        def answered(ask: Callable[[], _T]) -> _T:
            """The server's answer; retries for up to a minute while it is silent."""
            until = clock() + _SILENCE_S
            while True:
                try:
                    return ask()
                except (OSError, RuntimeError) as error:
                    if clock() >= until:
                        raise ClusterError(
                            f"the job server has not answered for {_SILENCE_S:.0f} s: {redact_text(str(error))[:200]}",
                            where=self.address,
                            repair=f"the job may still be running; when the server is back: finray jobs logs "
                            f"{identity} --follow{self.option}",
                        ) from None
                    pause(1.0)

        async def tail() -> None:
            nonlocal written
            passed = 0
            async for piece in self._client.tail_job_logs(identity):
                # After a lost connection the log starts from the beginning.
                fresh = piece[max(0, written - passed) :]
                passed += len(piece)
                if fresh:
                    written += len(fresh)
                    show(fresh)

        while not (job := answered(lambda: self.job(identity))).has_ended:
            with suppress(OSError, RuntimeError, TimeoutError, aiohttp.ClientError, *_ODD):
                asyncio.run(tail())
            pause(0.5)
        show(answered(lambda: self._log(identity))[written:], end=True)
        return job

    def stop(self, identity: str) -> Job:
        """Ask a job to end: it saves a checkpoint first."""
        if not self.job(identity).has_ended:
            with self._answering():
                self._client.stop_job(identity)
        return self.job(identity)


def _job(info: Any) -> Job:
    started = (
        None if not info.start_time else f"{datetime.fromtimestamp(info.start_time / 1000, UTC):%Y-%m-%d %H:%M:%S}"
    )
    status = getattr(info.status, "value", str(info.status)).lower()
    run = (info.metadata or {}).get(_RUN, "")
    return Job(info.submission_id, run, status, started, info.driver_exit_code, redact_text(info.message or "") or None)


def require_no_secret(config: Config, *, option: str = "--env", environ: Mapping[str, str] = os.environ) -> None:
    """Check that a config that is sent away holds no secret.

    Args:
        config: what is sent.
        option: the command's option that names variables to take along.
        environ: environment variables; the values of those that are secrets are looked for.

    Raises:
        ConfigError: it holds one; the message says what to use instead.
    """
    problems: list[str] = []

    def look(value: Any, path: str) -> None:
        if isinstance(value, Mapping):
            for key, item in value.items():
                look(item, f"{path}.{key}" if path else str(key))
        elif isinstance(value, list | tuple):
            for number, item in enumerate(value):
                look(item, f"{path}.{number}")
        elif isinstance(value, str) and value:
            name = path.rpartition(".")[2]
            if holds_secret(value, environ=environ) or (
                is_secret_name(name) and not any(f".{field}." in path for field in NAMED_BY_DATA)
            ):
                problems.append(f"{redact_text(path)}: {_without(value, name, option, environ)}")

    look(config.model_dump(mode="json", exclude_unset=True), "")
    if problems:
        raise ConfigError(
            "the config holds a secret, but it is written to files and logs of the cluster", problems=tuple(problems)
        )


def _without(value: str, name: str, option: str, environ: Mapping[str, str]) -> str:
    """What to do instead of a secret in the value of a field."""
    if (variable := variable_in(value, environ)) is not None:
        return f"it contains the value of {variable}: remove it, and add {option} {variable}"
    tokens = tokens_in(value)
    usual = next((usual for start, usual in _USUAL.items() if any(token.startswith(start) for token in tokens)), None)
    if usual is None and is_secret_name(name):
        usual = re.sub(r"\W", "_", name).upper()
    if usual is not None:
        return f"remove it, export {usual}=..., and add {option} {usual}"
    if "://" in value and not tokens:
        return (
            "use an address without a key: a file on the cluster, or s3://... with the variables of its credentials "
            f"given by {option}"
        )
    return "remove it"


def secrets_named(names: tuple[str, ...], environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of these names. Raises ConfigError: one is not set, or was given as NAME=VALUE."""
    for name in names:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ConfigError(
                "give only the name: the value is read from the environment, so that it is on no command line",
                where="--env",
                repair="export it, and write --env NAME",
            )
        if not environ.get(name):
            raise ConfigError(f"{name} is not set here", where=f"--env {name}", repair=f"export {name}=...")
    return {name: environ[name] for name in names}
