"""The quick checks: extras, the output directory, stored weights; all of them at once."""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from finray.checkpoint import manifest
from finray.checkpoint.rundir import check_output
from finray.config.resume_adapter import with_start
from finray.config.schema import Config
from finray.errors import ConfigError, FinrayError, ModelError
from finray.planning.checks import (
    check_extras,
    check_quantization,
    check_shards,
    check_sources,
    check_task,
    quick_problems,
    require_startable,
)
from finray.planning.plan import make_plan
from tests.support import runs, tiny


@pytest.fixture
def plain(tiny_model_dir: Path, tmp_path: Path) -> dict[str, Any]:
    return runs.tiny_run(tiny_model_dir, tiny.write_chat_rows(tmp_path, 4), tmp_path / "deep" / "out")


def with_fields(plain: dict[str, Any], **sections: dict[str, Any]) -> Config:
    return runs.config_of(runs.changed(plain, sections))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"parallel.strategy": "fsdp", "parallel.shard_size": 3}, "parallel.shard_size: 3 does not divide 4 workers"),
        ({"parallel.strategy": "fsdp", "parallel.shard_size": 8}, "parallel.shard_size: 8 does not divide 4 workers"),
        ({"parallel.strategy": "fsdp", "parallel.shard_size": 2}, None),
        ({"parallel.shard_size": 2}, "parallel.shard_size: has no effect with parallel.strategy ddp"),
        ({"parallel.cpu_offload": True}, "parallel.cpu_offload: has no effect with parallel.strategy ddp"),
        ({"parallel.strategy": "deepspeed", "parallel.cpu_offload": True}, None),
        ({"data.source": None, "data.mix": [{"source": "a"}], "data.revision": "v1"}, "data.revision: has no effect"),
        ({"data.source": None, "data.mix": [{"source": "a", "revision": "v1"}]}, None),
    ],
)
def test_settings_that_would_be_ignored_are_refused_before_a_run_and_not_in_the_config_of_one_that_is_there(
    plain: dict[str, Any], changes: dict[str, Any], said: str | None
) -> None:
    config = runs.config_of(runs.changed(plain, {"cluster.num_workers": 4, **changes}))
    found = []
    for check in (check_shards, check_sources):
        try:
            check(config)
        except ConfigError as error:
            found.append(str(error))
    assert len(found) == (said is not None)
    assert said is None or said in found[0]


def test_extras_are_named_in_one_line(plain: dict[str, Any]) -> None:
    config = with_fields(plain, model={"name": "a.gguf"}, prepare={"dir": "s3://bucket/prepared"})
    with pytest.raises(ConfigError) as caught:
        check_extras(config, installed=lambda package: False)
    assert caught.value.repair == "pip install 'finray[gguf,s3]'"
    assert caught.value.where == "model.name, prepare.dir"
    for field, value, extra in (
        ("train.optimizer", "paged_adamw_8bit", "quantization"),
        ("model.quantization", "8bit", "quantization"),
        ("train.liger", True, "liger"),
    ):
        needs = runs.config_of(runs.changed(plain, {field: value}))
        with pytest.raises(ConfigError) as caught:
            check_extras(needs, installed=lambda package: False)
        assert caught.value.repair == f"pip install 'finray[{extra}]'"
    check_extras(config, installed=lambda package: True)
    check_extras(with_fields(plain), installed=lambda package: False)


def test_commands_that_start_together_do_not_take_the_output_directory_from_each_other(
    plain: dict[str, Any], tmp_path: Path
) -> None:
    """Four look at it while four make it and a directory in it, as `open_run` does, and remove that again."""
    config = with_fields(plain)
    out = tmp_path / "deep" / "out"

    def look(_: int) -> None:
        check_output(config)

    def make(number: int) -> None:
        out.mkdir(parents=True, exist_ok=True)
        (out / str(number)).mkdir()
        (out / str(number)).rmdir()

    with ThreadPoolExecutor(8) as pool:
        for number in range(100):
            shutil.rmtree(tmp_path / "deep", ignore_errors=True)
            started = [pool.submit(look if one % 2 else make, one) for one in range(8)]
            assert [one.exception() for one in started] == [None] * 8, number


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_output_directory_without_permission(plain: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir(mode=0o500)
    with pytest.raises(ConfigError, match="cannot be written"):
        check_output(with_fields(plain))


def test_all_problems_at_once(plain: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "deep").write_text("a file", encoding="utf-8")
    config = with_fields(plain, adapter={"target_modules": ["nothing"]}, data={"source": str(tmp_path / "no.jsonl")})
    assert len(quick_problems(config)) == 3
    with pytest.raises(ConfigError) as caught:
        require_startable(config)
    assert "3 problems" in str(caught.value)
    assert "no.jsonl" in str(caught.value)
    assert "nothing" in str(caught.value)
    # One alone is itself.
    (tmp_path / "deep").unlink()
    with pytest.raises(ModelError, match="matches no module"):
        require_startable(with_fields(plain, adapter={"target_modules": ["nothing"]}))
    require_startable(with_fields(plain))


def test_packed_bases_that_cannot_be(plain: dict[str, Any]) -> None:
    four = {"model": {"quantization": "4bit"}}
    zero = {"strategy": "deepspeed", "zero_stage": 3}
    with pytest.raises(ConfigError, match="ZeRO-3") as caught:
        check_quantization(with_fields(plain, **four, parallel=zero))
    assert "parallel.strategy=fsdp" in str(caught.value.repair)
    with pytest.raises(ConfigError, match="GGUF"):
        check_quantization(with_fields(plain, model={**four["model"], "name": "a.gguf"}))
    with pytest.raises(ConfigError, match="cannot be trained"):
        with_fields(plain, **four, adapter={"method": "none"})
    for parallel in ({**zero, "zero_stage": 2}, {"strategy": "fsdp"}):
        check_quantization(with_fields(plain, **four, parallel=parallel))
    check_quantization(with_fields(plain, parallel=zero))


def test_an_adapter_to_go_on_from_must_have_its_weights(plain: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    config = with_start(with_fields({**plain, "adapter": {"start_from": str(folder)}}))
    (folder / "adapter_model.bin").write_bytes(b"a pickle")
    assert "has no `adapter_model.safetensors`" in str(quick_problems(config)[0])
    (folder / "adapter_model.safetensors").write_bytes(b"cut")
    assert "is damaged" in str(quick_problems(config)[0])
    save_file({"a": torch.zeros(2, dtype=torch.int8)}, folder / "adapter_model.safetensors")
    assert "no floating-point numbers: a (I8)" in str(quick_problems(config)[0])
    # As PEFT saves an adapter of an embedding, of which it cannot know whether that was resized.
    for name in ("model.embed_tokens.base_layer.weight", "lm_head.weight"):
        name = f"base_model.model.{name}"
        save_file({name: torch.zeros(2), "a.lora_A.weight": torch.zeros(2)}, folder / "adapter_model.safetensors")
        assert f"weights of its base model, such as {name}" in str(quick_problems(config)[0])
    save_file({"a": torch.zeros(2)}, folder / "adapter_model.safetensors")
    assert quick_problems(config) == []
    manifest.write(folder, [manifest.entry(folder, folder / "adapter_model.safetensors")], step=1, metrics={})
    assert quick_problems(config) == []
    runs.flip(folder / "adapter_model.safetensors")
    assert "has changed since it was written" in str(quick_problems(config)[0])


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b'{"peft_type": "LORA", "r": null}', b'{"r": "x"}'])
def test_settings_of_an_adapter_that_are_none(plain: dict[str, Any], tmp_path: Path, content: bytes) -> None:
    (tmp_path / "adapter_config.json").write_bytes(content)
    with pytest.raises(FinrayError) as caught:
        with_start(with_fields({**plain, "adapter": {"start_from": str(tmp_path)}}))
    assert str(tmp_path / "adapter_config.json") in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"model_type": "bert", "architectures": ["BertModel"]}, True),
        ({"model_type": "xlm-roberta", "architectures": ["XLMRobertaForMaskedLM"]}, True),
        ({"model_type": "modernbert"}, True),
        ({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}, True),
        ({"model_type": "bert", "architectures": ["BertLMHeadModel"], "is_decoder": True}, False),
        ({"model_type": "modernbert-decoder", "architectures": ["ModernBertDecoderForCausalLM"]}, False),
        ({"model_type": "modernbert-decoder"}, False),
        ({"model_type": "modernbert-decoder", "architectures": ["ModernBertDecoderForSequenceClassification"]}, True),
        ({"model_type": "bert-generation", "architectures": ["BertGenerationDecoder"]}, False),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, False),
        ({"model_type": "llama", "architectures": None}, False),
        ([], False),
    ],
)
def test_an_encoder_without_a_task_is_proposed_one(
    plain: dict[str, Any], settings: Any, told: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    config = with_fields(plain, model={"name": str(folder)})
    if not told:
        check_task(config)
        return
    for check in (check_task, require_startable, make_plan):
        with pytest.raises(ConfigError, match="reads text and writes none") as caught:
            check(config)
        assert "set model.task=sequence_classification" in str(caught.value.repair)
    check_task(with_fields(plain, model={"name": str(folder), "task": "sequence_classification"}))


def test_a_reference_must_read_the_tokens_of_the_rows(plain: dict[str, Any], tmp_path: Path) -> None:
    def problems(reference: str) -> str:
        own = {"train.objective": "dpo", "preference.reference": reference}
        return " ".join(map(str, quick_problems(runs.config_of(runs.changed(plain, own)))))

    model = Path(plain["model"]["name"])
    same, other, kind = (Path(shutil.copytree(model, tmp_path / name)) for name in ("same", "other", "kind"))
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    (kind / "config.json").write_text((model / "config.json").read_text().replace('"llama"', '"qwen2"'))
    assert [problems(str(name)) for name in ("start", "base", model, same)] == [""] * 4
    assert "2 of 384 tokens are others in the reference, such as `a`" in problems(str(other))
    assert "the reference is a qwen2, and the model a llama" in problems(str(kind))
    assert f"preference.reference={tmp_path}/no: the model does not exist" in problems(f"{tmp_path}/no")
    with pytest.raises(ConfigError, match="write reference_in_step: true"):
        problems("in_step")
