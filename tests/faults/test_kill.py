"""The kill test: workers and drivers die by SIGKILL at random steps, and the run's record does not change by a bit."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import forks, gated, lacking, runs
from tests.support.gated import allow
from tests.support.group import run_group
from tests.support.runs import Plain, changed

STEPS = 40


@pytest.fixture(scope="module")
def plain(tiny_run: Callable[..., Plain], dropout_model: Path) -> Plain:
    """Two workers with dropout on, accumulating over two micro-batches."""
    changes = {"train.max_steps": STEPS, "adapter.dropout": 0.2, "checkpoint": {"every_steps": 7, "keep_last": 2}}
    return tiny_run(changes | {"cluster": {"num_workers": 2, "max_failures": 5}}, rows=50, model=dropout_model)


def kill_worker(run_dir: Path, rank: int) -> None:
    os.kill(runs.read_workers(run_dir)[rank]["pid"], signal.SIGKILL)


def test_workers_and_the_driver_killed_at_random_steps_change_nothing(
    plain: Plain, tmp_path: Path, ray_cluster: str
) -> None:
    """Each rank once, then the driver; the same command again ends as a run that nobody disturbed."""
    chance = random.Random(1)
    *targets, last = sorted(chance.sample(range(8, STEPS - 12), 3))
    config = runs.into(gated.gated(plain, tmp_path), tmp_path)
    # It cannot end before its driver is killed.
    allow(tmp_path, last + 1)
    process = forks.Command("train", config)
    run_dir = tmp_path / "run"
    who = run_dir / "workers.json"

    def kill_and_wait(rank: int) -> None:
        before = who.read_bytes()
        kill_worker(run_dir, rank)
        runs.wait_until(lambda: who.read_bytes() != before, process)

    for rank, step in enumerate(targets):
        runs.wait_for_step(run_dir, step, process)
        kill_and_wait(rank)
    runs.wait_for_step(run_dir, last, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    runs.wait_for_no_group()
    allow(tmp_path, STEPS)
    code, out, err = runs.finray("train", config)
    assert code == 0, out + err
    assert "resuming   at step" in out
    assert_nothing_changed(run_dir, plain, tmp_path / "undisturbed")


STRATEGIES = {"ddp": {"strategy": "ddp"}, "fsdp": {"strategy": "fsdp"}}
STRATEGIES |= {"zero3": {"strategy": "deepspeed", "zero_stage": 3}}


@pytest.mark.parametrize(
    "strategy", ["ddp", *(pytest.param(name, marks=pytest.mark.nightly) for name in STRATEGIES if name != "ddp")]
)
def test_pairs_killed_in_the_pass_of_the_reference_in_training_and_in_a_save_are_the_same_in_the_same_steps(
    tiny_run: Callable[..., Plain], dropout_model: Path, tmp_path: Path, ray_cluster: str, strategy: str
) -> None:
    pairs = tmp_path / "pairs.jsonl"
    rows = [
        {"prompt": f"what is {at}", "chosen": f"it is {at * 7}", "rejected": "no " * (at % 5 + 1)} for at in range(30)
    ]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {
        "train.objective": "dpo",
        "preference.beta": 0.3,
        "data.source": str(pairs),
        "parallel": STRATEGIES[strategy],
    }
    changes |= {"train.max_steps": 12, "adapter.dropout": 0.2, "cluster": {"num_workers": 2, "max_failures": 5}}
    plain = tiny_run(changes, model=dropout_model)
    config = runs.into(gated.gated(plain, tmp_path), tmp_path)
    run_dir = tmp_path / "run"
    allow(tmp_path, 0)
    process = forks.Command("train", config)
    runs.wait_until(lambda: (tmp_path / "waits").exists() and (tmp_path / "waits").read_text(), process)
    runs.kill(int((tmp_path / "waits").read_text()))
    assert not list(tmp_path.rglob("made_by.json"))
    allow(tmp_path, 6)
    runs.wait_for_step(run_dir, 5, process)
    before = (run_dir / "workers.json").read_bytes()
    (tmp_path / "hold").touch()
    kill_worker(run_dir, rank=1)
    allow(tmp_path, 12)
    runs.wait_until(lambda: (tmp_path / "saves").exists(), process)
    assert (run_dir / "workers.json").read_bytes() != before
    kill_worker(run_dir, rank=0)
    assert not (run_dir / "checkpoint-000008").exists()
    (tmp_path / "hold").unlink()
    out, err = process.communicate(timeout=runs.PATIENCE_S)
    assert process.returncode == 0, out + err
    assert_nothing_changed(run_dir, plain, tmp_path / "undisturbed", steps=12)
    # One worker continues with the same pairs; its sums are in another order.
    alone = runs.cut(run_dir, tmp_path / "alone", step=8)
    runs.run_alone(changed(plain, {"cluster.num_workers": 1}), alone)
    runs.assert_same_curve(alone, run_dir, rel=1e-5)


def test_a_controller_creates_no_group_once_its_driver_has_ended(
    monkeypatch: pytest.MonkeyPatch, ray_cluster: str
) -> None:
    """Of drivers that were killed up to 0.35 s after their workers, one in ten left a group for ever."""
    from ray.train.v2._internal.execution.worker_group import worker_group

    from finray.runtime import trainer
    from finray.runtime.progress import Address

    def end(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(trainer.os, "_exit", end)
    monkeypatch.setattr(worker_group, "placement_group", lambda **options: options["name"])
    with socket.create_server(("127.0.0.1", 0)) as driver:
        driver_is = Address("127.0.0.1", driver.getsockname()[1], "token")
        trainer._NamedGroup("finray run", driver_is).after_controller_start(None)
        # It need not answer: a driver that is busy has not ended.
        assert worker_group.placement_group(bundles=[]).startswith("finray run ")
    with pytest.raises(SystemExit):
        worker_group.placement_group(bundles=[])


def assert_nothing_changed(run_dir: Path, plain: Plain, undisturbed: Path, steps: int = STEPS) -> None:
    """A run of two workers under Ray did what two processes without Ray do that nobody disturbs."""
    run_group(plain, undisturbed, world_size=2)
    assert runs.trace(run_dir) == runs.trace(undisturbed)
    name = "adapter_model.safetensors"
    done = (undisturbed / f"checkpoint-{steps:06d}" / name).read_bytes()
    assert (run_dir / "final" / name).read_bytes() == done


def test_a_classifier_whose_worker_is_killed_goes_on_to_the_bit_and_with_fewer_workers(
    classifier_run: Callable[..., Plain], tmp_path: Path, ray_cluster: str
) -> None:
    """Dropout of the encoder and of the adapter is on; no worker is restarted, so the run ends with one message."""
    changes = {"train.max_steps": STEPS, "train.micro_batch_size": 2, "adapter.dropout": 0.2}
    changes |= {"checkpoint": {"every_steps": 7, "keep_last": 2}, "cluster": {"num_workers": 2, "max_failures": 0}}
    plain = classifier_run(changes)
    own = {"model.task": gated.CLASSIFIER}
    config = runs.into(gated.gated(plain, tmp_path, own), tmp_path)
    allow(tmp_path, 17)
    process = forks.Command("train", config)
    run_dir = tmp_path / "run"
    runs.wait_for_step(run_dir, 16, process)
    kill_worker(run_dir, rank=1)
    # The other one continues to the sum of a step.
    allow(tmp_path, STEPS)
    out, err = process.communicate(timeout=runs.PATIENCE_S)
    assert process.returncode == 2, out + err
    assert "Traceback" not in out + err
    shutil.copytree(run_dir, tmp_path / "alone" / "run")
    alone = runs.into(gated.gated(plain, tmp_path / "alone", own), tmp_path / "alone", {"cluster.num_workers": 1})
    for command in (config, alone):
        code, out, err = runs.finray("train", command)
        assert code == 0, out + err
        assert "resuming   at step" in out
    undisturbed = tmp_path / "undisturbed"
    assert_nothing_changed(run_dir, plain, undisturbed)
    # One worker sees the same rows in the same steps; its sums are in another order.
    runs.assert_same_curve(tmp_path / "alone" / "run", undisturbed, rel=1e-3)
    assert runs.values(tmp_path / "alone" / "run", "samples_digest") == runs.values(undisturbed, "samples_digest")


@pytest.mark.nightly
def test_a_loss_that_is_not_finite_ends_the_run_with_one_message(
    plain: Plain, tmp_path: Path, ray_cluster: str
) -> None:
    """No restart helps against a learning rate that makes the loss infinite: no retries."""
    diverging = {"train": {"learning_rate": 1e30, "warmup_steps": 0, "max_grad_norm": None}}
    code, out, err = runs.finray("train", runs.into(plain, tmp_path, diverging))
    assert code == 2
    assert "no weight was changed" in err
    assert "Traceback" not in out + err
    assert "the workers were restarted" not in out


def test_a_bug_is_not_retried_for_ever(plain: Plain, tmp_path: Path, ray_cluster: str) -> None:
    """A model whose forward always raises: two attempts, then its own error, though Ray might restart five times."""
    changes = {"model.task": lacking.BROKEN, "cluster.num_workers": 1}
    code, out, err = runs.finray("train", runs.into(plain, tmp_path, changes))
    assert code == 2
    assert "2 times from step 0; the first error, of rank 0 on" in err
    assert ": IndexError" in err
    # The end of its traceback.
    assert "  - IndexError" in err
    assert out.count("the workers were restarted") == 2


def test_storage_that_does_not_answer_while_workers_start_is_asked_again(
    plain: Plain, tmp_path: Path, ray_cluster: str
) -> None:
    """One rank finds none, once: all start again, and it is said."""
    changes = {"model.task": lacking.SILENT, "train.max_steps": 2}
    changes["cluster"] = {"num_workers": 2, "max_failures": 1, "env": {lacking.MARK: str(tmp_path / "mark")}}
    code, out, err = runs.finray("train", runs.into(plain, tmp_path, changes))
    assert code == 0, err
    assert "the server gave no answer within 10 s; the workers are restarted" in " ".join((out + err).split())
