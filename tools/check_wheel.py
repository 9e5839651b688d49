"""Build the wheel, install only the wheel in an empty environment, and run the quickstart there: `make test-wheel`.

Uses pip, or uv with `--uv`; the versions of `constraints.txt`, or with `--versions newest` or `oldest` those that
`pyproject.toml` allows (`oldest` and another Python need uv); `--all` goes through `CASES`. Not part of `make test`,
because it installs every dependency.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODEL = ROOT / ".models" / "SmolLM2-135M-Instruct"
CHANGES = ("train.max_steps=2", "train.global_batch_size=4", "evaluation.max_rows=4", "cluster.cpus_per_worker=1")


def run(*words: object, cwd: Path = ROOT, tries: int = 1) -> None:
    """Run a command, without the environment variables that would let it find the checkout."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    command = [str(word) for word in words]
    print("$", *command, flush=True)
    while (code := subprocess.run(command, check=False, cwd=cwd, env=env).returncode) and tries > 1:
        tries -= 1
    if code:
        raise SystemExit(f"exit code {code}: {' '.join(command)}")


@dataclass(frozen=True)
class Case:
    """How the wheel is installed: by whom, in which Python, in which versions."""

    python: str
    installer: str
    versions: str


HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
CASES = (
    Case("3.11", "pip", "constraints"),
    Case("3.11", "uv", "oldest"),
    Case("3.12", "uv", "newest"),
    Case("3.13", "uv", "newest"),
)
SHOWN = ("torch", "transformers", "peft", "ray", "datasets")


def create(environment: Path, case: Case) -> Path:
    """Make an empty environment; returns its Python."""
    if case.installer == "pip":
        assert case.python == HERE, f"pip installs for the Python that runs this: {HERE}"
        run(sys.executable, "-m", "venv", environment)
    else:
        run("uv", "venv", "--quiet", "--python", case.python, environment)
    return environment / "bin" / "python"


def install(python: Path, wheel: Path, case: Case) -> None:
    """Install torch, then the wheel, as the guide says; the oldest versions all at once."""
    pip = ["uv", "pip", "install", "--quiet", "--python", python] if case.installer == "uv" else []
    command = pip or [python, "-m", "pip", "install", "-q"]
    if case.versions == "oldest":
        # What only the wheel asks for would be indirect, and of the newest versions.
        run(*command, "--resolution", "lowest-direct", "--requirements", ROOT / "pyproject.toml", wheel)
        return
    limits = ["--constraint", ROOT / "constraints.txt"] if case.versions == "constraints" else []
    run(*command, *limits, "torch")
    run(*command, *limits, wheel)


def check(folder: Path, wheel: Path, case: Case) -> str:
    """Create an environment with the wheel, and plan, train, evaluate and export a config in it.

    Returns:
        A row of the table in docs/release.md.
    """
    began = time.monotonic()
    python = create(folder / "environment", case)
    finray = python.with_name("finray")
    install(python, wheel, case)
    versions = f"from importlib.metadata import version; print(*map(version, {SHOWN}), sep=' | ')"
    found = subprocess.run([python, "-c", versions], check=True, capture_output=True, text=True).stdout.strip()
    work = folder / "work"
    shutil.copytree(ROOT / "examples" / "quickstart", work / "examples" / "quickstart")
    run(finray, "--version", cwd=work)
    # Type checkers of users read the package's types only if this file is in it.
    run(python, "-c", "from importlib.resources import files; files('finray').joinpath('py.typed').read_text()")
    run(finray, "plan", "qwen3-8b-lora", "--gpu", "a100-80gb", "--offline", cwd=work)
    run(finray, "jobspec", "--model", "llama3", "--dataset", "alpaca", "--to", "slurm", cwd=work)
    config = "examples/quickstart/quickstart.yaml"
    # A machine that has too much else to do may not start Ray in time: finray says so, and the next call continues.
    run(finray, "train", config, f"model.name={MODEL}", *CHANGES, cwd=work, tries=3)
    run(finray, "evaluate", "runs/quickstart", "--max-rows", 2, "--max-new-tokens", 4, cwd=work)
    run(finray, "report", "runs/quickstart", cwd=work)
    run(finray, "export", "runs/quickstart", "--output", "merged", cwd=work)
    assert (work / "merged" / "model.safetensors").is_file()
    minutes = (time.monotonic() - began) / 60
    return f"| {case.python} | {case.installer} | {case.versions} | {found} | {minutes:.0f} min |"


def main() -> None:
    """Build and check."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--uv", action="store_true", help="install with uv")
    options.add_argument("--python", default=HERE, help="version of Python (uv)")
    options.add_argument("--versions", choices=("constraints", "newest", "oldest"), default="constraints")
    options.add_argument("--all", action="store_true", help="go through all cases")
    given = options.parse_args()
    assert MODEL.is_dir(), f"run `make {MODEL.relative_to(ROOT)}` first"
    cases = CASES if given.all else (Case(given.python, "uv" if given.uv else "pip", given.versions),)
    rows = []
    with tempfile.TemporaryDirectory(prefix="finray-wheel-") as name:
        folder = Path(name)
        run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT)
        (wheel,) = folder.glob("finray-*.whl")
        for case in cases:
            (folder / "case").mkdir()
            rows.append(check(folder / "case", wheel, case))
            print(rows[-1], flush=True)
            # An environment takes 2 to 6 GB.
            shutil.rmtree(folder / "case")
    print(f"| Python | installer | versions | {' | '.join(SHOWN)} | time |", *rows, "the wheel works", sep="\n")


if __name__ == "__main__":
    main()
