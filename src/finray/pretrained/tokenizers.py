"""Where a model's files are, and its tokenizer; imports no torch, which takes seconds that preparing data can save."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from logging import ERROR, getLogger
from pathlib import Path
from typing import Any

from finray import compat
from finray.config.paths import is_template
from finray.config.schema import ModelConfig
from finray.errors import DataError, FinrayError, ModelError, did_you_mean_path, first_sentence
from finray.files import FileKind
from finray.limits import cut, shown
from finray.pretrained import hub

TOKENIZER_FILES = (
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "additional_chat_templates/*",
    "config.json",
)


_TEMPLATES = FileKind(
    ModelError, repair="model.chat_template names a Jinja template, a text file in UTF-8", limit=2**20, links=True
)
_CONFIGS = FileKind(ModelError, repair="download the model again", links=True)
# What Transformers and PEFT open in a model directory, and what of it they read in one go.
_TEXTS = frozenset((".json", ".jinja", ".txt", ".model", ".tiktoken", ".py"))
_OPENED = _TEXTS | {".safetensors", ".bin", ".gguf"}
_MOST_BYTES = 2**30
# Numbers in a model's configuration that memory and time follow from, with the largest that one would believe.
_SIZES = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 10_000),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "intermediate_size", "head_dim"), 2**22),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "num_heads"), 2**16),
    "vocab_size": 2**26,
    # Transformers names every label of a number of labels.
    "num_labels": 2**20,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 2**16),
}
# Of these there may be none.
_NONE = ("num_labels", "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def check_sizes(content: Mapping[str, Any], where: str) -> None:
    """Check that the sizes in a model's configuration are those of a model, before anything is made of them.
    Raises ModelError: one is too large, not positive, or no whole number."""
    for name, value in content.items():
        if isinstance(value, Mapping):
            check_sizes(value, where)
        least, most = int(name not in _NONE), _SIZES.get(name)
        # A list has the size of each layer; null is what the model's code says.
        for size in value if isinstance(value, list) else [value]:
            if most is None or size is None:
                continue
            if not isinstance(size, int) or isinstance(size, bool) or not least <= size <= most:
                raise ModelError(
                    f"`{name}` is {shown(size)}; it must be a whole number from {least} to {most:,}",
                    where=where,
                    repair="download the model's config.json again",
                )


def silence_transformers() -> None:
    """Keep Transformers' bars and advice out of finray's output; errors still come.

    Call it before anything else is imported from Transformers. Its package puts another module in its own place while
    it is imported, and an import that has waited for that in another thread is handed the empty one; the next is not.
    """
    import transformers  # noqa: F401, I001
    import warnings

    compat.check_etags()
    compat.read_models_once()

    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    # PEFT imports bitsandbytes wherever it is installed, and that tells of kernels it could fetch.
    getLogger("bitsandbytes").setLevel(ERROR)
    # PEFT reads a name that Transformers has renamed.
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
    # It says so of ranks of experts, which it has just given to them.
    ignored = r"The following (rank|alpha)_pattern keys did not match any targeted module"
    warnings.filterwarnings("ignore", message=ignored, category=RuntimeWarning)


@contextmanager
def without_torch() -> Iterator[None]:
    """Let Transformers find no torch, for a process that only tokenizes: its import takes a third of the time then.

    Transformers does not look again: no model can be loaded in this process afterwards. Torch can still be imported.
    """
    hidden = "torch" not in sys.modules
    if hidden:
        # Else it tells the user that there is none.
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if hidden:
            del sys.modules["torch"]


def check_exists(name: str) -> None:
    """Find a wrong model path early, without importing Transformers or asking a hub.
    Raises ModelError: the name is a path, and no model is there."""
    path = Path(name).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        repair = "give a model directory"
        if (path / "final" / "config.json").is_file():
            repair = f"this is a run; its model is {path / 'final'}"
        elif (path / "final" / "adapter_config.json").is_file():
            repair = (
                f"this is a run; `adapter.start_from={name}` continues its adapter, and `finray export {name} --output "
                "DIR` writes a model"
            )
        elif (path / "adapter_config.json").is_file():
            repair = (
                f"this is an adapter; `adapter.start_from={name}` continues it, and `finray export {name} --output "
                "DIR` writes a model"
            )
        raise ModelError("the directory holds no `config.json`", where=f"model.name={name}", repair=repair)
    if path.is_dir():
        check_sizes(_CONFIGS.json(path / "config.json", dict[str, Any]), str(path / "config.json"))
    # Hub ids have one slash at most, and no dots in front: a name is else a path.
    is_path = path.suffix == ".gguf" or path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
    if is_path and not path.exists():
        raise ModelError(
            f"the model does not exist{did_you_mean_path(name)}",
            where=f"model.name={name}",
            repair="check the path and the working directory",
        )


def check_files(folder: Path) -> None:
    """Check that the files of a model directory that Transformers and PEFT open by their names can be read to an end.

    Links to files elsewhere are left: people put model directories together from them. Raises ModelError: one is a fifo
    or a device, or has no size that such a file may have.
    """
    with _CONFIGS.reading(folder):
        for path in (*folder.iterdir(), *folder.glob("additional_chat_templates/*")):
            if path.suffix in _OPENED and path.exists() and not path.is_dir():
                with _CONFIGS.opened(path) as stream:
                    size = os.fstat(stream.fileno()).st_size
                if path.suffix in _TEXTS and size > _MOST_BYTES:
                    raise _CONFIGS.refused(f"has {size:,} bytes; at most {_MOST_BYTES:,} are read", path)


def source_options(model: ModelConfig) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` that say where the files are; a Hub that does not answer is not asked again.
    Raises ModelError: a file there is none (:func:`check_files`)."""
    path = Path(model.name).expanduser()
    if (folder := path.parent if path.suffix == ".gguf" else path).is_dir():
        check_files(folder)
    if path.suffix == ".gguf":
        # Else Transformers would ask the user whether to run code that lies beside the file.
        trusted = {"trust_remote_code": model.trust_remote_code}
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name, **trusted}
    name = str(path) if path.exists() else model.name
    if not path.exists():
        hub.refusal()
    return {
        "pretrained_model_name_or_path": name,
        "revision": model.revision or "main",
        "trust_remote_code": model.trust_remote_code,
    }


def loading_options(model: ModelConfig) -> dict[str, Any]:
    """As :func:`source_options`, after a look at the sizes in the configuration, of a Hub id or a GGUF file too.
    Raises ModelError: one is not that of a model (:func:`check_sizes`)."""
    options = source_options(model)
    silence_transformers()
    from transformers import PretrainedConfig

    try:
        content, _ = PretrainedConfig.get_config_dict(**options)
    except Exception:
        # Loading says what is wrong with it.
        return options
    check_sizes(content, f"model.name={model.name}")
    return options


def _is_of_files(error: Exception) -> bool:
    """Whether an error is of reading files, and not of what they say."""
    readers = ("safetensors", "json", "zipfile", "pickle", "_pickle", "struct")
    return isinstance(error, OSError | EOFError | UnicodeError) or type(error).__module__.split(".")[0] in readers


def not_loaded(what: str, model: ModelConfig, error: Exception) -> ModelError:
    """The error of a model or tokenizer that Transformers could not load."""
    # The text of a KeyError is the key alone.
    text = f"KeyError: {error}" if isinstance(error, KeyError) else first_sentence(str(error))
    repair = "give a model directory, a .gguf file, or a Hub id that you have access to (HF_TOKEN for gated models)"
    is_there = Path(model.name).expanduser().exists()
    read_as = f"there is no directory {model.name} here{did_you_mean_path(model.name)}, and so it was read as a Hub id"
    if not is_there and (refused := hub.refusal()) is not None:
        return ModelError(
            f"the {what} is not in the local cache, and the Hub cannot be reached",
            where=f"model.name={model.name}",
            repair=f"{read_as}; {refused}; run the command again when it answers, or give a model directory (`finray "
            f"plan --offline` plans without the Hub)",
        )
    if not is_there:
        repair = f"{read_as}: check the path, or {repair}"
    elif Path(model.name).expanduser().is_dir() and "config" in what and not _is_of_files(error):
        repair = f"look at what its `config.json` says of this; transformers {version('transformers')} may not know it"
    elif Path(model.name).expanduser().is_dir():
        repair = "download the model again, with all of its files: weights as `.safetensors`, settings, tokenizer"
    if text.startswith("Unrecognized configuration class") and "config" in what:
        repair = "take a model of another type, or set model.task to what it is for"
    if text.startswith("Weights only load failed"):
        # Torch continues with how to load it nevertheless.
        text = "its pickled weights contain more than tensors"
    if text.startswith("Couldn't instantiate the backend tokenizer"):
        # A list of libraries follows.
        text = "there is no file of a tokenizer, such as `tokenizer.json`"
    if "trust_remote_code" in str(error):
        repair = "read the code that comes with the model; if you trust it, set model.trust_remote_code to true"
    return ModelError(
        f"the {what} cannot be loaded: {cut(text) or type(error).__name__}",
        where=f"model.name={model.name}",
        repair=repair,
    )


def load_tokenizer(model: ModelConfig) -> Any:
    """The tokenizer of a model, with the new tokens and the chat template of the config where there are some.
    Raises ModelError: it cannot be loaded, or has one of the new tokens."""
    tokenizer = _plain_tokenizer(model)
    add_tokens(tokenizer, model)
    return tokenizer


@dataclass(frozen=True, slots=True)
class NewTokens:
    """Words that were added."""

    ids: tuple[int, ...]  # of the words, in their order
    known: int  # number of the tokens before them

    @property
    def rows(self) -> int:
        """Rows that a table must have."""
        return max(self.ids) + 1


def add_tokens(tokenizer: Any, model: ModelConfig) -> NewTokens | None:
    """Add ``model.new_tokens`` to a tokenizer; None where there are none.
    Raises ModelError: one of them is a token already."""
    if not model.new_tokens:
        return None
    size = len(tokenizer)
    there = [word for word in model.new_tokens if word in tokenizer.get_vocab()]
    if there:
        raise ModelError(
            f"the tokenizer already has {', '.join(f'`{word}`' for word in there)}",
            where="model.new_tokens",
            repair="leave out the existing tokens",
        )
    tokenizer.add_tokens(list(model.new_tokens))
    return NewTokens(tuple(tokenizer.convert_tokens_to_ids(word) for word in model.new_tokens), size)


def new_tokens(model: ModelConfig) -> NewTokens | None:
    """The words that a model section adds; None where there are none.
    Raises ModelError: the tokenizer cannot be loaded, or has one of them."""
    return add_tokens(_plain_tokenizer(model), model) if model.new_tokens else None


def new_ids(model: ModelConfig) -> tuple[int, ...]:
    """Ids of the words that a model section adds."""
    added = new_tokens(model)
    return () if added is None else added.ids


def _plain_tokenizer(model: ModelConfig) -> Any:
    """As :func:`load_tokenizer`, without new tokens."""
    silence_transformers()
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(**loading_options(model))
    except FinrayError:
        raise
    except Exception as error:
        # Its files are anybody's, and what is wrong with them shows as any kind of error.
        raise not_loaded("tokenizer", model, error) from None
    if (template := _template_file(model)) is not None:
        tokenizer.chat_template = _TEMPLATES.text(template)
    elif model.chat_template is not None:
        tokenizer.chat_template = model.chat_template
    return tokenizer


def _template_file(model: ModelConfig) -> Path | None:
    """The file of the model's own chat template; None if there is none, or the config has the template itself."""
    named = model.chat_template
    path = None if named is None or is_template(named) else Path(named).expanduser()
    if path is not None and not path.exists():
        raise DataError(
            "the chat template does not exist",
            where=f"model.chat_template={model.chat_template}",
            repair="give a file with a Jinja template, or leave it out to use the tokenizer's own",
        )
    return path


def tokenizer_files(model: ModelConfig) -> list[Path] | None:
    """The files that decide what tokens a model's tokenizer makes; None for one on the Hub.

    With these, and the versions of the libraries that read them, a tokenizer is known without loading it.
    """
    path = Path(model.name).expanduser()
    template = [candidate for candidate in [_template_file(model)] if candidate is not None]
    if path.suffix == ".gguf" and path.is_file():
        return [path, *template]
    if not path.is_dir():
        return None
    files = {file for pattern in TOKENIZER_FILES for file in path.glob(pattern) if file.is_file()}
    return [*sorted(files), *template]


def generation_stops(model: ModelConfig) -> tuple[int, ...]:
    """Token ids at which a server ends an answer, from the model's generation settings; none without such a file."""
    path = Path(model.name).expanduser()
    stops: Any = None
    # Whatever the Hub's client raises: without the file there are none.
    with suppress(Exception):
        file = path / "generation_config.json"
        if not path.exists():
            # Else the client would try for minutes.
            hub.refusal()
            from huggingface_hub import hf_hub_download

            file = Path(hf_hub_download(model.name, file.name, revision=model.revision))
        stops = _CONFIGS.json(file, dict[str, Any]).get("eos_token_id")
    return tuple(stop for stop in (stops if isinstance(stops, list) else [stops]) if isinstance(stop, int))
