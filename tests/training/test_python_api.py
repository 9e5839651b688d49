"""What comes after a training, from Python and from the command line: the same numbers, answers and weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import finray
from finray.checkpoint.rundir import RunDir
from finray.records import RunSummary
from finray.reporting.run import TrainResult
from finray.tracking.jsonl import read_records
from tests.support import runs


@pytest.fixture(scope="module")
def result(tiny_run: Callable[..., dict[str, Any]]) -> TrainResult:
    """What `finray.train` gives, of a run without Ray."""
    plain = tiny_run({"data.eval_ratio": 0.2, "train.max_steps": 3, "evaluation.max_new_tokens": 4})
    folder = Path(plain["run"]["output_dir"]) / plain["run"]["name"]
    runs.run_alone(plain, folder)
    RunDir(folder).keep_config(runs.config_of(plain))
    step = RunDir(folder).make_final(best=None, warn=print)
    phases = dict.fromkeys(("start_ray", "prepare", "start_workers", "load", "train", "evaluate", "checkpoint"), 1.5)
    phases |= {"total": 10.5, "data_wait": 0.25}
    summary = RunSummary(3, 3, 400, 200, 1.5, 266.0, 3.5, 2.25, "eval_loss", 2.5, phases, (2**30, 2**31))
    return TrainResult(folder, folder / "final", step, summary)


def test_metrics_are_the_records_as_a_table(result: TrainResult) -> None:
    records = list(read_records(result.run_dir / "metrics.jsonl"))
    losses = {one["step"]: one["loss"] for one in records if one["kind"] == "train"}
    table = result.metrics
    assert table["loss"].dropna().to_dict() == losses
    assert len(losses) == 3
    assert table["eval_loss"].notna().any()


def test_a_result_is_shown_with_its_losses_and_what_comes_next(result: TrainResult) -> None:
    plain = json.loads(json.dumps(result.plain()))
    assert plain["summary"] == json.loads(json.dumps(result.summary.json()))
    assert (plain["run_dir"], plain["final"]) == (str(result.run_dir), str(result.final))
    bundle = result._repr_mimebundle_()
    for part in ("3.5000 at the first step, 2.2500 at the last", "2.5000", "2.00 GiB", "finray export"):
        assert part in bundle["text/plain"]


def test_the_model_is_the_tuned_one_with_its_tokenizer(result: TrainResult, tiny_model_dir: Path) -> None:
    model, tokenizer = result.model()
    ids = torch.tensor([tokenizer("one two three")["input_ids"]])
    base = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    with torch.no_grad():
        tuned = model(ids).logits.float()
        assert not torch.allclose(tuned, base(ids).logits, atol=1e-3)
        with model.disable_adapter():
            torch.testing.assert_close(model(ids).logits.float(), base(ids).logits, atol=0.05, rtol=0.05)


def test_evaluate_gives_the_document_of_its_command(result: TrainResult) -> None:
    own = finray.evaluate(result, max_rows=2, quiet=True)
    again = finray.evaluate(str(result.run_dir), max_rows=2, quiet=True)
    engine, *cut = own.notes
    assert engine == "using finray's own engine, because vLLM is not installed (pip install vllm)"
    # Of answers, not of computing them.
    assert all("answers were cut off" in note for note in cut)
    assert again.plain() == {**own.plain(), "notes": cut, "rates": []}, "nothing is computed again"
    assert {one["model"] for one in own.plain()["rates"]} == {"base", "tuned"}
    code, out, _ = runs.finray("evaluate", result.run_dir, "--max-rows", 2, "--json")
    assert code == 0
    document = json.loads(out)
    assert document == json.loads(json.dumps(again.plain()))
    assert own.rows == 2
    assert own._repr_mimebundle_()["text/plain"].startswith("2 rows; 95 % intervals")


def test_generate_gives_the_answers_of_its_command(result: TrainResult, tmp_path: Path) -> None:
    own = finray.generate(result, ["one two", [{"role": "user", "content": "three"}]], max_new_tokens=4)
    assert len(own) == 2
    code, out, _ = runs.finray("generate", result.run_dir, "one two", "three", "--max-new-tokens", 4, "--json")
    assert code == 0
    assert [row["answer"] for row in json.loads(out)["answers"]] == list(own)
    assert finray.generate(result.run_dir, "three", max_new_tokens=4)[0] == own[1]
    target = tmp_path / "answers.jsonl"
    words = ("generate", result.run_dir, "one two", "three", "--max-new-tokens", 4, "--output", target, "--json")
    assert json.loads(runs.finray(*words)[1]) == {"output": str(target), "rows": 2}
    assert [json.loads(line)["answer"] for line in target.read_text().splitlines()] == list(own)


def test_generate_without_a_prompt_is_refused_and_waits_for_nobody(result: TrainResult) -> None:
    with pytest.raises(finray.FinrayError, match="there is no prompt"):
        finray.generate(result)


def test_export_takes_names_and_says_what_it_wrote(result: TrainResult, tmp_path: Path) -> None:
    own = finray.export(result, str(tmp_path / "merged"))
    assert own.merged
    assert AutoModelForCausalLM.from_pretrained(own.folder).config.model_type == "llama"
    code, out, _ = runs.finray("export", result.run_dir, "--output", tmp_path / "again", "--json")
    assert code == 0
    assert json.loads(out) == {**json.loads(json.dumps(own.plain())), "folder": str(tmp_path / "again")}
    with pytest.raises(finray.FinrayError, match="use fp32, bf16 or fp16"):
        finray.export(result, tmp_path / "other", dtype="int4")
