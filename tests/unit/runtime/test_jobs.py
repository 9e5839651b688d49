"""What is refused before a job is sent, and where it would be sent to."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import yaml

from finray.config.load import load_config
from finray.errors import ClusterError, ConfigError
from finray.runtime.jobs import (
    CODE,
    CONFIG,
    DEFAULT_ADDRESS,
    SECRETS,
    Job,
    JobServer,
    address_of,
    require_no_secret,
    secrets_named,
)


@pytest.mark.parametrize(
    ("changes", "repair"),
    [
        ({"data.source": "https://me:hf_abcdefghijklmnopqrstuv@host/x"}, "--env HF_TOKEN"),
        ({"data.system": "use AKIAABCDEFGHIJKLMNOP"}, "--env AWS_ACCESS_KEY_ID"),
        # The beginning of another word says nothing of the token.
        ({"data.system": "the neighbours of disk-1 use hf_abcdefghijklmnopqrstuv"}, "--env HF_TOKEN"),
        # No variable would be read for these, and none is known for a token of an unknown service.
        ({"data.source": "https://neighbours.example.com/disk-1.jsonl?token=anything"}, "an address without a key"),
        ({"data.source": "s3://bucket/rows.jsonl?x=1&X-Amz-Signature=anything"}, "an address without a key"),
        ({"data.source": "https://me:anything@example.com/hf_rows.jsonl"}, "an address without a key"),
        ({"data.system": "xoxb-1234567890-abc, of the neighbours"}, "data.system: remove it"),
    ],
)
def test_a_secret_in_a_config_is_refused_with_the_name_to_use(changes: dict[str, Any], repair: str) -> None:
    with pytest.raises(ConfigError) as caught:
        require_no_secret(load_config("smollm2-lora", changes))
    said = str(caught.value)
    assert repair in said
    assert next(iter(changes)) in said
    assert ("export" in said) == ("--env" in repair)
    for value in ("hf_abc", "anything", "AKIAABC", "xoxb-"):
        assert value not in said


def test_the_value_of_a_secret_variable_of_this_shell_is_refused() -> None:
    environ = {
        "MY_JOB_TOKEN": "s3cr3t-value",
        "COLOUR": "gr33n-and-more",
        "DB_PASSWORD": "model",
        "A_TOKEN": "/a/path/1",
    }
    for field in ("data.system", "cluster.env", "data.field_mapping"):
        for place in ("use {}!", "{}"):
            text = place.format(environ["MY_JOB_TOKEN"])
            config = load_config("smollm2-lora", {field: text if field == "data.system" else {"prompt": text}})
            with pytest.raises(ConfigError) as caught:
                require_no_secret(config, environ=environ)
            assert f"{field}" in str(caught.value)
            assert "remove it, and add --env MY_JOB_TOKEN" in str(caught.value)
            assert "s3cr3t" not in str(caught.value)
    require_no_secret(load_config("smollm2-lora", {"data.system": "gr33n-more model /a/path/1"}), environ=environ)
    require_no_secret(load_config("smollm2-lora", {"data.field_mapping": {"prompt": "token"}}))
    # So without the environment, it would have been sent.
    require_no_secret(load_config("smollm2-lora", {"data.system": "use s3cr3t-value"}), environ={})


@pytest.mark.parametrize("identity", ["", "..", "a/b", "../x", "a b", "a\nb", "\x1b[31m", "a" * 5000, "a?b", "é"])
def test_what_can_be_no_job_is_none_and_the_server_is_not_asked(server: JobServer, identity: str) -> None:
    server._client = None
    for ask in (server.job, server.logs, server.stop, lambda name: server.follow(name, print)):
        with pytest.raises(ClusterError, match="there is no job") as caught:
            ask(identity)
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (TypeError("JobDetails() argument after ** must be a mapping, not list"), "something that is not about jobs"),
        (json.JSONDecodeError("Expecting value", "<html>", 0), "something that is not about jobs"),
        (KeyError("status"), "something that is not about jobs"),
        (AttributeError("'str' object has no attribute 'get'"), "something that is not about jobs"),
        (RuntimeError("Request failed with status code 500: oh"), "http://head:8265 reports an internal error: .*500"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_odd_answer_of_the_server_is_no_defect_of_finrays(server: JobServer, error: Exception, message: str) -> None:
    client: Any = server._client
    client.get_job_info = client.list_jobs = client.get_job_logs = Mock(side_effect=error)
    for ask in (lambda: server.job("a"), server.list, lambda: server.logs("a"), lambda: server.stop("a")):
        with pytest.raises(ConnectionError, match=message):
            ask()
    # Records of which a field is of another type.
    client.list_jobs = lambda: [SimpleNamespace(submission_id="a", metadata={"finray_run": "x"}, start_time="soon")]
    with pytest.raises(ConnectionError):
        server.list()


def test_a_log_is_shown_without_secrets(server: JobServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "very-secret-1")
    client: Any = server._client
    identity = server.submit(load_config("smollm2-lora", {"run.output_dir": "/runs"})).id
    client.connections = [["the token is very-", "secret-1\nnext\n"]]
    client.log = "the token is very-secret-1\nnext\nend hf_" + "a" * 30
    said: list[str] = []
    server.follow(identity, said.append, pause=lambda seconds: None)
    assert "".join(said) == server.logs(identity) == "the token is ***\nnext\nend ***"


def test_secrets_are_named_and_come_from_the_environment() -> None:
    assert secrets_named(("A",), {"A": "x", "B": "y"}) == {"A": "x"}
    with pytest.raises(ConfigError, match="B is not set here"):
        secrets_named(("B",), {"A": "x"})
    with pytest.raises(ConfigError, match="on no command line") as caught:
        secrets_named(("A=very-secret",), {})
    assert "very-secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "environ", "expected"),
    [
        (None, {}, DEFAULT_ADDRESS),
        ("head:8265", {}, "http://head:8265"),
        ("https://head/", {"RAY_API_SERVER_ADDRESS": "http://other"}, "https://head"),
        (None, {"RAY_API_SERVER_ADDRESS": "http://a:1", "RAY_ADDRESS": "http://b:2"}, "http://a:1"),
        (None, {"RAY_ADDRESS": "http://b:2"}, "http://b:2"),
        # That of a cluster, and of no job server.
        (None, {"RAY_ADDRESS": "10.0.0.1:6379"}, DEFAULT_ADDRESS),
    ],
)
def test_the_address_of_the_server(given: str | None, environ: dict[str, str], expected: str) -> None:
    assert address_of(given, environ) == expected


class Client:
    """What Ray's client is asked, and what it answers: a log in pieces, over connections that break."""

    def __init__(self) -> None:
        self.jobs: dict[str, SimpleNamespace] = {}
        self.sent: list[dict[str, Any]] = []
        self.files: list[dict[str, str]] = []
        self.connections: list[list[str]] = []
        self.log = ""
        # What it says before it is itself again.
        self.answers: list[Exception] = []
        self.refusals: list[Exception] = []

    def list_jobs(self) -> list[SimpleNamespace]:
        return list(self.jobs.values())

    def submit_job(self, **named: Any) -> None:
        if self.refusals:
            raise self.refusals.pop(0)
        folder = Path(named["runtime_env"]["working_dir"])
        self.files.append({file.name: file.read_text() for file in folder.iterdir() if file.is_file()})
        self.sent.append(named)
        self.jobs[named["submission_id"]] = SimpleNamespace(
            submission_id=named["submission_id"],
            metadata=named["metadata"],
            status="RUNNING",
            start_time=None,
            driver_exit_code=None,
            message=None,
        )

    def get_job_info(self, identity: str) -> SimpleNamespace:
        if self.answers:
            raise self.answers.pop(0)
        if identity not in self.jobs:
            raise RuntimeError(f"Request failed with status code 404: Job {identity} does not exist.")
        return self.jobs[identity]

    def get_job_logs(self, identity: str) -> str:
        return self.log

    async def tail_job_logs(self, identity: str) -> AsyncIterator[str]:
        for piece in self.connections.pop(0):
            yield piece
        if not self.connections:
            self.jobs[identity].status = "SUCCEEDED"
        raise OSError("the connection is lost")


@pytest.fixture
def server() -> JobServer:
    found = JobServer.__new__(JobServer)
    found.address, found._client = "http://head:8265", Client()
    return found


def test_the_config_and_the_secrets_are_sent_and_no_secret_is_in_the_environment_of_the_job(
    server: JobServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").touch()
    client: Any = server._client
    template = "{text}\n\u00e9\x85\u2028\n"
    changes = {"data.source": "rows.jsonl", "cluster.address": "10.0.0.1:6379", "data.input_template": template}
    config = load_config("smollm2-lora", {**changes, "data.output_template": "x"})
    variables = ("MY_TOKEN",), {"MY_TOKEN": "very-secret", "OTHER": "x"}
    job = server.submit(config, *variables)
    (sent,), (files,) = client.sent, client.files
    assert json.loads(files[SECRETS]) == {"MY_TOKEN": "very-secret"}
    assert "very-secret" not in files[CONFIG] + json.dumps({**sent, "runtime_env": sent["runtime_env"]["env_vars"]})
    assert not Path(sent["runtime_env"]["working_dir"]).exists()
    # Paths of this machine, and no address: Ray gives it to a job.
    assert f"source: {Path.cwd()}/rows.jsonl" in files[CONFIG]
    assert "10.0.0.1" not in files[CONFIG]
    assert yaml.safe_load(files[CONFIG])["data"]["input_template"] == template
    assert job.run == f"{Path.cwd()}/runs/run"
    # A job of the same run that is at work is found; one that has ended is continued by another.
    assert server.submit(config, *variables).id == job.id
    client.jobs[job.id].status = "STOPPED"
    assert server.submit(config, *variables).id != job.id
    # What Ray keeps by its digest is never the same: the secrets in it are deleted.
    assert client.files[0][CONFIG] != client.files[1][CONFIG]


@pytest.mark.parametrize(
    ("changes", "names", "code"),
    [
        ({"train.learning_rate": 0.5}, ("MY_TOKEN",), {"a.py": "1"}),
        ({}, (), {"a.py": "1"}),
        ({}, ("MY_TOKEN",), {"a.py": "2"}),
        ({}, ("MY_TOKEN",), None),
    ],
)
def test_a_running_job_of_other_content_is_not_taken_for_the_submitted_one(
    server: JobServer, changes: dict[str, Any], names: tuple[str, ...], code: dict[str, str] | None
) -> None:
    client: Any = server._client
    server.option = " --address head"
    base, environ = {"run.output_dir": "/runs"}, {"MY_TOKEN": "very-secret"}
    job = server.submit(load_config("smollm2-lora", base), ("MY_TOKEN",), environ, code={"a.py": "1"})
    # Another value of a variable is no other job: nothing about values leaves the file that is deleted.
    same = server.submit(load_config("smollm2-lora", base), ("MY_TOKEN",), {"MY_TOKEN": "x"}, code={"a.py": "1"})
    assert same.id == job.id
    with pytest.raises(ClusterError, match="with another config, other code or other variables") as caught:
        server.submit(load_config("smollm2-lora", {**base, **changes}), names, environ, code=code)
    assert f"`finray jobs stop {job.id} --address head` ends it with a checkpoint; then submit again" in str(
        caught.value
    )
    assert len(client.sent) == 1
    # A job of an earlier version says nothing of its content, and is followed.
    del client.jobs[job.id].metadata["finray_sent"]
    assert server.submit(load_config("smollm2-lora", {**base, **changes}), names, environ, code=code).id == job.id


def test_a_log_is_followed_over_connections_that_break(server: JobServer) -> None:
    client: Any = server._client
    identity = server.submit(load_config("smollm2-lora", {"run.output_dir": "/runs"})).id
    client.connections = [["one\n", "tw"], [], ["one\ntwo\n", "three\n"]]
    client.log = "one\ntwo\nthree\nfour\n"
    said: list[str] = []
    job = server.follow(identity, said.append, pause=lambda seconds: None)
    assert job.status == "succeeded"
    assert "".join(said) == client.log


SILENT = (
    ConnectionError("Failed to connect to Ray at address: x"),
    RuntimeError("Request failed with status code 503: "),
)


def test_a_head_that_is_silent_for_a_moment_does_not_end_what_follows_a_job(server: JobServer) -> None:
    client: Any = server._client
    identity = server.submit(load_config("smollm2-lora", {"run.output_dir": "/runs"})).id
    client.connections, client.log = [["one\n"]], "one\n"
    client.answers = [*SILENT, *SILENT]
    said: list[str] = []
    quick: dict[str, Any] = {"pause": lambda seconds: None, "clock": lambda: 0.0}
    job = server.follow(identity, said.append, **quick)
    assert (job.status, "".join(said)) == ("succeeded", "one\n")
    # One that stays silent is an error, which says that the job may continue, and how to follow it.
    client.jobs[identity].status = "RUNNING"
    client.answers = [SILENT[0]] * 100
    server.option = " --address http://head:8265"
    times = iter(range(0, 1000, 10))
    with pytest.raises(ClusterError, match=r"not answered for 60 s(?s:.*)the job may still be running") as caught:
        server.follow(identity, said.append, pause=lambda seconds: None, clock=lambda: next(times))
    assert f"finray jobs logs {identity} --follow --address http://head:8265" in str(caught.value.repair)
    # There is no waiting for a job that is not there.
    client.answers = []
    with pytest.raises(ClusterError, match="there is no job `other`") as caught:
        server.follow("other", said.append, **quick)
    assert caught.value.repair == "`finray jobs list --address http://head:8265` shows all jobs"


@pytest.mark.parametrize(("status", "code"), [("SUCCEEDED", 0), ("FAILED", 3), ("STOPPED", 143)])
def test_a_job_that_is_followed_for_a_program_is_one_document_at_its_end_and_has_its_exit_code(
    server: JobServer, monkeypatch: pytest.MonkeyPatch, status: str, code: int
) -> None:
    from finray.cli import jobs
    from tests.support.runs import finray

    client: Any = server._client
    identity = server.submit(load_config("smollm2-lora", {"run.output_dir": "/runs"})).id
    client.log = "one\ntwo\n"

    async def tail(identity: str) -> AsyncIterator[str]:
        client.jobs[identity].status, client.jobs[identity].driver_exit_code = status, code
        yield "one\n"

    client.tail_job_logs = tail
    monkeypatch.setattr(jobs, "JobServer", lambda address: server)
    found, out, _ = finray("jobs", "logs", identity, "--follow", "--json")
    told = json.loads(out)
    assert (found, told["job"], told["logs"]) == (code, identity, client.log)
    assert (told["status"], told["exit_code"]) == (status.lower(), code)


def test_a_job_is_sent_again_until_a_cluster_that_has_just_started_takes_it(server: JobServer) -> None:
    client: Any = server._client
    config = load_config("smollm2-lora", {"run.output_dir": "/runs"})
    no_agent = "Request failed with status code 500: No available agent to submit job, please try again later.."
    client.refusals = [RuntimeError(no_agent), RuntimeError(no_agent)]
    waited: list[float] = []
    assert server.submit(config, pause=waited.append, clock=lambda: 0.0).status == "running"
    assert (len(waited), len(client.sent)) == (2, 1)
    # One that takes none is an error, and so is any other answer, at once.
    client.jobs.clear()
    client.refusals = [RuntimeError(no_agent)] * 100
    times = iter(range(0, 1000, 10))
    with pytest.raises(ClusterError, match="no node of the cluster has accepted the job for 60 s"):
        server.submit(config, pause=waited.append, clock=lambda: next(times))
    client.refusals = [RuntimeError("Request failed with status code 500: other")] * 2
    with pytest.raises(ConnectionError, match=r"reports an internal error: .*other"):
        server.submit(config, pause=waited.append, clock=lambda: 0.0)
    assert len(client.refusals) == 1


@pytest.mark.parametrize("has_code", [False, True])
def test_a_job_runs_its_config_and_its_workers_get_its_code_and_no_secret(
    has_code: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray unpacks the directory of a job wherever it has workers, unless the driver of the job says otherwise."""
    from finray.cli import job_entry, start

    (tmp_path / SECRETS).write_text(json.dumps({"FINRAY_TEST_SECRET": "s3cret"}))
    code = tmp_path / CODE
    if has_code:
        code.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FINRAY_TEST_SECRET", "")
    given = {"runtime_env": {"working_dir": "gcs://pkg.zip", "env_vars": {"A": "b"}}, "metadata": {"x": "y"}}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps(given))
    monkeypatch.setattr("sys.argv", ["entry"])
    seen: list[Any] = []
    monkeypatch.setattr(
        start, "main", lambda: seen.append((sys.argv, Path.cwd(), dict(os.environ), (tmp_path / SECRETS).exists()))
    )
    job_entry.main()
    ((argv, cwd, environ, is_there),) = seen
    assert argv == ["finray", "train", str(tmp_path / CONFIG)]
    assert cwd == (code if has_code else tmp_path)
    assert environ["FINRAY_TEST_SECRET"] == "s3cret"
    assert not is_there
    folder = {"working_dir": str(code)} if has_code else {}
    expected = {"runtime_env": {"env_vars": {"A": "b"}, **folder}, "metadata": {"x": "y"}}
    assert json.loads(environ["RAY_JOB_CONFIG_JSON_ENV_VAR"]) == expected


def submitting(monkeypatch: pytest.MonkeyPatch, see: Callable[[Any, Any], object]) -> None:
    """A job server that takes every job."""
    from finray.cli import jobs

    def submit(self: JobServer, config: object, names: object, *, code: object, command: str) -> Any:
        see(config, code)
        return Job("finray-1", "/runs/run", "running")

    monkeypatch.setattr(jobs.JobServer, "__init__", lambda self, address: None)
    monkeypatch.setattr(jobs.JobServer, "submit", submit)


def test_a_chat_template_and_deepspeeds_json_are_sent_with_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.support.runs import finray, write_config

    (tmp_path / "chat.jinja").write_text("{% for m in messages %}\n{{ m }}{% endfor %}\n")
    (tmp_path / "zero.json").write_text('{"zero_optimization": {"stage": 3}}')
    config = {"model": {"name": "m", "chat_template": "chat.jinja"}, "data": {"source": "d"}}
    config["parallel"] = {"strategy": "deepspeed", "deepspeed_config": "zero.json"}
    write_config(config, tmp_path / "run.yaml")
    monkeypatch.chdir(tmp_path)
    sent: list[Any] = []
    submitting(monkeypatch, lambda config, code: sent.append(config))
    assert finray("submit", "run.yaml", "--detach")[0] == 0
    assert sent[0].model.chat_template == (tmp_path / "chat.jinja").read_text()
    assert sent[0].parallel.deepspeed_config == {"zero_optimization": {"stage": 3}}
    # A secret in one of them would be written to files of the cluster.
    (tmp_path / "chat.jinja").write_text("{{ messages }} hf_abcdefghijklmnopqrstuv")
    code, out, err = finray("submit", "run.yaml", "--detach")
    assert (code, len(sent)) == (2, 1)
    assert "model.chat_template" in out + err
    assert "hf_abc" not in out + err


def test_code_that_is_not_sent_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code of an installed package needs no word, and neither does what --code sends."""
    from tests.support.runs import finray, write_config

    for name in ("mine.py", "parts/yours.py", "parts/torch.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    trackers = ["mine:Tracker", "yours:Tracker", "installed.part:Tracker"]
    config = {"model": {"name": "m"}, "data": {"source": "d"}, "tracking": {"trackers": trackers}}
    write_config(config, tmp_path / "run.yaml")
    monkeypatch.chdir(tmp_path)
    sent: list[Any] = []
    submitting(monkeypatch, lambda config, code: sent.append(code))
    said = [finray("submit", "run.yaml", "--detach", *words)[2] for words in ((), ("--code", "parts"), ("--code", "."))]
    note = "tracking.trackers mine:Tracker is code of this directory and not sent with the job; --code . sends it"
    assert [note in one for one in said] == [True, True, False]
    assert ["torch.py is not sent" in one for one in said] == [False, True, False]
    assert not any("yours:" in one or "installed.part" in one for one in said)
    assert [sorted(one) for one in sent] == [[], ["yours.py"], ["mine.py", "parts/torch.py", "parts/yours.py"]]
