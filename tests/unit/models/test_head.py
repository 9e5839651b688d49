"""The chunked loss against a naive one in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from finray.models.head import Head, _add, loss_sum


def naive(head: Head, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = hidden @ head.weight_VH.T
    if head.bias_V is not None:
        logits = logits + head.bias_V
    logits = logits * head.scale
    if head.softcap is not None:
        logits = torch.tanh(logits / head.softcap) * head.softcap
    return F.cross_entropy(logits, targets, reduction="sum")


@pytest.mark.parametrize("chunk", [1, 5, 64, None])
@pytest.mark.parametrize(
    ("bias", "scale", "softcap"), [(False, 1.0, None), (True, 0.25, None), (False, 1.0, 3.0), (True, 2.0, 5.0)]
)
def test_loss_and_gradients_are_those_of_full_logits(
    chunk: int | None, bias: bool, scale: float, softcap: float | None
) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(23, 8, requires_grad=True)
    weight = torch.randn(37, 8, requires_grad=True)
    offset = torch.randn(37, requires_grad=True) if bias else None
    targets = torch.randint(0, 37, (23,))
    loss = loss_sum(Head(weight, offset, scale, softcap), hidden, targets, chunk=chunk) * 0.5
    loss.backward()

    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    exact_offset = offset.detach().double().requires_grad_() if offset is not None else None
    expected = naive(Head(exact[1], exact_offset, scale, softcap), exact[0], targets) * 0.5
    expected.backward()

    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(hidden.grad.double(), exact[0].grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weight.grad.double(), exact[1].grad, rtol=1e-4, atol=1e-5)
    if offset is not None and exact_offset is not None:
        torch.testing.assert_close(offset.grad.double(), exact_offset.grad, rtol=1e-4, atol=1e-5)


def test_a_frozen_head_gets_no_gradient_and_bf16_stays_close() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(40, 16, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(64, 16, dtype=torch.bfloat16) * 0.3
    targets = torch.randint(0, 64, (40,))
    loss = loss_sum(Head(weight), hidden, targets, chunk=7)
    loss.backward()
    exact = hidden.detach().double().requires_grad_()
    expected = naive(Head(weight.double()), exact, targets)
    expected.backward()
    assert weight.grad is None
    assert loss.item() == pytest.approx(expected.item(), rel=1e-2)
    # bf16 keeps eight bits; errors of single elements are judged by the size of the whole gradient.
    assert float((hidden.grad.double() - exact.grad).norm() / exact.grad.norm()) < 1e-2


def test_the_gradient_of_a_trained_head_exists_once() -> None:
    hidden, weight = torch.randn(5, 8, requires_grad=True), torch.randn(37, 8, requires_grad=True)
    loss = loss_sum(Head(weight), hidden, torch.randint(0, 37, (5,)))
    kept = loss.grad_fn.gradients[1].data_ptr()  # type: ignore[union-attr]
    loss.backward(retain_graph=True)
    assert weight.grad is not None
    assert weight.grad.data_ptr() == kept
    with pytest.raises(RuntimeError, match="given away"):
        loss.backward()


def large_tensors(weight: torch.Tensor) -> list[float]:
    """Bytes per weight of all tensors of a head's size that a bf16 loss of two chunks and its gradients make."""
    hidden = torch.randn(8, weight.shape[1], dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, len(weight), (8,))
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        loss_sum(Head(weight), hidden, targets, chunk=4).backward()
    made = [event.self_cpu_memory_usage / weight.numel() for event in profile.events()]
    return sorted(size for size in made if size >= 2)


def test_a_bf16_loss_copies_a_heads_fp32_weights_once_and_its_gradient_never() -> None:
    # A copy in bf16, the gradient, and a product of each chunk.
    assert large_tensors(torch.randn(8192, 256, requires_grad=True)) == [2, 2, 2, 4]


def test_an_fp32_copy_of_each_product_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finray.models.head._add", torch.Tensor.add_)
    assert large_tensors(torch.randn(8192, 256, requires_grad=True)) == [2, 2, 2, 4, 4, 4]


@pytest.mark.parametrize("shape", [(8191, 256), (5, 2**20)])
def test_a_product_that_is_added_in_slices_gives_the_same_bits(shape: tuple[int, int]) -> None:
    total, product = torch.randn(shape), torch.randn(shape, dtype=torch.bfloat16)
    expected = total + product
    _add(total, product)
    assert torch.equal(total, expected)


def test_no_label_no_loss() -> None:
    assert float(loss_sum(Head(torch.randn(9, 4)), torch.randn(0, 4), torch.empty(0, dtype=torch.int64))) == 0.0
