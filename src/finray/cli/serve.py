"""``finray serve``: serve models over an OpenAI-compatible API."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from finray.cli import show
from finray.config.environment import limit_spinning
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
    places: Annotated[
        list[str] | None,
        typer.Option(
            "--adapters-from",
            metavar="DIR",
            help="Directory (or URL) from which requests may add adapters; may be repeated (default: none).",
        ),
    ] = None,
    max_adapters: Annotated[int, typer.Option(min=1, help="Number of adapters that requests may add.")] = 32,
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
    allow_hosts: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host",
            metavar="NAME",
            help="Without a key: another name by which clients address this server, such as a proxy's; may be "
            "repeated.",
        ),
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
    trust_run: show.TrustRun = False,
) -> None:
    """Serve a trained model and further adapters on its base, with an API that OpenAI's clients talk to.

    Only who starts the server says what it serves. With --adapters-from DIR, requests may add adapters from that
    directory and remove them again: those with the API key, or without a key those from this machine.
    """
    for place in (model, *(_named(adapter)[1] for adapter in adapters or ())):
        show.trust(place, trust_run)
    limit_spinning()
    from finray.config.paths import is_url
    from finray.config.trust import accepted
    from finray.runtime.serve import serve as run_server
    from finray.serving.access import LOOPBACK
    from finray.serving.models import ServeSettings

    settings = ServeSettings(
        model,
        name=name,
        adapters=tuple(_named(adapter) for adapter in adapters or ()),
        base=base,
        slots=slots,
        max_queue=max_queue,
        max_length=max_length,
        max_new_tokens=max_new_tokens,
        dtype=dtype,
        engine=engine,
        key_env=api_key_env,
        host=host,
        allow_hosts=tuple(allow_hosts or ()),
        # The process of the models may have another working directory.
        adapters_from=tuple(
            place if is_url(place) else str(Path(place).expanduser().absolute()) for place in places or ()
        ),
        max_adapters=max_adapters,
        trusted=accepted(),
    )
    if api_key_env is None and host not in LOOPBACK:
        show.remark("anyone who reaches this address can use the model; --api-key-env NAME requires a key")
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"

    def ready(names: list[str]) -> None:
        show.lines({"url": url, "models": names}, f"serving {', '.join(names)} at {url}; Ctrl-C stops")

    run_server(settings, host=host, port=port, grace=grace, notify=show.remark, ready=ready)
