"""What somebody hands on (a model, an adapter, a checkpoint, a template) runs nothing and touches nothing of others.

Each file that is offered would leave a canary behind if anybody ran it; that it can is shown first.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch

from finray.checkpoint import CheckpointStore, manifest
from finray.checkpoint.rundir import open_run
from finray.config.schema import ModelConfig
from finray.data.dataset.prepare import prepare_here
from finray.data.dataset.prepared import PreparedDataset
from finray.data.tokenize import chat
from finray.errors import CheckpointError, DataError, FinrayError, HubError, ModelError
from finray.evaluation.artifacts import load_artifact, read_artifact
from finray.models.loading import load_model
from finray.publishing.push import model_files
from tests.support import runs
from tests.support.talk import Templated

MOMENTS = "training_state/optimizer-00001-of-00001.safetensors"


class Canary:
    """Whoever unpickles it makes a directory."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        return os.mkdir, (str(self._path),)


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "canary"


@pytest.fixture
def hostile(canary: Path) -> bytes:
    """A pickle; the negative control: it does what it says."""
    content = pickle.dumps(Canary(canary))
    pickle.loads(content)  # noqa: S301
    canary.rmdir()
    return content


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model.bin", "model.pt"])
def test_a_pickle_offered_as_a_model_is_not_run(
    name: str, hostile: bytes, canary: Path, tiny_model_dir: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(hostile)
    with pytest.raises(ModelError):
        load_model(ModelConfig(name=str(folder)), dtype=torch.float32)
    assert not canary.exists()


@pytest.fixture(scope="module")
def trained(tiny_run: Callable[..., runs.Plain], tmp_path_factory: pytest.TempPathFactory) -> tuple[runs.Plain, Path]:
    """A run of two steps, with a checkpoint after each."""
    folder = tmp_path_factory.mktemp("trained")
    plain = tiny_run({"train.max_steps": 2, "checkpoint.every_steps": 1}, rows=8)
    runs.run_alone(plain, folder / "run")
    return plain, folder / "run"


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt"])
def test_a_pickle_offered_as_an_adapter_is_not_run(
    name: str, hostile: bytes, canary: Path, trained: tuple[runs.Plain, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(trained[1] / "checkpoint-000002", tmp_path / "adapter"))
    shutil.rmtree(folder / "training_state")
    for one in (manifest.NAME, "adapter_model.safetensors"):
        (folder / one).unlink()
    (folder / name).write_bytes(hostile)
    with pytest.raises(ModelError):
        load_artifact(read_artifact(folder, base=str(trained[0]["model"]["name"])), dtype=torch.float32)
    assert not canary.exists()


@pytest.mark.parametrize("name", ["adapter_model.safetensors", MOMENTS, "training_state/state.json"])
def test_a_pickle_in_a_checkpoint_is_not_run_though_the_manifest_vouches_for_it(
    name: str, hostile: bytes, canary: Path, trained: tuple[runs.Plain, Path], tmp_path: Path
) -> None:
    plain, run_dir = trained[0], Path(shutil.copytree(trained[1], tmp_path / "run"))
    checkpoint = run_dir / "checkpoint-000002"
    files = [one["path"] for one in manifest.read(checkpoint)["files"]]
    assert name in files
    (checkpoint / name).write_bytes(hostile)
    entries = [manifest.entry(checkpoint, checkpoint / one) for one in files]
    manifest.write(checkpoint, entries, step=2, metrics={})
    with pytest.raises(FinrayError):
        runs.assemble_alone(runs.changed(plain, {"train.max_steps": 3}), run_dir)
    assert not canary.exists()


# Each makes the directory `canary` where nothing holds it back.
TEMPLATES = (
    "{{ cycler.__init__.__globals__.os.mkdir(canary) }}",
    "{{ lipsum.__globals__['os'].mkdir(canary) }}",
    "{{ self.__init__.__globals__.__builtins__['__import__']('os').mkdir(canary) }}",
    "{% set found = namespace.__init__.__globals__ %}{{ found['__builtins__']['__import__']('os').mkdir(canary) }}",
    "{{ messages['__class__']['__base__']['__subclasses__']() | map(attribute='__init__') | list }}"
    "{{ lipsum | attr('__globals__') | attr('get')('os') | attr('mkdir')(canary) }}",
    "{{ '{0.__globals__[os]}'.format(lipsum) }}{{ lipsum.__globals__.os.mkdir(canary) }}",
)


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_of_a_hostile_tokenizer_reaches_nothing(template: str, canary: Path) -> None:
    template = f"{{% set canary = '{canary}' %}}" + template
    jinja2.Environment(autoescape=True).from_string(template).render(messages=[])
    canary.rmdir()
    renderer = chat.ChatRenderer(Templated(template), special_tokens=())
    with pytest.raises(DataError):
        renderer.render((chat.Message("user", "hello"),))
    assert not canary.exists()


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A directory of somebody's, outside of the run."""
    (folder := tmp_path / "victim").mkdir()
    (folder / "thesis.tex").write_text("years of work")
    return folder


def test_what_is_deleted_of_a_run_is_not_deleted_through_a_link(
    victim: Path, trained: tuple[runs.Plain, Path], tmp_path: Path
) -> None:
    """A link that is named like a checkpoint, or like what a killed process left, points to somebody's files."""
    output = tmp_path / "runs"
    plain = runs.changed(trained[0], {"run.output_dir": str(output)})
    run_dir = Path(shutil.copytree(trained[1], output / "run"))
    for name in ("checkpoint-000000", "checkpoint-000009", ".tmp-old", "damaged-final-old"):
        (run_dir / name).symlink_to(victim, target_is_directory=True)
    (run_dir / "config.yaml").unlink(missing_ok=True)
    store = CheckpointStore(run_dir)
    store.prune(keep_last=1, best=None)
    store.drop_after(1)
    runs.write_config(plain, run_dir / "config.yaml")
    with open_run(runs.config_of(plain), fresh=False, notify=lambda message: None):
        pass
    assert (victim / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize("name", ["../up", "/etc", "a/b", "..", ".", "", "-rf", "a b\n"])
def test_a_name_of_a_run_that_is_no_plain_name_is_refused(name: str, trained: tuple[runs.Plain, Path]) -> None:
    with pytest.raises(FinrayError, match=r"run\.name"):
        runs.config_of(runs.changed(trained[0], {"run.name": name}))


@pytest.mark.parametrize("linked", ["file", "directory"])
def test_a_file_of_a_checkpoint_that_is_a_link_to_what_is_elsewhere_is_refused(
    linked: str, victim: Path, trained: tuple[runs.Plain, Path]
) -> None:
    """It has the size and the digest of its entry, and would become part of the finished model."""
    run = victim.parent / "run"
    folder = Path(shutil.copytree(trained[1] / "checkpoint-000002", run / "checkpoint-000002"))
    listed = json.loads((folder / manifest.NAME).read_text())["files"]
    secret = victim / "thesis.tex"
    name = "thesis.tex" if linked == "file" else "mine/thesis.tex"
    (folder / "thesis.tex").symlink_to(secret) if linked == "file" else (folder / "mine").symlink_to(victim)
    entry: Any = {"path": name, "bytes": secret.stat().st_size, "sha256": manifest.digest_of(secret)}
    manifest.write(folder, [*listed, entry], step=2, metrics={})
    with pytest.raises(CheckpointError, match="link to a file outside its directory"):
        CheckpointStore(run).verify(2)
    # Negative control: a link within the directory.
    manifest.write(folder, listed, step=2, metrics={})
    largest = folder / max(listed, key=lambda one: one["bytes"])["path"]
    largest.rename(folder / "moved")
    largest.symlink_to(folder / "moved")
    CheckpointStore(run).verify(2)


def test_a_file_of_an_adapter_that_is_a_link_to_what_is_elsewhere_is_not_published(
    victim: Path, trained: tuple[runs.Plain, Path]
) -> None:
    folder = Path(shutil.copytree(trained[1] / "checkpoint-000002", victim.parent / "adapter"))
    assert "adapter_model.safetensors" in model_files(folder)
    (folder / "README.md").symlink_to(victim / "thesis.tex")
    with pytest.raises(HubError, match=r"`README\.md` is a link to a file outside its directory"):
        model_files(folder)
    # Negative control: as the cache of the Hub has them.
    blobs, commit = victim.parent / "models--a--b" / "blobs", victim.parent / "models--a--b" / "snapshots" / "c0ffee"
    blobs.mkdir(parents=True)
    commit.mkdir(parents=True)
    (blobs / "1").write_text("text")
    (commit / "README.md").symlink_to("../../blobs/1")
    assert list(model_files(commit)) == ["README.md"]
    # A directory that is only called like one of the cache is none.
    shutil.move(folder, victim.parent / "snapshots" / "adapter")
    with pytest.raises(HubError, match="outside its directory"):
        model_files(victim.parent / "snapshots" / "adapter")


@pytest.mark.parametrize("name", ["../train", "/etc", "train/../../victim"])
def test_a_prepared_dataset_whose_manifest_names_what_is_elsewhere_is_refused(
    name: str, trained: tuple[runs.Plain, Path], tmp_path: Path
) -> None:
    prepared = prepare_here(runs.config_of(trained[0]))
    folder = Path(shutil.copytree(prepared, tmp_path / Path(prepared).name))
    known = PreparedDataset(folder).manifest
    train = known.splits["train"]
    streams = (replace(train.streams[0], name=name), *train.streams[1:])
    changed = replace(known, splits={**known.splits, "train": replace(train, streams=streams)})
    (folder / "manifest.json").write_bytes(changed.to_bytes())
    with pytest.raises(DataError, match="outside its directory"):
        PreparedDataset(folder)
