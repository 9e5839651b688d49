"""The model part of a plan: special tokens, vocabulary, context, and models that the Hub does not give."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from finray.config.load import build_config
from finray.config.schema import AdapterConfig, ModelConfig
from finray.errors import ModelError
from finray.models.loading import load_model
from finray.planning.blueprint import Blueprint, build_blueprint
from finray.planning.checks import check_stored_model
from finray.planning.findings import Findings
from finray.planning.model import check_context, check_tokens, explained, plan_model
from tests.support import tiny


def checked(tokenizer: Any, rows: int, stop: set[int], **options: bool) -> Findings:
    found = Findings()
    check_tokens(tokenizer, rows, stop, found, **options)
    return found


def test_tokens_and_embeddings(tokenizer: Any) -> None:
    fits = checked(tokenizer, 384, {tokenizer.eos_token_id})
    assert fits.problems == fits.warnings == ()
    (problem,) = checked(tokenizer, 100, set()).problems
    assert "have no embedding: the model has 100 rows" in problem.message
    assert "<|im_end|>" in checked(tokenizer, 384, {0}).warnings[0].message, "an end that the model does not name"
    without = copy.deepcopy(tokenizer)
    without.eos_token = None
    assert "no end-of-sequence token" in checked(without, 384, set()).warnings[0].message
    # A classifier writes nothing that ends.
    assert checked(without, 384, set(), writes=False).warnings == ()


def test_only_special_tokens_without_an_embedding_are_a_warning(tokenizer: Any) -> None:
    larger = copy.deepcopy(tokenizer)
    larger.add_tokens(["<image>"], special_tokens=True)
    found = checked(larger, len(tokenizer), {larger.eos_token_id})
    assert found.problems == ()
    assert "<image>" in found.warnings[0].message
    larger.eos_token = "<image>"
    assert checked(larger, len(tokenizer), set()).problems


@pytest.fixture(scope="module")
def blueprint(tiny_model_dir: Path) -> Blueprint:
    return build_blueprint(ModelConfig(name=str(tiny_model_dir)), AdapterConfig(rank=2))


@pytest.mark.parametrize(
    ("max_length", "longest", "learned", "kind"),
    [
        (512, None, False, ""),
        (1024, 400, False, ""),
        (1024, 600, False, "warning"),
        (1024, None, False, "warning"),
        (1024, 600, True, "problem"),
        # Not all rows are known: it may go well.
        (1024, None, True, "warning"),
    ],
)
def test_context(blueprint: Blueprint, max_length: int, longest: int | None, learned: bool, kind: str) -> None:
    found = Findings()
    shape = replace(blueprint, learned_positions=learned)
    check_context(shape, max_length=max_length, longest=longest, findings=found)
    assert bool(found.problems) == (kind == "problem")
    assert bool(found.warnings) == (kind == "warning")
    for one in (*found.problems, *found.warnings):
        assert one.repair == "data.max_length=512"


@pytest.mark.parametrize(
    ("text", "environ", "message"),
    [
        ("You are trying to access a gated repo", {}, "HF_TOKEN is not set"),
        ("401 Client Error", {"HF_TOKEN": "x"}, "HF_TOKEN gives no access to it"),
        ("We couldn't connect to the Hub to load the files", {}, "cannot be reached"),
        ("unrecognized model", {}, "unrecognized model"),
    ],
)
def test_models_that_the_hub_does_not_give(text: str, environ: dict[str, str], message: str) -> None:
    config = build_config({"model": {"name": "someone/model"}, "data": {"source": "rows.jsonl"}}, source="test")
    assert message in str(explained(ModelError(text), config, environ))


def pickled(folder: Path, name: str, content: Any = None) -> Path:
    """Pickled weights in the place of the safetensors file: its tensors, or something else."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors if content is None else content, folder / name)
    return folder / name


def write_cut_pickle(folder: Path) -> None:
    whole = pickled(folder, "pytorch_model.bin")
    whole.write_bytes(whole.read_bytes()[:-2000])


def write_pickle_that_lacks_a_weight(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    pickled(folder, "pytorch_model.bin", tensors)


def write_safetensors_that_lack_a_weight(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("model.layers.1.mlp.down_proj.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def write_index_of_a_missing_pickle(folder: Path) -> None:
    names = list(load_file(folder / "model.safetensors"))
    files = {name: f"pytorch_model-{number % 2}.bin" for number, name in enumerate(names)}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    pickled(folder, "pytorch_model-0.bin")


def write_pickle_that_calls(folder: Path) -> None:
    pickled(folder, "pytorch_model.bin").write_bytes(b"cbuiltins\nprint\n(Vran\ntR.")


# What is done to a model directory, and what is said of it; nothing where the model can be trained.
DIRECTORIES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "safetensors": (lambda folder: None, ""),
    "a weight is missing": (write_safetensors_that_lack_a_weight, "would be random"),
    "safetensors cut off": (
        lambda folder: os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size - 10),
        "damaged",
    ),
    "pickled tensors": (lambda folder: pickled(folder, "pytorch_model.bin"), ""),
    "a pickle that calls": (write_pickle_that_calls, "contain more than tensors"),
    "an empty pickle": (lambda folder: pickled(folder, "pytorch_model.bin").write_bytes(b""), "cannot be loaded"),
    "a pickle cut off": (write_cut_pickle, "cannot be loaded"),
    "a pickle that lacks a weight": (write_pickle_that_lacks_a_weight, "would be random"),
    "an index of a missing pickle": (write_index_of_a_missing_pickle, "1 of 2 weight files are missing"),
    "another pickle": (lambda folder: pickled(folder, "training_args.bin"), "holds no weights"),
    "GGUF": (lambda folder: pickled(folder, "model.gguf"), "holds no weights"),
    "an unnamed file": (lambda folder: pickled(folder, "model-00001.safetensors"), "holds no weights"),
    "generation settings": (
        lambda folder: (folder / "generation_config.json").write_text('{"max_new_tokens": "x"}'),
        "cannot be loaded",
    ),
    "an adapter's settings": (
        lambda folder: (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4}'),
        "cannot be loaded",
    ),
}


@pytest.mark.parametrize(("change", "said"), DIRECTORIES.values(), ids=DIRECTORIES.keys())
def test_a_model_directory_has_a_problem_exactly_where_the_model_does_not_load(
    tiny_model_dir: Path, tmp_path: Path, change: Callable[[Path], Any], said: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_dir, folder)
    change(folder)
    config = build_config({"model": {"name": str(folder)}, "data": {"source": "rows.jsonl"}}, source="test")
    found = Findings()
    try:
        check_stored_model(config)
    except ModelError as error:
        found.problem(error)
    plan_model(config, found)
    if said:
        with pytest.raises(ModelError):
            load_model(config.model, dtype=torch.float32)
    else:
        load_model(config.model, dtype=torch.float32)
    assert bool(found.problems) == bool(said)
    assert said in " ".join(one.message for one in found.problems)
    for one in found.problems:
        assert str(folder) in str(one.where)
        assert any(part in str(one.repair) for part in ("safetensors", "config.json", "fetch the file again"))


def test_quantized_files_that_do_not_load_here_are_a_warning(tiny_model_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_dir, folder)
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(settings))
    config = build_config({"model": {"name": str(folder)}, "data": {"source": "rows.jsonl"}}, source="test")
    found = Findings()
    assert plan_model(config, found) is not None
    assert found.problems == ()
    assert "its files are quantized" in found.warnings[0].message


@pytest.mark.parametrize("offline", [False, True])
def test_a_model_of_the_hub_without_its_weights_does_not_start_without_a_network(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: bool
) -> None:
    tiny.in_hub_cache(tmp_path, tokenizer, monkeypatch)
    config = build_config({"model": {"name": "org/tiny"}, "data": {"source": "rows.jsonl"}}, source="test")
    whole, lacking = Findings(), Findings()
    assert plan_model(config, whole, environ={}, offline=offline) is not None
    assert whole == Findings()
    next(tmp_path.glob("*/snapshots/000*/model.safetensors")).unlink()
    plan_model(config, lacking, environ={}, offline=offline)
    (said,) = lacking.unchecked if offline else lacking.problems
    assert said.where == "model.name=org/tiny"
    assert said.message == (
        "its weights" if offline else "the model is not in the local cache, and the Hub cannot be reached"
    )
