"""The forward pass over packed rows, shared by all tasks that train a Transformers model.

Rows are packed, and attention gets their boundaries. No score between two rows is ever computed, so nothing can leak
from one to the next, and no padding is computed either.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.nn import functional as F

from finray import compat
from finray.config.resolved import BY_ROW
from finray.errors import ModelError
from finray.models import attention, by_row, experts, norms, pooled, states
from finray.models.head import Head, log_probabilities, plain_head
from finray.models.loading import DTYPES
from finray.models.ropes import FIXED, RowRopes, rope_types
from finray.models.saved_layout import without_adapter
from finray.models.slots import Branches
from finray.models.towers import text_tower, text_writer

# oneDNN compiles the bf16 products of each number of tokens, and keeps them between tensors in the heap. Those of a
# classifier's batches all differ. Multiples save 240 MiB and 3 % of a step of MiniLM on SST-2, for 1.2 % more tokens.
TOKENS_OF = 64
# Hidden states for comparing our head with the model's own: few, to save memory. Some are large, because a cap of the
# logits shows only there.
_PROBES, _PROBE_SIZES = 32, (1.0, 30.0)


class PackedRows(Protocol):
    """The fields of a batch that a forward pass reads; see ``finray.data.sampling.collate.Batch``.

    A batch may also have a ``layout``, which then computes attention instead, and ``ends``: the largest position of
    each row, plus one, where that is not its length.
    """

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


class TargetRows(PackedRows, Protocol):
    """The fields that log-probabilities of targets need."""

    @property
    def target_positions_K(self) -> torch.Tensor:
        """int64 positions whose next token is a target."""

    @property
    def targets_K(self) -> torch.Tensor:
        """int64 target tokens."""


class LabelledRows(PackedRows, Protocol):
    """The fields that the forward pass of a classifier reads."""

    @property
    def token_types_1T(self) -> torch.Tensor:
        """int64, 0 for tokens of the first text of a row and 1 for those of the second."""


class PackedModel:
    """A Transformers or PEFT model that is called with packed rows.

    Attributes:
        model: the PEFT model, or the Transformers model itself.
        inner: the Transformers model.
        precision: ``fp32``, ``bf16`` or ``fp16``.
        shares_prompts: whether rows may branch from a common prompt.

    Args:
        attention_name: Transformers' name of the attention over packed rows; ``BY_ROW`` for the model's own, which gets
            each row alone; None for a model that cannot be packed. Then all rows of a batch must have the same length.
        device: of this rank.
    """

    def __init__(self, model: Any, *, precision: str, attention_name: str | None, device: torch.device) -> None:
        experts.register()
        if device.type == "cpu":
            norms.fuse(model)
        self.model = model
        self.inner: Any = without_adapter(model)
        self.precision = precision
        self._body = text_tower(self.inner)
        self._is_part = self._body is not getattr(self.inner, self.inner.base_model_prefix, self.inner)
        # First position: RoBERTa's is after the padding index.
        tables = (module for name, module in self._body.named_modules() if name.endswith("position_embeddings"))
        padding = getattr(next(tables, None), "padding_idx", None)
        self._first_position = 0 if padding is None else padding + 1
        takes = inspect.signature(self._body.forward).parameters
        self._has_token_types = "token_type_ids" in takes and getattr(self.inner.config, "type_vocab_size", 0) > 1
        self._takes_positions = "logits_to_keep" in inspect.signature(self.inner.forward).parameters
        self._device = device
        self._attention = attention_name
        self._reads_first = attention_name == attention.NAME and pooled.read_only_first(self._body)
        self._ropes = RowRopes(self._body)
        text = self.inner.config.get_text_config()
        # As in scoring: a token then depends on the tokens before it alone. The kernel of a GPU takes rows.
        self.shares_prompts = (
            (attention_name, device.type) == (attention.NAME, "cpu")
            and not any(getattr(text, name, 0.0) for name in ("attention_dropout", "attn_pdrop"))
            and set(rope_types(text)) <= set(FIXED)
            and not states.stateful(self._body)
        )
        if attention_name == BY_ROW:
            by_row.RowWise(self._body)
        else:
            states.separate(self._body, on_cpu=device.type == "cpu")
        self._has_plain_head: bool | None = None

    def autocast(self) -> torch.autocast:
        """Autocast context of a forward pass in ``precision``."""
        if self.precision == "fp32":
            return torch.autocast(self._device.type, enabled=False)
        return torch.autocast(self._device.type, dtype=DTYPES[self.precision])

    def hidden_TH(self, batch: PackedRows) -> torch.Tensor:
        """The last hidden states (T, H)."""
        return self._flat(self._call(self._body, batch))

    def hidden_and_routed(self, batch: PackedRows) -> tuple[torch.Tensor, torch.Tensor]:
        """The last hidden states (T, H), and the family's loss of how its routers chose experts, which has a gradient
        and no value."""
        router_loss = compat.router_loss(self._body)
        assert router_loss is not None
        output = self._call(self._body, batch, output_router_logits=True)
        each = self.inner.config.get_text_config().num_experts_per_tok
        loss = router_loss(output.router_logits, int(output.router_logits[0].shape[-1]), int(each))
        return self._flat(output), loss - loss.detach()

    def _flat(self, output: Any) -> torch.Tensor:
        hidden: torch.Tensor = output.last_hidden_state
        return hidden.flatten(0, 1)

    def _of_whole(self, output: Any, tokens: torch.Tensor) -> torch.Tensor:
        """Logits that the whole model makes of what its body returns."""
        writer, types = self.inner, {}
        if self._is_part:
            writer = text_writer(self.inner)
            # In training, Gemma 3 and Molmo 2 ask which tokens are of images.
            names = [name for name in inspect.signature(writer.forward).parameters if name.endswith("token_type_ids")]
            types = {name: torch.zeros_like(tokens) for name in names}
        with self._body_returning(output):
            logits: torch.Tensor = writer(input_ids=tokens, **types).logits
            return logits

    def logits_KV(self, batch: PackedRows, positions_K: torch.Tensor) -> torch.Tensor:
        """Logits (K, V) at the given positions, by the model's own head."""
        logits: torch.Tensor
        if self._is_part:
            # The parts beside it are told nothing of rows: the whole model only makes logits of hidden states.
            output = self._call(self._body, batch)
            output.last_hidden_state = self._flat(output).index_select(0, positions_K)[None]
            logits = self._of_whole(output, batch.tokens_1T[:, : len(positions_K)])[0]
            return logits
        if (
            not self._takes_positions
            or self._attention == BY_ROW
            or (self._attention is None and len(batch.lengths) > 1)
        ):
            # `logits_to_keep` counts within a row.
            logits = self._call(self.inner, batch).logits
            return logits.flatten(0, 1).index_select(0, positions_K)
        logits = self._call(self.inner, batch, logits_to_keep=positions_K).logits[0]
        return logits

    def log_probabilities_K(self, batch: TargetRows) -> torch.Tensor:
        """The log-probability (fp32, K) of each target, given the tokens of its row before it."""
        if self.has_plain_head(batch):
            hidden = self.hidden_TH(batch).index_select(0, batch.target_positions_K)
            return log_probabilities(self.head(), hidden, batch.targets_K)
        logits = self.logits_KV(batch, batch.target_positions_K).float()
        return -F.cross_entropy(logits, batch.targets_K, reduction="none")

    def logits_SC(self, batch: LabelledRows) -> torch.Tensor:
        """Logits (S, C) of each row, by the model's own pooling and head.

        A classifier's forward pass is its body, then a head that reads the first token of each row, the last one, or
        all. So the body runs over packed rows; then the model runs with its body replaced by the hidden states,
        gathered by rows. First and last token are enough unless the head averages over the row. If
        :mod:`finray.models.pooled` knows the last layer, the first is enough, and that layer computes no other.

        On a CPU in bf16, unused tokens bring the number of tokens to a multiple; see :class:`FilledRows`.
        """
        varied = self._attention is not None and len(set(batch.lengths)) > 1
        if varied and self.precision == "bf16" and self._device.type == "cpu":
            return self._logits_SC(FilledRows(batch))[: len(batch.lengths)]
        return self._logits_SC(batch)

    def _logits_SC(self, batch: LabelledRows) -> torch.Tensor:
        types = {"token_type_ids": batch.token_types_1T} if self._has_token_types else {}
        logits: torch.Tensor
        if self._attention is None:
            logits = self._call(self.inner, batch, **types).logits
            return logits
        tokens_T, starts_S, stops_S = batch.tokens_1T[0], batch.cu_seqlens[:-1].long(), batch.cu_seqlens[1:].long()
        padding = self.inner.config.get_text_config().pad_token_id
        reads_ends = getattr(self.inner.config, "classifier_pooling", "cls") in ("cls", "bos")
        if self._reads_first:
            index_SL = starts_S[:, None]
            mask_SL = torch.ones_like(index_SL)
        elif reads_ends:
            # A decoder pools the last token that is not padding.
            at_T = torch.arange(len(tokens_T), device=tokens_T.device)
            if padding is not None:
                at_T = at_T.where(tokens_T != padding, -1).cummax(0).values
            index_SL = torch.stack([starts_S, at_T[stops_S - 1].maximum(starts_S)], dim=1)
            mask_SL = torch.ones_like(index_SL)
        else:
            within_L = torch.arange(max(batch.lengths), device=tokens_T.device)
            index_SL = (starts_S[:, None] + within_L).minimum(stops_S[:, None] - 1)
            mask_SL = (within_L < (stops_S - starts_S)[:, None]).long()
        first = {"first_tokens_S": starts_S} if self._reads_first else {}
        output = self._call(self._body, batch, **types, **first)
        hidden = output.last_hidden_state[0]
        hidden_KH = hidden if self._reads_first else hidden.index_select(0, index_SL.flatten())
        output.last_hidden_state = hidden_KH.view(*index_SL.shape, -1)
        if output.get("pooler_output") is not None:
            output.pooler_output = self._body.pooler(output.last_hidden_state)
        with self._body_returning(output):
            logits = self.inner(input_ids=tokens_T[index_SL], attention_mask=mask_SL).logits
        return logits

    def has_plain_head(self, batch: PackedRows) -> bool:
        """Whether the head is a projection that :meth:`head` returns; else the model's own must be called.

        finray computes logits in chunks, so it must know how this model turns hidden states into logits. The first call
        compares its logits with the model's own for a few hidden states; if they differ, the model's own head is used
        from then on. An unknown model costs memory, not correctness. The hidden states are the same on every rank and
        at every start, whatever rows come first, and so is the result.
        """
        if self._has_plain_head is None:
            self._has_plain_head = plain_head(self.inner) is not None
            if self._has_plain_head:
                training = self.model.training
                self.model.eval()
                with torch.no_grad():
                    self._has_plain_head = self._heads_agree(batch.tokens_1T.device)
                self.model.train(training)
        return self._has_plain_head

    def _heads_agree(self, device: torch.device) -> bool:
        probe = ProbeRows(torch.arange(_PROBES, device=device)[None])
        output = self._call(self._body, probe)
        states = output.last_hidden_state
        drawn = torch.randn(states.shape, generator=torch.Generator().manual_seed(0)).to(states)
        for hidden in (drawn * size for size in _PROBE_SIZES):
            output.last_hidden_state = hidden
            try:
                theirs = self._of_whole(output, probe.tokens_1T)[0].float()
            except AttributeError:
                # Its forward pass reaches into the body (OPT): what the body itself makes of the tokens must do.
                hidden, theirs = states, self._call(self.inner, probe).logits[0].float()
            if self.head().weight_VH.shape[1] != hidden.shape[-1]:
                # Something in between makes it wider (RemBERT).
                return False
            ours = self.head().logits(hidden[0])
            # Apart by rounding at most.
            if theirs.shape != ours.shape or not (theirs - ours).abs().max() <= 2e-2 * ours.abs().max():
                return False
        return True

    @contextmanager
    def _body_returning(self, output: Any) -> Iterator[None]:
        """Within it the model's body returns this."""
        # An instance attribute takes precedence over a registered module, and over a method of the class.
        holder, name = (self._body, "forward") if self._is_part else (self.inner, self.inner.base_model_prefix)
        before = holder.__dict__.get(name)
        holder.__dict__[name] = lambda *_, **__: output
        try:
            yield
        finally:
            del holder.__dict__[name]
            if before is not None:
                holder.__dict__[name] = before

    def head(self) -> Head:
        """The head, looked up after the body has run: sharded weights are gathered on access."""
        head = plain_head(self.inner)
        assert head is not None
        return head

    def _call(self, module: Any, batch: PackedRows, **options: Any) -> Any:
        if self._attention is None:
            length = batch.lengths[0]
            assert set(batch.lengths) == {length}, "a model that cannot be packed takes rows of one length"
            if (types := options.pop("token_type_ids", None)) is not None:
                options["token_type_ids"] = types.view(-1, length)
            return module(input_ids=batch.tokens_1T.view(-1, length), use_cache=False, **options)
        if self._attention == BY_ROW:
            # As a caller of rows alone would: their positions and masks are the model's own.
            with states.of_rows(attention.RowLengths(batch.lengths)):
                return module(input_ids=batch.tokens_1T, use_cache=False, **options)
        longest, first = max(batch.lengths), self._first_position
        branches = getattr(batch, "branches", ())
        rows = getattr(batch, "layout", None) or (Branches(branches) if branches else None)
        rows = rows or attention.RowLengths(batch.lengths)
        if self._attention == attention.NAME:
            options["segment_lengths"] = rows
        with self._ropes.of(batch.lengths, getattr(batch, "ends", batch.lengths)), states.of_rows(rows):
            return module(
                input_ids=batch.tokens_1T,
                position_ids=batch.positions_1T + first if first else batch.positions_1T,
                use_cache=False,
                cu_seq_lens_q=batch.cu_seqlens,
                cu_seq_lens_k=batch.cu_seqlens,
                max_length_q=longest,
                max_length_k=longest,
                **options,
            )


def require_router_loss(model: Any, name: str) -> None:
    """Refuse ``train.router_loss`` for a model whose family has none. Raises ModelError: it has none."""
    if compat.router_loss(text_tower(model)) is None or plain_head(without_adapter(model)) is None:
        raise ModelError(
            "this model has no loss of a router",
            where=f"train.router_loss, model.name={name}",
            repair="set it to 0: it is for mixtures of experts whose family has one, such as Mixtral and Qwen3-MoE",
        )


class FilledRows:
    """The rows of a classifier, and after them rows of unused tokens, none longer than the longest.

    They bring the number of tokens to a multiple of a power of two: of :data:`TOKENS_OF` at most, and so small that at
    most a 32nd is added.
    """

    def __init__(self, batch: LabelledRows) -> None:
        count, longest = batch.tokens_1T.shape[1], max(batch.lengths)
        step = min(TOKENS_OF, 1 << max(count // 32, 1).bit_length() - 1)
        more = -count % step
        self.lengths = (*batch.lengths, *(min(longest, more - at) for at in range(0, more, longest)))
        self.tokens_1T, self.token_types_1T = (F.pad(ids, (0, more)) for ids in (batch.tokens_1T, batch.token_types_1T))
        positions = torch.arange(more, device=batch.positions_1T.device) % longest
        self.positions_1T = torch.cat([batch.positions_1T[0], positions])[None]
        cumulative = [0, *itertools.accumulate(self.lengths)]
        self.cu_seqlens = torch.tensor(cumulative, dtype=torch.int32, device=batch.cu_seqlens.device)


class ProbeRows:
    """Rows (1, L) of a few tokens as a batch; the second half of each has token type 1."""

    def __init__(self, *rows: torch.Tensor) -> None:
        device = rows[0].device
        self.tokens_1T = torch.cat(rows, dim=1)
        self.lengths = tuple(row.shape[1] for row in rows)
        self.positions_1T = torch.cat([torch.arange(length, device=device) for length in self.lengths])[None]
        self.token_types_1T = torch.cat(
            [(torch.arange(length, device=device) >= (length + 1) // 2).long() for length in self.lengths]
        )[None]
        self.cu_seqlens = torch.tensor([0, *itertools.accumulate(self.lengths)], dtype=torch.int32, device=device)


class CalledAsOne(torch.nn.Module):
    """A model and the computation on it as one module: sharded weights are gathered for its whole forward pass."""

    def __init__(self, model: Any, compute: Callable[[Any], torch.Tensor]) -> None:
        super().__init__()
        self.model = model
        self._compute = compute

    def forward(self, batch: Any) -> torch.Tensor:
        """The result for a batch."""
        return self._compute(batch)
