"""Commands of README and guide that need a Hub, a job server, storage, a server or several machines, against stand-ins.

`test_docs_commands.py` runs the others. Each command here is the page's own; what it names (an address, a bucket, a
user, a step, a number of workers) is replaced by what there is. `ELSEWHERE` names what another program runs.
"""

from __future__ import annotations

import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.journeys.test_docs_commands import SHORT, run, shared
from tests.support import forks, job_server, runs, s3
from tests.support import hub as hubs
from tests.support.documents import MODEL, PAGES, ROOT, blocks
from tests.support.server import KEY, serving

pytestmark = pytest.mark.nightly
__all__ = ["shared"]

# By the page and how the command begins.
HERE = {
    ("publish.md", "finray push"),
    ("publish.md", "finray pull"),
    ("publish.md", "finray train"),
    ("jobs.md", "finray submit"),
    ("jobs.md", "finray jobs "),
    ("jobs.md", "finray jobspec"),
    ("serving.md", "finray serve"),
    ("serving.md", "FINRAY_KEY"),
    ("first-hour.md", "finray serve"),
    ("storage.md", "finray"),
    ("strategies.md", "finray train"),
    ("evaluation.md", "finray evaluate my-model"),
}
ELSEWHERE = {
    "make quickstart": "tests/journeys/test_quickstart.py",
    "make test": "Makefile",
    "python -m pip install --constraint constraints.txt": "tools/check_wheel.py",
    "pip install": "tools/check_wheel.py",
    "PIP_EXTRA_INDEX_URL=URL": "tools/check_wheel.py",
    "finray cluster": "tests/hosts/test_cluster.py",
    "finray train my-run.yaml cluster.address": "tests/hosts/test_cluster.py",
    "finray doctor my-run.yaml --cluster": "tests/hosts/test_cluster.py",
    "RAY_ADDRESS=10.0.0.5:6379 finray evaluate": "tests/engines/test_vllm_replicas.py",
    "finray export runs/my-run --output my-gguf": "tests/services/test_llama_cpp.py",
    "finray export runs/my-classifier --output my-onnx": "tests/services/test_onnx.py",
    "finray sync runs/my-run": "tests/services/test_mlflow.py",
    "finray train my-run.yaml": "tests/services/test_mlflow.py",
    # Need a GPU, or data that is on the Hub only: no test runs them.
    "finray plan smollm2-lora": "",
    "finray train smollm2-lora": "",
    "finray generate runs/first": "",
    "finray evaluate runs/my-run --harness arc_easy": "",
    "finray train examples/gsm8k/gsm8k.yaml": "",
    "finray evaluate runs/gsm8k": "",
}


def written(page: str, start: str) -> list[str]:
    """The commands of a page that begin so and need a stand-in."""
    assert (page, start) in HERE
    (path,) = (path for path in PAGES if path.name == page)
    found = [one for block in blocks(path) if block.needs for one in block.commands if one.startswith(start)]
    assert found, f"{page} has no such command: {start}"
    return found


def test_every_command_that_needs_something_has_a_stand_in_or_is_named() -> None:
    used, unknown = set(), []
    for path in PAGES:
        for command in (one for block in blocks(path) if block.needs for one in block.commands):
            here = {key for key in HERE if key[0] == path.name and command.startswith(key[1])}
            there = {start for start in ELSEWHERE if command.startswith(start)}
            used |= here | there
            unknown += [] if here or there else [f"{path.name}: {command}"]
    assert unknown == []
    assert used == HERE | ELSEWHERE.keys(), "what is named is on a page"
    assert [name for name in ELSEWHERE.values() if not (ROOT / name).exists()] == []


@pytest.fixture(scope="module")
def trained(shared: Path) -> Path:
    """A directory with a run `my-run` of two steps, whose config says that it is so short."""
    folder = shared / "standins"
    shutil.copytree(shared / "files", folder, symlinks=True)
    plain = yaml.safe_load((folder / "my-run.yaml").read_text())
    settings = {name: yaml.safe_load(value) for name, _, value in (one.partition("=") for one in SHORT)}
    (folder / "my-run.yaml").write_text(yaml.safe_dump(runs.changed(plain, settings)))
    run("finray train my-run.yaml", folder, shares=False)
    return folder


@pytest.fixture
def page(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "page", symlinks=True)


def as_here(command: str, **replaced: str) -> list[str]:
    """The words of a command, with what is here in place of what a page names."""
    for old, new in replaced.items():
        command = re.sub(rf"\b{old}\b", new, command)
    words = shlex.split(re.sub(r"checkpoint-\d{6}", "checkpoint-000002", command), comments=True)
    assert words[0] == "finray"
    return words[1:]


def done(words: list[str], folder: Path, env: dict[str, str | None] | None = None) -> str:
    """What a command says, in a process that has imported nothing before."""
    code, out, err = runs.cli(*words, env=env, cwd=folder)
    assert code == 0, f"{words}\n{out}{err}"
    return out + err


@pytest.fixture
def hub(page: Path, tmp_path: Path) -> Iterator[tuple[hubs.Hub, dict[str, str | None]]]:
    """A Hub with the model of the pages, and what a command is started with to use it."""
    with hubs.serve() as running:
        snapshot = page / ".models" / Path(MODEL).name
        files = {path.name: path.read_bytes() for path in snapshot.iterdir()}
        running.repos[MODEL] = hubs.Repo(False, files, ["first"])
        running.orgs["my-team"] = "write"
        env = {**hubs.environment(running, tmp_path / "home"), "HF_HUB_CACHE": None, "RAY_ADDRESS": None}
        yield running, env


def test_publish(page: Path, hub: tuple[hubs.Hub, dict[str, str | None]], tmp_path: Path) -> None:
    running, env = hub
    (page / "my-model-directory").symlink_to(page / ".models" / Path(MODEL).name)
    for command in written("publish.md", "finray push"):
        done(as_here(command, me=hubs.USER), page, env)
    user = f"{hubs.USER}/"
    assert {name for name in running.repos if name != MODEL} == {f"{user}my-model", f"{user}my-run", "my-team/my-model"}
    assert running.repos[f"{user}my-model"].private
    assert "model.safetensors" in running.repos[f"{user}my-model"].files, "the second command merged it"
    assert not running.repos["my-team/my-model"].private

    # A run that pushes its checkpoints, and then is on another machine.
    push = (f"export.push_to_hub={user}pushed", "export.push_every_checkpoint=true")
    done(["train", "my-run.yaml", *push, "run.output_dir=elsewhere", "checkpoint.every_steps=1"], page, env)
    shutil.rmtree(page / "runs")
    done(as_here(*written("publish.md", "finray pull"), **{"me/my-model": f"{user}pushed"}), page, env)
    assert not (page / "runs" / "my-run" / "final").exists()
    done(as_here(written("publish.md", "finray train")[0]), page, env)
    assert (page / "runs" / "my-run" / "final" / "adapter_model.safetensors").is_file()


def test_jobs(page: Path, ray_cluster: str) -> None:
    folder = Path(tempfile.mkdtemp(prefix="fr-", dir="/tmp"))
    (page / "parts.py").write_text("")
    (page / "examples").unlink()
    shutil.rmtree(page / "runs")
    try:
        with job_server.serve(folder) as server:
            env = {**server.env(), "HF_TOKEN": "a-token"}
            job = ""
            for command in (*written("jobs.md", "finray submit"), *written("jobs.md", "finray jobs ")):
                there = {"http://head:8265": server.address, "JOB": job}
                words = [there.get(word, word) for word in as_here(command)]
                said = done(words, page, env)
                job = said.split()[0] if "--detach" in words else job
            assert (page / "runs" / "my-run" / "final" / "adapter_model.safetensors").is_file()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    (command,) = written("jobs.md", "finray jobspec")
    done(as_here(command), page)
    assert "RayJob" in (page / "job.yaml").read_text()


def test_serving(page: Path) -> None:
    for name in ("french", "terse", "run"):
        shutil.copytree(page / "runs" / "my-run", page / "runs" / name)
    commands = [*written("serving.md", "finray serve"), *written("serving.md", "FINRAY_KEY")]
    commands += written("first-hour.md", "finray serve")
    for command in commands:
        words = as_here(command.removeprefix("FINRAY_KEY=a-long-secret "))
        words = [re.sub(r"^(\w+=)?runs", rf"\1{page}/runs", word) for word in words]
        with serving(*words[1:], FINRAY_KEY=KEY) as running:
            names = [model.id for model in running.client().models.list()]
            adapters = {word.partition("=")[0] for word in words if "=" in word}
            assert adapters | {Path(words[1]).name} <= set(names), command
            answer = running.client().completions.create(model=names[0], prompt="one two", max_tokens=2)
            assert answer.usage is not None
            # It is drawn, and may end at once.
            assert (answer.usage.prompt_tokens, answer.choices[0].finish_reason in ("stop", "length")) == (2, True)


def test_storage(page: Path, bucket: s3.Bucket) -> None:
    there = f"run.output_dir={bucket.url('runs')}"
    code, out, err = forks.finray("train", "my-run.yaml", there, "run.name=llama-sft", cwd=page)
    assert code == 0, out + err
    for command in written("storage.md", "finray"):
        words = [word.replace("s3://bucket", bucket.url().rstrip("/")) for word in as_here(command)]
        code, out, err = forks.finray(*words, cwd=page)
        assert code == 0, f"{command}\n{out}{err}"
    assert (page / "exported").is_dir()


def test_strategies(page: Path, ray_cluster: str) -> None:
    """Two workers in place of eight, and the second command goes two steps further."""
    shutil.rmtree(page / "runs")
    (page / "my-run.yaml").rename(page / "run.yaml")
    for command, steps in zip(written("strategies.md", "finray train"), (2, 4), strict=True):
        words = [re.sub(r"num_workers=8", "num_workers=2", word) for word in as_here(command)]
        code, out, err = forks.finray(*words, f"train.max_steps={steps}", cwd=page)
        assert code == 0, f"{command}\n{out}{err}"
    assert runs.values(page / "runs" / "my-run", "step")[-1] == 4


def test_evaluation(page: Path, hub_cache: Path) -> None:
    model = (page / ".models" / Path(MODEL).name).resolve()
    for name in ("my-model", "other-model"):
        shutil.copytree(model, page / name)
    cached = hub_cache / f"models--{MODEL.replace('/', '--')}"
    shutil.copytree(cached, hub_cache / "models--org--third-model", symlinks=True)
    (command,) = written("evaluation.md", "finray evaluate my-model")
    code, out, err = forks.finray(*as_here(command), "evaluation.max_new_tokens=4", "evaluation.max_rows=4", cwd=page)
    assert code == 0, out + err
    assert (page / "my-model" / "evaluation" / "rows" / "metrics.json").is_file(), out
