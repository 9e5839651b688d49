"""deploy/: Dockerfiles, scripts and examples that linters and schemas accept, and that do what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from tests.support.runs import finray

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
BIN = Path(sys.executable).parent
DOCKERFILES = sorted(DEPLOY.glob("Dockerfile.*"))
SCRIPTS = [*sorted(DEPLOY.rglob("*.sh")), *sorted((ROOT / "examples").rglob("*.sh")), *sorted((ROOT / ".ci").iterdir())]


def run(*words: object, **env: str) -> subprocess.CompletedProcess[str]:
    command = [str(word) for word in words]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, cwd=ROOT)


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_a_dockerfile_is_clean_pinned_and_not_of_root(file: Path, tmp_path: Path) -> None:
    done = run(BIN / "hadolint", file)
    assert done.returncode == 0, done.stdout
    text = file.read_text()
    # One base image, by its whole version, which is one that finray takes.
    bases = set(re.findall(r"^FROM (\S+)", text, re.MULTILINE))
    (base,) = bases
    found = re.fullmatch(r"python:(\d+)\.(\d+)\.\d+-slim-\w+", base)
    assert found is not None
    assert (int(found[1]), int(found[2])) >= (3, 11)
    assert re.findall(r"^USER (\S+)", text, re.MULTILINE)[-1] == "1000"
    assert all("--constraint" in line for line in text.splitlines() if "pip install" in line)
    wanted = [one for line in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE) for one in line.split()]
    assert wanted
    assert all((ROOT / one).exists() for one in wanted)
    assert '".[$EXTRAS]"' in text
    extras = set(re.findall(r'^ARG EXTRAS="([\w,]+)"$', text, re.MULTILINE)[0].split(","))
    assert extras <= set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    # The negative control.
    (tmp_path / "Dockerfile").write_text(text.replace(base, "python:latest"))
    assert "DL3007" in run(BIN / "hadolint", tmp_path / "Dockerfile").stdout


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: file.name)
def test_a_script_is_clean(file: Path) -> None:
    done = run(BIN / "shellcheck", "--severity=style", file)
    assert done.returncode == 0, done.stdout
    assert os.access(file, os.X_OK)


@pytest.mark.parametrize(("builder", "verb"), [("docker", "build"), ("podman", "build"), ("buildah", "bud")])
def test_the_script_that_builds_takes_any_builder(builder: str, verb: str) -> None:
    given = {"PIP_EXTRA_INDEX_URL": "URL", "EXTRAS": "s3,serve"}
    done = run(DEPLOY / "build.sh", "cuda", "mine:1", BUILDER=builder, DRY_RUN="1", **given)
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    assert words[:2] == [builder, verb]
    assert words[words.index("--tag") + 1] == "mine:1"
    found = [after for word, after in pairwise(words) if word == "--build-arg"]
    assert found == [f"{name}={value}" for name, value in given.items()]
    assert "--build-arg" not in run(DEPLOY / "build.sh", "cpu", BUILDER=builder, DRY_RUN="1").stdout
    assert run(DEPLOY / "build.sh", "tpu").returncode == 2


def test_nfs_is_exported_to_machines_that_are_named_and_to_nobody_else() -> None:
    done = run(DEPLOY / "nfs" / "server.sh", "/srv/finray", "10.0.0.11", "worker-1", DRY_RUN="1")
    assert done.returncode == 0, done.stderr
    options = "(rw,sync,no_subtree_check,root_squash)"
    assert f"/etc/exports.d/finray.exports: /srv/finray 10.0.0.11{options} worker-1{options}\n" in done.stdout
    assert "install --directory --mode=0770 --owner=1000 --group=1000 /srv/finray\n" in done.stdout
    for wrong in (["/srv/finray", "*"], ["/srv/finray", "10.0.0.0/24"], ["/srv/finray"], ["srv", "a"]):
        assert run(DEPLOY / "nfs" / "server.sh", *wrong, DRY_RUN="1").returncode == 2, wrong
    done = run(DEPLOY / "nfs" / "client.sh", "head:/srv/finray", DRY_RUN="1")
    assert "/etc/fstab: head:/srv/finray /shared nfs4 rw,hard," in done.stdout
    assert run(DEPLOY / "nfs" / "client.sh", "head", DRY_RUN="1").returncode == 2


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("kubernetes/rayjob.yaml", ("--to", "rayjob")),
        ("compose.yaml", ("cluster.num_workers=2", "--nodes", "2", "--to", "compose")),
    ],
)
def test_the_examples_are_what_the_command_writes(file: str, words: tuple[str, ...]) -> None:
    code, out, err = finray("jobspec", "smollm2-lora", "run.name=smollm2", *words)
    assert code == 0, err
    assert (DEPLOY / file).read_text() == out, f"write deploy/{file} anew: docs/guide/deploy.md has the command"


def test_the_volume_is_one() -> None:
    volume = yaml.safe_load((DEPLOY / "kubernetes" / "shared-volume.yaml").read_text())
    kubernetes_validate.validate(volume, "1.31", strict=True)
    assert volume["spec"]["accessModes"] == ["ReadWriteMany"]
