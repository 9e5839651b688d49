"""`evaluation.mode: async` under Ray: a task with a CPU of its own evaluates what the workers write."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from finray.data.sampling.collate import Batch
from finray.records import Beat
from finray.runtime import evaluator, pulses
from finray.tasks.causal_lm import CausalLM
from tests.support import lacking, runs
from tests.support.runs import Plain, changed


@pytest.fixture(scope="module")
def plain(tiny_run: Callable[..., Plain], dropout_model: Path) -> Plain:
    evaluation = {"every_steps": 3, "on_start": True, "max_rows": 6, "generate_rows": 2, "max_new_tokens": 4}
    changes = {"data.eval_ratio": 0.3, "adapter.dropout": 0.2, "evaluation": evaluation}
    return tiny_run({**changes, "train": {"max_steps": 9, "learning_rate": 0.05}}, model=dropout_model)


def train(plain: Plain, output: Path, *changes: dict[str, Any]) -> tuple[Path, str]:
    """The run's directory, and what it said."""
    output.mkdir()
    config = runs.write_config(changed(plain, {"run.output_dir": str(output)}, *changes), output / "run.yaml")
    code, out, err = runs.finray("train", str(config))
    assert code == 0, err
    return output / "run", out + err


def evaluations(run_dir: Path) -> list[tuple[float, ...]]:
    names = ("step", "eval_loss", "perplexity", "exact_match")
    return sorted(tuple(one[name] for name in names) for one in runs.records(run_dir, "eval"))


class DyingLM(CausalLM):
    """A causal language model whose evaluations are killed every time, however fast they are."""

    def outputs(self, batch: Batch) -> torch.Tensor:
        """As usual in training."""
        if not self.model.training:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().outputs(batch)


class ReluctantLM(CausalLM):
    """A causal language model of which every other evaluation is killed, so many times in all."""

    has_counted = False

    def outputs(self, batch: Batch) -> torch.Tensor:
        """As usual in training; each evaluation counts itself in a file."""
        if not (self.has_counted or self.model.training):
            self.has_counted = True
            with Path(os.environ[lacking.MARK]).open("a+b") as file:
                number = file.tell()
                file.write(b".")
            if number % 2 == 0 and number < 2 * (evaluator.TRIES - 1):
                os.kill(os.getpid(), signal.SIGKILL)
        return super().outputs(batch)


class StoppingLM(CausalLM):
    """A causal language model whose first evaluation is stopped, and lives."""

    def outputs(self, batch: Batch) -> torch.Tensor:
        """As usual in training; its first heartbeat has been sent."""
        mark = Path(os.environ[lacking.MARK])
        if not (self.model.training or mark.exists()):
            mark.write_text(str(os.getpid()))
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().outputs(batch)


@pytest.fixture(scope="module")
def inline(plain: Plain, tmp_path_factory: pytest.TempPathFactory, ray_cluster: str) -> Path:
    """The run that evaluates between its steps."""
    return train(plain, tmp_path_factory.mktemp("inline") / "run")[0]


def test_it_gives_the_numbers_of_inline_and_changes_no_bit_of_the_training(
    plain: Plain, inline: Path, tmp_path: Path
) -> None:
    beside, said = train(plain, tmp_path / "async", {"evaluation.mode": "async"})
    assert [step for step, *_ in evaluations(inline)] == [0, 3, 6, 9]
    # One rank and one evaluator, with the same packs and as many threads: the same bits.
    assert evaluations(beside) == evaluations(inline), said
    assert runs.trace(beside) == runs.trace(inline)
    last = "checkpoint-000009/adapter_model.safetensors"
    assert (beside / last).read_bytes() == (inline / last).read_bytes()
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (beside / "final" / file).read_bytes() == (inline / "final" / file).read_bytes()
    assert "step 0/9  eval loss" in said

    # Killed, an evaluation is begun again.
    mark = tmp_path / "mark"
    dying = {"model.task": f"{__name__}:ReluctantLM", "cluster.env": {lacking.MARK: str(mark)}}
    disturbed, said = train(plain, tmp_path / "killed", {"evaluation.mode": "async"}, dying)
    # Four evaluations, of which the first ones were begun twice.
    assert mark.stat().st_size == 4 + evaluator.TRIES - 1
    # An attempt that Ray gives to a process that was just killed fails as well.
    assert said.count("restarting the evaluation of step") >= evaluator.TRIES - 1
    assert evaluations(disturbed) == evaluations(inline)
    assert runs.trace(disturbed) == runs.trace(inline)


@pytest.mark.nightly
def test_an_evaluation_that_is_killed_each_time_is_given_up_and_the_run_continues(
    plain: Plain, inline: Path, tmp_path: Path
) -> None:
    dying = {"model.task": f"{__name__}:DyingLM", "evaluation": {"mode": "async", "on_start": False}}
    hopeless, said = train(plain, tmp_path / "hopeless", dying)
    assert said.count("restarting the evaluation of step") == 3 * (evaluator.TRIES - 1)
    assert evaluations(hopeless) == []
    assert len(runs.records(hopeless, "warning")) == 3
    assert "cannot be the best checkpoint" in said
    assert runs.trace(hopeless) == runs.trace(inline)
    # The best of the others is an earlier one, and in final/.
    last = "checkpoint-000009/adapter_model.safetensors"
    weights = [(one / last).read_bytes() for one in (hopeless, inline)]
    assert weights[0] == weights[1]


@pytest.mark.nightly
def test_two_workers_share_prompts_and_differ_from_an_evaluator_in_the_last_bits_of_a_sum_at_most(
    plain: Plain, tmp_path: Path, ray_cluster: str
) -> None:
    two = {"cluster.num_workers": 2}
    inline, _ = train(plain, tmp_path / "inline", two)
    beside, _ = train(plain, tmp_path / "async", two, {"evaluation.mode": "async"})
    for one, other in zip(evaluations(inline), evaluations(beside), strict=True):
        assert one == pytest.approx(other, rel=1e-12)
    assert runs.trace(beside) == runs.trace(inline)


def test_an_evaluator_lets_a_model_answer_that_workers_hold_in_shares(
    plain: Plain, tmp_path: Path, ray_cluster: str
) -> None:
    shared = {"cluster.num_workers": 2, "parallel.strategy": "fsdp"}
    alone, _ = train(plain, tmp_path / "alone", {"evaluation.generate_rows": None}, shared)
    beside, _ = train(plain, tmp_path / "async", {"evaluation.mode": "async"}, shared)
    losses = [[one["eval_loss"] for one in runs.records(found, "eval")] for found in (alone, beside)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert runs.trace(beside) == runs.trace(alone)
    # Between two steps its workers cannot: said before any of them starts.
    inline = changed(plain, {"run.output_dir": str(tmp_path)}, shared)
    code, _, err = runs.finray("train", str(runs.write_config(inline, tmp_path / "inline.yaml")))
    assert code == 2
    assert "set evaluation.mode to async" in err
    assert not list((tmp_path / "run").glob("checkpoint-*"))


@pytest.mark.nightly
def test_an_evaluator_that_stands_still_is_named_and_its_evaluation_repeated(
    plain: Plain, inline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hear = pulses.Pulses._hear_evaluation

    def hear_and_be_impatient(self: pulses.Pulses, beat: Beat, now: float) -> None:
        # Not before: the workers have the time that they need to start.
        monkeypatch.setattr(pulses, "START_S", 0.0)
        hear(self, beat, now)

    monkeypatch.setattr(pulses.Pulses, "_hear_evaluation", hear_and_be_impatient)
    # What stops an evaluation is the time that stops a rank, longer than a busy machine lets one wait for a CPU.
    monkeypatch.setattr(pulses, "_FIRST", 1.0)
    mark = tmp_path / "mark"
    cluster = {"hang_seconds": 20, "env": {lacking.MARK: str(mark)}}
    stopping = {"model.task": f"{__name__}:StoppingLM", "evaluation.mode": "async", "cluster": cluster}
    found, said = train(plain, tmp_path / "stopped", stopping)
    text = " ".join(said.split())
    assert f"the evaluation of step 0 (pid {mark.read_text()} on " in text
    assert "has made no progress for 20 s; it is stopped, and repeated" in text
    assert "it is stopped (SIGSTOP)" in text
    assert said.count("restarting the evaluation of step 0") == 1
    assert evaluations(found) == evaluations(inline)
    assert runs.trace(found) == runs.trace(inline)
