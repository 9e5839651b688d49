"""The compiled attention of CPUs against float64, and what happens where it cannot be compiled."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from finray.hardware import missing_for_kernels
from finray.models import cpu_kernels
from finray.models.attention import packed_attention

# The rest of the suite computes with torch's products there.
needs_kernels = pytest.mark.skipif(missing_for_kernels() is not None, reason="this machine cannot compile the kernels")


def drawn(tokens: int, heads: int, kv_heads: int, width: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Queries, keys, values (1, H, T, D) as a projection gives them, and the gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(1, tokens, count, width, generator=generator) for count in (heads, kv_heads, kv_heads, heads)]
    query, key, value, grad_out = (part.bfloat16() for part in parts)
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), grad_out


def computed(
    tensors: tuple[torch.Tensor, ...], lengths: tuple[int, ...], sinks: torch.Tensor | None = None, **how: object
) -> list[torch.Tensor]:
    """The output, and the gradients of queries, keys, values and sinks."""
    leaves = [part.detach().requires_grad_() for part in (*tensors[:3], *([] if sinks is None else [sinks]))]
    options = {"s_aux": None if sinks is None else leaves[3], "segment_lengths": lengths, **how}
    out, _ = packed_attention(torch.nn.Module(), *leaves[:3], None, **options)  # type: ignore[arg-type]
    out.backward(tensors[3])
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def expected(
    tensors: tuple[torch.Tensor, ...], lengths: tuple[int, ...], sinks: torch.Tensor | None = None, **how: object
) -> list[torch.Tensor]:
    """The same, a row at a time in float64."""
    leaves = [part.detach().double().requires_grad_() for part in (*tensors[:3], *([] if sinks is None else [sinks]))]
    query, key, value = leaves[:3]
    groups, window = query.shape[1] // key.shape[1], how.get("sliding_window") or math.inf
    rows = []
    for q, k, v in zip(*(torch.split(part, lengths, dim=2) for part in (query, key, value)), strict=True):
        scores = q @ k.repeat_interleave(groups, 1).transpose(-1, -2) * (how.get("scaling") or q.shape[-1] ** -0.5)
        distance = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
        visible = (distance < window) & (distance > (-window if how.get("is_causal") is False else -1))
        scores = scores.masked_fill(~visible, -math.inf)
        if sinks is not None:
            column = leaves[3].view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, column], -1)
        weights = scores.softmax(-1)[..., : q.shape[2]]
        rows.append((weights @ v.repeat_interleave(groups, 1)).transpose(1, 2))
    out = torch.cat(rows, 1)
    out.backward(tensors[3].double())
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def far(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> list[float]:
    assert [part.shape for part in found] == [part.shape for part in wanted]
    return [float((one - other).norm() / other.norm()) for one, other in zip(found, wanted, strict=True)]


@needs_kernels
@pytest.mark.parametrize(
    ("lengths", "heads", "width", "how"),
    [
        # Around the size of a block of queries, of keys, and of a segment; one token; a row of several segments.
        ((33, 90, 150, 1, 2, 385, 402), (9, 3), 64, {}),
        ((47, 48, 49, 240, 241), (3, 3), 256, {"sliding_window": 7}),
        ((2500,), (2, 1), 64, {"scaling": 0.3}),
        ((700,), (4, 2), 80, {"sinks": True}),
        ((1000, 37), (2, 2), 128, {"sliding_window": 100, "sinks": True}),
        ((513, 512, 3), (4, 1), 96, {"sliding_window": 450, "is_causal": False}),
        ((90, 401, 35), (2, 1), 16, {"is_causal": False}),
    ],
)
def test_output_and_gradients_are_those_of_float64(
    lengths: tuple[int, ...], heads: tuple[int, int], width: int, how: dict[str, object]
) -> None:
    tensors = drawn(sum(lengths), *heads, width)
    if "sinks" in how:
        how = {**how, "sinks": 2 * torch.randn(heads[0], generator=torch.Generator().manual_seed(1))}
    found, wanted = computed(tensors, lengths, **how), expected(tensors, lengths, **how)
    # An output or a gradient that is rounded to bf16 is off by 2e-3; that of a sink is a sum of both signs over tokens.
    assert all(error < limit for error, limit in zip(far(found, wanted), (4e-3,) * 4 + (2e-2,), strict=False))
    # One token more in a row, and one less in the next, is another result.
    if len(lengths) > 1:
        moved = (lengths[0] + 1, lengths[1] - 1, *lengths[2:])
        assert max(far(found, expected(tensors, moved, **how))) > 2e-2


@needs_kernels
def test_rows_do_not_depend_on_those_beside_them_nor_on_the_number_of_threads() -> None:
    lengths, first = (70, 1100, 333), drawn(1503, 4, 2, 64)
    together = computed(first, lengths)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert all(map(torch.equal, together, computed(first, lengths)))
    finally:
        torch.set_num_threads(threads)
    start = 0
    for length in lengths:
        row = slice(start, start + length)
        alone = computed((*(part[:, :, row] for part in first[:3]), first[3][:, row]), (length,))
        assert torch.equal(alone[0], together[0][:, row])
        assert all(torch.equal(one, all_rows[:, :, row]) for one, all_rows in zip(alone[1:], together[1:], strict=True))
        start += length


@needs_kernels
@pytest.mark.parametrize("part", [0, 1, 2])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_not_hidden(part: int, value: float) -> None:
    tensors = drawn(500, 2, 1, 32)
    tensors[part][0, 0, 430] = value
    found = computed(tensors, (50, 450))
    assert found[0][:, :50].isfinite().all()
    # A score of minus infinity is no mistake, so not every token that sees an infinite key is.
    seen = slice(430, 431 if part == 0 else None)
    assert not found[0][0, seen, 0].isfinite().all()
    assert not all(tensor.isfinite().all() for tensor in found[1:])


@needs_kernels
def test_it_keeps_no_weights_and_takes_any_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = drawn(600, 4, 2, 32)
    usual = computed(tensors, (400, 200))
    # Heads before tokens, and a width that is not dense.
    turned = [part.contiguous() for part in tensors[:2]] + [tensors[2].transpose(-1, -2).contiguous().transpose(-1, -2)]
    assert all(map(torch.equal, usual, computed((*turned, tensors[3]), (400, 200))))  # type: ignore[arg-type]

    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda part: kept.append(part.numel()) or part, lambda part: part):
        computed(tensors, (400, 200))
    assert max(kept) == tensors[0].numel()
    # Products keep a weight for each pair of tokens.
    monkeypatch.setattr(cpu_kernels, "library", lambda: None)
    with torch.autograd.graph.saved_tensors_hooks(lambda part: kept.append(part.numel()) or part, lambda part: part):
        products = computed(tensors, (400, 200))
    assert max(kept) >= 4 * 400 * 400
    assert max(far(products, usual)) < 2e-2


@needs_kernels
@pytest.mark.parametrize("what", ["dropout", "softcap", "fp32", "width", "first tokens", "short rows"])
def test_what_it_cannot_do_is_left_to_products(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("called")

    monkeypatch.setattr(cpu_kernels, "attend", refuse)
    query, key, value, _ = drawn(64, 2, 1, 24 if what == "width" else 32)
    lengths, how = (40, 24), {}
    if what in ("dropout", "softcap"):
        how = {what: 0.5}
    elif what == "fp32":
        query, key, value = query.float(), key.float(), value.float()
    elif what == "first tokens":
        query = query[:, :, :2]
        how = {"is_causal": False}
    elif what == "short rows":
        lengths = (31, 16, 17)
    packed_attention(torch.nn.Module(), query, key, value, None, segment_lengths=lengths, **how)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="called"):
        packed_attention(torch.nn.Module(), *drawn(64, 2, 1, 32)[:3], None, segment_lengths=(32, 32))


@needs_kernels
@pytest.mark.parametrize("lengths", [(40, 25), (40, 23), (65, -1)])
def test_no_memory_beside_the_tensors_is_read(lengths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="rows of"):
        cpu_kernels.attend(*drawn(64, 2, 1, 32)[:3], lengths)
    with pytest.raises(ValueError, match="rows of"):
        cpu_kernels.attend(*drawn(64, 3, 2, 32)[:3], (40, 24))


@needs_kernels
def test_it_is_compiled_once_and_a_compiler_that_fails_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = cpu_kernels._compiled(tmp_path / "kernels")
    made = file.stat()
    assert cpu_kernels._compiled(tmp_path / "kernels").stat().st_mtime_ns == made.st_mtime_ns
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    # What somebody else may have put there is not run.
    file.parent.chmod(0o777)
    with pytest.raises(PermissionError, match="others can change"):
        cpu_kernels._compiled(file.parent)

    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho no immintrin.h >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    cpu_kernels.library.cache_clear()
    try:
        with caplog.at_level("INFO", logger=cpu_kernels.__name__):
            assert cpu_kernels.library() is None
        assert "no immintrin.h" in caplog.text
        out = computed(drawn(64, 2, 1, 32), (64,))
        assert out[0].isfinite().all()
    finally:
        cpu_kernels.library.cache_clear()


def test_what_a_machine_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "cpuinfo"
    assert missing_for_kernels(file) == "CPU"
    file.write_text("model name : avx512_bf16\nflags\t\t: fpu avx512f avx512bw avx512vl avx512dq\nbugs : avx512_bf16\n")
    assert missing_for_kernels(file) == "CPU"
    file.write_text("model name : x\nflags\t\t: fpu avx512f avx512_bf16 avx512bw avx512vl avx512dq\nbugs :\n")
    compiler = tmp_path / "cc"
    monkeypatch.setenv("CC", str(compiler))
    assert missing_for_kernels(file) == "compiler"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    assert missing_for_kernels(file) is None
    monkeypatch.setenv("CC", f"{compiler} -m64")
    assert missing_for_kernels(file) is None
