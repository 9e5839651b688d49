"""DeepSpeed's ZeRO gives the curve of one process in every stage, and its checkpoints are ordinary ones."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from finray.errors import TrainingError
from finray.sharding import full_tensor
from tests.support import runs
from tests.support.group import run_all
from tests.support.runs import Plain, changed

STAGES = (1, 2, 3)
FULL = {"adapter.method": "none", "train.learning_rate": 0.002, "checkpoint.every_steps": 2}
JSON_ADAM = {
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "torch_adam": True}},
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
}
# As many people have it.
JSON_FP16 = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
    "gradient_clipping": "auto",
}
FIRST_SCALE = 2.0**18


def zero(plain: Plain, stage: int, **fields: Any) -> Plain:
    return changed(plain, {"parallel": {"strategy": "deepspeed", "zero_stage": stage, **fields}})


def look(assembled: Any, run_dir: Path) -> None:
    """Write down how much of the model this rank holds before the first step."""
    held = {}
    for name, parameter in assembled.loop.task.model.named_parameters():
        share = getattr(parameter, "ds_tensor", None)
        whole = getattr(parameter, "ds_numel", parameter.numel())
        held[name] = (whole, parameter.numel(), 0 if share is None else share.numel())
    rank = assembled.loop.strategy.rank
    (run_dir / f"held-{rank}.json").write_text(json.dumps(held))
    if run_dir.name.startswith("poisoned"):
        poison(assembled.loop, run_dir)
    if run_dir.name.startswith("hot"):
        overheat(assembled.loop, run_dir)


def poison(loop: Any, run_dir: Path) -> None:
    """Make one rank's first loss not finite, and write down what becomes of the run."""
    real_run, real_loss, seen = loop.run, loop.task.outputs, []

    def loss_sum(batch: Any) -> torch.Tensor:
        seen.append(batch)
        loss: torch.Tensor = real_loss(batch)
        return loss * torch.nan if len(seen) == 1 and loop.strategy.rank == 1 else loss

    def run() -> None:
        before = {name: full_tensor(tensor).clone() for name, tensor in loop.task.layout.tensors().items()}
        said = "nothing"
        try:
            real_run()
        except TrainingError as error:
            said = str(error)
        same = all(
            torch.equal(full_tensor(tensor), before[name]) for name, tensor in loop.task.layout.tensors().items()
        )
        (run_dir / f"end-{loop.strategy.rank}.json").write_text(json.dumps([said, same, len(seen)]))

    loop.run, loop.task.outputs = run, loss_sum


def overheat(loop: Any, run_dir: Path) -> None:
    """Begin with a scale that is too large, and write down what each step leaves on this rank."""
    loop._guard._scale.fill_(FIRST_SCALE)
    before = {name: full_tensor(tensor).clone() for name, tensor in loop.task.layout.tensors().items()}
    real, found = loop._after_step, []

    def after(*args: Any, **more: Any) -> None:
        same = all(
            torch.equal(full_tensor(tensor), before[name]) for name, tensor in loop.task.layout.tensors().items()
        )
        found.append((float(loop._guard._scale), int(loop._guard._skipped), same))
        (run_dir / f"steps-{loop.strategy.rank}.json").write_text(json.dumps(found))
        real(*args, **more)

    loop._after_step = after


def scaled(done: Done) -> dict[int, Plain]:
    """Short runs in fp16, by stage: one as plain as can be, one with all that its users have."""
    short = changed(done.plain, FULL, {"train.precision": "fp16", "train.max_steps": 4})
    theirs = {"strategy": "deepspeed", "deepspeed_config": str(done.folder / "fp16.json")}
    people = {"optimizer": "paged_adamw_8bit", "gradient_checkpointing": True}
    return {2: zero(short, 2, cpu_offload=True), 3: changed(short, {"train": people, "parallel": theirs})}


@dataclass
class Done:
    """What the one group of processes has trained: run directories by name."""

    folder: Path
    plain: Plain

    def __getitem__(self, name: str) -> Path:
        return self.folder / name


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, tiny_run: Callable[..., Plain]) -> Done:
    folder = tmp_path_factory.mktemp("runs")
    # Steps of three rows on two workers: one of them always has a micro-batch for nothing.
    changes = {"train.global_batch_size": 3, "data.eval_ratio": 0.1, "evaluation.on_start": True}
    plain = tiny_run(changes, rows=37)
    full = changed(plain, FULL)
    half = changed(full, {"train.precision": "bf16", "train.gradient_checkpointing": True})
    small = changed(full, {"train.optimizer": "paged_adamw_8bit"})
    own = folder / "ds.json"
    own.write_text(json.dumps(JSON_ADAM))
    for name, one in (("full", full), ("half", half), ("small", small)):
        runs.run_alone(one, folder / name)
    jobs = [(zero(full, stage), folder / f"full-{stage}") for stage in STAGES]
    jobs += [(zero(half, 3), folder / "half-3")]
    jobs += [(zero(full, 2, cpu_offload=True), folder / "full-offloaded")]
    jobs += [(zero(small, stage), folder / f"small-{stage}") for stage in (2, 3)]
    theirs = changed(full, {"parallel": {"strategy": "deepspeed", "deepspeed_config": str(own)}})
    jobs += [(changed(theirs, {"train.gradient_checkpointing": True}), folder / "full-json")]
    # Without an evaluation at the start: the first loss is that of the first step.
    rare = {"tracking.log_every": 4, "evaluation.on_start": False}
    jobs += [(zero(changed(full, rare), 2), folder / "poisoned-2"), (changed(theirs, rare), folder / "poisoned-json")]
    (folder / "fp16.json").write_text(json.dumps(JSON_FP16))
    runs.run_alone(changed(full, {"train.max_steps": 4}), folder / "short")
    for stage, one in scaled(Done(folder, plain)).items():
        jobs += [(one, folder / f"scaled-{stage}"), (one, folder / f"hot-{stage}")]
    run_all(jobs, world_size=2, look=look)
    return Done(folder, plain)


@pytest.mark.parametrize("name", [*(f"full-{stage}" for stage in STAGES), "full-offloaded", "full-json"])
def test_the_curve_is_that_of_one_process(done: Done, name: str) -> None:
    runs.assert_same_curve(done[name], done["full"])


def test_bf16_is_close(done: Done) -> None:
    runs.assert_same_curve(done["half-3"], done["half"], rel=0.03)
    assert runs.values(done["half-3"], "loss") != runs.values(done["full"], "loss")


@pytest.mark.parametrize("stage", [2, 3])
def test_fp16_is_close(done: Done, stage: int) -> None:
    runs.assert_same_curve(done[f"scaled-{stage}"], done["short"], rel=0.02)
    assert runs.values(done[f"scaled-{stage}"], "loss") != runs.values(done["short"], "loss")
    assert runs.values(done[f"scaled-{stage}"], "loss_scale") == [2.0**16] * 4


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_too_large_for_fp16_leave_the_update_out_on_all_ranks(done: Done, stage: int) -> None:
    found, other = (json.loads((done[f"hot-{stage}"] / f"steps-{rank}.json").read_text()) for rank in (0, 1))
    assert found == other
    left_out = found[-1][1]
    assert 1 <= left_out <= 3
    # The scale is halved in each of these steps; weights are as they were until one update is good.
    halved = [[FIRST_SCALE / 2 ** (number + 1), number + 1, True] for number in range(left_out)]
    assert found == halved + [[FIRST_SCALE / 2**left_out, left_out, False]] * (4 - left_out)
    norms = runs.values(done[f"hot-{stage}"], "grad_norm")
    assert [norm is None for norm in norms] == [True] * left_out + [False] * (4 - left_out)


@pytest.mark.parametrize("stage", [2, 3])
def test_an_8_bit_optimizer_is_really_used(done: Done, stage: int) -> None:
    # Blocks are cut elsewhere, so moments are rounded elsewhere.
    runs.assert_same_curve(done[f"small-{stage}"], done["small"], rel=0.01)
    assert runs.values(done[f"small-{stage}"], "loss") != runs.values(done[f"full-{stage}"], "loss")


def test_stage_3_never_holds_the_whole_model(done: Done) -> None:
    for rank in (0, 1):
        held = json.loads((done["full-3"] / f"held-{rank}.json").read_text())
        for name, (size, here, share) in held.items():
            # Vectors may stay on every rank; matrices may not.
            assert share == -(-size // 2), name
            assert here == 0 or size <= 10 * 64, name
        # Otherwise the test would say the same of a model that is not shared.
        held = json.loads((done["full-2"] / f"held-{rank}.json").read_text())
        assert all(here == size and not share for size, here, share in held.values())


@pytest.mark.parametrize("name", ["poisoned-2", "poisoned-json"])
def test_a_loss_that_is_not_finite_stops_all_ranks_before_any_weight_changes(done: Done, name: str) -> None:
    for rank in (0, 1):
        said, same, micro_batches = json.loads((done[name] / f"end-{rank}.json").read_text())
        assert "the loss is nan at step 1; no weight was changed" in said
        assert same
        # There were steps after it, with gradients that are finite.
        assert micro_batches == 4


def test_resuming_is_exact_to_the_bit_and_other_strategies_go_on(done: Done, tmp_path: Path) -> None:
    def cut(name: str, target: str, *, step: int = 4) -> Path:
        return runs.cut(done[name], tmp_path / target, step=step)

    full = changed(done.plain, FULL)
    small = changed(full, {"train.optimizer": "paged_adamw_8bit"})
    jobs = [(zero(full, stage), cut(f"full-{stage}", f"full-{stage}")) for stage in STAGES]
    jobs += [(zero(small, stage), cut(f"small-{stage}", f"small-{stage}")) for stage in (2, 3)]
    jobs += [(one, cut(f"hot-{stage}", f"hot-{stage}", step=2)) for stage, one in scaled(done).items()]
    # 8-bit state that ZeRO-3 wrote, in one process.
    runs.run_alone(small, cut("small-3", "small"))
    runs.assert_same_curve(tmp_path / "small", done["small"], rel=0.01)
    # ZeRO-3 on 2, then one process, then FSDP on 2, then ZeRO-2 on 3.
    moved = cut("full-3", "moved", step=2)
    runs.run_alone(full, moved)
    runs.keep_until(moved, 4)
    jobs.append((changed(full, {"parallel.strategy": "fsdp"}), moved))
    run_all(jobs, world_size=2)
    for stage in STAGES:
        assert runs.trace(tmp_path / f"full-{stage}") == runs.trace(done[f"full-{stage}"])
    for stage in (2, 3):
        assert runs.trace(tmp_path / f"small-{stage}") == runs.trace(done[f"small-{stage}"])
        assert runs.trace(tmp_path / f"hot-{stage}") == runs.trace(done[f"hot-{stage}"])
        scales = runs.values(tmp_path / f"hot-{stage}", "loss_scale")
        assert scales == runs.values(done[f"hot-{stage}"], "loss_scale")
    runs.keep_until(moved, 6)
    run_all([(zero(full, 2, keep_deepspeed_shards=False), moved)], world_size=3)
    runs.assert_same_curve(moved, done["full"])
    # Each of these wrote its checkpoint: that the runs did continue, and did not only look at what was there.
    assert (moved / "checkpoint-000006" / "training_state" / "optimizer-00002-of-00002.safetensors").is_file()
    assert (moved / "checkpoint-000008" / "training_state" / "optimizer-00003-of-00003.safetensors").is_file()
    assert not (moved / "checkpoint-000008" / "deepspeed").exists()


def test_deepspeeds_own_files_give_the_same_weights(done: Done, tmp_path: Path) -> None:
    checkpoints = {stage: done[f"full-{stage}"] / "checkpoint-000008" for stage in STAGES}
    # As each script says of itself, but in one process.
    program = "import runpy, sys\nfor own, target in zip(sys.argv[1::2], sys.argv[2::2]):\n"
    program += "    runpy.run_path(f'{own}/zero_to_fp32.py')['convert_zero_checkpoint_to_fp32_state_dict'](\n"
    program += "        own, target, safe_serialization=True)\n"
    places = [str(place) for stage in STAGES for place in (checkpoints[stage] / "deepspeed", tmp_path / str(stage))]
    subprocess.run([sys.executable, "-c", program, *places], check=True, capture_output=True)
    for stage, checkpoint in checkpoints.items():
        own = {path.relative_to(checkpoint).as_posix() for path in (checkpoint / "deepspeed").rglob("*.*")}
        assert own <= {entry["path"] for entry in json.loads((checkpoint / "manifest.json").read_text())["files"]}
        found = load_file(tmp_path / str(stage) / "model.safetensors")
        expected: dict[str, torch.Tensor] = {}
        for path in checkpoint.glob("model-*.safetensors"):
            expected |= load_file(path)
        assert {f"model.{name}" for name in expected} <= found.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[f"model.{name}"], tensor), name
