"""The script of `finray jobspec --to slurm` on a real Slurm of one node: `make test-slurm`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from finray.config.load import preset_names
from tests.support import runs, slurm
from tests.support.runs import Plain, changed

ROOT = Path(__file__).parents[2]
STEPS = 200


@pytest.fixture(scope="module")
def cluster() -> Iterator[slurm.Slurm]:
    """Skips where this machine can have no Slurm; in CI that is a failure."""
    if (why := slurm.missing()) is not None:
        assert os.environ.get("CI") != "true", f"CI must run these tests: {why}"
        pytest.skip(why)
    with runs.short_folder() as folder, slurm.serve(folder) as found:
        yield found


def until(what: Callable[[], Any], told: Callable[[], str]) -> Any:
    deadline = time.monotonic() + slurm.PATIENCE_S
    while not (found := what()):
        assert time.monotonic() < deadline, told()
        time.sleep(0.5)
    return found


def write_script(file: Path, *words: object) -> Path:
    code, out, err = runs.finray("jobspec", *words, "--to", "slurm", "-o", file)
    assert code == 0, out + err
    return file


@pytest.mark.parametrize("name", preset_names())
def test_slurm_takes_the_script_of_a_preset(name: str, tmp_path: Path, cluster: slurm.Slurm) -> None:
    script = write_script(tmp_path / "job.sbatch", name)
    assert "to start at" in cluster.run("sbatch", "--test-only", script)


def test_slurm_refuses_a_directive_that_is_none(tmp_path: Path, cluster: slurm.Slurm) -> None:
    """The negative control."""
    script = write_script(tmp_path / "job.sbatch", "smollm2-lora", "--cpus-per-node", 2, "--memory", 2)
    assert "to start at" in cluster.run("sbatch", "--test-only", script)
    for right, wrong in (("--signal=B:TERM@120", "--signal=B:TREM@120"), ("--requeue", "--requeues")):
        script.write_text(script.read_text().replace(right, wrong))
        assert "to start at" not in cluster.run("sbatch", "--test-only", script, check=False)
        script.write_text(script.read_text().replace(wrong, right))


@pytest.mark.timeout(1200)
def test_a_job_is_preempted_ends_by_its_time_limit_and_goes_on(
    tiny_run: Callable[..., Plain], tmp_path: Path, cluster: slurm.Slurm
) -> None:
    go, run_dir = tmp_path / "go", tmp_path / "out" / "run"
    changes = {
        "run.output_dir": str(tmp_path / "out"),
        "train.max_steps": STEPS,
        "checkpoint.every_steps": 10_000,
        "cluster.cpus_per_worker": 1,
        "prepare.num_workers": 1,
        "model.task": "tests.support.job_server:SlowLM",
        "cluster.env": {"FINRAY_TESTS_GO": str(go)},
    }
    config = runs.write_config(changed(tiny_run(rows=16), changes), tmp_path / "run.yaml")
    script = write_script(
        tmp_path / "job.sbatch", config, "--cpus-per-node", 2, "--memory", 4, "--shared", tmp_path, "--hours", 1
    )
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {"PATH": path, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "TMPDIR": str(cluster.folder), "MY_TOKEN": "unsaid"}
    job = cluster.run("sbatch", "--parsable", script, cwd=tmp_path, **env).strip()

    def told() -> str:
        log = tmp_path / f"run-{job}.log"
        return f"{cluster.job(job)}\n{log.read_text() if log.exists() else 'no log'}\n{cluster.logs()}"

    def steps() -> list[int]:
        return runs.values(run_dir, "step") if (run_dir / "metrics.jsonl").exists() else []

    def trains_again(restarts: int, after: int) -> bool:
        assert cluster.job(job)["JobState"] not in ("FAILED", "CANCELLED", "TIMEOUT"), told()
        return cluster.job(job)["Restarts"] == str(restarts) and len(steps()) >= after + 2

    until(lambda: trains_again(0, 0), told)

    # A job of more weight wants the node: Slurm signals the steps of the first, which saves a checkpoint and is queued.
    other = cluster.run("sbatch", "--parsable", f"--partition={slurm.HIGH}", "--exclusive", "--wrap=true")
    until(lambda: cluster.job(other.strip())["JobState"] == "COMPLETED", told)
    first = len(steps())
    assert (run_dir / f"checkpoint-{first:06d}" / "manifest.json").is_file(), told()
    until(lambda: trains_again(1, first), told)

    # What --signal does before the time limit.
    cluster.run("scancel", "--batch", "--signal=TERM", job)
    until(lambda: cluster.job(job)["Restarts"] == "2", told)
    second = len(steps())
    assert (run_dir / f"checkpoint-{second:06d}" / "manifest.json").is_file(), told()
    go.touch()
    until(lambda: cluster.job(job)["JobState"] == "COMPLETED", told)
    assert steps() == list(range(1, STEPS + 1))
    assert (run_dir / "final" / "adapter_model.safetensors").is_file(), told()
