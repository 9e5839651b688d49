"""Build the wheel, install only the wheel in an empty environment, and run the quickstart there: `make test-wheel`.

Uses pip, or uv with `--uv`; with constraints, or without them with `--no-constraints`. Not part of `make test`, because
it installs every dependency.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODEL = ROOT / ".models" / "SmolLM2-135M-Instruct"
CHANGES = ("train.max_steps=2", "train.global_batch_size=4", "evaluation.max_rows=4", "cluster.cpus_per_worker=1")


def run(*words: object, cwd: Path = ROOT) -> None:
    """Run a command, without the environment variables that would let it find the checkout."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    command = [str(word) for word in words]
    print("$", *command, flush=True)
    subprocess.run(command, check=True, cwd=cwd, env=env)


def install(python: Path, wheel: Path, *, uv: bool, constraints: bool) -> None:
    """Install torch, then the wheel, as the guide says."""
    command = ["uv", "pip", "install", "--python", str(python)] if uv else [str(python), "-m", "pip", "install", "-q"]
    limits = ["--constraint", str(ROOT / "constraints.txt")] if constraints else []
    run(*command, *limits, "torch")
    run(*command, *limits, wheel)


def check(folder: Path, wheel: Path, *, uv: bool, constraints: bool) -> None:
    """Create an environment with the wheel, and plan, train, evaluate and export a config in it."""
    environment = folder / "environment"
    run(sys.executable, "-m", "venv", environment)
    finray, python = environment / "bin" / "finray", environment / "bin" / "python"
    install(python, wheel, uv=uv, constraints=constraints)
    work = folder / "work"
    shutil.copytree(ROOT / "examples" / "quickstart", work / "examples" / "quickstart")
    run(finray, "--version", cwd=work)
    # Type checkers of users read the package's types only if this file is in it.
    run(python, "-c", "from importlib.resources import files; files('finray').joinpath('py.typed').read_text()")
    run(finray, "plan", "qwen3-8b-lora", "--gpu", "a100-80gb", "--offline", cwd=work)
    run(finray, "jobspec", "--model", "llama3", "--dataset", "alpaca", "--to", "slurm", cwd=work)
    config = "examples/quickstart/quickstart.yaml"
    run(finray, "train", config, f"model.name={MODEL}", *CHANGES, cwd=work)
    run(finray, "evaluate", "runs/quickstart", "--max-rows", 2, "--max-new-tokens", 4, cwd=work)
    run(finray, "report", "runs/quickstart", cwd=work)
    run(finray, "export", "runs/quickstart", "--output", "merged", cwd=work)
    assert (work / "merged" / "model.safetensors").is_file()


def main() -> None:
    """Build and check."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--uv", action="store_true", help="install with uv")
    options.add_argument("--no-constraints", action="store_true", help="install the newest version of every dependency")
    given = options.parse_args()
    assert MODEL.is_dir(), f"run `make {MODEL.relative_to(ROOT)}` first"
    with tempfile.TemporaryDirectory(prefix="finray-wheel-") as name:
        folder = Path(name)
        run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT)
        (wheel,) = folder.glob("finray-*.whl")
        check(folder, wheel, uv=given.uv, constraints=not given.no_constraints)
    print("the wheel works")


if __name__ == "__main__":
    main()
