"""Every private name of another library that finray relies on, each with the version that it was last checked in.

A new version of a library that breaks finray breaks it here. Libraries are imported inside the functions, because this
module lies below all rooms and most of them must not pay for torch. Public but undocumented attributes of DeepSpeed's
engine and of bitsandbytes' optimizers are read in :mod:`finray.parallel.deepspeed` and :mod:`finray.training.optim`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finray.errors import HubError
from finray.limits import bounded_product, cut, shown

if TYPE_CHECKING:
    import torch

# --- typer 0.29.2 ----------------------------------------------------------------------------------------------------


def hide_range(option: Any) -> None:
    """Leave the range of a number out of the help of an option."""
    option._get_number_range_help_str = lambda: None


# --- huggingface_hub 2.4.0 -------------------------------------------------------------------------------------------


def check_etags() -> None:
    """Let the Hub's client refuse an ETag that is a path: it names a file in its cache after it, and would write to any
    file that the server names.
    """
    from huggingface_hub import file_download

    asked: Any = file_download._get_metadata_or_catch_error

    def checked(*arguments: Any, **options: Any) -> Any:
        answer = asked(*arguments, **options)
        if (etag := answer[1]) is not None and (etag in ("", ".", "..") or set(etag) & set("/\\\0") or len(etag) > 200):
            raise HubError(
                f"the server gives a file the version {shown(etag)}, which would become the name of a file here",
                where=cut(str(answer[0])),
                repair="use another Hub or mirror (HF_ENDPOINT)",
            )
        return answer

    if not hasattr(asked, "asked"):
        checked.asked = asked  # type: ignore[attr-defined]
        file_download._get_metadata_or_catch_error = checked


# --- torch 2.13.0 ---------------------------------------------------------------------------------------------------


def shard_offset(tensor: Any) -> tuple[int, ...]:
    """Index in the whole DTensor of the first element of this rank's shard, per dimension."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return tuple(compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[1])


def dtensor_like(local: torch.Tensor, like: Any, shape: tuple[int, ...]) -> torch.Tensor:
    """A DTensor of this shape with the mesh and placements of another, around the local tensor.

    ``DTensor.from_local`` would move that to the mesh's device, where the shards of offloaded weights are not.
    """
    import torch
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), local.dtype)
    spec = DTensorSpec(like.device_mesh, like.placements, meta)
    made: torch.Tensor = DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return made


def foreach_mul_(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply many tensors by one scalar tensor in place, in few kernels."""
    import torch

    torch._foreach_mul_(list(tensors), factor)


def set_found_inf(optimizer: Any, found_inf: torch.Tensor | None) -> None:
    """Make a fused optimizer's next step change nothing where ``found_inf`` is one, without waiting for the device.

    ``torch.amp.GradScaler`` sets the same attribute; it has no public setter.
    """
    optimizer.found_inf = found_inf


def fake_tensors() -> AbstractContextManager[Any]:
    """A mode in which tensors have shapes, dtypes and devices, and no values; also those that were made outside."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode: AbstractContextManager[Any] = FakeTensorMode(allow_non_fake_inputs=True)
    return mode


def varlen_logsum() -> Any:
    """What to ask variable-length attention for, so that it returns the logarithm of each softmax's sum too: (H, T)."""
    from torch.nn.attention.varlen import AuxRequest

    return AuxRequest(lse=True)


def varlen_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsum: torch.Tensor,
    bounds: tuple[torch.Tensor, torch.Tensor, int, int],
    options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of queries, keys and values, for an output and a sum of its softmax that a caller has changed.

    The public operation takes both from its own forward pass.
    """
    import torch

    window = tuple(options["window_size"])
    unused = torch.zeros(2, dtype=torch.uint64, device=query.device)
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = torch.ops.torch_attn._varlen_attn_backward(
        *(grad.contiguous(), query, key, value, out.contiguous(), logsum.contiguous(), *bounds),
        *(window == (-1, 0), unused, options["scale"], list(window)),
    )
    return gradients


def can_reorder(weight: torch.Tensor) -> bool:
    """Whether :func:`reordered_weight` takes a weight: in fp32 or bf16, on a CPU that torch has oneDNN for."""
    import torch

    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    operations = torch.ops.mkldnn
    if weight.dtype == torch.bfloat16:
        return bool(operations._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32 and hasattr(operations, "_linear_pointwise")


def reordered_weight(weight_OI: torch.Tensor) -> torch.Tensor:
    """A copy in the order in which oneDNN's product reads it, which torch's inductor uses for frozen weights."""
    import torch

    # The second argument is how many rows the order is chosen for; other numbers are computed as well.
    reordered: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI, 512)
    return reordered


def onednn_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, plus: torch.Tensor | None = None
) -> torch.Tensor:
    """``x W' + b + plus`` with a reordered weight or a plain one; rounded once. It has no gradient."""
    import torch

    operation = torch.ops.mkldnn._linear_pointwise
    if plus is not None:
        return operation.binary(x, plus, weight, bias, "add")  # type: ignore[no-any-return]
    return operation(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]


# --- transformers 5.23.0 --------------------------------------------------------------------------------------------


def read_models_once() -> None:
    """Keep Transformers from reading the 1,600 files of its models twice, half a second each time: to be imported, and
    to find its first class, because its own cache holds 128 folders."""
    from transformers.utils import import_utils

    asked: Any = import_utils.define_import_structure
    folder = Path(import_utils.__file__).parents[1] / "models"

    def remembered(module_path: Any, prefix: str | None = None) -> Any:
        # The folder is what the import has asked for last.
        return asked(folder if str(module_path) == str(folder / "__init__.py") else module_path, prefix)

    if not hasattr(asked, "asked"):
        remembered.asked = asked  # type: ignore[attr-defined]
        import_utils.define_import_structure = remembered


def attention_implementation(model: Any) -> str:
    """Name of the attention that a model runs with; public is only the setter."""
    name: str = model.config._attn_implementation
    return name


def layer_values(config: Any, name: str) -> list[Any]:
    """The values of a field in a text model's configuration: of each layer where layers differ, else the one; None for
    a field that is not there. What differs can be read of a layer alone."""
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    return [getattr(layer, name, None) for layer in layers]


def name_body(model: Any) -> None:
    """Let a model know the name of its body: the class of Llama 4's text model names one that it does not have."""
    if not hasattr(model, model.base_model_prefix) and hasattr(model, "model"):
        model.base_model_prefix = "model"


def carries_state(model: Any) -> bool:
    """Whether a model keeps a recurrent state from token to token (Mamba, RecurrentGemma)."""
    return bool(model._is_stateful)


def kernel_of(function: Any) -> tuple[str | None, bool]:
    """The kernel that a function of Transformers stands for, by its name in its package, and whether it is installed;
    checked in 5.23."""
    while inspect.isfunction(function):
        known = inspect.getclosurevars(function).nonlocals
        if {"func_name", "is_new_implementation"} <= known.keys():
            return known["func_name"], known["is_new_implementation"]
        function = getattr(function, "__wrapped__", None)
    return None, False


def accepts_attention(model: Any) -> bool:
    """Whether a model calls Transformers' attention interface, so that its attention can be replaced."""
    return bool(model._can_set_attn_implementation())


def replace_grouped_mm(product: Callable[..., Any]) -> None:
    """Have the experts of Transformers multiplied by a function that is given Transformers' own and its arguments."""
    from transformers.integrations import moe

    usual = moe._grouped_mm
    if usual.__module__ == moe.__name__:
        moe._grouped_mm = lambda input, weight, offs: product(usual, input, weight, offs)


def replace_experts(experts: Callable[..., Any]) -> None:
    """Have experts compute by a function that is given Transformers' own for grouped products and its arguments: the
    module, the tokens, and of each token its experts and their weights."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    usual = ALL_EXPERTS_FUNCTIONS["grouped_mm"]

    def replaced(module: Any, *arguments: Any, **named: Any) -> Any:
        return usual(module, *arguments, **named) if named else experts(usual, module, *arguments)

    if usual.__module__.startswith("transformers."):
        ALL_EXPERTS_FUNCTIONS.register("grouped_mm", replaced)


def has_gate_and_bias(experts: Any) -> bool:
    """Whether experts are two products with a bias each, and a gate between them, and nothing else."""
    more = ("_is_expert_parallel", "has_post_expert_norm")
    return (
        all(getattr(experts, name, False) for name in ("has_bias", "has_gate", "_apply_gate"))
        and not any(getattr(experts, name, False) for name in more)
        and hasattr(experts, "is_transposed")
    )


@contextmanager
def without_grouped_mm() -> Iterator[None]:
    """Let experts multiply by an operation of Transformers' own: torch's has no shapes for fp32 without values."""
    from transformers.integrations import moe

    before = moe._can_use_grouped_mm
    moe._can_use_grouped_mm = lambda *_: False
    try:
        yield
    finally:
        moe._can_use_grouped_mm = before


def adds_bias_in_place(module: Any) -> bool:
    """Whether a module is experts to whose products Transformers adds a bias in place (``integrations/moe.py``)."""
    return bool(getattr(module, "has_bias", False)) and hasattr(module, "is_transposed")


def recomputes_cache_at(model: Any) -> int | None:
    """Tokens after which ``generate`` throws the cached keys of a model away and computes them anew, once: in Phi-3 and
    its relatives (``prepare_inputs_for_generation``), where LongRoPE turns to its other frequencies."""
    config = model.config.get_text_config()
    if config.model_type not in ("phi3", "phi4_multimodal", "phimoe"):
        return None
    return getattr(config, "original_max_position_embeddings", None)


def published_names(model: Any, names: Iterable[str]) -> dict[str, str]:
    """The names that weights of a model have in the files that Transformers writes, where they only have other names
    there; empty where weights are also joined or split (experts)."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightConverter, apply_converters, apply_renamings

    # As `save_pretrained` does: the rules that the model was loaded with, or those of its kind.
    rules = getattr(model, "_weight_conversions", None)
    if rules is None:
        known = get_model_conversion_mapping(model, add_legacy=False) or []
        rules = [rule for rule in known if not isinstance(rule, PrefixChange)]
    backwards = [rule.reverse_transform() for rule in reversed(rules)]
    converters = [rule for rule in backwards if isinstance(rule, WeightConverter)]
    renamings = [rule for rule in backwards if not isinstance(rule, WeightConverter)]
    held = list(names)
    if any(apply_converters(name, converters)[1] is not None for name in held):
        return {}
    renamed = {name: apply_renamings(name, renamings) for name in held}
    return {name: new for name, new in renamed.items() if new != name}


def builds_text(config: Any) -> Callable[..., Any] | None:
    """What builds the text part of a model for images from its configuration, where Transformers' tables have no class
    for it; None where there is none of that name."""
    name = type(config).__module__.replace(".configuration_", ".modeling_")
    if not name.startswith("transformers.models."):
        return None
    classes = [value for value in vars(import_module(name)).values() if isinstance(value, type)]
    models = [each for each in classes if getattr(each, "config_class", None) is type(config)]
    text_model: Any = next((each for each in reversed(models) if each.__name__.endswith("TextModel")), None)
    if text_model is None:
        return None

    def build(small: Any, *, trust_remote_code: bool = False, **options: Any) -> Any:  # noqa: ARG001
        return text_model._from_config(small, **options)

    return build


def publish(model: Any) -> None:
    """Let a model be saved as models of its kind are published, where its files held joined experts: it would be saved
    by the rules that it was loaded with."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    known = get_model_conversion_mapping(model, add_legacy=False) or []
    used = getattr(model, "_weight_conversions", None) or []
    if any(isinstance(rule, WeightConverter) for rule in known):
        converts = any(isinstance(rule, WeightConverter) for rule in used)
        model._weight_conversions = used if converts else None


def router_loss(model: Any) -> Callable[[Any, int, int], torch.Tensor] | None:
    """What a family computes of its routers' logits, the number of experts and how many of them a token takes; None for
    a model that is trained without."""
    body = sys.modules[type(model).__module__]
    recorded: Any = getattr(model, "_can_record_outputs", None) or {}
    return getattr(body, "load_balancing_loss_func", None) if "router_logits" in recorded else None


def init_module(model: Any, module: torch.nn.Module) -> None:
    """Let a model initialize one of its modules, buffers included."""
    model._init_weights(module)


def compile_chat_template(source: str) -> Any:
    """The jinja template that ``apply_chat_template`` renders, compiled once by its cache.

    Its sandbox limits ranges, and not what `*` and `**` make: one operation could fill the memory.
    """
    from jinja2.sandbox import SandboxedEnvironment
    from transformers.utils.chat_template_utils import _compile_jinja_template

    # Of the class, because constants are multiplied while a template is compiled.
    SandboxedEnvironment.intercepted_binops = frozenset(("*", "**"))
    template = _compile_jinja_template(source)
    template.environment.call_binop = bounded_product
    return template


# --- peft 0.21.2 ----------------------------------------------------------------------------------------------------


@contextmanager
def without_bitsandbytes() -> Iterator[None]:
    """Let PEFT find no bitsandbytes, unless something has imported it already.

    PEFT imports it wherever it is installed, and it imports torch's compiler: 1.3 s at the start of every worker. Only
    a base model in a file that is quantized has its layers, and Transformers has imported it for that. What PEFT found
    out it keeps in a cache.
    """
    hidden = "bitsandbytes" not in sys.modules
    if hidden:
        sys.modules["bitsandbytes"] = None  # type: ignore[assignment]
    try:
        from peft import import_utils

        caches = (import_utils.is_bnb_available, import_utils.is_bnb_4bit_available)
        for cached in caches:
            cached.cache_clear()
        yield
        for cached in caches:
            cached.cache_clear()
    finally:
        if hidden:
            del sys.modules["bitsandbytes"]


@contextmanager
def with_adapter(model: Any, name: str | None) -> Iterator[None]:
    """Within it a PEFT model computes with this adapter, or with none. PEFT's own methods decide anew which parameters
    are trained, which those who shard them may not see."""
    layers = [module for module in model.modules() if hasattr(module, "_active_adapter")]
    before = [(layer._disable_adapters, layer._active_adapter) for layer in layers]
    try:
        for layer in layers:
            layer._disable_adapters, layer._active_adapter = name is None, [name] if name else layer._active_adapter
        yield
    finally:
        for layer, (disabled, active) in zip(layers, before, strict=True):
            layer._disable_adapters, layer._active_adapter = disabled, active


def names_of_experts(model: Any) -> frozenset[str]:
    """Endings of names that PEFT takes for experts of this model in ``target_modules``, whatever else has them: it
    rewrites adapters of earlier versions of Transformers, where experts were linear layers."""
    from peft.utils import transformers_weight_conversion as conversion

    pattern = conversion._MODEL_TO_CONVERSION_PATTERN.get(model.config.model_type, model.config.model_type)
    known = conversion._MOE_TARGET_MODULE_MAPPING
    return frozenset(known.get(pattern, ()))


def refused_by_lora(model: Any) -> frozenset[str]:
    """Endings of names of linear layers that PEFT puts no LoRA on: the kernels of Mamba read their matrix alone."""
    mamba = ("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h")
    config = getattr(model, "config", None)
    return frozenset(("out_proj", "conv1d") if getattr(config, "model_type", None) in mamba else ())


# --- datasets 4.5 ---------------------------------------------------------------------------------------------------


def dataset_fingerprint(dataset: Any) -> str:
    """Digest that ``datasets`` keeps of a dataset and of what was done to it."""
    fingerprint: str = dataset._fingerprint
    return fingerprint


# --- liger-kernel 0.6 -----------------------------------------------------------------------------------------------


def liger_patcher() -> tuple[Callable[..., None], frozenset[str]]:
    """The function that gives Liger's layers to a loaded model, and the model types that it knows.
    Raises ImportError: Liger is not installed."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    return _apply_liger_kernel_to_instance, frozenset(MODEL_TYPE_TO_APPLY_LIGER_FN)


# --- deepspeed 0.19.8 -----------------------------------------------------------------------------------------------


def zero_fragment(parameter: Any) -> Any | None:
    """Under stages 1 and 2: where this rank's fp32 optimizer vector holds elements of a parameter; None where not."""
    return parameter._hp_mapping


def zero3_gradient_norm(optimizer: Any) -> torch.Tensor:
    """Under stage 3: norm of the summed gradients, still multiplied by the loss scale; -1 where it is not finite."""
    from deepspeed.runtime.utils import combine_grad_norm_groups

    norm: torch.Tensor = combine_grad_norm_groups(optimizer._get_norm_groups())
    return norm


def without_compiled_collectives() -> None:
    """Keep DeepSpeed from compiling a shared-memory collective for CPUs when it starts.

    That takes minutes, needs a compiler, and waits for ever on the lock of a process that was killed while compiling.
    """
    # As an attribute, `deepspeed.comm.torch` is torch itself.
    backend: Any = import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None


def allow_fp16_on_cpu() -> None:
    """DeepSpeed asks for fp16 in hardware; torch computes it without, slowly."""
    import deepspeed

    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True


# --- sacrebleu 2.6.0 ------------------------------------------------------------------------------------------------


def sacrebleu_counts(metric: Any, answers: list[str], references: list[str]) -> list[list[int]]:
    """What a corpus score of sacrebleu counts in each row; sums over rows are what the score is made of."""
    counts: list[list[int]] = metric._extract_corpus_statistics(answers, [references])
    return counts


def sacrebleu_score(metric: Any, sums: list[int]) -> float:
    """The score computed from summed counts."""
    return float(metric._aggregate_and_compute([sums]).score)


# --- gguf 0.19.0 ------------------------------------------------------------------------------------------------------


@contextmanager
def quick_gguf() -> Iterator[None]:
    """Within it `gguf.GGUFReader` slices a plain array, a million times for a vocabulary, and no `numpy.memmap`, which
    takes several times as long."""
    import gguf.gguf_reader
    import numpy as np

    class Plain:
        def __getattr__(self, name: str) -> Any:
            return getattr(np, name)

        @staticmethod
        def memmap(path: Any, mode: Any) -> Any:
            return np.asarray(np.memmap(path, mode=mode))

    before = gguf.gguf_reader.np
    gguf.gguf_reader.np = Plain()
    try:
        yield
    finally:
        gguf.gguf_reader.np = before
