"""Every output goes through `finray.config.redact`: rules about the source, and secrets planted in every field."""

from __future__ import annotations

import ast
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from rich.text import Text

from finray.cli import failure
from finray.config.load import build_config, load_config
from finray.config.redact import redact, redact_error, redact_saved, redact_text
from finray.config.schema import sections
from finray.errors import FinrayError
from finray.jobspec.hosts import compose, ray_cluster, slurm
from finray.jobspec.kubernetes import rayjob
from finray.jobspec.replicas import replicas
from finray.jobspec.spec import Machines, make_spec
from finray.records import Note
from finray.reporting import page
from finray.results import AsIs, PlainConsole, Table
from finray.runtime.jobs import require_no_secret
from tests.support import runs
from tests.support.source import FILES, calls

# The places that write to a screen, each through `redact`: the console of all commands, a document, an answer and a
# note, in Python too; a child process that tells its parent a number, and a replica that tells why it cannot load one.
SCREENS = {"results.py": {"Console"}, "cli/show.py": {"typer.echo", "sys.stdout.write", "sys.stderr.write"}}
SCREENS |= {"api.py": {"print"}, "runtime/allreduce.py": {"sys.stdout.write"}, "runtime/serve.py": {"sys.stderr.write"}}
PRINTING = {"print", "pprint.pprint", "typer.echo", "typer.secho", "click.echo", "sys.stdout.write", "sys.stderr.write"}
PRINTING |= {"Console", "rich.print", "warnings.warn", "traceback.print_exc", "traceback.print_exception"}
LOGGING = {"debug", "info", "warning", "error", "exception", "critical", "log"}
# What starts processes. Arguments of a process can be read by every user of a machine.
STARTING = {
    "runtime/nodes.py",
    "runtime/pulses.py",
    "runtime/probe.py",
    "evaluation/scores/checking.py",
    "evaluation/scores/code.py",
    "models/cpu_kernels.py",
    "publishing/gguf.py",
}


def screens(source: str) -> Iterator[str]:
    """Calls that print, and calls of loggers that are given an error as it is."""
    for _, node in calls(source):
        name = ast.unparse(node.func)
        if name in PRINTING:
            yield name
        receiver, _, method = name.rpartition(".")
        if method in LOGGING and receiver.strip("_").endswith(("logger", "log", "logging")) and receiver != "self._log":
            given = [ast.unparse(one) for one in node.args[1:]] + [one.arg or "" for one in node.keywords]
            if method == "exception" or "exc_info" in given or {"error", "str(error)", "repr(error)"} & set(given):
                yield name


@pytest.mark.parametrize("file", FILES)
def test_screens_are_written_in_one_place(file: str) -> None:
    assert set(screens(FILES[file])) <= SCREENS.get(file, set())


@pytest.mark.parametrize(
    "source",
    [
        "print('a')",
        "import sys\nsys.stderr.write(text)",
        "typer.echo(text)",
        "console = Console()",
        "logger.error('a', exc_info=error)",
        "_logger.warning('%s', error)",
        "self.logger.exception('a')",
    ],
)
def test_the_rule_can_see(source: str) -> None:
    assert len(list(screens(source))) == 1


def test_processes_are_started_where_their_arguments_are_known() -> None:
    starts = r"Popen$|subprocess\.(run|call|check_\w+|getoutput)$|_subprocess_\w+$|os\.(spawn|exec)\w+$"
    found = {
        file for file, text in FILES.items() for _, call in calls(text) if re.search(starts, ast.unparse(call.func))
    }
    assert found == STARTING


TOKEN = "hf_" + "aB3dE" * 7
ADDRESS = "https://bob:" + "hunter-the-2nd@host/rows.jsonl?X-Amz-Signature=0123456789abcdef"
VALUE = "s3cr3t-value-of-this-shell"
LEAKS = (TOKEN, "hunter-the-2nd", "0123456789abcdef", VALUE)
FIELDS = [f"{section}.{name}" for section, model in sections().items() for name in model.model_fields]


@pytest.fixture(autouse=True)
def _shell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MY_JOB_TOKEN", VALUE)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text("model: {name: org/model}\ndata: {source: org/rows}\nrun: {output_dir: runs}\n")


def leaks(*texts: str) -> list[str]:
    return [secret for secret in LEAKS for text in texts if secret in text.replace("\n", "").replace(" ", "")]


def said(field: str, text: str) -> list[str]:
    """What is shown and written of a config with this in a field, whether the field takes it or not."""
    errors = io.StringIO()
    found = []
    try:
        config = load_config("c.yaml", [f"{field}={text}"])
        found += [yaml.safe_dump(redact_saved(config.plain())), *map(redact_text, config.notes)]
        require_no_secret(config)
        machines = Machines(hosts=tuple("abcdefgh"))
        found += [form(make_spec(config, machines)) for form in (compose, ray_cluster, slurm, rayjob, replicas)]
    except FinrayError as error:
        failure.report(error, PlainConsole(file=errors))
        found += [errors.getvalue(), json.dumps(redact(error.to_dict())), str(error)]
    return found


@pytest.mark.parametrize("field", FIELDS)
def test_a_secret_in_a_field_is_neither_shown_nor_sent(field: str) -> None:
    for secret in (TOKEN, ADDRESS, VALUE, "x" * 100 + f" {TOKEN} {ADDRESS} {VALUE} " + "y" * 200):
        for text in (json.dumps(secret), f"[{json.dumps(secret)}]", f"{{prompt: {json.dumps(secret)}}}"):
            assert leaks(*said(field, text)) == []


def test_without_redaction_secrets_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "redact_saved", lambda plain: plain)
    assert leaks(*said("data.system", VALUE)) == [VALUE]


@pytest.mark.parametrize("form", [compose, ray_cluster, slurm])
def test_a_job_with_a_secret_is_not_written(form: Callable[..., str], tmp_path: Path) -> None:
    plain = {"model": {"name": "m"}, "data": {"source": "org/rows", "system": f"use {VALUE}"}}
    Path("job.yaml").write_text(yaml.safe_dump(plain))
    assert build_config(plain, source="x").data.system == f"use {VALUE}"
    name = {compose: "compose", ray_cluster: "ray-cluster", slurm: "slurm"}[form]
    code, out, err = runs.finray("jobspec", "job.yaml", "--to", name, "-o", "job", "--host", "a")
    assert (code, out) == (2, "")
    assert "data.system: it contains the value of MY_JOB_TOKEN" in err
    assert "--secret" in err
    assert not Path("job").exists()


@pytest.mark.parametrize("words", [("train", "c.yaml", TOKEN), ("train", f"--{TOKEN}"), (TOKEN,), ("report", TOKEN)])
def test_what_a_command_does_not_understand_is_said_without_the_secret(words: tuple[str, ...]) -> None:
    code, out, err = runs.finray(*words)
    assert code == 2
    assert leaks(out, err) == []


def test_screens_mask_text_in_every_wrapping_and_show_what_was_asked_for() -> None:
    table = Table()
    for name in ("a", "b"):
        table.add_column(name)
    table.add_row(f"in a cell {TOKEN}", Text(f"styled {VALUE}", style="bold"))
    stream = io.StringIO()
    console = PlainConsole(file=stream, width=30)
    for one in (TOKEN, Text(f"x {TOKEN}", style="red"), table, f"{ADDRESS} and [{VALUE}]"):
        console.print(one)
    assert leaks(stream.getvalue()) == []
    assert stream.getvalue().count("***") >= 5
    console.print(AsIs(f"the answer {TOKEN}"), soft_wrap=True)
    assert stream.getvalue().endswith(f"the answer {TOKEN}\n")


def test_notes_and_warnings_hold_no_secret_wherever_they_go() -> None:
    """Of a tracker that fails, for example, whose error quotes its token."""
    note = Note(f"the tracker x failed: RuntimeError: {TOKEN} at {ADDRESS}", 3, "warning")
    assert leaks(note.message, json.dumps(note.json())) == []
    assert (note.step, note.level) == (3, "warning")


def test_pages_hold_no_secret() -> None:
    body = "{% block body %}{{ data('x', rows) }}{% endblock %}"
    rows = [{"a": TOKEN, "token": "the"}, [VALUE]]
    source = "{% extends 'shell.html.j2' %}{% block title %}{{ title }}{% endblock %}"
    html = page.render(source + body, title=f"rows of {ADDRESS}", rows=rows)
    assert leaks(html) == []
    assert '"token":"the"' in html
    assert "bob:***@host/rows.jsonl?***" in html


def test_errors_and_their_causes_are_logged_without_secrets() -> None:
    try:
        try:
            raise ValueError(f"no {TOKEN}")
        except ValueError as error:
            raise RuntimeError(f"at {ADDRESS}") from error
    except RuntimeError as error:
        said = redact_error(error)
    assert leaks(said) == []
    assert "ValueError" in said
    assert "RuntimeError" in said
