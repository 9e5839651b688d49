"""What a run or a model of somebody else brings runs here only if the user says so; and who loads code by name."""

from __future__ import annotations

import ast
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from finray.checkpoint.rundir import RunDir, trust_run
from finray.config import trust
from finray.errors import ConfigError, FinrayError, ModelError
from finray.evaluation.artifacts import artifact_of
from finray.models.artifacts import checked_notes
from finray.publishing.hub import Hub
from finray.publishing.push import push
from finray.serving.models import ServeSettings
from finray.serving.server import ApiServer
from tests.support import evaluated
from tests.support.evaluated import evaluate
from tests.support.source import FILES, calls

CONNECT = {"connected", "worker_environment", "cluster_here"}
LOADERS = {
    *CONNECT,
    "load_named",
    "imported",
    "load_function",
    "import_module",
    "task_class",
    "objective_class",
    "score_named",
    "make_tracker",
}
# Functions that load code by a name, and where that name is looked at first.
CHECKED = {
    "config/extensions.py:load_named": "by its callers",
    "config/extensions.py:imported": "by its callers",
    "config/tasks.py:task_class": "by its callers",
    "config/objectives.py:objective_class": "by its callers",
    "config/objectives.py:objective_spec": "driver.train, make_plan, start_preparation and inspect",
    "tasks/packed_task.py:objective_of": "driver.train",
    "config/tasks.py:task_spec": "checked_notes, of a model; driver, plan and evaluation, of a config",
    "config/tasks.py:chosen": "driver.train and make_plan",
    "data/formats/convert.py:shaped_by": "start_preparation",
    "data/formats/convert.py:converter_of": "start_preparation",
    "data/formats/convert.py:load_function": "start_preparation",
    "evaluation/during.py:_scores": "driver.train",
    "evaluation/engines/__init__.py:_named": "a name of the command line",
    "evaluation/scores/base.py:score_named": "judge and driver.train",
    "evaluation/scores/checking.py:_work": "judge",
    "evaluation/scores/code.py:__init__": "judge",
    "models/adapter_methods.py:adapter_method": "driver.train and make_plan",
    "parallel/__init__.py:make_strategy": "driver.train, and RunDir.resolved",
    "planning/checks.py:check_extensions": "driver.train and make_plan",
    "planning/checks.py:check_evaluation": "driver.train and make_plan",
    "tracking/base.py:make_tracker": "driver.train",
    "training/assemble.py:_task": "driver.train",
    "training/outputs.py:start_trackers": "driver.train",
    "__init__.py:__getattr__": "modules of finray",
    "compat.py:without_compiled_collectives": "a module of DeepSpeed",
    "compat.py:builds_text": "a module of Transformers, beside that of a configuration",
    "runtime/preload.py:import_all": "modules of finray and Transformers",
    "evaluation/answers.py:_scores": "here, by require_trusted",
    "evaluation/answers.py:_user_task": "here, by require_trusted",
    "reporting/sync.py:sync_run": "here, by require_trusted",
    "cli/doctor.py:doctor": "here, by require_trusted",
    "cli/cluster.py:down": "an address of the command line",
    "runtime/cluster.py:ask": "here, by require_trusted",
    "runtime/prepare.py:prepare": "here, by require_trusted",
    "runtime/spread.py:__init__": "_engine",
    "runtime/driver.py:connect": "driver.train",
    "runtime/doctor.py:cluster": "doctor, of the command line",
    "runtime/status.py:status": "an address of the command line",
    "runtime/serve.py:serve": "no config",
}
HERE = [place for place, why in CHECKED.items() if why.startswith("here")]


def loaders(source: str) -> Iterator[tuple[str, str]]:
    """Function and loader, of each call that loads code by a name."""
    for function, call in calls(source):
        if (name := ast.unparse(call.func).rpartition(".")[2]) in LOADERS:
            yield function, name


def unknown(file: str, source: str) -> list[str]:
    return [
        f"{file}:{function} calls {name}" for function, name in loaders(source) if f"{file}:{function}" not in CHECKED
    ]


def test_whoever_loads_code_by_a_name_is_known() -> None:
    assert [line for file, source in FILES.items() for line in unknown(file, source)] == []


@pytest.mark.parametrize(
    "place",
    [
        *HERE,
        "runtime/driver.py:train",
        "planning/plan.py:make_plan",
        "data/dataset/prepare.py:start_preparation",
        "evaluation/answers.py:_engine",
        "publishing/push.py:push",
        "cli/data.py:_root",
    ],
)
def test_the_check_stands_where_it_is_said_to_stand(place: str) -> None:
    file, _, function = place.partition(":")
    tree = ast.parse(FILES[file])
    (body,) = (one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef) and one.name == function)
    assert "require_trusted" in [ast.unparse(one.func) for one in ast.walk(body) if isinstance(one, ast.Call)]


def test_the_rule_can_see() -> None:
    source = "def f(config):\n    return load_named('finray.metrics', config.evaluation.metrics[0], where='')"
    assert len(unknown("reporting/new.py", source)) == 1
    assert unknown("reporting/new.py", "def f(x):\n    return x.load()") == []


@pytest.fixture(scope="module")
def trained(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return evaluated.train(tiny_model_dir, tmp_path_factory.mktemp("trust"))


@pytest.fixture
def stranger(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run whose config names code, and is not signed by this user."""
    run = RunDir(Path(shutil.copytree(trained, tmp_path / "out" / "run")))
    text = run.config_file.read_text()
    assert "scoring: null" in text
    text = text.replace("scoring: null", "scoring: {checker: 'builtins:exec', run_code: true}")
    run.config_file.write_text(text.replace("- exact_match", "- pass_at_k"))
    monkeypatch.setattr(trust, "_ACCEPTED", set())
    return run


def test_the_checker_of_a_pulled_run_is_not_called(stranger: RunDir, tmp_path: Path) -> None:
    (file := tmp_path / "mine.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    with pytest.raises(ConfigError, match="cannot tell that you wrote") as found:
        evaluate(stranger.path, file=file)
    assert any("builtins:exec" in one for one in found.value.problems)
    # The user's own word for one of the two is not their word for the other.
    with pytest.raises(ConfigError, match="cannot tell that you wrote") as found:
        evaluate(stranger.path, ["evaluation.scoring.run_code=true"], file=file)
    assert not any("run_code" in one for one in found.value.problems)


def test_a_pulled_run_does_not_say_where_it_is_pushed(stranger: RunDir) -> None:
    text = stranger.config_file.read_text()
    assert "push_to_hub: null" in text
    stranger.config_file.write_text(text.replace("push_to_hub: null", "push_to_hub: evil/model"))

    def login() -> Hub:
        raise AssertionError

    with pytest.raises(ConfigError, match="cannot tell that you wrote"):
        push(stranger.path, login=login)
    with pytest.raises(AssertionError):
        push(stranger.path, to="me/model", base="org/base", login=login)


def test_the_strategy_of_a_run_is_that_of_its_config(stranger: RunDir) -> None:
    file = stranger.path / "resolved.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "strategy": "evil:Strategy"}))
    with pytest.raises(ConfigError, match="names the strategy `evil:Strategy`, which its config does not"):
        stranger.resolved()


def test_a_model_that_names_code_of_its_own_is_loaded_only_if_the_user_accepts_it(
    tiny_adapter_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trust, "_ACCEPTED", set())
    (tiny_adapter_dir / "finray.json").write_text(json.dumps({"task": "evil:Task", "auto_class": "Evil"}))
    with pytest.raises(ModelError, match=r"names code of its own, the task `evil:Task`"):
        artifact_of(tiny_adapter_dir)
    (line,) = trust_run(tiny_adapter_dir)
    assert "task: evil:Task" in line
    assert checked_notes(tiny_adapter_dir, "x")["task"] == "evil:Task"


def test_a_model_of_the_hub_is_accepted_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trust, "_ACCEPTED", set())
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "me"))
    (tmp_path / "finray.json").write_text(json.dumps({"task": "evil:Task", "auto_class": "Evil"}))
    assert trust_run("org/model") == []
    with pytest.raises(ModelError, match="names code of its own"):
        checked_notes(tmp_path, "org/other")
    checked_notes(tmp_path, "org/model")
    assert "evil:Task" in caplog.text
    # Its text is remembered, and not its name.
    monkeypatch.setattr(trust, "_ACCEPTED", set())
    checked_notes(tmp_path, "org/other")


def test_what_the_command_has_accepted_is_accepted_where_the_models_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "_ACCEPTED", set())
    with pytest.raises(FinrayError):
        ApiServer(ServeSettings("no/such/model", engine="none", trusted=frozenset(["a digest"])), print)
    assert "a digest" in trust.accepted()
