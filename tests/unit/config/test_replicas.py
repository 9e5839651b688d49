"""Config files of job platforms (`replicas`, `resources`, `config_map`), and names from the environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from finray.config.load import load_config
from finray.config.replicas import from_replicas
from finray.errors import ConfigError

# As the system had it that `bert-sst2-lora` comes from.
OLD = """
resources:
  gpu:
    accelerator_count: 1      # GPUs per replica
    accelerator: H100
  memory: 128                # Memory per replica in GB
  cpu: 4                     # CPU cores per replica
replicas: 4                  # Number of distributed workers/nodes
config_map:
  HF_TOKEN: hf_of_the_file
  RESULT_MODEL_ID: someone/sst2
  RUN_NAME: "run #1"
shared_volume:
  size: 10                   # Shared storage size in GB for model checkpoints
"""
FILE = f"{OLD}preset: bert-sst2-lora\n"


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RUN_NAME", "RESULT_MODEL_ID", "HF_TOKEN"):
        # Set first, so that what is set meanwhile is taken away again.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def load(tmp_path: Path, text: str = FILE, overrides: list[str] | None = None) -> Any:
    (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
    return load_config(tmp_path / "config.yaml", overrides or [])


def test_the_file_is_a_run_of_the_preset_on_as_many_workers(tmp_path: Path) -> None:
    config = load(tmp_path)
    assert (config.model.name, config.model.task) == ("bert-base-uncased", "sequence_classification")
    assert (config.cluster.num_workers, config.cluster.use_gpu, config.cluster.cpus_per_worker) == (4, True, 4)
    assert config.run.name == "run-1"
    assert (config.export.push_to_hub, config.export.public) == ("someone/sst2", False)
    assert config.cluster.env == {}
    said = "\n".join(config.notes)
    assert "the run is called run-1, from config_map.RUN_NAME ('run #1')" in said
    assert "config_map.RESULT_MODEL_ID: the finished model is pushed to someone/sst2" in said
    for field in ("shared_volume", "H100", "memory"):
        assert field in said


def test_a_token_in_the_file_comes_into_no_config_and_no_note(tmp_path: Path) -> None:
    raw = yaml.safe_load(FILE)
    environ: dict[str, str] = {}
    found, notes = from_replicas(raw, environ)
    assert environ == {"HF_TOKEN": "hf_of_the_file"}
    assert "hf_of_the_file" not in f"{found} {notes}"
    # What is exported wins.
    environ = {"HF_TOKEN": "own"}
    from_replicas(raw, environ)
    assert environ == {"HF_TOKEN": "own"}


def test_place_holders_are_left_out(tmp_path: Path) -> None:
    text = FILE.replace("hf_of_the_file", "<your hf token with write creds>").replace("someone/sst2", "<your repo id>")
    config = load(tmp_path, text)
    assert (config.cluster.env, config.export.push_to_hub) == ({}, None)
    assert "config_map.HF_TOKEN holds a place-holder, and is left out" in config.notes
    assert not any("hf token" in note for note in config.notes)


def test_sections_of_finray_beside_it_and_overrides_win(tmp_path: Path) -> None:
    own = "model: {name: m}\ndata: {source: d}\nrun: {name: mine}\ncluster: {num_workers: 2, env: {A: b}}\n"
    config = load(tmp_path, OLD + own, ["cluster.cpus_per_worker=3"])
    assert (config.model.task, config.run.name, config.train.global_batch_size) == ("causal_lm", "mine", "auto")
    assert (config.cluster.num_workers, config.cluster.cpus_per_worker) == (2, 3)
    assert config.cluster.env == {"A": "b"}
    assert load(tmp_path, FILE + "export: {push_to_hub: my/own}\n").export.push_to_hub == "my/own"


@pytest.mark.parametrize(("text", "workers", "gpu"), [("replicas: 3", 3, False), ("resources: {gpu: {}}", 1, False)])
def test_without_gpus_workers_have_none(tmp_path: Path, text: str, workers: int, gpu: bool) -> None:
    config = load(tmp_path, f"preset: bert-sst2-lora\n{text}")
    assert (config.cluster.num_workers, config.cluster.use_gpu) == (workers, gpu)


def test_a_file_that_names_no_model_is_refused(tmp_path: Path) -> None:
    for text in (OLD, "replicas: 2", "replicas: 2\ntrain: {max_steps: 4}\n"):
        with pytest.raises(ConfigError, match="names no model") as caught:
            load(tmp_path, text)
        assert "preset: bert-sst2-lora" in (caught.value.repair or "")
    assert load(tmp_path, "replicas: 2\ndata: {source: d}\n", ["model.name=m"]).model.name == "m"


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("replicas: 0", "replicas"),
        ("replicas: many", "replicas"),
        ("replicas: true", "replicas"),
        ("resources: 4", "resources"),
        ("resources: {gpu: {accelerator_count: -1}}", "resources.gpu.accelerator_count"),
        ("config_map: [a]", "config_map"),
    ],
)
def test_a_value_that_is_none_is_named(tmp_path: Path, text: str, where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert caught.value.where == where


SMALL = {"model": "m", "data": "d", "replicas": 1}


def test_the_environment_names_runs_of_this_form_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """CI and platforms export `RUN_NAME` for their own use."""
    monkeypatch.setenv("RUN_NAME", "run #1")
    monkeypatch.setenv("RESULT_MODEL_ID", "a/b")
    for other in ({"model": "m", "data": "d"}, "bert-sst2-lora"):
        config = load_config(other)
        assert (config.run.name, config.export.push_to_hub, config.notes) == ("run", None, ())
    assert load_config(SMALL).export.push_to_hub == "a/b"


@pytest.mark.parametrize(
    ("changes", "overrides", "name", "pushed"),
    [
        ({}, [], "run-1", "a/b"),
        # What the config or the command names wins, also that nothing is pushed.
        ({"run": {"name": "own"}, "export": {"push_to_hub": "my/own"}}, [], "own", "my/own"),
        ({"export": {"push_to_hub": None}}, ["run.name=told"], "told", None),
        ({}, ["export.push_to_hub=null"], "run-1", None),
    ],
)
def test_the_environment_names_what_has_no_name(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], overrides: list[str], name: str, pushed: str | None
) -> None:
    monkeypatch.setenv("RUN_NAME", "run #1")
    monkeypatch.setenv("RESULT_MODEL_ID", "a/b")
    config = load_config(SMALL | changes, overrides)
    assert (config.run.name, config.export.push_to_hub, config.export.public) == (name, pushed, False)
    said = "\n".join(config.notes)
    assert ("RUN_NAME" in said, "RESULT_MODEL_ID" in said) == (name == "run-1", pushed == "a/b")
    # A configuration is what it is.
    assert load_config(config).run.name == name


def test_a_name_of_which_nothing_is_left_is_said_and_a_wrong_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUN_NAME", "###")
    config = load_config(SMALL)
    assert config.run.name == "run"
    assert any("RUN_NAME" in note and "'###'" in note for note in config.notes)
    monkeypatch.setenv("RESULT_MODEL_ID", "a/b/c")
    with pytest.raises(ConfigError, match="a model name on the Hub"):
        load_config(SMALL)
