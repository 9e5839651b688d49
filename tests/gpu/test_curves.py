"""Whatever is trained, and however: on a GPU it is what the same run is on the CPU, and a resumed one is the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from finray.evaluation.engines import Sampling
from finray.evaluation.engines.transformers import TransformersEngine
from finray.models import liger
from finray.parallel.base import backend_of
from finray.runtime.failures import bytes_missing, out_of_memory
from tests.support import processes, runs, tiny
from tests.support.group import run_all
from tests.support.runs import Plain, changed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use (CUDA)")

CPU, GPU = torch.device("cpu"), torch.device("cuda")
FULL = {"adapter.method": "none", "train.learning_rate": 0.002}
# With their own masks on each device, dropout would be another run.
KINDS: dict[str, Plain] = {
    "lora": {},
    "lora plus": {"adapter.lora_plus_ratio": 4.0, "train.micro_batch_size": 2},
    "rslora": {"adapter.method": "rslora"},
    "dora": {"adapter.method": "dora"},
    "pissa": {"adapter.method": "pissa"},
    "8bit": {"model.quantization": "8bit"},
    "4bit": {"model.quantization": "4bit"},
    "full": FULL,
    "not packed": {**FULL, "data.packing": False, "train.micro_batch_size": 3},
    "no liger": {**FULL, "train.liger": False},
    "selective": {**FULL, "train.gradient_checkpointing": "selective"},
    "full checkpointing": {**FULL, "train.gradient_checkpointing": "full"},
    "adafactor": {**FULL, "train.optimizer": "adafactor", "train.learning_rate": 0.02},
    "muon": {**FULL, "train.optimizer": "muon"},
    "adamw_8bit": {**FULL, "train.optimizer": "adamw_8bit"},
    "paged_adamw_8bit": {**FULL, "train.optimizer": "paged_adamw_8bit"},
}
# What rounds to a few bits may round to a neighbour.
ROUGH = {"8bit": 5e-2, "4bit": 5e-2, "adamw_8bit": 2e-2, "paged_adamw_8bit": 2e-2, "pissa": 5e-3, "muon": 1e-2}


@pytest.fixture(scope="module")
def plain(tiny_run: Callable[..., Plain]) -> Plain:
    return tiny_run({"data.eval_ratio": 0.1, "evaluation.on_start": True})


@pytest.fixture(autouse=True)
def plain_functions() -> None:
    """The comparisons in fp32 want all bits, and models without Liger have none of its functions."""
    assert not torch.backends.cuda.matmul.allow_tf32
    liger.restore()


def assert_resumes(plain: Plain, whole: Path, again: Path) -> None:
    """The run from its middle on is the same to the bit."""
    runs.cut(whole, again)
    assert runs.run_alone(plain, again, device=GPU).header.step == 4
    assert runs.trace(again) == runs.trace(whole)
    for file in (whole / "checkpoint-000008").rglob("*.safetensors"):
        assert file.read_bytes() == (again / file.relative_to(whole)).read_bytes(), file


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_in_fp32_is_that_of_the_cpu_and_resumes_to_the_bit(plain: Plain, kind: str, tmp_path: Path) -> None:
    one = changed(plain, KINDS[kind])
    runs.run_alone(one, tmp_path / "cpu", device=CPU)
    runs.run_alone(one, tmp_path / "gpu", device=GPU)
    runs.assert_same_curve(tmp_path / "gpu", tmp_path / "cpu", rel=ROUGH.get(kind, 1e-3))
    for found, expected in zip(*(runs.records(tmp_path / name, "eval") for name in ("gpu", "cpu")), strict=True):
        assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=ROUGH.get(kind, 1e-3))
    assert runs.values(tmp_path / "gpu", "loss")[-1] != pytest.approx(
        runs.values(tmp_path / "gpu", "loss")[0], rel=0.02
    )
    assert_resumes(one, tmp_path / "gpu", tmp_path / "again")


# The names that the families have for it.
NO_DROPOUT = dict.fromkeys(
    ["hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout", "seq_classif_dropout"], 0.0
)


@pytest.mark.parametrize("family", tiny.ENCODERS)
@pytest.mark.parametrize("packing", [True, False])
def test_a_classifier_in_fp32_is_that_of_the_cpu(
    classifier_run: Callable[..., Plain], tokenizer: Any, family: str, packing: bool, tmp_path: Path
) -> None:
    tiny.save_encoder(family, tmp_path / "model", tokenizer, **NO_DROPOUT)
    one = classifier_run({"model.name": str(tmp_path / "model"), "data.packing": packing}, family=family)
    runs.run_alone(one, tmp_path / "cpu", device=CPU)
    runs.run_alone(one, tmp_path / "gpu", device=GPU)
    runs.assert_same_curve(tmp_path / "gpu", tmp_path / "cpu", rel=1e-3)
    assert_resumes(one, tmp_path / "gpu", tmp_path / "again")


@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16-true"])
@pytest.mark.parametrize("task", ["causal_lm", "classifier"])
def test_a_run_in_half_precision_is_near_that_in_fp32_and_resumes_to_the_bit(
    plain: Plain, classifier_run: Callable[..., Plain], task: str, precision: str, tmp_path: Path
) -> None:
    one = changed(plain, FULL) if task == "causal_lm" else classifier_run(FULL)
    half = changed(one, {"train.precision": precision})
    runs.run_alone(one, tmp_path / "fp32", device=GPU)
    runs.run_alone(half, tmp_path / "half", device=GPU)
    assert runs.values(tmp_path / "half", "loss") == pytest.approx(runs.values(tmp_path / "fp32", "loss"), rel=5e-2)
    assert_resumes(half, tmp_path / "half", tmp_path / "again")


STRATEGIES: dict[str, Plain] = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "fsdp, offloaded": {"strategy": "fsdp", "cpu_offload": True},
    "zero2": {"strategy": "deepspeed", "zero_stage": 2},
    "zero3": {"strategy": "deepspeed", "zero_stage": 3},
}


PRECISIONS = {"fp32": 1e-3, "bf16": 5e-2, "fp16": 5e-2}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_strategy_on_a_gpu_is_that_of_one_process_and_resumes_to_the_bit(
    plain: Plain, strategy: str, world_size: int, tmp_path: Path
) -> None:
    """NCCL with one rank; two share the GPU, and so use Gloo."""
    if STRATEGIES[strategy]["strategy"] == "deepspeed":
        pytest.importorskip("deepspeed")
    jobs: list[tuple[Plain, Path]] = []
    for precision in PRECISIONS:
        one = changed(plain, FULL, {"train.precision": precision})
        runs.run_alone(one, tmp_path / f"{precision}-one", device=GPU)
        jobs.append((changed(one, {"parallel": STRATEGIES[strategy]}), tmp_path / precision))
    run_all(jobs, world_size=world_size, device=GPU)
    again = [(shared, runs.cut(whole, whole.with_name(f"{whole.name}-again"))) for shared, whole in jobs]
    run_all(again, world_size=world_size, device=GPU)
    for precision, rel in PRECISIONS.items():
        alone, whole = tmp_path / f"{precision}-one", tmp_path / precision
        assert runs.values(whole, "loss") == pytest.approx(runs.values(alone, "loss"), rel=rel), precision
        assert runs.values(whole, "samples") == runs.values(alone, "samples")
        assert runs.trace(tmp_path / f"{precision}-again") == runs.trace(whole), precision


def test_layers_that_are_computed_again_or_kept_elsewhere_have_the_same_dropout(
    plain: Plain, dropout_model: Path, tmp_path: Path
) -> None:
    """The forward pass to the bit, and what follows as close as another order of sums leaves it."""
    dropping = {"model.name": str(dropout_model), "adapter.dropout": 0.2, "train.learning_rate": 1e-3}
    dropping = changed(plain, dropping, {"train.liger": False})
    runs.run_alone(dropping, tmp_path / "usual", device=GPU)
    for name, setting in {
        "selective": {"train.gradient_checkpointing": "selective"},
        "full": {"train.gradient_checkpointing": "full"},
        "offloaded": {"train.activation_offload": True},
        "other": {"adapter.dropout": 0.21},
    }.items():
        runs.run_alone(changed(dropping, setting), tmp_path / name, device=GPU)
        losses, norms = ([runs.values(tmp_path / one, key) for one in (name, "usual")] for key in ("loss", "grad_norm"))
        assert (losses[0][0] == losses[1][0]) == (name != "other"), name
        assert (norms[0] == pytest.approx(norms[1], rel=1e-3)) == (name != "other"), name


def test_ligers_kernels_give_the_run_without_them(plain: Plain, tmp_path: Path) -> None:
    pytest.importorskip("liger_kernel")
    for precision, rel in (("fp32", 1e-3), ("bf16", 3e-2)):
        one = changed(plain, FULL, {"train.precision": precision})
        for name, wanted in (("usual", False), ("liger", True)):
            changes = {"train.liger": wanted, "data.eval_ratio": 0.0}
            runs.run_alone(changed(one, changes), tmp_path / f"{precision}-{name}", device=GPU)
        runs.assert_same_curve(tmp_path / f"{precision}-liger", tmp_path / f"{precision}-usual", rel=rel)
    found = [runs.values(tmp_path / f"fp32-{name}", "loss") for name in ("usual", "liger")]
    assert found[0] != found[1], "other kernels round otherwise"


def test_a_compiled_run_is_that_of_the_cpu(plain: Plain, tmp_path: Path) -> None:
    jobs = []
    for name, changes in (("lora", {}), ("full", FULL)):
        one = changed(plain, changes)
        runs.run_alone(one, tmp_path / f"{name}-cpu", device=CPU)
        jobs.append((changed(one, {"train.compile": True}), tmp_path / name))
    run_all(jobs, world_size=1, device=GPU)
    for name in ("lora", "full"):
        runs.assert_same_curve(tmp_path / name, tmp_path / f"{name}-cpu", rel=1e-3)


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3", "gpt2"])
def test_answers_are_those_of_transformers_generate(family: str) -> None:
    model = tiny.build_model(family).eval().to(GPU)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 380, (length,), generator=generator).tolist() for length in (3, 9, 1, 30, 17, 4)]
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=GPU)
        said = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, pad_token_id=0
        )
        expected.append(said[0, len(prompt) :].tolist())
    engine = TransformersEngine.of(model, _Words(), batch_size=3)
    found = {answer.row: list(answer.tokens) for answer in engine.generate(prompts, Sampling(20))}
    engine.close()
    assert [found[row] for row in range(len(prompts))] == expected


class _Words:
    """A tokenizer whose text shows every token, and that ends no answer."""

    eos_token_id, pad_token_id = None, 0

    def decode(self, tokens: list[int], *, skip_special_tokens: bool = False) -> str:
        return " ".join(map(str, tokens))


def _exchange(rank: int, meeting: str) -> None:
    """What finray exchanges: tensors on the GPU and in CPU memory, and objects."""
    torch.cuda.set_device(0)
    dist.init_process_group(backend_of(GPU), store=dist.FileStore(meeting, 1), rank=rank, world_size=1)
    for device in (GPU, CPU):
        values = torch.arange(3.0, device=device)
        dist.all_reduce(values)
        assert values.tolist() == [0.0, 1.0, 2.0]
    objects: list[Any] = [None]
    dist.all_gather_object(objects, {"a": 1})
    assert objects == [{"a": 1}]
    dist.barrier()
    dist.destroy_process_group()


def test_a_group_of_gpus_reduces_what_is_in_cpu_memory_too(tmp_path: Path) -> None:
    processes.start(_exchange, (str(tmp_path / "meeting"),), processes=1, device="cuda")


def test_an_error_of_the_gpus_allocator_says_how_much_was_missing() -> None:
    free, _ = torch.cuda.mem_get_info()
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(free + 2**31, dtype=torch.uint8, device=GPU)
    found = out_of_memory(caught.value, "rank 0", 3)
    assert found is not None
    assert "rank 0 ran out of memory after step 3: it asked for" in found.message
    assert bytes_missing(found.message) == pytest.approx(2**31, rel=0.2)


def test_the_record_has_the_peak_memory_and_the_name_of_the_gpu(plain: Plain, tmp_path: Path) -> None:
    header = runs.run_alone(plain, tmp_path / "run", device=GPU).header
    assert header.device == torch.cuda.get_device_name()
    model = sum(one.numel() for one in tiny.build_model("llama").parameters())
    peaks: list[Any] = runs.values(tmp_path / "run", "peak_memory_bytes")
    assert all(4 * model < peak < 2**30 for peak in peaks), json.dumps(peaks)
