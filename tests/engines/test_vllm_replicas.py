"""`finray evaluate --engine vllm --replicas 2`: two engines of vLLM on a Ray, and one of Transformers, answer alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import runs

pytest.importorskip("vllm", reason="an environment of its own has vLLM: make test-engines")

QUESTIONS = ("The capital of France is", "One two three four", "Hello", "A dog and a cat went", "2 + 2 =", "Why?")


def answered(folder: Path, adapter: Path, *options: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What `finray evaluate` of some options writes: its metrics and its predictions."""
    words = ("--file", str(folder / "rows.jsonl"), "--max-new-tokens", "8", "--metrics", "exact_match", *options)
    out = folder / "-".join(options).replace("--", "")
    code, printed, err = runs.cli("evaluate", str(adapter), *words, "--output", str(out), "train.precision=fp32")
    assert code == 0, printed + err
    (metrics,), (predictions,) = out.rglob("metrics.json"), out.rglob("predictions.jsonl")
    return json.loads(metrics.read_text()), [json.loads(line) for line in predictions.read_text().splitlines()]


def test_two_replicas_answer_as_transformers_does(adapter: Path, tmp_path: Path) -> None:
    turns = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": "Paris"}] for question in QUESTIONS
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"messages": one}) + "\n" for one in turns))
    metrics, spread = answered(tmp_path, adapter, "--engine", "vllm", "--replicas", "2")
    _, alone = answered(tmp_path, adapter, "--engine", "transformers")
    assert len(spread) == len(QUESTIONS)
    assert spread == alone
    assert "2 replicas on Ray" in json.dumps(metrics["made_by"])
