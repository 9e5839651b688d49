"""Attention over packed rows refuses what it cannot compute, instead of leaving it out."""

from __future__ import annotations

import random
from itertools import combinations, product
from typing import Any

import pytest
import torch

from finray.models import attention
from finray.models.attention import packed_attention
from finray.models.dropout import drop


def attend(**options: Any) -> torch.Tensor:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 6, 8)
    return packed_attention(torch.nn.Module(), query, key, value, None, segment_lengths=(2, 4), **options)[0]


@pytest.mark.parametrize(
    "options",
    [
        {"s_aux": torch.ones(2), "softcap": 0.5},
        {"sinks": torch.ones(2)},
        {"position_bias": torch.ones(1, 2, 6, 6)},
        {"head_mask": torch.ones(2)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_arguments_that_would_change_the_result_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match=f"uses `{next(iter(options))}`"):
        attend(**options)


def test_arguments_that_change_nothing_are_not() -> None:
    plain = attend()
    harmless = {"position_ids": torch.arange(6)[None], "is_causal": True, "use_cache": False, "s_aux": None}
    assert torch.equal(attend(**harmless), plain)


class Encoder(torch.nn.Module):
    """An attention module that sees both sides."""

    is_causal = False


def test_a_module_is_causal_unless_it_or_the_call_says_otherwise() -> None:
    plain, other = attend(), attend(is_causal=False)
    assert not torch.allclose(plain, other)
    torch.manual_seed(0)
    tensors = torch.randn(3, 1, 2, 6, 8)
    for options, expected in (({}, other), ({"is_causal": True}, plain)):
        found, _ = packed_attention(Encoder(), *tensors, None, segment_lengths=(2, 4), **options)
        assert torch.equal(found, expected)


def eager(*rows: torch.Tensor, window: int | None, softcap: float | None, dropout: float) -> torch.Tensor:
    """Attention as papers write it, over the queries, keys and values (1, heads, L, D) of one row."""
    query, key, value = rows
    scores = query @ key.transpose(-1, -2) * 0.3
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    places = torch.arange(query.shape[2])
    distance = places[:, None] - places
    seen = (distance >= 0) & (distance < (window or 1000))
    weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), dim=-1)
    return (drop(weights, dropout) @ value).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_window_softcap_and_dropout_are_those_of_the_formula(
    window: int | None, softcap: float | None, dropout: float
) -> None:
    """Row for row, which draw one after the other."""
    torch.manual_seed(0)
    lengths, tensors = (7, 2, 5), torch.randn(3, 1, 4, 14, 8)
    options = {"window": window, "softcap": softcap, "dropout": dropout}
    torch.manual_seed(1)
    parts = [eager(*(one.split(lengths, dim=2)[row] for one in tensors), **options) for row in range(3)]  # type: ignore[arg-type]
    torch.manual_seed(1)
    found, _ = packed_attention(
        torch.nn.Module(),
        *tensors,
        None,
        segment_lengths=lengths,
        scaling=0.3,
        sliding_window=window,
        softcap=softcap,
        dropout=dropout,
    )
    torch.testing.assert_close(found, torch.cat(parts, dim=1), rtol=1e-5, atol=1e-6)


# --- every path, against a loop over queries --------------------------------------------------------------------------

LENGTHS = (1, 7, 4)


def by_hand(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *,
    scaling: float | None = None, window: int | None = None, softcap: float | None = None, causal: bool = True,
    s_aux: torch.Tensor | None = None, lengths: tuple[int, ...] = LENGTHS,
) -> torch.Tensor:  # fmt: skip
    """Softmax over the tokens of the same row (that came before), one query of one head at a time: (1, T, H, D)."""
    heads, total, width = query.shape[1:]
    result = torch.zeros(1, total, heads, width, dtype=torch.float64)
    for head in range(heads):
        shared = head * key.shape[1] // heads
        start = 0
        for length in lengths:
            for at in range(start, start + length):
                reach = total if window is None else window
                first, last = max(start, at - reach + 1), at + 1 if causal else min(start + length, at + reach)
                keys = key[0, shared, first:last].double()
                scores = keys @ query[0, head, at].double() * (width**-0.5 if scaling is None else scaling)
                if softcap is not None:
                    scores = torch.tanh(scores / softcap) * softcap
                total_of = scores.exp().sum() + (0 if s_aux is None else s_aux[head].double().exp())
                result[0, at, head] = scores.exp() / total_of @ value[0, shared, first:last].double()
            start += length
    return result


def parts(heads: int, shared: int, dtype: torch.dtype, lengths: tuple[int, ...] = LENGTHS) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [(torch.randn(1, count, sum(lengths), 8) * 2).to(dtype) for count in (heads, shared, shared)]


# Many short rows are batches of about one length, wherever they lie, and padded.
FEW, SHORT, PADDED = LENGTHS, (3, 1, 2, 3) * 4, (8, 1, 7, 6) * 4
# A sink that takes nearly all, some that take their share, and one that takes nothing.
SINKS = torch.tensor([4.0, 0.5, -1.0, -40.0])
OPTIONS: list[tuple[Any, ...]] = [
    (torch.float32, torch.bfloat16),
    (1, 2, 4),
    (None, 3, 7),
    ({}, {"softcap": 2.0}, {"s_aux": SINKS}),
    (None, 0.9),
    (torch.nn.Module(), Encoder()),
    (FEW, SHORT, PADDED),
]


def covering(options: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Combinations in which every two values of different options meet, drawn in a fixed order."""
    every = list(product(*(range(len(values)) for values in options)))
    random.Random(0).shuffle(every)
    met, chosen = set[tuple[tuple[int, int], ...]](), []
    for combination in every:
        pairs = set(combinations(enumerate(combination), 2))
        if not pairs <= met:
            met |= pairs
            chosen.append(tuple(values[at] for values, at in zip(options, combination, strict=True)))
    return chosen


@pytest.mark.parametrize(("dtype", "shared", "window", "extra", "scaling", "module", "lengths"), covering(OPTIONS))
def test_each_path_on_a_cpu_is_attention(
    dtype: torch.dtype,
    shared: int,
    window: int | None,
    extra: dict[str, Any],
    scaling: float | None,
    module: Any,
    lengths: tuple[int, ...],
) -> None:
    query, key, value = parts(4, shared, dtype, lengths)
    if dtype == torch.bfloat16 and max(lengths) == 8:
        # Scores are rounded to 8 bits, in rows alone too: the bound is for small scores.
        query, key, value = query / 2, key / 2, value / 2
    options = {"segment_lengths": lengths, "sliding_window": window, "scaling": scaling} | extra
    found, weights = packed_attention(module, query, key, value, None, **options)
    causal = not isinstance(module, Encoder)
    expected = by_hand(query, key, value, scaling=scaling, window=window, causal=causal, lengths=lengths, **extra)
    assert weights is None
    assert found.is_contiguous()
    tolerance = 1e-5 if dtype == torch.float32 else 4e-2
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shared", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 1, 4, 9])
@pytest.mark.parametrize("sinks", [None, SINKS])
def test_long_rows_are_attended_by_blocks_and_so_are_their_gradients(
    shared: int, window: int | None, sinks: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of less than a block, of whole blocks and of some more, beside a row that is not long; in float64."""
    lengths, results = (7, 12, 2, 13), []
    tensors = [part.double().requires_grad_() for part in (*parts(4, shared, torch.float32, lengths), SINKS)]
    given = {"scaling": 0.7, "s_aux": None if sinks is None else tensors[3]}
    names: set[str] = set()
    for reach in (window, 3):
        with monkeypatch.context() as patch:
            patch.setattr(attention, "EXPLICIT_UP_TO", 5)
            patch.setattr(attention, "QUERIES", 4)
            # Where it computes in this dtype alone.
            patch.setattr(torch, "bfloat16", torch.float64)
            options = {"segment_lengths": lengths, "sliding_window": reach, **given}
            found, _ = packed_attention(torch.nn.Module(), *tensors[:3], None, **options)
        names |= {node.name() for parent, _ in found.grad_fn.next_functions for node, _ in parent.next_functions}
        results.append(
            [found, *torch.autograd.grad(found.sin().sum(), tensors[: 4 if given["s_aux"] is not None else 3])]
        )
    assert "_ByBlocksBackward" in names
    expected = by_hand(*tensors[:3], window=window, lengths=lengths, **given)
    wanted = [expected, *torch.autograd.grad(expected.sin().sum(), tensors[: len(results[0]) - 1])]
    for ours, other, theirs in zip(*results, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
        # Negative control: another window is seen.
        assert not torch.allclose(other, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("module", [torch.nn.Module(), Encoder()])
def test_long_rows_keep_no_scores(module: Any) -> None:
    def kept(length: int) -> int:
        sizes: list[int] = []
        tensors = [part.requires_grad_() for part in parts(4, 2, torch.bfloat16, (length,))]
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: sizes.append(saved.numel()) or saved, lambda x: x):
            packed_attention(module, *tensors, None, segment_lengths=(length,))
        return max(sizes)

    assert kept(600) < 600**2
    # Negative control: of shorter ones they are kept.
    assert kept(400) >= 400**2


MANY = (*(8, 1, 7, 6) * 4, 130)


def gradients(window: int | None, causal: bool, softcap: float | None) -> list[torch.Tensor]:
    """The attention of many rows, and the gradients of its inputs."""
    tensors = [part.requires_grad_() for part in parts(4, 2, torch.float32, MANY)]
    options: dict[str, Any] = {"segment_lengths": MANY, "sliding_window": window, "is_causal": causal}
    options["softcap"] = softcap
    found, _ = packed_attention(torch.nn.Module(), *tensors, None, **options)
    return [found, *torch.autograd.grad(found.sin().sum(), tensors)]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_padded_rows_have_the_gradients_of_rows_alone(
    window: int | None, causal: bool, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = gradients(window, causal, softcap)
    with monkeypatch.context() as patch:
        patch.setattr(attention, "BATCHED_FROM", 100)
        alone = gradients(window, causal, softcap)
    for ours, theirs in zip(found, alone, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    if not causal:
        # Negative control: padding that is seen. A causal row ends before it.
        visible = attention._visible
        monkeypatch.setattr(attention, "_visible", lambda *args, lengths, **options: visible(*args, **options))
        seen = zip(gradients(window, causal, softcap), alone, strict=True)
        assert all(not torch.allclose(ours, theirs, atol=1e-2) for ours, theirs in seen)


def test_batches_of_short_rows_have_few_shapes() -> None:
    """Rows, some of them twice, and length with padding: oneDNN compiles a product for each shape."""
    assert attention._batches((4, 200, 128, 3, 96, 113, 16, 129, 17, 1, 2, 200)) == [
        ([0, 3, 6, 9, 10, 0, 3, 6], 16),
        ([1, 11], 200),
        ([2, 5, 2, 5], 128),
        ([4, 4, 4, 4], 96),
        ([7], 129),
        ([8, 8, 8, 8], 32),
    ]
    # Nothing is padded where all rows have one length.
    assert attention._batches((7, 7, 7)) == [([0, 1, 2], 7)]


class OnAGpu(torch.Tensor):
    """Says that it lies on a GPU."""

    is_cuda = True  # type: ignore[assignment]


def kernel(takes_groups: bool, asked: list[dict[str, Any]]) -> Any:
    """Stands for torch's variable-length attention, which CPUs have not: (T, H, D) of all rows, by the same loop."""

    def varlen(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_q: Any, cu_k: Any, max_q: int, max_k: int,
        *, scale: float | None, window_size: tuple[int, int], **options: Any,
    ) -> torch.Tensor:  # fmt: skip
        asked.append(options)
        assert cu_q is cu_k
        assert (cu_q.tolist(), max_q, max_k) == ([0, 1, 8, 12], 7, 7)
        assert window_size[1] in (0, window_size[0])
        if not options.get("enable_gqa"):
            assert query.shape == key.shape == value.shape
        left = None if window_size[0] == -1 else window_size[0] + 1
        rows = [part.as_subclass(torch.Tensor).transpose(0, 1)[None] for part in (query, key, value)]
        causal = window_size[1] == 0
        return by_hand(rows[0], rows[1], rows[2], scaling=scale, window=left, causal=causal)[0].to(query.dtype)

    return varlen, takes_groups


@pytest.mark.parametrize("takes_groups", [True, False])
@pytest.mark.parametrize("shared", [2, 4])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("scaling", [None, 0.9])
@pytest.mark.parametrize("module", [torch.nn.Module(), Encoder()], ids=["causal", "both ways"])
def test_the_kernel_of_a_gpu_is_given_the_same_rows(
    takes_groups: bool,
    shared: int,
    window: int | None,
    scaling: float | None,
    module: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(attention, "_varlen", lambda: kernel(takes_groups, asked))
    plain = parts(4, shared, torch.bfloat16)
    bounds = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
    found, _ = packed_attention(
        *(module, *(part.as_subclass(OnAGpu) for part in plain), None),
        **{"segment_lengths": LENGTHS, "cu_seq_lens_q": bounds, "max_length_q": 7},
        **{"sliding_window": window, "scaling": scaling},
    )
    causal = not isinstance(module, Encoder)
    expected = by_hand(plain[0], plain[1], plain[2], scaling=scaling, window=window, causal=causal)
    torch.testing.assert_close(found.double().as_subclass(torch.Tensor), expected, rtol=2e-2, atol=2e-2)
    assert asked == [{"enable_gqa": True} if takes_groups and shared == 2 else {}]


def test_the_kernel_of_a_gpu_learns_of_sinks_by_the_sum_of_its_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and gradients, with values narrower than keys; the kernel's two passes as its authors write them."""
    seen = torch.block_diag(*(torch.ones(length, length).tril().triu(-2) for length in LENGTHS)).bool()

    def scores_of(query: torch.Tensor, key: torch.Tensor, scale: float) -> torch.Tensor:
        return (query.transpose(0, 1) @ key.permute(1, 2, 0) * scale).masked_fill(~seen, float("-inf"))

    def forward(query: Any, key: Any, value: Any, *_: Any, return_aux: Any, scale: float, **options: Any) -> Any:
        assert return_aux.lse
        assert options == {"window_size": (2, 0)}
        logsum = scores_of(query, key, scale).logsumexp(-1)
        return ((scores_of(query, key, scale) - logsum[..., None]).exp() @ value.transpose(0, 1)).transpose(
            0, 1
        ), logsum

    def backward(grad: Any, query: Any, key: Any, value: Any, out: Any, logsum: Any, *others: Any) -> Any:
        scale, upward = others[-1]["scale"], grad.transpose(0, 1)
        weights = (scores_of(query, key, scale) - logsum[..., None]).exp()
        of_scores = weights * (upward @ value.permute(1, 2, 0) - (grad * out).sum(-1).t()[..., None]) * scale
        gradients = of_scores @ key.transpose(0, 1), of_scores.mT @ query.transpose(0, 1), weights.mT @ upward
        return tuple(one.transpose(0, 1) for one in gradients)

    monkeypatch.setattr(attention, "_varlen", lambda: (forward, True))
    monkeypatch.setattr(attention.compat, "varlen_backward", backward)
    tensors = [part.double().requires_grad_() for part in (*parts(4, 4, torch.float32), SINKS)]
    bounds = torch.tensor([0, 1, 8, 12], dtype=torch.int32)
    results = []
    for kind in (OnAGpu, torch.Tensor):
        with monkeypatch.context() as patch:
            # The kernel is asked for this dtype and another alone.
            patch.setattr(torch, "bfloat16", torch.float64)
            found, _ = packed_attention(
                *(torch.nn.Module(), tensors[0].as_subclass(kind), tensors[1], tensors[2][..., :6], None),
                **{"segment_lengths": LENGTHS, "cu_seq_lens_q": bounds, "max_length_q": 7},
                **{"sliding_window": 3, "scaling": 0.9, "s_aux": tensors[3]},
            )
        results.append([found, *torch.autograd.grad(found.sin().sum(), tensors)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours.as_subclass(torch.Tensor), theirs, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("lengths", [LENGTHS, (8, 1, 7, 6) * 4, (3,) * 20], ids=["few", "many", "equal"])
@pytest.mark.parametrize("shared", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_first_tokens_that_ask_alone_are_answered_as_among_all(
    dtype: torch.dtype, shared: int, lengths: tuple[int, ...]
) -> None:
    """Outputs and gradients; so an encoder's last layer computes them, if its head reads nothing else."""
    tensors = [(part / 2).requires_grad_() for part in parts(4, shared, dtype, lengths)]
    starts = torch.tensor([0, *lengths[:-1]]).cumsum(0)

    def attention_of(query: torch.Tensor) -> torch.Tensor:
        return packed_attention(Encoder(), query, *tensors[1:], None, segment_lengths=lengths)[0]

    found = attention_of(tensors[0][:, :, starts])
    among_all = attention_of(tensors[0])[:, starts]
    tolerance = 1e-5 if dtype == torch.float32 else 4e-2
    torch.testing.assert_close(found, among_all, rtol=tolerance, atol=tolerance)
    by_one = by_hand(*(one.detach() for one in tensors), causal=False, lengths=lengths)[:, starts]
    torch.testing.assert_close(found.double(), by_one, rtol=tolerance, atol=tolerance)
    gradients = [torch.autograd.grad(out.sin().sum(), tensors) for out in (found, among_all)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_the_kernel_of_a_gpu_is_told_that_each_row_asks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def varlen(query: Any, key: Any, value: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, **options: Any) -> Any:
        asked.append((len(query), cu_q.tolist(), cu_q.dtype, max_q, len(key), cu_k.tolist(), max_k, options))
        return torch.zeros_like(query)

    monkeypatch.setattr(attention, "_varlen", lambda: (varlen, True))
    query, key, value = (part.as_subclass(OnAGpu) for part in parts(4, 4, torch.bfloat16))
    bounds = torch.tensor([0, 1, 8, 12], dtype=torch.int32)
    found, _ = packed_attention(
        *(Encoder(), query[:, :, [0, 1, 8]], key, value, None),
        **{"segment_lengths": LENGTHS, "cu_seq_lens_q": bounds, "max_length_q": 7},
    )
    assert found.shape == (1, 3, 4, 8)
    every = {"scale": None, "window_size": (-1, -1)}
    assert asked == [(3, [0, 1, 2, 3], torch.int32, 1, 12, [0, 1, 8, 12], 7, every)]


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.bfloat16, {"softcap": 2.0}),
        (torch.bfloat16, {"max_length_q": None}),
        (torch.bfloat16, {"cu_seq_lens_q": None}),
    ],
)
def test_what_the_kernel_cannot_do_goes_row_by_row(
    dtype: torch.dtype, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_varlen", lambda: kernel(True, []))
    plain = parts(4, 4, dtype)
    bounds = torch.tensor([0, 1, 8, 12], dtype=torch.int32)
    given = {"segment_lengths": LENGTHS, "cu_seq_lens_q": bounds, "max_length_q": 7, **options}
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(attention, "_varlen", lambda: kernel(True, asked))
    found, _ = packed_attention(torch.nn.Module(), *(part.as_subclass(OnAGpu) for part in plain), None, **given)
    expected = by_hand(plain[0], plain[1], plain[2], softcap=options.get("softcap"))
    torch.testing.assert_close(found.double().as_subclass(torch.Tensor), expected, rtol=4e-2, atol=4e-2)
    assert asked == []


def test_queries_that_were_widened_are_narrowed_again_under_autocast() -> None:
    query, key, value = parts(4, 2, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, _ = packed_attention(torch.nn.Module(), query, key, value, None, segment_lengths=LENGTHS)
    assert found.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("options", "message"),
    [({"segment_lengths": None}, "does not pass row lengths"), ({"mask": 1}, "its own attention mask")],
)
def test_a_model_that_cannot_be_packed_is_named(options: dict[str, Any], message: str) -> None:
    query, key, value = parts(4, 4, torch.float32)
    mask = torch.ones(1) if options.pop("mask", None) else None
    with pytest.raises(RuntimeError, match=f"Module .*{message}"):
        packed_attention(torch.nn.Module(), query, key, value, mask, **{"segment_lengths": LENGTHS, **options})
