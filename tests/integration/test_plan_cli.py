"""`finray plan` as a user meets it, and the checks that `finray train` does first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import runs, tiny
from tests.support.runs import Plain, finray


@pytest.fixture
def plain(tiny_model_dir: Path, tmp_path: Path) -> Plain:
    rows = tiny.write_chat_rows(tmp_path, 24)
    return runs.tiny_run(tiny_model_dir, rows, tmp_path / "out", {"train.max_steps": 2})


@pytest.fixture
def config(plain: Plain, tmp_path: Path) -> Path:
    return runs.write_config(plain, tmp_path / "run.yaml")


@pytest.fixture(autouse=True)
def _no_cluster_of_another_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def test_a_plan_of_a_run_that_starts(config: Path, tmp_path: Path) -> None:
    code, out, err = finray("plan", config)
    assert code == 0, out + err
    assert "the run would start" in out
    for expected in ("parameters", "are trained", "context", "24 rows", "2 steps", "1 worker with", "activations"):
        assert expected in out
    # Plain text where it is not a terminal.
    assert not set(out) & set("┏┃│━")
    # Nothing was made: neither a run nor prepared data.
    assert not (tmp_path / "out" / "run").exists()
    assert not list(tmp_path.rglob("manifest.json"))


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("qwen3_moe", {}, ["on experts 74%, attention 26%; none on the router"]),
        ("qwen3_moe", {"train.router_loss": 0.01}, ["the run would start"]),
        (
            "mistral3",
            {"train.router_loss": 0.01},
            ["it alone is trained", "(vision_tower, multi_modal_projector)", "this model has no loss of a router"],
        ),
    ],
)
def test_what_of_a_model_is_trained_is_said(
    family: str, changes: dict[str, float], said: list[str], plain: Plain, tmp_path: Path, tokenizer: Any
) -> None:
    save = tiny.save_reader if family in tiny.READERS else tiny.save_model
    save(family, tmp_path / family, tokenizer)
    other = runs.changed(plain, {"model.name": str(tmp_path / family), **changes})
    code, out, err = finray("plan", runs.write_config(other, tmp_path / "other.yaml"))
    assert code == (2 if family == "mistral3" else 0), out + err
    assert not [part for part in said if part not in out + err]
    assert code or not err, "nothing of another library"


def test_counts_and_json_are_those_of_the_run(plain: Plain, config: Path, tmp_path: Path) -> None:
    code, out, _ = finray("plan", config, "--json")
    assert code == 0
    plan = json.loads(out)
    header = runs.assemble_alone(plain, tmp_path / "run").header
    assert plan["starts"] is True
    assert (plan["model"]["parameters"], plan["model"]["trainable"]) == (header.parameters, header.trainable)
    for key in ("rows", "tokens", "supervised", "packs"):
        assert plan["data"][key] == getattr(header, key)
    assert plan["data"]["steps"] == header.total_steps
    assert sum(plan["memory"]["parts"].values()) == plan["memory"]["total"]


def test_the_change_that_is_proposed_makes_it_fit(tiny_model_dir: Path, tmp_path: Path) -> None:
    # A model of 3 G parameters, whose file has a header and no content.
    model = tmp_path / "large"
    model.mkdir()
    shape = json.loads((tiny_model_dir / "config.json").read_text(encoding="utf-8"))
    shape |= {"hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 28, "head_dim": 128}
    shape |= {"num_attention_heads": 20, "num_key_value_heads": 4, "max_position_embeddings": 8192}
    (model / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    for file in tiny_model_dir.glob("*token*"):
        (model / file.name).write_bytes(file.read_bytes())
    (model / "chat_template.jinja").write_text(tiny.CHATML, encoding="utf-8")
    tiny.write_empty_weights(model)
    wide = {"data.max_length": 4096, "train.precision": "bf16", "train.micro_batch_size": 4}
    plain = runs.tiny_run(model, tiny.write_chat_rows(tmp_path, 600), tmp_path / "out", wide)
    config = runs.write_config(plain, tmp_path / "run.yaml")
    arguments = ("--gpu", "rtx4090-24gb", "--json")
    code, out, err = finray("plan", config, *arguments)
    assert code == 2, out + err
    plan = json.loads(out)
    changes = plan["memory"]["changes"]
    assert changes
    assert all(change in plan["problems"][0]["repair"] for change in changes)
    code, out, err = finray("plan", config, *changes, *arguments)
    assert code == 0, out + err


def test_a_configuration_that_cannot_be_read(config: Path) -> None:
    code, out, _ = finray("plan", config, "train.nonsense=1", "--json")
    assert code == 2
    assert "train.nonsense" in json.loads(out)["problems"][0]["message"]
