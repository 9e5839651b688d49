"""Engines that answer prompts and score continuations: one file each."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch

from finray.config.extensions import load_named
from finray.errors import ModelError
from finray.evaluation.engines.base import Answer, Continuation, Engine, Likelihood, Loading
from finray.evaluation.engines.sampling import Sampling
from finray.models.artifacts import Artifact

__all__ = ["Answer", "Continuation", "Engine", "Likelihood", "Sampling", "joins_gpus", "make_engine", "require_engine"]


def make_engine(
    name: str,
    artifact: Artifact,
    *,
    batch_size: int = 32,
    merge: bool = False,
    dtype: torch.dtype | None = None,
    notify: Callable[[str], None] = lambda line: None,
) -> Engine:
    """Load a model into an engine.

    Args:
        name: of the engine, or ``auto``: vLLM if it is installed, else finray's own.
        artifact: the weights; :func:`finray.evaluation.artifacts.find_artifact` finds them.
        batch_size: maximum number of rows processed at the same time.
        merge: merge an adapter into the weights, for speed.
        dtype: of weights and arithmetic; None means the default for inference on this machine.
        notify: called with messages for the user, such as which engine ``auto`` has chosen.

    Raises:
        FinrayError: there is no such engine, it is not installed, or the model cannot be loaded.
    """
    loading = Loading.of(artifact, batch_size=batch_size, merge=merge, dtype=dtype, notify=notify)
    if name == "auto":
        name = "transformers"
        if find_spec("vllm") is None:
            notify("using finray's own engine, because vLLM is not installed (pip install vllm)")
        else:
            try:
                return _named("vllm")(loading)
            except ModelError as error:
                notify(f"using finray's own engine: {error.message}")
    return _named(name)(loading)


def require_engine(name: str) -> None:
    """Check that an engine exists and that its package is installed; nothing is loaded.

    Raises:
        FinrayError: there is no such engine, or its package is missing.
    """
    if name != "auto":
        getattr(_named(name), "require", lambda: None)()


def joins_gpus(name: str) -> bool:
    """Whether the engine may use several GPUs for one model: only vLLM does."""
    return name == "vllm" or (name == "auto" and find_spec("vllm") is not None)


def _named(name: str) -> Callable[[Loading], Engine]:
    engine: Callable[[Loading], Engine] = load_named("finray.engines", name, where="--engine")
    return engine
