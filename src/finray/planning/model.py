"""The model part of a plan: counts, vocabulary, special tokens and context length, without reading weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import is_offline_mode

from finray.config.adapter_files import matching_none
from finray.config.objectives import objective_spec
from finray.config.resolved import LabelSet, Packing
from finray.config.schema import Config
from finray.config.tasks import task_spec
from finray.data.dataset.run_data import groups_apart
from finray.errors import FinrayError, ModelError, about_model
from finray.models.loading import check_loading, is_quantized, load_model
from finray.models.packed import require_router_loss
from finray.models.packing_cache import packing_of
from finray.models.sharded import cut_model, left_out
from finray.models.targets import expert_names
from finray.planning.blueprint import Blueprint, ModelShape, draw_blueprint, stored_in
from finray.planning.checks import check_saved_modules, check_targets, not_a_writer
from finray.planning.findings import Findings
from finray.planning.layers import LayerProbe
from finray.planning.steps import beyond_positions
from finray.pretrained import hub
from finray.pretrained.bundled_configs import bundled_config
from finray.pretrained.tokenizers import load_tokenizer, new_ids

_GATED = ("gated", "401", "403", "restricted", "unauthorized")
_UNREACHABLE = ("offline", "couldn't connect", "connection", "cannot find the requested files", "timed out")
# The same for files that an earlier download left out, when the Hub is not asked for them.
_LEFT_OUT = "does not appear to have a file"
_OUT_OF_REACH = "the model is not in the local cache, and the Hub cannot be reached"
_TOKEN_NAMES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """The model and its adapter."""

    name: str  # as the config has it
    parameters: int  # all of them, the adapter's included
    trainable: int
    adapter: int
    layers: int
    context: int | None  # most positions, where the model names them
    embedding_rows: int
    tokens: int | None  # entries of the tokenizer, where it could be loaded
    eos: str | None
    pad: str | None
    stored_bytes: int | None  # size of the weights' files, where it is known
    labels: LabelSet | None = None  # that a classifier's head is for, where they are known
    is_reward: bool = False  # whether that head says how good an answer is
    kept: int = 0  # parameters of parts that do not read text, which stay as they are
    parts: tuple[str, ...] = ()  # their names
    adapted: str = ""  # what the adapter is on, where that is not all linear layers


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A :class:`ModelPlan` with what the memory estimate reads."""

    plan: ModelPlan
    shape: ModelShape
    packing: Packing


def plan_model(
    config: Config,
    findings: Findings,
    *,
    labels: LabelSet | None = None,
    environ: Mapping[str, str] = os.environ,
    offline: bool = False,
) -> PlannedModel | None:
    """Build the model on the meta device, check its tokenizer, and record problems; None if it is not available.

    With ``offline`` a model on an unreachable Hub is not a problem, but listed as not checked. A classifier's head is
    built for ``labels``, or as configured.
    """
    with about_model(config.model.name):
        return _planned(config, findings, labels=labels, environ=environ, offline=offline)


def _planned(
    config: Config, findings: Findings, *, labels: LabelSet | None, environ: Mapping[str, str], offline: bool
) -> PlannedModel | None:
    opened = _open(config, findings, environ, labels=labels, offline=offline)
    if opened is None:
        return None
    model, tokenizer, packing = opened
    unused = list[str]()
    if tokenizer is not None:
        sources = [model.config, getattr(model, "generation_config", None)]
        ends = [getattr(source, "eos_token_id", None) for source in sources]
        stop = {token for end in ends for token in (end if isinstance(end, list) else [end]) if token is not None}
        writes = not task_spec(config.model.task).reads_labels
        if (error := not_a_writer(config, model.config.to_dict())) is not None:
            findings.problem(error)
        else:
            check_tokens(tokenizer, int(model.get_input_embeddings().weight.shape[0]), stop, findings, writes=writes)
            unused = _check_weights(config, findings, environ, offline=offline)
    stored = stored_in(config.model)
    layers = [] if stored is None else left_out(model, stored)
    names = [name for name, module in model.named_modules() if getattr(module, "weight", None) is not None]
    names += expert_names(model)
    unmatched: FinrayError | None = None
    try:
        check_targets(config, names)
        check_saved_modules(config, [name for name, _ in model.named_modules()])
    except FinrayError as error:
        findings.problem(error)
        if not isinstance(config.adapter.target_modules, list):
            return None
        unmatched = error
    try:
        # Where some entries of a list match, the others are a problem, but the plan of the model continues.
        adapter, targets = config.adapter, config.adapter.target_modules
        if isinstance(targets, list):
            odd = matching_none(targets, names)
            adapter = adapter.model_copy(update={"target_modules": [target for target in targets if target not in odd]})
        added = () if tokenizer is None else new_ids(config.model)
        blueprint = draw_blueprint(model, adapter, added, task_spec(config.model.task).peft_type)
    except FinrayError as error:
        if unmatched is None:
            findings.problem(error)
        return None
    if not packing.safe:
        findings.warn(packing.warning, "data.packing")
        if objective_spec(config).in_groups:
            findings.problem(groups_apart(config))
    if config.train.router_loss:
        try:
            require_router_loss(model, config.model.name)
        except ModelError as error:
            findings.problem(error)
    width = getattr(model.config.get_text_config(), "hidden_size", None)
    if config.adapter.method != "none" and isinstance(width, int) and config.adapter.rank > width:
        findings.warn(
            f"rank {config.adapter.rank:,} is more than the model's {width:,} columns, so part of it has no effect",
            "adapter.rank",
            "8 to 128 is usual",
        )
    if layers:
        findings.warn(cut_model(layers), "model.name")
    # The head that a classifier's replaces is not worth a word.
    if (others := sorted(set(unused) - set(layers))) and not task_spec(config.model.task).adds_head:
        shown = ", ".join(others[:2]) + (", ..." if len(others) > 2 else "")
        findings.warn(
            f"of the tensors in the model's files, {len(others):,} {'are' if len(others) > 1 else 'is'} not part of "
            f"the model that is trained: {shown}",
            "model.name",
        )
    same = ("parameters", "trainable", "adapter", "layers", "context", "kept", "parts", "adapted")
    plan = ModelPlan(
        **{name: getattr(blueprint, name) for name in same},
        name=config.model.name,
        embedding_rows=blueprint.vocabulary,
        tokens=None if tokenizer is None else len(tokenizer),
        eos=None if tokenizer is None else tokenizer.eos_token,
        pad=None if tokenizer is None else tokenizer.pad_token,
        stored_bytes=None if stored is None else stored.size,
        labels=labels,
        is_reward=objective_spec(config).is_reward,
    )
    return PlannedModel(plan, ModelShape(model, blueprint, LayerProbe(model, packs=packing.is_told), stored), packing)


def _open(
    config: Config, findings: Findings, environ: Mapping[str, str], *, labels: LabelSet | None, offline: bool
) -> tuple[Any, Any | None, Packing] | None:
    """The model without weights, its tokenizer, and whether it may be packed.

    If the Hub does not provide them, a shape that is included in finray is used, without a tokenizer.
    """
    try:
        return (
            load_model(config.model, dtype=torch.float32, on_meta=True, labels=labels),
            load_tokenizer(config.model),
            packing_of(config.model),
        )
    except FinrayError as error:
        _not_had(error, "its weights and its tokenizer", config, findings, environ, offline=offline)
    shape = None if Path(config.model.name).exists() else bundled_config(config.model)
    if shape is None:
        return None
    findings.warn("its shape comes from the config bundled with finray, not from the Hub", "model.name")
    try:
        model = load_model(shape, dtype=torch.float32, on_meta=True, labels=labels)
    except FinrayError:
        # A decoder would ask the missing tokenizer for a padding token.
        model = load_model(shape, dtype=torch.float32, on_meta=True)
    return model, None, packing_of(shape)


def _check_weights(config: Config, findings: Findings, environ: Mapping[str, str], *, offline: bool) -> list[str]:
    """Check that the model would load, as far as headers tell and without downloads; returns the tensors in its files
    that it does not have."""
    path = Path(config.model.name).expanduser()
    if path.suffix == ".gguf" or not (path.is_dir() or is_offline_mode()):
        return []
    try:
        return check_loading(config.model)
    except FinrayError as error:
        if path.is_dir() and is_quantized(config.model):
            # The machine of the run may have what this one lacks.
            findings.warn(f"its files are quantized, but {error.message}", "model.name")
        else:
            _not_had(error, "its weights", config, findings, environ, offline=offline)
        return []


def _not_had(
    error: FinrayError, part: str, config: Config, findings: Findings, environ: Mapping[str, str], *, offline: bool
) -> None:
    """Record that a model is not available, or that ``what`` of it was not checked."""
    explanation = explained(error, config, environ)
    if offline and explanation.message == _OUT_OF_REACH:
        findings.skip(part, explanation.where)
    else:
        findings.problem(explanation)


def check_tokens(tokenizer: Any, rows: int, stop: set[int], findings: Findings, *, writes: bool = True) -> None:
    """Compare a tokenizer with the embedding and with the model's stop tokens.

    Args:
        tokenizer: Transformers' tokenizer.
        rows: rows of the embedding.
        stop: ids that end an answer, by the model's configuration.
        found: collects problems and warnings.
        writes: whether the model is trained to write text, which ends.
    """
    added = {int(number) for number in tokenizer.added_tokens_decoder}
    beyond = {name: number for name, number in tokenizer.get_vocab().items() if number >= rows}
    special = {kind: getattr(tokenizer, f"{kind}_token_id", None) for kind in ("eos", "pad", "bos")}
    used = [kind for kind, number in special.items() if number is not None and number >= rows]
    if used or any(number not in added for number in beyond.values()):
        findings.problem(
            ModelError(
                f"{len(beyond):,} of {len(tokenizer):,} tokens have no embedding: the model has {rows:,} rows",
                where="model.name",
                repair="use the model's own tokenizer, or a model whose embedding was resized for it",
            )
        )
    elif beyond:
        findings.warn(
            f"the model has no embedding for {', '.join(sorted(beyond)[:3])}: rows with these tokens will fail",
            "model.name",
        )
    if not writes:
        return
    if special["eos"] is None:
        findings.warn(
            "the tokenizer has no end-of-sequence token: without a chat template the model cannot learn to stop",
            "model.name",
        )
    elif stop and special["eos"] not in stop:
        findings.warn(
            f"answers end with {tokenizer.eos_token}, which is not an EOS token in the model's configuration: other "
            f"programs may not stop there",
            "model.name",
        )


def check_context(blueprint: Blueprint, *, max_length: int, longest: int | None, findings: Findings) -> None:
    """Compare the model's context length with the rows.

    Args:
        blueprint: of the model.
        max_length: ``data.max_length``.
        longest: tokens of the longest row, or None if not all rows are known.
        found: collects problems and warnings.
    """
    context = blueprint.context
    if context is None or min(max_length, longest or max_length) <= context:
        return
    if blueprint.learned_positions and longest:
        findings.problem(beyond_positions(context, longest))
    else:
        length = f"the longest row has {longest:,} tokens" if longest else f"rows may have {max_length:,} tokens"
        findings.warn(
            f"{length}, but the model's context length is {context:,}", "data.max_length", f"data.max_length={context}"
        )


def explained(error: FinrayError, config: Config, environ: Mapping[str, str]) -> FinrayError:
    """The error for an unavailable Hub model: whether the token is missing, or the Hub is unreachable."""
    if Path(config.model.name).exists():
        return error
    cause = error.__cause__ or error.__context__ or error
    text = f"{error.message} {cause}".lower()
    where = f"model.name={config.model.name}"
    token = any(environ.get(name) for name in _TOKEN_NAMES)
    if any(sign in text for sign in _GATED):
        return ModelError(
            "the model is gated, and " + ("HF_TOKEN gives no access to it" if token else "HF_TOKEN is not set"),
            where=where,
            repair="accept its terms on its Hub page"
            + (
                " with the account of that token"
                if token
                else ", then export HF_TOKEN=... with a token of that account"
            ),
        )
    signs = (*_UNREACHABLE, _LEFT_OUT) if is_offline_mode() else _UNREACHABLE
    if hub.refusal() is None and any(sign in text for sign in signs):
        return ModelError(
            _OUT_OF_REACH,
            where=where,
            repair="download it on a machine with network access, and give its directory here"
            + ("" if token else "; a gated model needs HF_TOKEN too"),
        )
    return error
