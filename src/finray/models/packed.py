"""The forward pass over packed rows: what every task that trains a Transformers model shares.

Rows are laid end to end, and attention is told where each begins. No score between two rows is ever computed, so
nothing can leak from one to the next, and no padding is computed either.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from finray.models import attention
from finray.models.head import Head, plain_head
from finray.models.loading import DTYPES

# Tokens of the first row on which our head is compared with the model's own: few, so that it needs little memory.
_HEAD_CHECK_TOKENS = 64


class PackedRows(Protocol):
    """What a forward pass reads of a batch; see ``finray.data.sampling.collate.Batch``."""

    @property
    def tokens_1T(self) -> torch.Tensor:
        """int64 token ids."""

    @property
    def positions_1T(self) -> torch.Tensor:
        """int64 positions within rows."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens per row."""

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """int32 cumulative lengths."""


class PackedModel:
    """A Transformers or PEFT model that is called with packed rows.

    Attributes:
        model: the PEFT model, or the Transformers model itself.
        inner: the Transformers model.
        precision: ``fp32``, ``bf16`` or ``fp16``.

    Args:
        attention_name: Transformers' name of the attention over packed rows; None for a model that cannot be packed
            and keeps its own. Each of its batches is then one row.
        device: of this rank.
    """

    def __init__(self, model: Any, *, precision: str, attention_name: str | None, device: torch.device) -> None:
        self.model = model
        self.inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.precision = precision
        self._body = getattr(self.inner, self.inner.base_model_prefix)
        self._device = device
        self._attention = attention_name
        counts = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
        self._counts = sum(count for count, trained in counts if trained), sum(count for count, _ in counts)
        self._has_plain_head: bool | None = None

    @property
    def is_on_meta(self) -> bool:
        """Whether parameters have no values yet."""
        return any(parameter.is_meta for parameter in self.model.parameters())

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """The parameters that are trained, by name, in a fixed order."""
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    def initialised_parameters(self) -> list[torch.nn.Parameter]:
        """The parameters that got their values here: trained ones, and those of a frozen adapter."""
        named = self.model.named_parameters()
        return [parameter for name, parameter in named if parameter.requires_grad or ".lora_" in name]

    def parameter_counts(self) -> tuple[int, int]:
        """(trainable, all) parameters."""
        return self._counts

    def autocast(self) -> torch.autocast:
        """The context of a forward pass in ``precision``."""
        if self.precision == "fp32":
            return torch.autocast(self._device.type, enabled=False)
        return torch.autocast(self._device.type, dtype=DTYPES[self.precision])

    def hidden_TH(self, batch: PackedRows) -> torch.Tensor:
        """The last hidden states (T, H)."""
        hidden: torch.Tensor = self._call(self._body, batch).last_hidden_state[0]
        return hidden

    def logits_KV(self, batch: PackedRows, positions_K: torch.Tensor) -> torch.Tensor:
        """Logits (K, V) at some positions, by the model's own head."""
        logits: torch.Tensor = self._call(self.inner, batch, logits_to_keep=positions_K).logits[0]
        return logits

    def has_plain_head(self, batch: PackedRows) -> bool:
        """Whether the head is a projection that :meth:`head` gives; else the model's own must be called.

        finray computes logits a chunk at a time, so it must know how this model turns hidden states into logits. The
        first call compares its logits with the model's own on a few tokens; if they differ, the model's own head is
        used from then on. An unknown model costs memory, not correctness.
        """
        if self._has_plain_head is None:
            self._has_plain_head = plain_head(self.inner) is not None
            if self._has_plain_head:
                training = self.model.training
                self.model.eval()
                with torch.no_grad():
                    probe = _OneRow(batch.tokens_1T[:, : min(batch.lengths[0], _HEAD_CHECK_TOKENS)])
                    theirs = self._call(self.inner, probe).logits[0].float()
                    hidden = self.hidden_TH(probe)
                    ours = self.head().logits(hidden)
                self.model.train(training)
                alike = theirs.shape == ours.shape and torch.allclose(theirs, ours, rtol=2e-2, atol=2e-2)
                self._has_plain_head = alike
        return self._has_plain_head

    def head(self) -> Head:
        """The head, looked up after the body has run: weights that are sharded are gathered when they are asked for."""
        head = plain_head(self.inner)
        assert head is not None
        return head

    def _call(self, module: Any, batch: PackedRows, **options: Any) -> Any:
        if self._attention is None:
            assert len(batch.lengths) == 1, "a model that cannot be packed takes one row at a time"
            return module(input_ids=batch.tokens_1T, use_cache=False, **options)
        longest = max(batch.lengths)
        if self._attention == attention.NAME:
            options["segment_lengths"] = attention.RowLengths(batch.lengths)
        return module(
            input_ids=batch.tokens_1T,
            position_ids=batch.positions_1T,
            use_cache=False,
            cu_seq_lens_q=batch.cu_seqlens,
            cu_seq_lens_k=batch.cu_seqlens,
            max_length_q=longest,
            max_length_k=longest,
            **options,
        )


class _OneRow:
    """A row of a few tokens as a batch."""

    def __init__(self, tokens_1T: torch.Tensor) -> None:
        length, device = tokens_1T.shape[1], tokens_1T.device
        self.tokens_1T = tokens_1T
        self.positions_1T = torch.arange(length, device=device)[None]
        self.lengths = (length,)
        self.cu_seqlens = torch.tensor([0, length], dtype=torch.int32, device=device)
