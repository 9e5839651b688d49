"""The parts that docs/guide/extending.md adds from outside the package train, each as what it is."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import yaml

from finray.errors import ConfigError
from finray.tracking.jsonl import read_records
from tests.support import forks, runs, tiny
from tests.support.runs import Plain, changed

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "extending.md"


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert found is not None
    return found[1]


@pytest.fixture
def plain(tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Plain:
    """The page's config and its file, with a tiny model."""
    (tmp_path / "my_parts.py").write_text(block("python"), encoding="utf-8")
    notes = [{"note": tiny.WORDS[row % 50], "record": " ".join(tiny.WORDS[row % 7 : row % 7 + 3])} for row in range(30)]
    notes.append({"note": "left out", "record": ""})
    (tmp_path / "notes.jsonl").write_text("".join(json.dumps(note) + "\n" for note in notes), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    # A module of this name that another test imported is not this one.
    monkeypatch.delitem(__import__("sys").modules, "my_parts", raising=False)
    own = yaml.safe_load(block("yaml"))
    own["model"].pop("name")
    own["data"].pop("source")
    changes = {"train": {"max_steps": 4, "warmup_steps": 0}, "checkpoint.every_steps": 2, "cluster.num_workers": 2}
    return runs.tiny_run(tiny_model_dir, tmp_path / "notes.jsonl", tmp_path / "runs", {**own, **changes})


def test_parts_from_outside_train_under_ray_and_resume(ray_cluster: str, plain: Plain, tmp_path: Path) -> None:
    config = runs.write_config(plain, tmp_path / "own.yaml")
    # Ray's workers look for modules where the program of the driver was started.
    code, out, err = forks.finray("train", config, cwd=tmp_path)
    assert code == 0, err
    run_dir = tmp_path / "runs" / "run"
    tracked = (run_dir / "losses.txt").read_text().splitlines()
    assert re.fullmatch(r"# [0-9a-f]{32} from step 0", tracked[0])
    assert [line.split()[0] for line in tracked[1:]] == ["1", "2", "3", "4"]
    # The converter left a row out, and the report says so.
    assert "left out 1 of 31 rows" in out
    # Rank-stabilised scaling and orthogonal rows are in the adapter's own files.
    assert json.loads((run_dir / "final" / "adapter_config.json").read_text())["use_rslora"] is True
    code, out, err = runs.finray("evaluate", run_dir)
    assert code == 0, err
    assert {"exact_match", "same_length", "loss", "perplexity"} == set(
        json.loads((run_dir / "evaluation" / "metrics.json").read_text())["models"]["tuned"]
    )
    assert "same length" in out
    # The loss of a task of one's own is the same in training and after it.
    losses = [one["eval_loss"] for one in read_records(run_dir / "metrics.jsonl") if one["kind"] == "eval"]
    scores = json.loads((run_dir / "evaluation" / "metrics.json").read_text())["models"]
    assert scores["tuned"]["loss"]["value"] == pytest.approx(losses[-1], rel=1e-3)
    # A later start of the same run has the same id.
    runs.run_alone(plain, run_dir)
    starts = [line for line in (run_dir / "losses.txt").read_text().splitlines() if line.startswith("#")]
    assert starts == [tracked[0], tracked[0].replace("step 0", "step 4")]


def test_each_part_from_outside_does_what_it_says(plain: Plain, tmp_path: Path) -> None:
    import my_parts

    config = runs.config_of(plain)
    assembled = runs.assemble_alone(plain, tmp_path / "alone")
    weights = {name: one for name, one in assembled.loop.task.trainable().items() if ".lora_A." in name}
    for weight in weights.values():
        rows = weight.detach()
        torch.testing.assert_close(rows @ rows.T, torch.eye(len(rows)), rtol=0, atol=1e-5)
    assert isinstance(assembled.loop.task, my_parts.SmoothedLM)
    assembled.loop.run()
    smoothed = runs.values(tmp_path / "alone", "loss")
    assert config.model.task == "my_parts:SmoothedLM"
    # Control: without the task of its own the same rows have another loss.
    runs.run_alone(changed(plain, {"model.task": "causal_lm"}), tmp_path / "usual")
    assert runs.values(tmp_path / "usual", "loss")[0] != smoothed[0]
    # An objective of its own, with a column: at the first step nothing has changed since the run began.
    own = {"model.task": "causal_lm", "train.objective": "my_parts:Leashed"}
    runs.run_alone(changed(plain, own), tmp_path / "leashed")
    drift = runs.values(tmp_path / "leashed", "drift")
    assert drift[0] < 1e-5 < 1e-3 < drift[-1]
    first = [runs.values(tmp_path / name, "loss")[0] for name in ("leashed", "usual")]
    assert first[0] == pytest.approx(first[1], rel=1e-5)
    assert my_parts.same_length(["a b", "c"], ["x y", "z z"]) == 0.5


def test_a_part_that_cannot_be_imported_is_named_before_ray_is_asked(plain: Plain, tmp_path: Path) -> None:
    from finray.planning.checks import check_extensions

    with pytest.raises(ConfigError, match="did you mean `fsdp`"):
        runs.config_of(changed(plain, {"parallel.strategy": "fsdpp"}))
    wrong = changed(plain, {"tracking.trackers": ["my_parts:LostFile"]})
    with pytest.raises(ConfigError, match="LostFile") as caught:
        check_extensions(runs.config_of(wrong))
    assert str(caught.value.where).startswith("tracking.trackers")
