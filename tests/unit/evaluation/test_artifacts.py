"""What is decided before a model is loaded for inference."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants, snapshot_download

from finray.checkpoint import copies
from finray.checkpoint.copies import push, push_folder
from finray.checkpoint.objects import Objects
from finray.checkpoint.remote import RemoteStore
from finray.checkpoint.rundir import RunDir
from finray.config.schema import ModelConfig
from finray.errors import FinrayError, ModelError
from finray.evaluation import artifacts
from finray.evaluation.artifacts import artifact_of, export_model, find_artifact, inference_device, inference_dtype
from finray.evaluation.generate import Asking
from finray.pretrained import hub
from finray.pretrained.tokenizers import load_tokenizer
from tests.support import damaged, runs, tiny
from tests.support import hub as hubs

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.mark.parametrize(
    ("hardware", "precision", "on_cpu", "on_gpu"),
    [
        # torch emulates bf16 on a T4 or V100, many times slower than fp32.
        (True, None, torch.bfloat16, torch.bfloat16),
        (False, None, torch.float32, torch.float32),
        (True, "auto", torch.bfloat16, torch.bfloat16),
        # What the run was trained in is kept on a GPU; a CPU takes fp32 for what it would emulate.
        (True, "bf16", torch.bfloat16, torch.bfloat16),
        (False, "bf16", torch.float32, torch.bfloat16),
        (True, "fp32", torch.float32, torch.float32),
        (True, "fp16", torch.float32, torch.float16),
    ],
)
def test_the_dtype_of_answers(
    hardware: bool, precision: Any, on_cpu: torch.dtype, on_gpu: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or hardware
    )
    monkeypatch.setattr(artifacts, "cpu_has_bf16", lambda: hardware)
    assert (inference_dtype(precision, CPU), inference_dtype(precision, CUDA)) == (on_cpu, on_gpu)


@pytest.mark.parametrize(
    ("has_gpu", "asked_for_cpu", "expected"), [(True, "", "cuda"), (True, "1", "cpu"), (False, "", "cpu")]
)
def test_the_gpu_is_taken_unless_the_cpu_is_asked_for(
    has_gpu: bool, asked_for_cpu: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setenv("FINRAY_CPU", asked_for_cpu)
    assert inference_device().type == expected


# --- which weights --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tiny_run: Callable[..., dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two checkpoints with its final model."""
    plain = tiny_run({"train.max_steps": 2, "checkpoint.every_steps": 1}, rows=8)
    config = runs.config_of(plain)
    run = RunDir.of(config)
    runs.run_alone(plain, run.path)
    run.keep_config(config)
    run.make_final(best=None, warn=lambda message: None)
    return run.path


@pytest.fixture
def run_dir(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_a_finished_run_stands_for_its_final_model(run_dir: Path) -> None:
    found = find_artifact(run_dir)
    assert found.folder == run_dir / "final"
    assert found.is_adapter


def test_a_run_behind_a_url_stands_for_the_copy_of_its_final_model(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"memory://{tmp_path.name}-{id(tmp_path)}/runs/run"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    push(run_dir, Objects(url), ["config.yaml"])
    push_folder(run_dir, Objects(url), "final")
    found = find_artifact(url)
    assert found.folder.name == "final"
    assert found.folder.is_relative_to(tmp_path / "cache")
    assert found.is_adapter


def test_a_run_that_is_not_finished_stands_for_its_newest_valid_checkpoint(run_dir: Path) -> None:
    shutil.rmtree(run_dir / "final")
    assert find_artifact(run_dir).folder == run_dir / "checkpoint-000002"
    assert find_artifact(run_dir, base="acme/moved").model.name == "acme/moved"
    runs.flip(run_dir / "checkpoint-000002" / "adapter_model.safetensors")
    assert find_artifact(run_dir).folder == run_dir / "checkpoint-000001"


def test_a_checkpoint_of_an_earlier_run_at_a_url_is_not_taken_for_one_of_it(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy on this machine still has it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = f"memory://{tmp_path.name}-{id(tmp_path)}/runs/run"
    objects = Objects(url)
    push(run_dir, objects, ["config.yaml"])
    objects.write("run_id", b"one")
    store = RemoteStore(tmp_path / "trainer", objects)
    store.take()

    def save(step: int, text: str) -> None:
        def fill(folder: Path) -> None:
            shutil.copytree(run_dir / "checkpoint-000001", folder, dirs_exist_ok=True)
            (folder / "manifest.json").unlink()
            (folder / "README.md").write_text(text)

        store.commit(scratch := store.begin(step), step, store.fill(scratch, step, fill), metrics={})
        store.close_part(scratch)

    save(3, "old")
    assert (find_artifact(url).folder / "README.md").read_text() == "old"
    copies.move_aside(objects, f"{url}.before")
    push(run_dir, Objects(url), ["config.yaml"])
    Objects(url).write("run_id", b"two")
    store = RemoteStore(tmp_path / "again", Objects(url))
    store.take()
    save(1, "new")
    assert (find_artifact(url).folder / "README.md").read_text() == "new"
    assert [one.name for one in find_artifact(url).folder.parent.glob("checkpoint-*")] == ["checkpoint-000001"]


def test_a_directory_of_weights_stands_for_itself(run_dir: Path) -> None:
    assert find_artifact(run_dir / "checkpoint-000001").folder == run_dir / "checkpoint-000001"
    # Weights without a manifest, as plain PEFT writes them.
    elsewhere = Path(shutil.copytree(run_dir / "final", run_dir.parent / "final"))
    (elsewhere / "manifest.json").unlink()
    assert find_artifact(elsewhere).folder == elsewhere


@pytest.mark.parametrize("named", ["", "final", "checkpoint-000002"])
def test_without_its_manifest_nothing_of_a_run_is_believed(run_dir: Path, named: str) -> None:
    """Else removing it would switch the comparison with its digests off."""
    folder = run_dir / (named or "final")
    (folder / "manifest.json").unlink()
    with pytest.raises(FinrayError, match="is missing") as caught:
        find_artifact(run_dir / named)
    assert caught.value.where == str(folder / "manifest.json")
    assert ("makes final/ again" if named != "checkpoint-000002" else "give the run") in str(caught.value.repair)


def test_a_finished_run_without_its_final_model_does_not_stand_for_another(run_dir: Path) -> None:
    (run_dir / "summary.json").write_text("{}")
    shutil.rmtree(run_dir / "final")
    with pytest.raises(ModelError, match="its final/ is missing") as caught:
        find_artifact(run_dir)
    assert "makes final/ again" in str(caught.value.repair)


STRAYS = (
    *("model.safetensors", "adapter_model.bin", "model.safetensors.index.json", "added_tokens.json"),
    *("tokenizer.model", "additional_chat_templates/x.jinja", "generation_config.json", "modeling.py"),
)


@pytest.mark.parametrize("stray", STRAYS)
@pytest.mark.parametrize("named", ["final", "checkpoint-000002"])
def test_a_file_that_the_manifest_does_not_list_and_a_library_would_read_is_refused(
    run_dir: Path, stray: str, named: str
) -> None:
    (run_dir / named / stray).parent.mkdir(exist_ok=True)
    (run_dir / named / stray).write_text("{}")
    with pytest.raises(ModelError, match=f"{stray} is not listed"):
        find_artifact(run_dir / named)
    (run_dir / named / stray).unlink()
    # What nobody reads may lie there.
    (run_dir / named / "README.md").write_text("mine")
    assert find_artifact(run_dir / named).folder == run_dir / named


@pytest.mark.parametrize("named", ["", "final", "checkpoint-000001"])
def test_weights_that_cannot_be_read_are_named(run_dir: Path, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = run_dir / (named or "final") / "adapter_model.safetensors"
    damaged.unreadable(file, monkeypatch)
    with pytest.raises(FinrayError, match="cannot be read: Permission denied") as caught:
        find_artifact(run_dir / named)
    assert caught.value.where == str(file)


@pytest.mark.parametrize("folder", ["", "final"])
def test_damaged_weights_are_refused(run_dir: Path, folder: str) -> None:
    weights = run_dir / "final" / "adapter_model.safetensors"
    runs.flip(weights)
    with pytest.raises(FinrayError) as caught:
        find_artifact(run_dir / folder)
    assert str(weights) in str(caught.value)


def test_a_directory_that_is_not_there_and_a_run_without_checkpoints_are_errors(tmp_path: Path, run_dir: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        find_artifact(tmp_path / "none")
    for folder in [run_dir / "final", *run_dir.glob("checkpoint-*")]:
        shutil.rmtree(folder)
    with pytest.raises(ModelError, match="no checkpoint yet"):
        find_artifact(run_dir)


def test_a_misspelt_run_is_not_looked_for_on_the_hub(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`runs/rum` has the form of a Hub id."""
    asked: list[str] = []
    monkeypatch.setattr(hub, "refusal", lambda: asked.append("the Hub"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="the directory does not exist"):
        artifact_of("runs/rum")
    shutil.copytree(run_dir, tmp_path / "mine/run")
    with pytest.raises(ModelError, match=r"the directory does not exist \(did you mean `mine/run`\?\)"):
        artifact_of("mine/rum")
    assert not asked
    # Nothing beside it is a run.
    (tmp_path / "org").mkdir()
    assert artifact_of("org/model").folder == Path("org/model")
    assert asked


NOTES = {"rows": "chat", "system": "the dog runs", "chat_template_arguments": {"word": "a bird"}, "tool_format": "x"}


@pytest.fixture
def on_hub(tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[hubs.Hub]:
    """A Hub with a model that finray pushed, and one of somebody else."""
    with hubs.serve() as found:
        hubs.use(found, tmp_path / "home", monkeypatch)
        files = {path.name: path.read_bytes() for path in tiny_model_dir.iterdir()}
        found.repos["ada/chat"] = hubs.Repo(True, {**files, "finray.json": json.dumps(NOTES).encode()})
        found.repos["acme/plain"] = hubs.Repo(True, files)
        yield found


def test_a_model_on_the_hub_has_the_notes_that_were_pushed_with_it(on_hub: hubs.Hub, tmp_path: Path) -> None:
    found = artifact_of("ada/chat")
    assert (found.folder, found.base, found.notes) == (Path("ada/chat"), None, NOTES)
    tokenizer = load_tokenizer(ModelConfig(name="ada/chat"))
    by_path = find_artifact(snapshot_download("ada/chat"))
    assert Asking.of(found, tokenizer) == Asking.of(by_path, tokenizer)
    assert Asking.of(found, tokenizer).system == "the dog runs"
    assert artifact_of("acme/plain").notes == {}
    # A later push with other notes.
    repo = on_hub.repos["ada/chat"]
    repo.files["finray.json"] = b'{"rows": "completion"}'
    repo.commits.append("later")
    assert artifact_of("ada/chat").notes == {"rows": "completion"}


def test_the_notes_are_those_of_the_revision(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.in_hub_cache(tmp_path, tokenizer, monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for number, rows in enumerate(("chat", "completion")):
        notes = tmp_path / "models--org--tiny" / "snapshots" / (str(number) * 40) / "finray.json"
        notes.write_text(json.dumps({"rows": rows}))
    assert artifact_of("org/tiny").notes == artifact_of("org/tiny", revision="main").notes == {"rows": "chat"}
    assert artifact_of("org/tiny", revision="v1").notes == {"rows": "completion"}


def test_a_whole_classifier_on_the_hub_is_one(on_hub: hubs.Hub) -> None:
    notes = {"auto_class": "AutoModelForSequenceClassification", "problem": "single_label", "labels": ["a", "b"]}
    on_hub.repos["ada/kinds"] = hubs.Repo(True, {"finray.json": json.dumps(notes).encode()})
    assert artifact_of("ada/kinds").model == ModelConfig(name="ada/kinds", task="sequence_classification")


def test_offline_a_model_on_the_hub_has_the_notes_in_the_cache(
    on_hub: hubs.Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact_of("ada/chat")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    on_hub.asked.clear()
    assert artifact_of("ada/chat").notes == NOTES
    # None are known of it.
    assert artifact_of("acme/plain").notes == {}
    assert not on_hub.asked


@pytest.mark.parametrize("status", [401, 503])
def test_notes_that_the_hub_fails_to_give_are_an_error_unless_it_said_before_that_there_are_none(
    on_hub: hubs.Hub, status: int
) -> None:
    """Else the model would be prompted in another way, and nobody told."""
    fault = on_hub.fail("HEAD", "finray.json", times=10**6, status=status)
    with pytest.raises(ModelError, match=rf"finray\.json.*cannot be fetched from the Hub: .*{status}") as found:
        artifact_of("ada/chat")
    assert found.value.where == "ada/chat"
    assert found.value.repair
    fault.times = 0
    assert (artifact_of("ada/chat").notes, artifact_of("acme/plain").notes) == (NOTES, {})
    fault.times = 10**6
    assert (artifact_of("ada/chat").notes, artifact_of("acme/plain").notes) == (NOTES, {})


def test_a_model_that_is_not_on_the_hub_is_left_to_what_loads_it(on_hub: hubs.Hub) -> None:
    for name in ("ada/gone", "two words"):
        assert artifact_of(name).notes == {}


def test_damaged_notes_on_the_hub_are_refused(on_hub: hubs.Hub) -> None:
    on_hub.repos["ada/chat"].files["finray.json"] = b'{"rows": 3}'
    with pytest.raises(ModelError, match="has invalid content: rows"):
        artifact_of("ada/chat")
    on_hub.repos["ada/chat"].files["finray.json"] = b'{"auto_class": "None", "task": "poems"}'
    on_hub.repos["ada/chat"].commits.append("later")
    with pytest.raises(ModelError, match="none of finray's"):
        artifact_of("ada/chat")


@pytest.mark.parametrize("moved", [False, True])
def test_a_model_is_exported_as_it_is_asked_for(
    run_dir: Path, tiny_model_dir: Path, tmp_path: Path, moved: bool
) -> None:
    base = str(shutil.copytree(tiny_model_dir, tmp_path / "moved")) if moved else None
    merged = export_model(run_dir, tmp_path / "merged", merge=True, dtype="bf16", base=base)
    assert (merged.merged, merged.dtype, merged.onto) == (True, "bf16", base or str(tiny_model_dir))
    assert not export_model(run_dir, tmp_path / "adapter", merge=False, dtype="fp32", base=base).merged
    with pytest.raises(ModelError, match="weights cannot be stored as `int8`"):
        export_model(run_dir, tmp_path / "other", dtype="int8")


def test_a_model_without_an_adapter_is_not_exported_as_one(tiny_model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no adapter"):
        export_model(tiny_model_dir, tmp_path / "out", merge=False, dtype="bf16")
    assert not (tmp_path / "out").exists()


def test_a_full_disk_at_export_is_one_error_and_nothing_is_left(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors import SafetensorError
    from transformers import LlamaForCausalLM

    def full(*_: object, **__: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", full)
    with pytest.raises(ModelError, match="No space left on device"):
        export_model(tiny_model_dir, tmp_path / "out", merge=True, dtype="bf16")
    assert list(tmp_path.iterdir()) == []
    code, _, err = runs.finray("export", tiny_model_dir, "--output", tmp_path / ("x" * 300))
    assert code == 2
    assert "file name too long\n  repair: take a shorter name" in err


def test_a_whole_model_has_no_base(tiny_model_dir: Path) -> None:
    assert find_artifact(tiny_model_dir).base is None
    with pytest.raises(ModelError, match="a full model, which has no base") as caught:
        find_artifact(tiny_model_dir, base="other")
    assert caught.value.repair == "leave out --base"


def test_a_directory_with_the_name_of_a_checkpoint_is_one_of_a_run_only_beside_its_records(tmp_path: Path) -> None:
    """Weights that somebody else saved have no manifest, and need none."""
    for name, is_refused in (("final", True), ("checkpoint-000003", True), ("other", False)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        assert find_artifact(tmp_path / name).folder == tmp_path / name
        (tmp_path / "attempt").write_text("{}")
        if is_refused:
            with pytest.raises(FinrayError, match="is missing"):
                find_artifact(tmp_path / name)
        else:
            assert find_artifact(tmp_path / name).folder == tmp_path / name
        (tmp_path / "attempt").unlink()
