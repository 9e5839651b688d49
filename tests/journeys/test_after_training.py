"""From one command to answers: a few steps of the quickstart's own config, then all that comes after training."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

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
