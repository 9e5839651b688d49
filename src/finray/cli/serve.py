"""``finray serve``: serve models over an OpenAI-compatible API."""

from __future__ import annotations

from typing import Annotated

import typer

from finray.cli import show
from finray.errors import ConfigError


def _dtype(name: str | None) -> str | None:
    if name not in (None, "fp32", "bf16"):
        raise ConfigError(f"weights cannot be loaded as `{name}`", where="--dtype", repair="use fp32 or bf16")
    return name


def _named(adapter: str) -> tuple[str, str]:
    """Name and path of an adapter."""
    name, equals, path = adapter.partition("=")
    if not (equals and name and path):
        raise ConfigError(
            f"`{adapter}` is not of the form NAME=PATH", where="--adapter", repair="--adapter french=runs/french"
        )
    return name, path


def serve(
    model: Annotated[str, typer.Argument(help="Run, checkpoint or model directory, or a Hub id.", show_default=False)],
    adapters: Annotated[
        list[str] | None,
        typer.Option("--adapter", help="NAME=PATH of another adapter of the same base model; may be repeated."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name that clients use for the model (default: the name of its directory).")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 means all addresses of this machine.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    api_key_env: Annotated[
        str | None, typer.Option(help="Environment variable that holds the API key which clients must send.")
    ] = None,
    slots: Annotated[int, typer.Option(min=1, max=1024, help="Number of answers generated at the same time.")] = 32,
    max_queue: Annotated[
        int, typer.Option(min=0, help="Number of requests that may wait; more are refused (429).")
    ] = 256,
    max_length: Annotated[
        int | None,
        typer.Option(
            min=2, help="Maximum number of tokens in a prompt and its answer (default: the model's context length)."
        ),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Maximum number of tokens in a chat answer where the request sets none.")
    ] = 512,
    dtype: Annotated[
        str | None,
        typer.Option(
            callback=_dtype, help="Dtype of the weights: fp32 or bf16 (default: the faster one on this machine)."
        ),
    ] = None,
    engine: Annotated[
        str, typer.Option(help="Engine that runs the model: transformers, vllm, or auto (vllm where it is installed).")
    ] = "auto",
    grace: Annotated[
        float, typer.Option(min=0, max=3600, help="Seconds that running answers have to finish after Ctrl-C.")
    ] = 10.0,
    base: Annotated[str | None, typer.Option(help="Base model of the adapters, if it has moved.")] = None,
) -> None:
    """Serve a trained model and further adapters on its base, with an API that OpenAI's clients talk to."""
    from finray.runtime.serve import LOOPBACK
    from finray.runtime.serve import serve as run_server
    from finray.serving.models import Settings

    may_change = api_key_env is not None or host in LOOPBACK
    settings = Settings(
        model,
        name=name,
        adapters=tuple(_named(one) for one in adapters or ()),
        base=base,
        slots=slots,
        max_queue=max_queue,
        max_length=max_length,
        max_new_tokens=max_new_tokens,
        dtype=dtype,
        engine=engine,
        key_env=api_key_env,
        may_change=may_change,
    )
    if not may_change:
        show.remark("anyone who reaches this address can use the model; --api-key-env NAME requires a key")
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"

    def ready(names: list[str]) -> None:
        show.lines({"url": url, "models": names}, f"serving {', '.join(names)} at {url}; Ctrl-C stops")

    run_server(settings, host=host, port=port, grace=grace, notify=show.remark, ready=ready)
