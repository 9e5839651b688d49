"""The causal language-model task: next-token loss over packed rows, logits only where there is a label."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.nn import functional as F

from finray.config.schema import AdapterConfig, ModelConfig
from finray.models import adapters, attention
from finray.models.adapter_init import PISSA_RESIDUAL
from finray.models.build import build_model
from finray.models.head import Head, loss_sum, plain_head
from finray.models.loading import DTYPES


class PackedRows(Protocol):
    """What the task reads of a batch; see ``finray.data.sampling.collate.Batch``."""

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
    def starts_S1(self) -> torch.Tensor:
        """int32 cumulative lengths."""

    @property
    def at_K(self) -> torch.Tensor:
        """int64 labelled positions."""

    @property
    def targets_K(self) -> torch.Tensor:
        """int64 targets."""


class CausalLM:
    """A causal language model in training.

    Attributes:
        model: what is wrapped, saved and counted: the PEFT model, or the Transformers model itself.
        precision: ``fp32``, ``bf16`` or ``fp16``.

    Args:
        attention_name: Transformers' name of the attention for packed rows; None for a model that cannot be packed and
            keeps its own. Each of its batches is then one row.
    """

    def __init__(self, model: Any, *, precision: str, attention_name: str | None, device: torch.device) -> None:
        self.model = model
        self.precision = precision
        self._device = device
        self._attention = attention_name
        self._inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._body = getattr(self._inner, self._inner.base_model_prefix)
        # What is called for a forward pass; a strategy may put something around it.
        self.module: torch.nn.Module = _LossModule(model, self._loss_sum)
        counts = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
        self._counts = sum(count for count, trained in counts if trained), sum(count for count, _ in counts)
        self._head_is_ours = plain_head(self._inner) is not None
        self._head_is_proven = False

    @classmethod
    def build(
        cls,
        model: ModelConfig,
        adapter: AdapterConfig,
        *,
        precision: str,
        seed: int,
        device: torch.device,
        empty: bool = False,
        packs: bool = True,
        bits: int | None = None,
    ) -> CausalLM:
        """Load the model, add adapters, and put it on the device.

        Frozen weights are stored in the arithmetic's dtype, or in fewer ``bits``; weights that are trained are fp32.
        An ``empty`` model, and one with packed weights, has no weights yet: :func:`finray.models.sharded.materialise`
        gives it some, when it is sharded. A model that does not pack (:mod:`finray.models.packing_check`) keeps its own
        attention.
        """
        built, name = build_model(
            model, adapter, precision=precision, seed=seed, device=device, empty=empty, packs=packs, bits=bits
        )
        return cls(built, precision=precision, attention_name=name, device=device)

    @property
    def is_empty(self) -> bool:
        """Whether the model has no weights yet."""
        return any(parameter.is_meta for parameter in self.model.parameters())

    def loss_sum(self, batch: PackedRows) -> torch.Tensor:
        """Cross-entropy summed over the batch's K targets (fp32 scalar, nats)."""
        result: torch.Tensor = self.module(batch)
        return result

    def _loss_sum(self, batch: PackedRows) -> torch.Tensor:
        with self._arithmetic():
            if not self._head_is_proven:
                self._prove_head(batch)
            if not self._head_is_ours:
                logits = self._forward(self._inner, batch, logits_to_keep=batch.at_K).logits[0]
                return F.cross_entropy(logits.float(), batch.targets_K, reduction="sum")
            hidden = self._forward(self._body, batch).last_hidden_state[0]
            return loss_sum(self._head(), hidden.index_select(0, batch.at_K), batch.targets_K)

    def _head(self) -> Head:
        """The head, looked up anew for each use: where weights are sharded, they are there once somebody asks."""
        head = plain_head(self._inner)
        assert head is not None
        return head

    def _arithmetic(self) -> torch.autocast:
        if self.precision == "fp32":
            return torch.autocast(self._device.type, enabled=False)
        return torch.autocast(self._device.type, dtype=DTYPES[self.precision])

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """The parameters that are trained, by name, in a fixed order."""
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    def initialised_parameters(self) -> list[torch.nn.Parameter]:
        """The parameters that were given their values here: trained ones, and those of a frozen adapter."""
        named = self.model.named_parameters()
        return [parameter for name, parameter in named if parameter.requires_grad or ".lora_" in name]

    def parameter_counts(self) -> tuple[int, int]:
        """(trainable, all) parameters."""
        return self._counts

    def weights(self) -> dict[str, torch.Tensor]:
        """What is saved, under the names in its files: the adapter, or all weights; tensors may be shards."""
        if self.model is self._inner:
            kept = self._inner.state_dict().keys()
            buffers = {name: buffer for name, buffer in self.model.named_buffers() if name in kept}
            return {**dict(self.model.named_parameters()), **buffers}
        return adapters.adapter_tensors(self.model)

    @property
    def weights_stem(self) -> str:
        """Name of the weights' file, without its suffix."""
        return "model" if self.model is self._inner else Path(adapters.WEIGHTS).stem

    def in_file(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What is written of whole tensors of :meth:`weights`."""
        return tensors if self.model is self._inner else adapters.joined(tensors)

    def place_of(self, name: str) -> tuple[str, Callable[[Any], adapters.Half] | None]:
        """Name in the file of a tensor of :meth:`weights`, and which part of what is there, if not all."""
        if self.model is self._inner:
            return name, None
        return adapters.part_of(name, PISSA_RESIDUAL in self.model.peft_config)

    def save_settings(self, folder: Path) -> None:
        """Write what PEFT or Transformers needs beside the weights."""
        if self.model is self._inner:
            self.model.config.save_pretrained(str(folder))
            if self.model.generation_config is not None:
                self.model.generation_config.save_pretrained(str(folder))
        else:
            adapters.saved_settings(self.model).save_pretrained(str(folder))

    def _forward(self, module: Any, batch: PackedRows, **options: Any) -> Any:
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
            cu_seq_lens_q=batch.starts_S1,
            cu_seq_lens_k=batch.starts_S1,
            max_length_q=longest,
            max_length_k=longest,
            **options,
        )

    @torch.no_grad()
    def _prove_head(self, batch: PackedRows) -> None:
        """Compare our head with the model's own on the first batch; one we do not understand is left to the model."""
        self._head_is_proven = True
        if not self._head_is_ours:
            return
        probe = _Probe(batch.tokens_1T[:, : min(batch.lengths[0], 64)])
        training = self.model.training
        self.model.eval()
        theirs = self._forward(self._inner, probe).logits[0].float()
        hidden = self._forward(self._body, probe).last_hidden_state[0]
        ours = self._head().logits(hidden)
        self.model.train(training)
        if theirs.shape != ours.shape or not torch.allclose(theirs, ours, rtol=2e-2, atol=2e-2):
            self._head_is_ours = False


class _LossModule(torch.nn.Module):
    """Model and loss as one module: what shards weights gathers them for the whole of its forward pass."""

    def __init__(self, model: Any, loss: Callable[[PackedRows], torch.Tensor]) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, batch: PackedRows) -> torch.Tensor:
        return self._loss(batch)


class _Probe:
    """One row of a few tokens, as a batch without targets."""

    def __init__(self, tokens_1T: torch.Tensor) -> None:
        length = tokens_1T.shape[1]
        device = tokens_1T.device
        self.tokens_1T = tokens_1T
        self.positions_1T = torch.arange(length, device=device)[None]
        self.lengths = (length,)
        self.starts_S1 = torch.tensor([0, length], dtype=torch.int32, device=device)
        self.at_K = self.targets_K = torch.empty(0, dtype=torch.int64, device=device)
