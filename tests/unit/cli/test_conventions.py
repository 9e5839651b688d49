"""What all commands have in common: help, version, quiet, verbose and JSON, the default config, presets as configs."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
import yaml

import finray
from finray.cli.helping import EXAMPLES
from finray.cli.main import PANELS, app
from finray.config.load import preset_names, read_preset
from tests.support import runs, tiny
from tests.support.recorded import write_run
from tests.unit.cli.test_bad_values import commands

pytestmark = pytest.mark.long


COMMANDS = dict(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "1e400", "9" * 400])
@pytest.mark.parametrize(
    "words",
    [
        ("generate", "model", "prompt", "--temperature={}"),
        ("generate", "model", "prompt", "--repetition-penalty={}"),
        ("generate", "model", "prompt", "--seed={}"),
        ("evaluate", "model", "--top-p={}"),
        ("evaluate", "model", "--max-rows={}"),
        ("jobspec", "smollm2-lora", "--step-seconds={}"),
        ("jobspec", "smollm2-lora", "--nodes={}"),
        ("cache", "prune", "--older-than-days={}"),
        ("cluster", "down", "--within={}"),
        ("inspect", "smollm2-lora", "--rows={}"),
    ],
    ids=" ".join,
)
def test_a_number_that_is_none_is_refused_by_its_option(words: tuple[str, ...], value: str) -> None:
    """In :mod:`finray.cli.show`, for all commands alike."""
    code, out, err = runs.finray(*(word.format(value) for word in words))
    assert (code, out) == (2, "")
    assert words[-1].partition("=")[0] in err
    assert "bug" not in err
    assert len(err) < 2500


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_the_help_of_every_command(path: tuple[str, ...]) -> None:
    """The common options, a text for each option, an example that parses, and no raw range."""
    options = {name for param in COMMANDS[path].params for name in param.opts}
    assert {"--json", "-q", "--quiet", "-v", "--verbose"} <= options
    assert [param.name for param in COMMANDS[path].params if not param.help] == []
    code, out, _ = runs.finray(*path, "--help")
    assert runs.finray(*path, "-h")[:2] == (code, out)
    example = EXAMPLES[" ".join(path)]
    shown = " ".join(out.replace("│", " ").split())
    assert (code, f"Example: {example}" in shown) == (0, True)
    assert not re.search(r"range>|<=x|x>=", out)
    assert tuple(shlex.split(example)[1 : 1 + len(path)]) == path
    COMMANDS[path].make_context(path[-1], shlex.split(example)[1 + len(path) :])


def test_version_help_and_completion_are_found() -> None:
    assert runs.finray("--version")[:2] == (0, f"{finray.__version__}\n")
    assert json.loads(runs.finray("version", "--json")[1]) == {"version": finray.__version__}
    code, out, _ = runs.finray("-h")
    assert code == 0
    for words in ("--install-completion", "--show-completion", "train"):
        assert words in out


def test_help_lists_commands_in_the_order_in_which_they_are_needed() -> None:
    out = runs.finray("--help")[1]
    places = [out.index(f" {one} ") for one in ("init", "plan", "train", "evaluate", "serve", "cluster", "version")]
    assert places == sorted(places)
    listed = [name for names in PANELS.values() for name in names]
    assert sorted(listed) == sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def test_finray_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "finray", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"{finray.__version__}\n"


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_is_printed_and_is_a_config_for_commands(name: str) -> None:
    assert yaml.safe_load(runs.finray("config", "presets", name)[1]) == read_preset(name)
    code, out, _ = runs.finray("config", "show", name, "run.seed=4", "--json")
    assert code == 0
    shown = json.loads(out)
    assert (shown["model"]["name"], shown["run"]["seed"]) == (read_preset(name)["model"]["name"], 4)


def test_a_command_without_a_config_takes_finray_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = runs.finray("config", "show")
    assert (code, out) == (2, "")
    assert "finray.yaml" in err
    assert "finray init" in err
    runs.finray("init", "--model", "m", "--data", "d.jsonl")
    for words in ([], ["run.seed=4"], ["finray.yaml", "run.seed=4"]):
        code, out, err = runs.finray("config", "show", *words)
        assert code == 0, err
        assert yaml.safe_load(out)["run"]["seed"] == (4 if words else 17)
    # A file may have an equals sign in its name.
    (tmp_path / "a=b.yaml").write_text("model: {name: other}\ndata: {source: d}\n")
    assert yaml.safe_load(runs.finray("config", "show", "a=b.yaml")[1])["model"]["name"] == "other"


def test_an_error_is_one_document_on_standard_output_and_a_message_on_standard_error(tmp_path: Path) -> None:
    code, out, err = runs.finray("config", "show", tmp_path / "none.yaml", "--json")
    assert code == 2
    assert json.loads(out)["error"]["where"] == str(tmp_path / "none.yaml")
    assert err.startswith("error: ")


def test_secrets_are_masked_in_documents(tmp_path: Path) -> None:
    token = "hf_" + "a" * 30
    code, out, _ = runs.finray("config", "show", "smollm2-lora", f"data.source=https://me:{token}@host/x", "--json")
    assert code == 0
    assert token not in out


def test_init_writes_the_schema_beside_the_file_that_names_it(tmp_path: Path) -> None:
    assert runs.finray("init", tmp_path / "mine.yaml", "--full")[0] == 0
    first = (tmp_path / "mine.yaml").read_text().splitlines()[0]
    schema = json.loads((tmp_path / first.rpartition("=")[2]).read_text())
    assert schema == json.loads(runs.finray("config", "schema")[1])
    assert "max_grad_norm" in (tmp_path / "mine.yaml").read_text()


def test_the_shell_completes_config_files_and_presets(tmp_path: Path) -> None:
    (tmp_path / "llama-mine.yaml").touch()
    (tmp_path / "llama.txt").touch()
    (tmp_path / "configs").mkdir()

    def completed(words: str) -> list[str]:
        env = {**os.environ, "_FINRAY_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": "2"}
        script = "import sys; sys.argv = ['finray']; from finray.cli.main import main; main()"
        command = [sys.executable, "-c", script]
        return subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path).stdout.split()

    assert completed("finray plan llama") == ["llama-mine.yaml", "llama3-70b-fsdp", "llama3-8b-lora"]
    assert completed("finray plan con") == ["configs/"]


IMPORTS = """
import sys
from pathlib import Path
import finray
from finray.planning.checks import require_startable
from finray.reporting.listing import list_runs
def loaded(*names):
    print([name for name in names if name in sys.modules])
dir(finray), finray.load_config, finray.train, finray.plan, finray.Config
loaded("torch", "ray", "transformers", "datasets", "pandas")
list_runs(Path(sys.argv[1]), now=0)
loaded("torch", "ray", "transformers", "scipy")
require_startable(finray.load_config(sys.argv[2]))
loaded("ray", "transformers", "peft")
"""


def test_the_api_lists_of_runs_and_quick_checks_are_there_without_what_takes_seconds_to_import(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    write_run(tmp_path / "run")
    rows = tiny.write_chat_rows(tmp_path, 4)
    config = runs.write_config(runs.tiny_run(tiny_model_dir, rows, tmp_path / "out"), tmp_path / "run.yaml")
    command = [sys.executable, "-c", IMPORTS, tmp_path, config]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n" * 3


FIRST_TORCH = """
import os, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Finder())
from finray.cli.main import main
main()
"""


@pytest.mark.parametrize("command", ["generate", "evaluate", "chat", "serve"])
def test_threads_that_compute_in_a_command_do_not_keep_each_others_core(command: str, tiny_model_dir: Path) -> None:
    """On a machine with other work, answers took eight times as long. torch reads the variable when it is imported."""

    def spins(**given: str) -> str:
        env = {key: value for key, value in os.environ.items() if key not in {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}}
        words = [sys.executable, "-c", FIRST_TORCH, command, tiny_model_dir]
        run = subprocess.run(words, capture_output=True, text=True, env=env | given, stdin=subprocess.DEVNULL)
        return run.stdout.strip()

    assert spins() == "2000"
    if command == "generate":
        assert spins(OMP_WAIT_POLICY="active") == "None"
        assert spins(GOMP_SPINCOUNT="7") == "7"
