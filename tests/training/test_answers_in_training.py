"""Held-out prompts that are answered at evaluations in training: as plain PEFT answers them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from finray.checkpoint import CheckpointStore
from finray.data.dataset.prepare import prepare_here
from finray.data.dataset.prepared import PreparedDataset
from finray.errors import TrainingError
from finray.evaluation.during import TrainingAnswers
from finray.evaluation.engines.transformers import TransformersEngine
from finray.models import attention
from tests.support import runs
from tests.support.runs import Plain, changed

ME = "tests.training.test_answers_in_training"
SEEN: list[tuple[list[str], list[str]]] = []


def seen(answers: list[str], references: list[str]) -> float:
    """A metric of one's own: keeps what it was shown, and falls with every call."""
    SEEN.append((list(answers), list(references)))
    return -float(len(SEEN))


seen.higher_is_better = True  # type: ignore[attr-defined]


def broken(answers: list[str], references: list[str]) -> float:
    return 1.0 / 0.0


@pytest.fixture(scope="module")
def plain(tiny_run: Callable[..., Plain], dropout_model: Path) -> Plain:
    changes = {"data.eval_ratio": 0.3, "adapter.dropout": 0.2, "evaluation.every_steps": 2, "train.max_steps": 4}
    return tiny_run({**changes, "train.learning_rate": 0.05, "checkpoint.every_steps": 2}, model=dropout_model)


def asking(plain: Plain, **evaluation: Any) -> Plain:
    asks = {"generate_rows": 3, "metrics": ["exact_match", f"{ME}:seen"], "max_new_tokens": 6, "batch_size": 2}
    return changed(plain, {"evaluation": {**asks, **evaluation}})


def run(plain: Plain, run_dir: Path) -> Any:
    SEEN.clear()
    return runs.run_alone(plain, run_dir, answering=TrainingAnswers(runs.config_of(plain), "fp32"))


def answered_by_peft(plain: Plain, checkpoint: Path) -> tuple[list[str], list[str]]:
    """One prompt at a time by Transformers and PEFT alone: the rows that the sample has, and what follows them."""
    config = runs.config_of(plain)
    tokenizer = AutoTokenizer.from_pretrained(plain["model"]["name"])
    base = AutoModelForCausalLM.from_pretrained(plain["model"]["name"], dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(checkpoint)).eval()
    held_out = PreparedDataset(prepare_here(config)).splits(config.data, seed=config.run.seed).eval
    assert held_out is not None
    answers, references = [], []
    for row in range(len(some := held_out.sample(3, seed=config.run.seed))):
        ids, mask = some.row(row)
        end = int(mask.nonzero()[0][0])
        prompt = torch.tensor([ids[:end].tolist()])
        said = model.generate(
            input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=False
        )[0, end:].tolist()
        stop = said.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in said else len(said)
        answers.append(tokenizer.decode(said[:stop], skip_special_tokens=True))
        references.append(tokenizer.decode(ids[end:][mask[end:] == 1].tolist(), skip_special_tokens=True))
    return answers, references


def test_the_answers_are_those_of_plain_peft_and_their_metrics_stand_beside_the_loss(
    plain: Plain, tmp_path: Path
) -> None:
    slower = changed(plain, {"train": {"learning_rate": 0.01, "max_steps": 8}})
    run(asking(slower), tmp_path / "run")
    found = runs.records(tmp_path / "run", "eval")
    assert [(one["step"], one["exact_match"], one["seen"]) for one in found] == [
        (2 * number, 0.0, -number) for number in (1, 2, 3, 4)
    ]
    for number, (answers, references) in enumerate(SEEN, start=1):
        assert (answers, references) == answered_by_peft(plain, tmp_path / "run" / f"checkpoint-{2 * number:06d}")
    # There are words in them, and the model has learned something in between: stale weights would be seen.
    assert any(answer for answers, _ in SEEN for answer in answers)
    assert any(SEEN[0][0] != later for later, _ in SEEN[1:])


def test_the_training_is_the_same_to_the_bit_with_and_without_answers(plain: Plain, tmp_path: Path) -> None:
    assembled = run(asking(plain), tmp_path / "asked")
    runs.run_alone(plain, tmp_path / "plain")
    assert runs.trace(tmp_path / "asked") == runs.trace(tmp_path / "plain")
    losses = [[one["eval_loss"] for one in runs.records(tmp_path / name, "eval")] for name in ("asked", "plain")]
    assert losses[0] == losses[1]
    # Attention over packed rows is back.
    assert assembled.loop.task.model.get_base_model().config._attn_implementation == attention.NAME


@pytest.mark.parametrize("size", [1, 3])
def test_so_many_prompts_are_answered_together(
    plain: Plain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    together: list[int] = []
    step = TransformersEngine.step

    def counted(self: TransformersEngine, slots: Any, working: Any, coming: Any, *rest: Any) -> torch.Tensor:
        together.append(len(working) + len(coming))
        return step(self, slots, working, coming, *rest)

    monkeypatch.setattr(TransformersEngine, "step", counted)
    run(changed(asking(plain, batch_size=size), {"train.max_steps": 2}), tmp_path)
    assert max(together) == size


def test_a_metric_of_answers_chooses_the_checkpoint_and_stops_the_run(plain: Plain, tmp_path: Path) -> None:
    stopping = asking(plain, every_steps=1, metric="seen", early_stopping={"patience": 2})
    stopping = changed(stopping, {"train.max_steps": 8})
    assembled = run(stopping, tmp_path / "run")
    # It falls with every evaluation, and more is better: the first is the best.
    assert assembled.loop.state.step == 3
    assert assembled.loop.summary().json()["best_seen"] == -1.0
    assert CheckpointStore(tmp_path / "run").best("seen", "max") == 1
    (note,) = runs.records(tmp_path / "run", "note")
    assert "stopped early at step 3 of 8: seen has not improved" in note["message"]


def test_a_killed_run_goes_on_counting_a_metric_that_is_maximized(plain: Plain, tmp_path: Path) -> None:
    stopping = asking(plain, every_steps=2, metric="seen", early_stopping={"patience": 2})
    stopping = changed(stopping, {"train.max_steps": 12})
    run(stopping, tmp_path / "run")
    cut = runs.keep_until(tmp_path / "run", 4)
    state = json.loads((cut / "checkpoint-000004/training_state/state.json").read_text())
    assert (state["best"], state["stale_evaluations"], state["metric"]) == (-1.0, 1, "seen")
    # Values continue from -3; were more worse here, or the count forgotten, it would not end at once.
    SEEN[:] = SEEN[:2]
    config = runs.config_of(stopping)
    assembled = runs.run_alone(stopping, cut, answering=TrainingAnswers(config, "fp32"))
    assert assembled.loop.state.step == 6
    # With `min` it is always better, so that the run is not stopped: what the mode decides.
    assert run(changed(stopping, {"evaluation.metric_mode": "min"}), tmp_path / "min").loop.state.step == 12


def test_a_metric_that_fails_is_one_message_and_the_checkpoints_stand(plain: Plain, tmp_path: Path) -> None:
    failing = asking(plain)
    failing["evaluation"]["metrics"] = [f"{ME}:broken"]
    saving = {"every_steps": 1, "asynchronous": False}
    with pytest.raises(TrainingError) as caught:
        run(changed(failing, {"evaluation.every_steps": 3, "checkpoint": saving}), tmp_path / "run")
    assert "failed: ZeroDivisionError" in str(caught.value)
    assert caught.value.where == "evaluation.metrics"
    assert CheckpointStore(tmp_path / "run").steps() == [1, 2]
