"""Every command in a shell block of README.md, docs and examples runs: the real `finray`, page by page and in order.

Each page has a directory of its own with the files that pages speak of. The model's name is a Hub id, which stands in
the cache for a tiny model; trainings get two steps, and answers few tokens. A command that another page has run already
is not run again; of a training with the same file, a page that reads it gets a copy, and one that continues it does
not: a run knows where its data are. A block that cannot run here says why in a comment above it:
`<!-- needs: network -->`.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support import forks, tiny
from tests.support.documents import FILE, FOREIGN, MODEL, PAGES, ROOT, blocks, name_of

pytestmark = pytest.mark.nightly

NEEDS = {"gpu", "network", "hosts", "server"}
SHORT = (
    *("train.epochs=null", "train.max_steps=2", "train.global_batch_size=2", "cluster.cpus_per_worker=1"),
    "evaluation.max_new_tokens=16",
)
# Commands that change nothing which another one reads run two at a time, and so does a run of another name.
READERS = ("config", "plan", "inspect", "generate", "chat", "export")
# What these write is read by no other command.
ONCE = (*READERS, "prepare")
# A page that begins after a training.
BEFORE = {"docs-guide-evaluation": "finray train my-run.yaml"}
# What has run on another page, where files of these names are much the same.
RAN: list[list[str]] = []
# Directories of runs after their first training, by its words and its file.
TRAINED: dict[tuple[str, ...], Path] = {}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, tokenizer: object, hub_cache: Path, ray_cluster: str) -> Path:
    """Files that every page's directory has; and the model in the cache of the Hub."""
    folder = tmp_path_factory.mktemp("documents")
    cached = hub_cache / f"models--{MODEL.replace('/', '--')}"
    snapshot = cached / "snapshots" / ("0" * 40)
    # Another file has this fixture too, and the same cache.
    if not snapshot.exists():
        snapshot.mkdir(parents=True)
        (cached / "refs").mkdir()
        (cached / "refs" / "main").write_text(snapshot.name)
        tiny.save_model("llama", snapshot, tokenizer)
    files = folder / "files"
    (files / "data").mkdir(parents=True)
    tiny.write_chat_rows(files / "data", 60).rename(files / "data" / "train.jsonl")
    shutil.copy(files / "data" / "train.jsonl", files / "rows.jsonl")
    for name, text in FOREIGN.items():
        (files / name).write_text(text)
    (files / "prompts.jsonl").write_text('{"prompt": "one two"}\n')
    (files / ".venv" / "bin").mkdir(parents=True)
    (files / ".venv" / "bin" / "finray").symlink_to(Path(sys.executable).parent / "finray")
    (files / "examples").symlink_to(ROOT / "examples")
    (files / ".models").mkdir()
    (files / ".models" / Path(MODEL).name).symlink_to(snapshot)
    for name in ("my-run.yaml", "config.yaml"):
        (files / name).write_text(FILE.findall((ROOT / "README.md").read_text())[0][1])
    return folder


def run(command: str, folder: Path, *, shares: bool = True) -> None:
    """Run one command in a page's directory.

    Args:
        command: the command.
        folder: the directory.
        shares: whether a copy of the run of another page will do.

    Raises:
        AssertionError: it fails.
    """
    name, *words = shlex.split(command, comments=True)
    if name == "python":
        done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return
    assert Path(name).name == "finray", "which other commands are there?"
    # A plan asks the cluster that it is given, and the tests' one has no GPU.
    env = {"RAY_ADDRESS": None} if "plan" in words else {}
    # A page may speak of a longer run.
    words = [re.sub(r"checkpoint-\d{6}", "checkpoint-000002", word) for word in words]
    is_training = words[0] == "train"
    trained = (*words, (folder / words[1]).read_text(encoding="utf-8")) if is_training else ()
    runs, is_first = folder / "runs", is_training and not (folder / "runs").exists()
    if shares and is_first and trained in TRAINED:
        shutil.copytree(TRAINED[trained], runs, symlinks=True)
        return
    code, out, err = forks.finray(*words, *(SHORT if is_training else ()), env=env, cwd=folder)
    assert code == 0, f"{command}\n{out}{err}"
    if shares and is_first:
        TRAINED[trained] = shutil.copytree(runs, folder.with_name(f"{folder.name}-trained"), symlinks=True)


@pytest.mark.parametrize("page", PAGES, ids=map(name_of, PAGES))
def test_the_commands_of_a_page_run(page: Path, shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    skipped, commands = [], []
    for block in blocks(page):
        if block.needs:
            assert block.needs <= NEEDS, f"{block}: needs what? {sorted(block.needs)}"
            skipped.append(f"{block} is not run, it needs {', '.join(sorted(block.needs))}: {block.commands}")
        else:
            commands += block.commands
    with capsys.disabled():
        print("", *skipped, sep="\n")
    if not commands:
        pytest.skip("no commands that run here")
    folder = shared / name_of(page)
    shutil.copytree(shared / "files", folder, symlinks=True)
    written = dict(FILE.findall(page.read_text(encoding="utf-8")))
    for name, text in written.items():
        (folder / name).write_text(text, encoding="utf-8")
    if before := BEFORE.get(name_of(page)):
        run(before, folder)
    shares = sum(" train " in command and "run.name=" not in command for command in commands) < 2
    with ThreadPoolExecutor(2) as pool:
        waiting: list[Future[None]] = []
        for command in commands:
            words = shlex.split(command, comments=True)
            if words in RAN:
                continue
            if words[1] in ONCE:
                RAN.append(words)
            if "init" in words:
                (folder / words[2]).unlink(missing_ok=True)
            beside = words[1] in READERS or any(word.startswith("run.name=") for word in words)
            if not beside:
                finish(waiting)
            waiting.append(pool.submit(run, command, folder, shares=shares))
            if not beside:
                finish(waiting)
            if "init" in words and words[2] in written:
                (folder / words[2]).write_text(written[words[2]], encoding="utf-8")
        finish(waiting)


def finish(waiting: list[Future[None]]) -> None:
    """Wait for commands, and raise what one of them raised."""
    while waiting:
        waiting.pop(0).result()


def test_a_command_that_fails_is_seen(shared: Path) -> None:
    """The negative control."""
    with pytest.raises(AssertionError, match="no-such-file"):
        run("finray plan no-such-file.yaml", shared)
