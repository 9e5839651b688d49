"""Adapters: PEFT injects them, finray initializes them; :mod:`finray.models.saved_layout` saves them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from finray import compat
from finray.config.adapter_files import WEIGHTS, matching_none
from finray.config.schema import AdapterConfig
from finray.config.tasks import CAUSAL_LM
from finray.errors import FinrayError, ModelError, unmatched
from finray.files import first_line
from finray.models.adapter_methods import adapter_method, first_values
from finray.models.classifier import modules_to_save
from finray.models.saved_layout import NAME, PISSA_RESIDUAL, REFERENCE, SavedLayout
from finray.models.targets import adapter_targets, expert_names
from finray.pretrained.weights import stored_weights
from finray.sharding import load_local, rows_of, shape_of

# Tensors that PEFT holds once for all layers, and lists under each.
_SHARED = ("vblora_vector_bank", "tinylora_v", "unilora_theta_d")


def add_lora(
    model: Any,
    adapter: AdapterConfig,
    *,
    seed: int,
    new_tokens: tuple[int, ...] = (),
    task_type: str = CAUSAL_LM.peft_type,
    revision: str | None = None,
    keeps_start: bool = False,
) -> Any:
    """Wrap a model with an adapter; trained weights are fp32, and their initial values depend only on ``seed``.

    On the meta device there are no values: see :func:`finray.models.sharded.materialize`.

    Args:
        model: the base model.
        adapter: the adapter section.
        seed: seed of the initial values.
        new_tokens: ids whose rows of the embedding, and of an untied head, are trained too.
        task_type: PEFT's name of the task; the head of a classifier is trained and saved in full.
        revision: of the base model, recorded for loading the saved adapter.
        keeps_start: whether to add a second, frozen copy of ``adapter.start_from``, which is not active.

    Raises:
        ModelError: the target modules or ``modules_to_save`` match nothing (the message lists the available ones), or
            ``adapter.start_from`` does not fit.
    """
    # PEFT ignores names that match nothing.
    there = [name for name, _ in model.named_modules()] + expert_names(model)
    targets = adapter.target_modules
    # A saved adapter may name layers of other models too; its tensors are compared when they are loaded.
    if isinstance(targets, list) and adapter.start_from is None and (missing := matching_none(targets, there)):
        raise unmatched(missing, linear_names(model), where="adapter.target_modules")
    if missing := [wanted for wanted in adapter.modules_to_save if not any(name.endswith(wanted) for name in there)]:
        raise unmatched(missing, linear_names(model), where="adapter.modules_to_save")
    try:
        # PEFT's random values are replaced below.
        with compat.without_bitsandbytes(), torch.random.fork_rng(devices=[]):
            from peft import PeftModel, get_peft_model
            from peft.tuners.lora.layer import LoraLayer

            config = _lora_config(model, adapter, new_tokens, task_type)
            config.revision = revision
            wrapped = get_peft_model(model, config)
            if adapter_method(adapter.method).is_pissa:
                residual = copy.copy(config)
                residual.lora_dropout, residual.modules_to_save, residual.trainable_token_indices = 0.0, None, None
                # That of a classifier would add the head to what this one trains and saves.
                PeftModel.add_adapter(wrapped, PISSA_RESIDUAL, residual)
                for module in wrapped.modules():
                    if isinstance(module, LoraLayer):
                        module.set_adapter([NAME, PISSA_RESIDUAL])
            if keeps_start:
                PeftModel.add_adapter(wrapped, REFERENCE, copy.copy(config))
    except (ValueError, TypeError) as error:
        raise ModelError(
            f"the adapter cannot be added: {str(error).splitlines()[0]}",
            where="adapter.modules_to_save" if "modules_to_save" in str(error) else "adapter.target_modules",
            repair=f"available modules: {', '.join(linear_names(model))}",
        ) from None
    modules, on_meta = dict(wrapped.named_modules()), False
    for name, parameter in wrapped.named_parameters():
        on_meta |= parameter.is_meta
        if f".{PISSA_RESIDUAL}." in name:
            parameter.requires_grad_(False)
        is_reference = REFERENCE in name.split(".")
        if parameter.requires_grad or ".lora_" in name or is_reference:
            parameter.data = parameter.data.float()
        if is_reference:
            parameter.requires_grad_(False)
    if not on_meta:
        start(wrapped, adapter, seed=seed, weight_of=lambda name: modules[name].base_layer.weight.detach())
    return wrapped


def _lora_config(model: Any, adapter: AdapterConfig, new_tokens: tuple[int, ...], task_type: str) -> Any:
    from peft import LoraConfig

    if adapter.start_from is not None:
        config = LoraConfig.from_pretrained(adapter.start_from)
        config.lora_dropout = adapter.dropout
        config.inference_mode = False
        # Skip PEFT's random or SVD initialization: values come from its file.
        config.init_lora_weights = True
        return config
    # Task types for which PEFT also saves a head.
    head = modules_to_save(model) if task_type in ("SEQ_CLS", "TOKEN_CLS") else ()
    # New rows are trained in the embedding, and in the head where it is not tied to that.
    tables = [table for table in (model.get_input_embeddings(), model.get_output_embeddings()) if table is not None]
    if tables[-1].weight is tables[0].weight:
        del tables[1:]
    targets = adapter_targets(model, adapter)
    return LoraConfig(
        task_type=task_type,
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=targets.target_modules,
        target_parameters=targets.target_parameters,
        exclude_modules=targets.exclude_modules,
        modules_to_save=[*adapter.modules_to_save, *head] or None,
        **adapter_method(adapter.method).options,
        trainable_token_indices={
            name: list(new_tokens)
            for name, module in model.named_modules()
            if any(module is embedding for embedding in tables)
        }
        if new_tokens
        else None,
        # GPT-2 stores its projections transposed.
        fan_in_fan_out=any(type(module).__name__ == "Conv1D" for module in model.modules()),
    )


@torch.no_grad()
def start(model: Any, adapter: AdapterConfig, *, seed: int, weight_of: Callable[[str], torch.Tensor]) -> None:
    """Initialize the tensors of an adapter: from the adapter that it continues, or anew.

    Args:
        model: the PEFT model, sharded by any strategy.
        adapter: the adapter section.
        seed: of new values.
        weight_of: the stored base weight of an adapted module, by the module's name.

    Raises:
        ModelError: ``adapter.start_from`` does not fit.
    """
    if adapter.start_from is not None:
        for name in {NAME, REFERENCE} & model.peft_config.keys():
            SavedLayout(model, name).load(Path(adapter.start_from))
        return
    modules = dict(model.named_modules())

    def base(name: str) -> torch.Tensor:
        return weight_of(name).T if modules[name].fan_in_fan_out else weight_of(name)

    def scaling(name: str) -> float:
        return float(modules[name].scaling[NAME])

    value = first_values(adapter_method(adapter.method), seed=seed, scaling=scaling, base=base)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            load_local(parameter, rows_of(value(name, torch.Size(shape_of(parameter)))))


def linear_names(model: Any) -> list[str]:
    """Name suffixes of the linear layers of a model."""
    kinds = {
        name.rsplit(".", 1)[-1]
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"
    }
    return sorted(kinds)


def load_adapter(model: Any, folder: Path) -> Any:
    """Wrap a base model with a saved adapter, for inference.
    Raises ModelError: it cannot be loaded, belongs to another model, or is an activated LoRA."""
    try:
        if (folder / WEIGHTS).exists():
            # Names the damaged file.
            stored_weights(folder, Path(WEIGHTS).stem)
        with compat.without_bitsandbytes(), warnings.catch_warnings():
            from peft import PeftModel

            # It is an error below.
            warnings.filterwarnings("ignore", message="Found missing adapter keys")
            loaded = PeftModel.from_pretrained(model, str(folder))
            if getattr(loaded.peft_config[NAME], "alora_invocation_tokens", None):
                raise ModelError(
                    "the adapter is an activated LoRA, which acts only behind the tokens that invoke it; finray does "
                    "not look for them",
                    where=str(folder),
                    repair="use PEFT itself, or a plain LoRA",
                )
            _require_all_tensors(loaded, folder)
            return loaded.eval()
    except (FinrayError, MemoryError):
        raise
    except Exception as error:
        # Third-party files: PEFT may fail on them in any way.
        raise ModelError(
            f"the adapter cannot be loaded, or does not fit the model: {first_line(error)}",
            where=str(folder),
            repair="copy its files again, or give the base model it was trained on with --base",
        ) from None


def _require_all_tensors(model: Any, folder: Path) -> None:
    """Refuse an adapter of which tensors are missing or left over: PEFT loads the others, and the rest is the base."""
    from peft import load_peft_weights, set_peft_model_state_dict

    if model.peft_config[NAME].is_prompt_learning:
        return
    # PEFT maps the names that other versions of it wrote, and says what is left only where weights are set.
    result = set_peft_model_state_dict(model, load_peft_weights(str(folder), device="cpu"))
    # Saved modules and new tokens that are missing are errors of PEFT's.
    prefix = getattr(model.base_model, "prefix", None)
    missing = [
        name
        for name in result.missing_keys
        if prefix and f".{prefix}" in name and not any(f".{kind}" in name for kind in _SHARED)
    ]
    stored = stored_weights(folder, Path(WEIGHTS).stem) if missing and (folder / WEIGHTS).exists() else None
    if stored is not None and stored.tensors.keys() == SavedLayout(model).tensors().keys():
        # The names are those of this version. Of some families (Laguna, Inkling 2) PEFT renames them nevertheless.
        SavedLayout(model).load(folder)
        return
    # With save_embedding_layers, PEFT writes a table that is saved anyway under a second name.
    odd = [name for name in result.unexpected_keys if ".modules_to_save." not in name]
    names = [name.replace(f".{NAME}", "") for name in missing or odd]
    if names:
        listed = ", ".join(names[:3]) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")
        raise ModelError(
            f"the adapter lacks tensors: {listed}" if missing else f"the model does not take tensors of it: {listed}",
            where=str(folder / WEIGHTS),
            repair="copy its files again, or give the base model it was trained on with --base",
        )
