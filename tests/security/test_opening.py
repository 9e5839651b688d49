"""One place opens what others may have written: ``finray.files``. Whoever opens files in another way is named here.

A run, a checkpoint, a model, a directory of code may come from somebody else, with links to the user's files in it, and
with fifos that keep a reader waiting for ever.
"""

from __future__ import annotations

import ast
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from finray.config.load import load_config, read_yaml
from finray.config.own_code import python_files
from finray.config.schema import ModelConfig
from finray.errors import ConfigError, DataError, FinrayError, ModelError
from finray.evaluation.result_cache import ResultCache
from finray.files import FileKind, NotOpened, appending, lies_in, lines_of, opened
from finray.pretrained.tokenizers import load_tokenizer
from finray.reporting.listing import RecordFollower, list_runs
from finray.reporting.recorded import read_run
from finray.reporting.report import report
from finray.runtime.logs import RecordLog
from tests.support.recorded import prediction, write_evaluation, write_run
from tests.support.source import FILES, calls, imported

# Calls that open a file by its path, or copy one.
OPENERS = {
    *("open", "io.open", "os.open", "read_text", "read_bytes", "write_text", "write_bytes", "safe_open", "load_file"),
    *("memory_map", "OSFile", "ParquetFile", "read_table", "copyfile", "shutil.copy", "copy2", "copytree", "cat_file"),
    *("memmap", "fromfile", "GGUFReader"),
}
# Everything else that opens files, by file and function, and why that is right.
ALLOWED = {
    "cli/config.py:init": "the user names a file that is not there yet",
    "cli/doctor.py:": "the user's own cache, and a file that the user names",
    "cli/failure.py:": "the user's own cache",
    "cli/job_entry.py:": "the working directory of a job, which the job server made from what was submitted",
    "cli/main.py:main": "/dev/null",
    "cli/show.py:": "a file that the user names",
    "checkpoint/manifest.py:write": "a directory that this process is filling",
    "checkpoint/objects.py:": "objects behind a URL, and a new file of this process",
    "checkpoint/rundir.py:check_output": "a new file of this process",
    "checkpoint/rundir.py:make_final": "files of a checkpoint that was verified just before",
    "checkpoint/store.py:fsync": "a file that this process has written",
    "compat.py:": "a GGUF file, which was looked at before",
    "config/redact.py:_forms": "a file of finray",
    "config/load.py:preset_text": "a file of finray",
    "data/dataset/export.py:": "a directory that this process is filling",
    "data/dataset/parts.py:": "a new file of this process",
    "data/dataset/prepared.py:": "files that were verified just before",
    "data/formats/convert.py:_digest": "a module that was imported",
    "data/sources/memory.py:": "a new file of this process",
    "data/sources/pieces.py:": "a stream of data.storage",
    "data/sources/readers.py:": "a stream of data.storage",
    "data/sources/resolve.py:is_datasets_directory": "a regular file in a directory that the user names",
    "data/storage.py:": "objects behind a URL, and a new file of this process",
    "evaluation/harness.py:": "a file that the user names",
    "evaluation/scores/checking.py:": "/proc",
    "evaluation/scores/code.py:": "/proc",
    "files.py:": "the place itself",
    "hardware.py:": "/proc and /sys",
    "inspection/page.py:": "a file of finray",
    "jobspec/spec.py:": "files that the user's own config names",
    "limits.py:": "/proc",
    "models/cpu_kernels.py:_compiled": "a file of finray",
    "models/export.py:": "a directory that this process is filling, and weights whose header was read just before",
    "models/many_adapters.py:read_plain_lora": "weights whose header was read just before",
    "models/packing_cache.py:_digest": "files of finray",
    "pretrained/weights.py:": "files that FileKind.require has looked at",
    "checkpoint/pieces.py:": "files that FileKind.require has looked at",
    "publishing/background.py:_files": "a directory that this process has made",
    "publishing/gguf.py:": "files that this process, or the converter that it has run, has written",
    "publishing/restore.py:pull": "a new file of this process",
    "reporting/page.py:": "files of finray, and a file that the user names",
    "reporting/report.py:page": "a file of finray",
    "results.py:write": "a file that the user names",
    "runtime/cluster.py:": "the state of the user's own Ray",
    "runtime/token.py:": "the user's own token of Ray",
    "runtime/jobs.py:": "a directory that this process has made",
    "runtime/probe.py:": "objects behind a URL",
    "runtime/nodes.py:": "the state of the user's own Ray",
    "runtime/signals.py:_leave_terminal": "/dev/null",
    "tracking/follow.py:": "no file: a service",
    "training/checkpointing.py:": "a directory that this process is filling",
    "training/loop.py:": "/proc",
    "training/memory.py:": "a directory that this process has made, and records that this run has begun anew",
    "training/outputs.py:": "a directory that this process is filling",
}


def openers(source: str) -> Iterator[tuple[str, str]]:
    """Function and call, of each call that opens a file in another way than through ``finray.files``."""
    known = imported(source)
    for function, call in calls(source):
        name = ast.unparse(call.func)
        opens = {name, name.rpartition(".")[2]} & OPENERS and name != "self.open"
        if opens and not known.get(name, "").startswith("finray.files."):
            yield function, name


def unknown(file: str, source: str) -> list[str]:
    return [
        f"{file}: {function} calls {name}"
        for function, name in openers(source)
        if f"{file}:{function}" not in ALLOWED and f"{file}:" not in ALLOWED
    ]


def test_what_others_may_have_written_is_opened_in_one_place() -> None:
    assert [line for file, source in FILES.items() for line in unknown(file, source)] == []
    # No permission outlives its reason.
    used = {
        place
        for file, source in FILES.items()
        for function, _ in openers(source)
        for place in (f"{file}:{function}", f"{file}:")
    }
    assert sorted(set(ALLOWED) - used) == []


@pytest.mark.parametrize(
    "source",
    [
        "def f(p):\n    return p.read_text()",
        "def f(p):\n    with p.open('rb') as s: return s.read()",
        "def f(p):\n    return open(p)",
        "from safetensors import safe_open\ndef f(p):\n    return safe_open(p)",
        "import pyarrow as pa\ndef f(p):\n    return pa.memory_map(p)",
        "import shutil\ndef f(p):\n    shutil.copyfile(p, 'x')",
        "import os\ndef f(p):\n    os.open(p, 0)",
        "def f(p):\n    p.write_text('x')",
    ],
)
def test_the_rule_can_see(source: str) -> None:
    assert len(unknown("reporting/new.py", source)) == 1
    assert unknown("files.py", source) == []


def test_the_rule_lets_the_one_place_be_used() -> None:
    assert unknown("reporting/new.py", "from finray.files import opened\ndef f(p):\n    return opened(p)") == []


# --- the one place ---------------------------------------------------------------------------------------------------


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(str(path))


def folder(path: Path) -> None:
    path.mkdir()


def endless(path: Path) -> None:
    path.symlink_to(path)


def missing(path: Path) -> None:
    path.symlink_to("nowhere")


ODD: tuple[Callable[[Path], None], ...] = (fifo, device, listening, folder, endless, missing)


@pytest.mark.parametrize("make", ODD)
def test_only_regular_files_are_opened_and_nothing_is_waited_for(
    make: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The path of a socket has a limit.
    monkeypatch.chdir(tmp_path)
    make(path := Path("odd"))
    for root in (None, Path()):
        with pytest.raises(OSError, match=r"is not a file|is a link|No such file|Too many levels"):
            opened(path, root)
    with pytest.raises(OSError, match=r"is not a file|is a link|Is a directory"):
        appending(path)
    with pytest.raises(ConfigError) as found:
        FileKind(ConfigError).read(path)
    assert found.value.where == "odd"


def test_a_file_lies_in_its_directory_whatever_links_lead_to_it(tmp_path: Path) -> None:
    (run := tmp_path / "run").mkdir()
    (victim := tmp_path / "victim").mkdir()
    for place in (run, victim):
        (place / "file").write_text("text")
    (run / "out").symlink_to(victim / "file")
    (run / "middle").symlink_to(victim)
    (run / "within").symlink_to("file")
    (tmp_path / "link").symlink_to(run)
    for name in ("out", "middle/file", "../victim/file"):
        assert not lies_in(run / name, run)
        with pytest.raises(NotOpened, match="outside its directory"):
            opened(run / name, run)
        with pytest.raises(NotOpened):
            appending(run / name, run)
    # The user names the run, which may be a link itself; a link within it may be read.
    for place in (run, tmp_path / "link"):
        assert opened(place / "within", place).read() == b"text"
        with pytest.raises(NotOpened, match="is a link"):
            appending(place / "within", place)
    assert (victim / "file").read_text() == (run / "file").read_text() == "text"


def test_a_second_name_of_a_file_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine\n")
    os.link(tmp_path / "victim", tmp_path / "log")
    with appending(tmp_path / "log") as stream:
        stream.write(b"more\n")
    assert (tmp_path / "victim").read_text() == "mine\n"
    assert (tmp_path / "log").read_text() == "mine\nmore\n"


def test_a_file_that_is_longer_than_it_says_has_an_end(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has more than 100 bytes"):
        FileKind(ConfigError, limit=100, links=True).read(Path("/proc/self/mountinfo"))
    (tmp_path / "long").write_bytes(b"x" * 101)
    with pytest.raises(ConfigError, match="has 101 bytes; at most 100"):
        FileKind(ConfigError, limit=100).read(tmp_path / "long")


def test_a_line_without_an_end_comes_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finray.files.LINE_BYTES", 4)
    (tmp_path / "file").write_bytes(b"a\nlong line\nb\n")
    with opened(tmp_path / "file") as stream:
        assert list(lines_of(stream)) == [b"a\n", b"long", b" lin", b"e\n", b"b\n"]


# --- who uses it -----------------------------------------------------------------------------------------------------

NAMES = (
    *("config.yaml", "metrics.jsonl", "starts.jsonl", "summary.json", "resolved.json", "run_id", "failures.jsonl"),
    *("evaluation/metrics.json", "evaluation/predictions.jsonl"),
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    made = write_run(tmp_path / "runs" / "stranger", starts=[(0, 2)], finished=False)
    write_evaluation(made, [prediction(0, base=0, tuned=1)])
    write_run(tmp_path / "runs" / "mine")
    return made


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("make", [fifo, device])
def test_a_run_with_an_odd_file_is_read_without_it_and_hides_no_other(
    run: Path, name: str, make: Callable[[Path], None]
) -> None:
    (run / name).unlink(missing_ok=True)
    make(run / name)
    assert sorted(one.name for one in list_runs(run.parent, now=0.0).runs) == ["mine", "stranger"]
    assert any(name.rpartition("/")[2] in problem for problem in read_run(run).problems)
    report([run])
    list(RecordFollower(run).new())


@pytest.mark.parametrize("name", [*NAMES, "evaluation"])
def test_what_a_link_in_a_run_leads_to_is_on_no_page(run: Path, name: str, tmp_path: Path) -> None:
    """It has what that file would have, and a text that belongs to nobody else."""
    aside = tmp_path / "aside"
    if (run / name).exists():
        shutil.move(run / name, aside)
    else:
        aside.write_text('{"error": "tuned says 0", "start": "", "attempt": "", "from_step": 0}\n')
    (run / name).symlink_to(aside)
    found = read_run(run)
    assert any("outside its directory" in problem for problem in found.problems)
    text = Path(report([run]).output).read_text()
    if name.startswith("evaluation"):
        assert "tuned says 0" not in text


def test_a_page_is_not_written_through_a_link(run: Path, tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("mine")
    (run / "report.html").symlink_to(tmp_path / "profile")
    with pytest.raises(DataError, match="is a link, or not a file"):
        report([run])
    assert (tmp_path / "profile").read_text() == "mine"


@pytest.mark.parametrize("linked", ["file", "directory"])
def test_kept_answers_are_not_written_through_a_link(linked: str, tmp_path: Path) -> None:
    (tmp_path / "evaluation").mkdir()
    (victim := tmp_path / "victim.jsonl").write_text("mine\n")
    belongs = {"model": "m"}
    name = Path(ResultCache(tmp_path / "evaluation", "answers", belongs)._path).name
    (tmp_path / "evaluation" / name).symlink_to(victim)
    with (
        pytest.raises(FinrayError, match="is a link"),
        ResultCache(tmp_path / "evaluation", "answers", belongs).writer(made_by={}) as keep,
    ):
        keep(0, "text")
    assert victim.read_text() == "mine\n"


def test_a_log_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "logs").symlink_to(tmp_path / "victim")
    RecordLog(tmp_path / "run" / "logs" / "training.log", "title").write("text")
    assert list((tmp_path / "victim").iterdir()) == []


@pytest.mark.parametrize("make", [fifo, device, folder])
def test_a_config_that_is_no_file_is_refused(
    make: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finray.limits.PIPE_S", 0.1)
    make(tmp_path / "config.yaml")
    with pytest.raises(ConfigError):
        read_yaml(tmp_path / "config.yaml")


def test_a_config_may_come_from_a_pipe_of_the_shell() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"model: {name: m}\ndata: {source: d}\n")
    os.close(writing)
    assert load_config(f"/dev/fd/{reading}").model.name == "m"
    os.close(reading)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"])
def test_a_model_with_a_fifo_in_it_is_refused(name: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name)
    with pytest.raises(ModelError, match="is not a file") as found:
        load_tokenizer(ModelConfig(name=str(model)))
    assert name in str(found.value.where)


def test_code_that_is_sent_to_a_cluster_lies_in_its_directory(tmp_path: Path) -> None:
    config = load_config({"model": "m", "data": "d"})
    (code := tmp_path / "code").mkdir()
    (code / "mine.py").write_text("x = 1\n")
    (code / "other.py").symlink_to("mine.py")
    assert set(python_files(code, config)[0]) == {"mine.py", "other.py"}
    (tmp_path / "id_rsa").write_text("key")
    (code / "evil.py").symlink_to(tmp_path / "id_rsa")
    with pytest.raises(ConfigError, match="is a link to a file outside its directory") as found:
        python_files(code, config)
    assert found.value.where == str(code / "evil.py")
    (code / "evil.py").unlink()
    os.mkfifo(code / "evil.py")
    with pytest.raises(ConfigError, match="is not a file"):
        python_files(code, config)
