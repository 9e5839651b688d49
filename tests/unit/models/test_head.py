"""The chunked loss against a naive one in float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from finray.models.head import Head, _add, log_probabilities, loss_sum, plain_head


def naive(head: Head, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = hidden @ head.weight_VH.T
    if head.bias_V is not None:
        logits = logits + head.bias_V
    logits = logits * head.scale
    if head.softcap is not None:
        logits = torch.tanh(logits / head.softcap) * head.softcap
    return F.cross_entropy(logits, targets, reduction="sum")


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


class GpuHead(Head):
    """Its logits are taken for a GPU's."""

    def logits(self, hidden_KH: torch.Tensor) -> torch.Tensor:
        return Head.logits(self, hidden_KH).as_subclass(OnGpu)


@pytest.mark.parametrize("kind", [Head, GpuHead])
@pytest.mark.parametrize("chunk", [1, 5, 64, None])
@pytest.mark.parametrize(
    ("bias", "scale", "softcap"), [(False, 1.0, None), (True, 0.25, None), (False, 1.0, 3.0), (True, 2.0, 5.0)]
)
def test_loss_and_gradients_are_those_of_full_logits(
    kind: type[Head], chunk: int | None, bias: bool, scale: float, softcap: float | None
) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(23, 8, requires_grad=True)
    weight = torch.randn(37, 8, requires_grad=True)
    offset = torch.randn(37, requires_grad=True) if bias else None
    targets = torch.randint(0, 37, (23,))
    loss = loss_sum(kind(weight, offset, scale, softcap), hidden, targets, chunk=chunk) * 0.5
    loss.backward()

    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    exact_offset = offset.detach().double().requires_grad_() if offset is not None else None
    expected = naive(Head(exact[1], exact_offset, scale, softcap), exact[0], targets) * 0.5
    expected.backward()

    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    with torch.no_grad():
        evaluated = loss_sum(kind(weight, offset, scale, softcap), hidden, targets, chunk=chunk)
    assert 0.5 * evaluated.item() == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(hidden.grad.double(), exact[0].grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weight.grad.double(), exact[1].grad, rtol=1e-4, atol=1e-5)
    if offset is not None and exact_offset is not None:
        torch.testing.assert_close(offset.grad.double(), exact_offset.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [Head, GpuHead])
@pytest.mark.parametrize("trained", [(0,), (1, 2), (0, 1, 2)])
@pytest.mark.parametrize("chunk", [1, 5, None])
def test_log_probabilities_and_what_an_objective_makes_of_them_have_the_gradients_of_full_logits(
    kind: type[Head], trained: tuple[int, ...], chunk: int | None
) -> None:
    """An objective scales each differently, and not by one number as the sum does."""
    torch.manual_seed(0)
    tensors = [torch.randn(23, 8), torch.randn(37, 8), torch.randn(37)]
    targets, scale, softcap = torch.randint(0, 37, (23,)), 0.5, 5.0
    for at in trained:
        tensors[at].requires_grad_()
    found = log_probabilities(kind(tensors[1], tensors[2], scale, softcap), tensors[0], targets, chunk=chunk)
    assert (found.shape, found.dtype) == ((23,), torch.float32)
    torch.sigmoid(found * torch.linspace(-1, 1, 23)).sum().backward()  # type: ignore[no-untyped-call]
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    logits = torch.tanh((exact[0] @ exact[1].T + exact[2]) * scale / softcap) * softcap
    expected = logits.log_softmax(-1)[torch.arange(23), targets]
    torch.sigmoid(expected * torch.linspace(-1, 1, 23, dtype=torch.float64)).sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(found.detach().double(), expected.detach(), rtol=1e-5, atol=1e-5)
    for at, (tensor, other) in enumerate(zip(tensors, exact, strict=True)):
        assert (tensor.grad is not None) == (at in trained)
        if tensor.grad is not None and other.grad is not None:
            torch.testing.assert_close(tensor.grad.double(), other.grad, rtol=1e-4, atol=1e-5)


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


def test_a_head_that_is_trained_in_bf16_gets_gradients_summed_in_fp32() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(40, 16, dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(64, 16) * 0.3).bfloat16().requires_grad_()
    offset = torch.randn(64).bfloat16().requires_grad_()
    targets = torch.randint(0, 64, (40,))
    loss_sum(Head(weight, offset), hidden, targets, chunk=7).backward()
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight, offset)]
    naive(Head(exact[1], exact[2]), exact[0], targets).backward()
    for found, expected in zip((hidden, weight, offset), exact, strict=True):
        assert found.grad is not None
        assert found.grad.dtype == torch.bfloat16
        assert expected.grad is not None
        assert float((found.grad.double() - expected.grad).norm() / expected.grad.norm()) < 1e-2


@pytest.mark.parametrize("trained", [(0,), (1,), (2,), (0, 2)])
def test_only_what_is_trained_gets_a_gradient(trained: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(23, 8), torch.randn(37, 8), torch.randn(37)]
    targets = torch.randint(0, 37, (23,))
    for at in trained:
        tensors[at].requires_grad_()
    loss_sum(Head(tensors[1], tensors[2]), tensors[0], targets, chunk=5).backward()
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    naive(Head(exact[1], exact[2]), exact[0], targets).backward()
    for at, (tensor, expected) in enumerate(zip(tensors, exact, strict=True)):
        if at in trained:
            assert tensor.grad is not None
            torch.testing.assert_close(tensor.grad.double(), expected.grad, rtol=1e-4, atol=1e-5)
        else:
            assert tensor.grad is None


def test_under_autocast_products_are_in_its_dtype_and_the_sum_is_not() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(40, 16), torch.randn(64, 16)
    targets = torch.randint(0, 64, (40,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = loss_sum(Head(weight), hidden, targets)
    assert found.dtype == torch.float32
    expected = naive(Head(weight.bfloat16().double()), hidden.bfloat16().double(), targets)
    assert float(found) == pytest.approx(float(expected), rel=1e-2)
    assert float(found) != float(loss_sum(Head(weight), hidden, targets))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (1.0, None)),
        ({"logit_scale": 0.25}, (0.25, None)),
        ({"logits_scaling": 8.0}, (0.125, None)),
        ({"logit_scale": None, "logits_scaling": 4}, (0.25, None)),
        ({"final_logit_softcapping": 30}, (1.0, 30.0)),
    ],
)
def test_the_head_of_a_model_is_as_its_configuration_says(
    fields: dict[str, object], expected: tuple[float, float | None]
) -> None:
    layer = torch.nn.Linear(4, 9)
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(**fields))
    head = plain_head(SimpleNamespace(config=config, get_output_embeddings=lambda: layer))
    assert head is not None
    assert (head.scale, head.softcap) == expected
    assert (head.weight_VH, head.bias_V) == (layer.weight, layer.bias)

    class Adapted(torch.nn.Linear):
        pass

    for other in (Adapted(4, 9), None):
        assert plain_head(SimpleNamespace(config=config, get_output_embeddings=lambda other=other: other)) is None


def test_the_gradient_of_a_trained_head_exists_once() -> None:
    hidden, weight = torch.randn(5, 8, requires_grad=True), torch.randn(37, 8, requires_grad=True)
    loss = loss_sum(Head(weight), hidden, torch.randint(0, 37, (5,)))
    kept = loss.grad_fn.gradients[1].data_ptr()  # type: ignore[union-attr]
    loss.backward(retain_graph=True)
    assert weight.grad is not None
    assert weight.grad.data_ptr() == kept
    with pytest.raises(RuntimeError, match="freed by"):
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
