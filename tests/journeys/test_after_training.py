"""From one command to answers: a few steps of the quickstart's own config, then all that comes after training."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

import pytest

from tests.support import runs
from tests.support.runs import finray

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, smollm2_dir: Path, ray_cluster: str) -> Path:
    output = tmp_path_factory.mktemp("quickstart")
    with contextlib.chdir(ROOT):
        code, out, err = finray(
            *("train", "examples/quickstart/quickstart.yaml", f"model.name={smollm2_dir}", f"run.output_dir={output}"),
            *("cluster.cpus_per_worker=1", "train.epochs=null", "train.max_steps=2"),
            *("evaluation.max_rows=4", "tracking.tensorboard=true"),
        )
    assert code == 0, out + err
    parts = ["M trained", "packs", "2 x CPU", "batch ", "step 2/2", "eval loss", "run finished", "peak memory"]
    for part in [*parts, "next: finray generate"]:
        assert part in out, part
    return output / "quickstart"


def test_the_run_directory_has_what_the_documents_say(run_dir: Path) -> None:
    names = {path.name for path in run_dir.iterdir()}
    assert {"config.yaml", "metrics.jsonl", "summary.json", "tensorboard", "checkpoint-000002", "final"} <= names
    final = {path.name for path in (run_dir / "final").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json"} <= final
    assert {"tokenizer.json", "chat_template.jinja", "manifest.json"} <= final
    assert "training_state" not in final
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    kinds = [one["kind"] for one in records]
    steps = [one for one in records if one["kind"] == "train"]
    summary = json.loads((run_dir / "summary.json").read_text())["summary"]
    supervised = [one["supervised"] for one in steps]
    weighted = sum(one["loss"] * count for one, count in zip(steps, supervised, strict=True))
    assert summary["mean_loss"] == pytest.approx(weighted / sum(supervised))
    assert summary["train_seconds"] == pytest.approx(steps[-1]["seconds"], abs=1e-6)
    assert summary["train_seconds"] > 0
    # Records of the machine come when they come.
    assert [kind for kind in kinds if kind != "system"] == ["eval", "train", "train", "eval"]


def test_evaluate_compares_with_the_base_on_the_held_out_rows(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    code, out, err = finray("evaluate", run_dir, "--max-rows", 3, "--max-new-tokens", 16)
    assert code == 0, out + err
    assert "3 rows" in out
    assert "exact match" in out
    scores = json.loads((run_dir / "evaluation" / "metrics.json").read_text())
    assert scores["rows"] == 3
    # Two steps are too few for exact answers, and enough for a better loss.
    assert scores["models"]["tuned"]["loss"]["value"] < scores["models"]["base"]["loss"]["value"]
    predictions = [json.loads(line) for line in (run_dir / "evaluation" / "predictions.jsonl").read_text().splitlines()]
    assert len(predictions) == 3
    rows = (ROOT / "examples/quickstart/validation.jsonl").read_text().splitlines()
    expected = json.loads(rows[predictions[0]["row"]])
    assert predictions[0]["reference"] == expected["messages"][-1]["content"]
    assert set(predictions[0]) == {"row", "where", "prompt", "reference", "answers", "scores"}


def test_generate_answers_and_a_seed_gives_the_same_sample(run_dir: Path, tmp_path: Path) -> None:
    code, out, err = finray("generate", run_dir, "Say hello.", "--system", "Be brief.", "--max-new-tokens", 8)
    assert code == 0, out + err
    assert out.strip()
    answers = tmp_path / "answers.jsonl"
    prompts = ROOT / "examples/quickstart/prompts.jsonl"
    sampled = ("--max-new-tokens", 8, "--temperature", 0.7, "--seed", 3)
    arguments = ("generate", run_dir / "checkpoint-000002", "--file", prompts, "--output", answers, *sampled)
    assert finray(*arguments)[0] == 0
    first = answers.read_text()
    assert len(first.splitlines()) == len(prompts.read_text().splitlines())
    assert finray(*arguments)[0] == 0
    assert answers.read_text() == first, "the same seed gives the same sample"


def test_export_as_adapter_and_merged(run_dir: Path, tmp_path: Path) -> None:
    for option, name in (("--merge", "model.safetensors"), ("--adapter", "adapter_model.safetensors")):
        target = tmp_path / option.strip("-")
        code, out, err = finray("export", run_dir, "--output", target, option)
        assert code == 0, out + err
        assert "logits differ by" in out
        assert (target / name).is_file()
        assert (target / "chat_template.jinja").is_file()
    code, out, err = finray("generate", tmp_path / "merge", "Say hello.", "--max-new-tokens", 4)
    assert code == 0, out + err


def test_a_damaged_final_model_is_refused_by_name(run_dir: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run_dir / "final", tmp_path / "final")
    weights = copy / "adapter_model.safetensors"
    runs.flip(weights)
    code, _, err = finray("generate", copy, "hello")
    assert code == 2
    assert str(weights) in err
