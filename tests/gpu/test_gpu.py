"""What is promised of a GPU, on one: tiny models built here, no Ray and no network. Skipped where there is none."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from finray.config.schema import AdapterConfig
from finray.data.sampling.collate import Batch
from finray.models import adapters, attention, fused_lora
from finray.models.head import Head, loss_sum
from finray.tasks.causal_lm import CausalLM
from tests.integration.test_reference import check_against_a_plain_loop
from tests.support import runs, tiny
from tests.support.packing import assert_equal_gradients, batch_of, gradients, packed_model, reference_gradients, rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use (CUDA)")

DEVICE = torch.device("cuda")
FAMILIES = ["llama", "qwen3", "gemma3", "gpt2"]
Items = Sequence[tuple[Any, Any]]


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """No TF32: it keeps ten bits, and the comparisons in fp32 here want all of them."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture
def bf16() -> None:
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        pytest.skip("this GPU has no bf16, and so no variable-length attention in it")


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference, relative to that of what is expected."""
    exact = expected.detach().double()
    return float((actual.detach().double() - exact).norm() / exact.norm())


# Packing, in fp32: every row by itself.


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_gradients_in_fp32_are_those_of_plain_transformers(family: str) -> None:
    model = packed_model(family).to(DEVICE)
    task = CausalLM(model, precision="fp32", attention_name=attention.NAME, device=DEVICE)
    loss = task.outputs(batch_of(rows()).to(DEVICE))
    loss.backward()
    expected_loss, expected = reference_gradients(family, rows(), "cuda")
    assert loss.item() == pytest.approx(expected_loss, rel=1e-5)
    assert_equal_gradients(gradients(model), expected)
    assert task.packed._has_plain_head, "the fast head must be the one that was tested"


# Packing, in bf16: torch's variable-length kernel.


def gentle_model(family: str) -> Any:
    """With weights half as large: sharp attention multiplies the rounding of bf16, whatever works it out."""
    model = packed_model(family)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(0.5)
    return model


def lora_task(family: str) -> CausalLM:
    """As `CausalLM.build` makes it: frozen weights in bf16, adapters in fp32. B is not zero, or A had no gradients."""
    model = gentle_model(family).to(torch.bfloat16).requires_grad_(False)
    model = adapters.add_lora(model, AdapterConfig(rank=4, dropout=0.0), seed=3)
    fused_lora.fuse(model)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02, generator=torch.Generator().manual_seed(len(name)))
    return CausalLM(model.to(DEVICE), precision="bf16", attention_name=attention.NAME, device=DEVICE)


def full_task(family: str) -> CausalLM:
    """As `CausalLM.build` makes it without an adapter: all weights in fp32, bf16 by autocast alone."""
    model = gentle_model(family).to(DEVICE)
    return CausalLM(model, precision="bf16", attention_name=attention.NAME, device=DEVICE)


def long_rows() -> Items:
    """Rows of one block of the kernel and of several, and of two tokens."""
    generator = np.random.default_rng(1)
    return [
        (generator.integers(3, 380, length).astype(np.int32), (np.arange(length) % 3 != 0).astype(np.uint8))
        for length in (300, 2, 130, 61)
    ]


def watch_kernel(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the kernel do its work; the list gets the tokens of every call."""
    calls: list[int] = []
    varlen = attention._varlen()
    assert varlen is not None, "this torch has no varlen_attn with the arguments that are wanted"
    kernel, takes_groups = varlen

    def watched(query: torch.Tensor, *rest: Any, **options: Any) -> Any:
        calls.append(query.shape[0])
        return kernel(query, *rest, **options)

    monkeypatch.setattr(attention, "_varlen", lambda: (watched, takes_groups))
    return calls


def learn(task: CausalLM, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    task.model.zero_grad(set_to_none=True)
    loss = task.outputs(batch.to(DEVICE))
    loss.backward()
    return loss.item(), gradients(task.model)


def check_kernel_against_rows(monkeypatch: pytest.MonkeyPatch, task: CausalLM) -> None:
    """The kernel is taken in each of the two layers, and gives what each row by itself gives."""
    batch = batch_of(long_rows())
    with monkeypatch.context() as patch:
        calls = watch_kernel(patch)
        loss, grads = learn(task, batch)
        assert calls.count(batch.tokens) == 2
    with monkeypatch.context() as patch:
        patch.setattr(attention, "_varlen", lambda: None)
        expected_loss, expected = learn(task, batch)
    assert loss == pytest.approx(expected_loss, rel=2e-3)
    assert runs.relative_difference(expected, grads) < 2e-2


@pytest.mark.usefixtures("bf16")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_kernel_is_taken_and_agrees_with_rows_alone(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    check_kernel_against_rows(monkeypatch, lora_task(family))


@pytest.mark.usefixtures("bf16")
def test_the_kernel_is_taken_where_every_weight_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    check_kernel_against_rows(monkeypatch, full_task("llama"))


def input_gradients(task: CausalLM, batch: Batch) -> tuple[torch.Tensor, ...]:
    """The gradient of the batch's loss with respect to the embedded tokens, row by row."""
    leaves: list[torch.Tensor] = []

    def cut(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        leaves.append(output.detach().requires_grad_())
        return leaves[-1]

    handle = task.model.get_input_embeddings().register_forward_hook(cut)
    task.outputs(batch.to(DEVICE)).backward()
    handle.remove()
    grad = leaves[-1].grad
    assert grad is not None
    lengths = np.diff(batch.cu_seqlens.cpu().numpy()).tolist()
    return grad[0].split(lengths)


def with_other_row(items: Items, row: int) -> Items:
    """The same rows, but for the tokens of one."""
    changed = [(ids, mask) for ids, mask in items]
    ids, mask = items[row]
    changed[row] = ((ids * 7 + 11) % 380, mask)
    return changed


@pytest.mark.usefixtures("bf16")
@pytest.mark.parametrize("family", FAMILIES)
def test_perturbing_one_row_leaves_the_others_alone_in_the_kernel(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """To the bit: the rows are short enough for one block of the kernel each, which leaves no order of sums open."""
    calls = watch_kernel(monkeypatch)
    task = lora_task(family)
    before = input_gradients(task, batch_of(rows()))
    for row in range(len(before)):
        after = input_gradients(task, batch_of(with_other_row(rows(), row)))
        same = [torch.equal(left, right) for left, right in zip(before, after, strict=True)]
        assert same == [number != row for number in range(len(before))]
    assert calls


@pytest.mark.usefixtures("bf16")
def test_the_perturbation_can_see_a_leak() -> None:
    """Negative control: told that two rows are one, the kernel lets the first reach the second."""
    task = lora_task("llama")

    def joined(items: Items) -> Batch:
        batch = batch_of(items)
        first, second, *rest = batch.lengths
        return dataclasses.replace(
            batch, lengths=(first + second, *rest), cu_seqlens=torch.cat([batch.cu_seqlens[:1], batch.cu_seqlens[2:]])
        )

    before, after = (
        input_gradients(task, joined(items))[0][len(rows()[0][0]) :] for items in (rows(), with_other_row(rows(), 0))
    )
    assert not torch.equal(before, after)


# A whole run.


def test_twenty_steps_in_fp32_agree_with_a_plain_loop(tiny_model_dir: Path, tmp_path: Path) -> None:
    check_against_a_plain_loop(tiny_model_dir, tiny.chat_rows(30), tmp_path, steps=20, device=DEVICE)


# The two layers with arithmetic of their own.


def layer_results(layer: Any, x: torch.Tensor, grad: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a LoRA layer makes of an input under autocast, and the gradients of everything that has one."""
    leaf = x.clone().requires_grad_()
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        output = layer(leaf)
    low, high = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    grads = torch.autograd.grad(output, (leaf, low, high), grad.to(output.dtype))
    return {"output": output, **dict(zip(("x", "A", "B"), grads, strict=True))}


@pytest.mark.usefixtures("bf16")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_fused_lora_layer_is_pefts_in_bf16_autocast(dtype: torch.dtype) -> None:
    """Layer by layer: through a whole model the rounding of bf16 grows, and would hide what is looked for."""
    base = tiny.build_model("llama").to(dtype)
    theirs = adapters.add_lora(base, AdapterConfig(rank=4, dropout=0.0), seed=1).to(DEVICE).train()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    ours = copy.deepcopy(theirs)
    assert fused_lora.fuse(ours) == 14
    torch.manual_seed(0)
    for plain, fused in zip(theirs.modules(), ours.modules(), strict=True):
        if not hasattr(plain, "lora_A"):
            continue
        x = torch.randn(2, 50, plain.in_features, device=DEVICE, dtype=dtype)
        grad = torch.randn(2, 50, plain.out_features, device=DEVICE)
        expected, actual = layer_results(plain, x, grad), layer_results(fused, x, grad)
        assert actual["output"].dtype == torch.bfloat16
        assert all(actual[name].dtype == expected[name].dtype for name in ("x", "A", "B"))
        assert all(relative(actual[name], expected[name]) < 1e-2 for name in expected)


@pytest.mark.usefixtures("bf16")
@pytest.mark.parametrize("chunk", [7, 64, None])
@pytest.mark.parametrize("trained", [False, True])
def test_the_chunked_head_in_bf16_is_close_to_float64(chunk: int | None, trained: bool) -> None:
    """A frozen bf16 projection, as under LoRA, and a trained fp32 one, as without."""
    torch.manual_seed(0)
    hidden = torch.randn(300, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(1000, 64, device=DEVICE) * 0.3).to(torch.float32 if trained else torch.bfloat16)
    weight.requires_grad_(trained)
    targets = torch.randint(0, 1000, (300,), device=DEVICE)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        loss = loss_sum(Head(weight), hidden, targets, chunk=chunk)
    loss.backward()
    exact_hidden, exact_weight = (tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    expected = F.cross_entropy(exact_hidden @ exact_weight.T, targets, reduction="sum")
    expected.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-2)
    assert hidden.grad is not None
    assert relative(hidden.grad, exact_hidden.grad) < 1e-2
    if trained:
        assert relative(weight.grad, exact_weight.grad) < 1e-2
    else:
        assert weight.grad is None
