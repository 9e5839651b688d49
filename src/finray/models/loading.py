"""Loads models from a directory, a GGUF file or the Hugging Face Hub, with the class of their task."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from finray import compat
from finray.config.resolved import BY_ROW, LabelSet
from finray.config.schema import AdapterConfig, ModelConfig
from finray.config.tasks import task_spec
from finray.errors import FinrayError, ModelError
from finray.models import adapters, attention, classifier, fused_lora, towers, vocabulary
from finray.models.quantized import quantize_layers
from finray.pretrained.tokenizers import (
    check_exists,
    loading_options,
    new_ids,
    new_tokens,
    not_loaded,
    silence_transformers,
)
from finray.pretrained.weights import StoredWeights, folder_of, like_scales, require_numbers, stored_weights

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def load_model(
    model: ModelConfig,
    *,
    dtype: torch.dtype,
    attention_name: str | None = None,
    on_meta: bool = False,
    seed: int = 0,
    labels: LabelSet | None = None,
) -> Any:
    """The base model of a task, in evaluation mode, on the CPU; with rows for the new tokens of the model section.

    Args:
        model: the model section; its task names Transformers' class.
        dtype: storage dtype of the weights.
        attention_name: Transformers' name of the attention; None and ``BY_ROW`` mean its own choice.
        on_meta: build the model on the meta device; no weights are read or initialized.
        seed: for weights that the files lack (a head that the task adds), so that they are the same on every rank.
        labels: label set of the head; None keeps that of the configuration.

    Raises:
        ModelError: it cannot be loaded, its files lack weights that its configuration requires, or there is no such
            task.
    """
    auto_class = _auto_class(model, with_weights=not on_meta)
    if not torch.cuda.is_available():
        # PEFT imports DeepSpeed if it is installed, which prints a line about GPUs unless this is set.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    attention.register()
    options: dict[str, Any] = {"dtype": dtype}
    if attention_name not in (None, BY_ROW):
        options["attn_implementation"] = _attention_of(auto_class, model, attention_name)
    has_head = task_spec(model.task).adds_head
    try:
        if on_meta:
            from transformers import AutoConfig, GenerationConfig

            config = AutoConfig.from_pretrained(**loading_options(model), **classifier.head_options(labels))
            # The model gets plain layers, even if the files hold quantized ones.
            if getattr(config, "quantization_config", None) is not None:
                del config.quantization_config
            with torch.device("meta"):
                loaded = auto_class.from_config(config, trust_remote_code=model.trust_remote_code, **options)
            # As `from_pretrained` does: the tokens that end a turn may stand in this file alone.
            if loaded.can_generate():
                with suppress(OSError):
                    loaded.generation_config = GenerationConfig.from_pretrained(model.name, revision=model.revision)
            if has_head and (folder := Path(model.name).expanduser()).is_dir():
                # Errors in the files are reported when they are read.
                with suppress(FinrayError):
                    classifier.mark_new(loaded, stored_weights(folder))
        else:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                loaded, new, _ = _from_files(auto_class, model, **options, **classifier.head_options(labels))
            if has_head:
                classifier.mark_new(loaded, new)
                shapes = {name: tuple(loaded.get_parameter(name).shape) for name in new}
                for name, value in classifier.new_values(loaded.config, shapes, seed).items():
                    loaded.get_parameter(name).data.copy_(value)
            if model.name.endswith(".gguf") and getattr(loaded.config, "quantization_config", None) is not None:
                # The weights are dequantized, but the configuration still says quantized, and saving would fail.
                del loaded.config.quantization_config
                loaded.hf_quantizer, loaded.is_quantized = None, False
        compat.name_body(loaded)
        if (added := new_tokens(model)) is not None:
            vocabulary.widen(loaded, added)
        if labels is not None:
            classifier.set_padding(loaded, model)
            loaded.config.architectures = [type(loaded).__name__]
        require_sensible(loaded, model)
        towers.keep_others(loaded)
    except (FinrayError, MemoryError):
        raise
    except Exception as error:
        # Third-party files, read by any model's code: they can fail in any way.
        raise not_loaded("model's configuration" if on_meta else "model", model, error) from None
    return loaded


def require_sensible(loaded: Any, model: ModelConfig) -> None:
    """Refuse values of a model's configuration that only its forward pass would refuse, or that would make numbers
    that are none.

    Args:
        loaded: the model, on any device.
        model: the model section.

    Raises:
        ModelError: names the key.
    """
    values = loaded.config.get_text_config().to_dict()
    numbers = {
        name: entry for name, entry in values.items() if isinstance(entry, int | float) and not isinstance(entry, bool)
    }
    ropes = {name: entry for name, entry in values.items() if name.startswith("rope_") and isinstance(entry, dict)}
    nested = [(f"{name}.{key}", value) for name, entry in ropes.items() for key, value in entry.items()]
    numbers |= {name: entry for name, entry in nested if isinstance(entry, float)}
    problems = []
    for name, value in numbers.items():
        if math.isnan(value):
            problems.append(f"`{name}` is not a number")
        elif "drop" in name and not 0 <= value <= 1:
            problems.append(f"`{name}` is {value:g}, and a probability is from 0 to 1")
        elif name.endswith(("_eps", "_epsilon")) and not 0 <= value < math.inf:
            problems.append(f"`{name}` is {value:g}, and must not be negative or infinite")
        elif name.endswith(("rope_theta", "rotary_emb_base")) and not 0 < value < math.inf:
            problems.append(f"`{name}` is {value:g}, and must be a positive number")
    heads, shared = values.get("num_attention_heads"), values.get("num_key_value_heads")
    uses = any(hasattr(module, "num_key_value_groups") for module in loaded.modules())
    if uses and isinstance(heads, int) and isinstance(shared, int) and (shared < 1 or heads % shared):
        problems.append(f"`num_key_value_heads` is {shared}, which does not divide `num_attention_heads`, {heads}")
    used = values.get("num_experts_per_tok")
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    there = next((values[name] for name in names if isinstance(values.get(name), int)), None)
    if isinstance(used, int) and there and used > there:
        problems.append(f"`num_experts_per_tok` is {used}, and there are {there} experts")
    if problems:
        raise ModelError(
            f"the model cannot compute with its configuration: {'; '.join(problems)}",
            where=f"model.name={model.name}, config.json",
            repair="correct it, or take the file from where the model was made",
        )


def check_loading(model: ModelConfig) -> list[str]:
    """Check that the files of a model have what :func:`load_model` needs; of weights, only headers are read.

    Returns:
        Names of tensors in the files that the model does not have.

    Raises:
        ModelError: they do not.
    """
    auto_class = _auto_class(model, with_weights=True)
    try:
        return _from_files(auto_class, model, dtype=torch.float32, device_map={"": "meta"})[2]
    except (FinrayError, MemoryError):
        raise
    except Exception as error:
        raise not_loaded("model", model, error) from None


def is_quantized(model: ModelConfig) -> bool:
    """Whether a model's files hold quantized weights, according to its configuration."""
    from transformers import AutoConfig

    return getattr(AutoConfig.from_pretrained(**loading_options(model)), "quantization_config", None) is not None


def _auto_class(model: ModelConfig, *, with_weights: bool) -> Any:
    """Transformers' class for a model, after checking its files."""
    check_exists(model.name)
    if with_weights and (folder := Path(model.name).expanduser()).is_dir():
        # Names the damaged file, and unlike Transformers follows no index out of the directory.
        stored_weights(folder)
    silence_transformers()
    import transformers

    return getattr(transformers, class_name(model))


def class_name(model: ModelConfig) -> str:
    """The name of Transformers' class that loads a model: that of its task, or the one for images and text."""
    from transformers import AutoConfig

    asked = task_spec(model.task).auto_class
    if not model.name.endswith(".gguf"):
        # What is wrong with a configuration is said where the model is loaded.
        with suppress(Exception):
            return towers.auto_class_of(AutoConfig.from_pretrained(**loading_options(model)), asked)
    return asked


def _attention_of(auto_class: Any, model: ModelConfig, name: str) -> Any:
    """The option that gives a model an attention; of one that reads images, its text tower alone."""
    from transformers import AutoConfig

    if auto_class.__name__ != "AutoModelForImageTextToText":
        return name
    config = AutoConfig.from_pretrained(**loading_options(model))
    text = config.get_text_config()
    part = next((part for part in config.sub_configs if getattr(config, part, None) is text), None)
    return name if part is None else {part: name}


def _from_files(auto_class: Any, model: ModelConfig, **options: Any) -> tuple[Any, list[str], list[str]]:
    """The model as loaded by Transformers; the names of weights that may be new: of a head that the task adds, or of a
    pooler before it; and those of tensors in the files that the model does not have.

    A partly random model, which Transformers only mentions in a log, is refused, and so are quantized weights that it
    would take for numbers.
    """
    loaded, report = auto_class.from_pretrained(
        **loading_options(model), **options, output_loading_info=True, ignore_mismatched_sizes=True
    )
    unused = sorted(report["unexpected_keys"])
    if getattr(loaded.config, "quantization_config", None) is None and not model.name.endswith(".gguf"):
        stored = None
        if (folder := folder_of(model, local=True)) is not None:
            # Errors in the files of a directory were found before.
            with suppress(FinrayError):
                stored = stored_weights(folder)
        require_numbers([] if stored is None else _coded_weights(loaded, stored), like_scales(unused), model.name)
    missing, mismatched = sorted(report["missing_keys"]), sorted(report["mismatched_keys"])
    new: list[str] = []
    if task_spec(model.task).adds_head:
        odd = [*missing, *(name for name, _, _ in mismatched)]
        new = [name for name in odd if classifier.may_be_new(loaded, name)]
        missing = [name for name in missing if name not in new]
        mismatched = [item for item in mismatched if item[0] not in new]
    what, names = "are missing from its files: they would be random", missing
    if not missing:
        what = "have a different shape in its files than in its configuration"
        names = [f"{name} ({tuple(there)}, not {tuple(here)})" for name, there, here in mismatched]
    if names:
        more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
        raise ModelError(
            f"weights that {auto_class.__name__} needs {what}: {', '.join(names[:3])}{more}",
            where=f"model.name={model.name}",
            repair="check `config.json` (model_type, num_hidden_layers, vocab_size, ...), or download the model "
            "again, with all of its `.safetensors` files",
        )
    return loaded, new, unused


def _coded_weights(model: Any, stored: StoredWeights) -> list[str]:
    """Weights in files whose elements are no numbers by themselves. Masks and positions, which older files hold, are no
    weights: the model has no parameters of their names."""
    body = f"{model.base_model_prefix}."
    names = {name.removeprefix(body) for name, _ in model.named_parameters(remove_duplicate=False)}
    return stored.coded(name for name in stored.tensors if name.endswith(".weight") or name.removeprefix(body) in names)


def build_model(
    model: ModelConfig,
    adapter: AdapterConfig,
    *,
    precision: str,
    attention_name: str | None,
    bits: int | None,
    seed: int,
    device: torch.device,
    on_meta: bool = False,
    weights: str = "fp32",
    labels: LabelSet | None = None,
    keeps_start: bool = False,
) -> Any:
    """Load a model and add adapters: the PEFT model, or the Transformers model itself.

    Frozen weights are stored in the dtype of ``precision``, or quantized to ``bits``; an adapter's are fp32. On the
    meta device, and always with ``bits``, the model has no weights yet: :func:`finray.models.sharded.materialize` loads
    them after sharding.

    Args:
        model: the model section.
        adapter: the adapter section.
        precision: ``fp32``, ``bf16`` or ``fp16``.
        attention_name: Transformers' name of the attention; None for the model's own choice.
        bits: 4 or 8 for quantized frozen linear layers, else None.
        seed: for the initial values of the adapter, and of a head that the files lack.
        device: target device.
        on_meta: whether to build it on the meta device.
        weights: dtype of the weights of a model without an adapter.
        labels: label set of a classifier's head.
        keeps_start: see :func:`finray.models.adapters.add_lora`.

    Raises:
        ModelError: it cannot be loaded, or the adapter cannot be added.
    """
    on_meta = on_meta or bits is not None
    dtype = DTYPES[precision if adapter.method != "none" else weights]
    loaded = load_model(model, dtype=dtype, attention_name=attention_name, on_meta=on_meta, seed=seed, labels=labels)
    has_head = task_spec(model.task).adds_head
    if on_meta and has_head and (folder := folder_of(model)) is not None:
        classifier.mark_new(loaded, stored_weights(folder))
    if adapter.method != "none":
        loaded.requires_grad_(False)
        if bits is not None:
            keep = [*adapter.modules_to_save, *(classifier.modules_to_save(loaded) if has_head else ())]
            quantize_layers(loaded, bits, dtype=dtype, keep=keep)
        loaded = adapters.add_lora(
            loaded,
            adapter,
            seed=seed,
            new_tokens=new_ids(model),
            task_type=task_spec(model.task).peft_type,
            revision=model.revision,
            keeps_start=keeps_start,
        )
        fused_lora.fuse(loaded)
    loaded.config.use_cache = False
    return loaded if on_meta else loaded.to(device)
