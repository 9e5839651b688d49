"""``finray serve``: models behind an address, with the API that OpenAI's clients talk to."""

from __future__ import annotations

from typing import Annotated

import typer

from finray.cli import show
from finray.errors import ConfigError


def _dtype(name: str | None) -> str | None:
    if name not in (None, "fp32", "bf16"):
        raise ConfigError(f"weights cannot be held as `{name}`", where="--dtype", repair="use fp32 or bf16")
    return name


def serve(
    model: Annotated[str, typer.Argument(help="Run, checkpoint or model directory, or a Hub id.", show_default=False)],
    adapters: Annotated[
        list[str] | None,
        typer.Option("--adapter", help="NAME=PATH of a further adapter of the same base model; may be repeated."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="What clients call the model, instead of the name of its directory.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 is all of this machine's.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    api_key_env: Annotated[
        str | None, typer.Option(help="Environment variable with the API key that clients have to send.")
    ] = None,
    slots: Annotated[int, typer.Option(min=1, max=1024, help="Answers that are written at the same time.")] = 32,
    max_queue: Annotated[int, typer.Option(min=0, help="Answers that wait for a slot; more are refused (429).")] = 256,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Most tokens of a prompt and its answer (default: what the model reads).")
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens of a chat's answer where the request does not say.")
    ] = 512,
    dtype: Annotated[
        str | None, typer.Option(callback=_dtype, help="Of the weights: fp32 or bf16 (default: what is fast here).")
    ] = None,
    engine: Annotated[
        str, typer.Option(help="What runs the model: transformers, vllm, or auto: vLLM where it is installed.")
    ] = "auto",
    grace: Annotated[
        float, typer.Option(min=0, max=3600, help="Seconds that answers have to come to their end after Ctrl-C.")
    ] = 10.0,
    base: Annotated[
        str | None, typer.Option(help="Base model of the adapters, if it is no longer where it was.")
    ] = None,
) -> None:
    """Serve a trained model and further adapters on its base, with an API that OpenAI's clients talk to."""
    from finray.runtime.serve import LOOPBACK
    from finray.runtime.serve import serve as run_server
    from finray.serving.models import Settings

    pairs = []
    for one in adapters or ():
        given, equals, path = one.partition("=")
        if not (equals and given and path):
            raise ConfigError(f"`{one}` is no NAME=PATH", where="--adapter", repair="--adapter french=runs/french")
        pairs.append((given, path))
    may_change = api_key_env is not None or host in LOOPBACK
    settings = Settings(
        model,
        name=name,
        adapters=tuple(pairs),
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
    quiet = show.mode().quiet
    if not may_change and not quiet:
        show.note("everybody who reaches this address gets answers; --api-key-env NAME asks for a key")
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"

    def ready(names: list[str]) -> None:
        show.lines({"url": url, "models": names}, f"serving {', '.join(names)} at {url}; Ctrl-C stops")

    run_server(
        settings, host=host, port=port, grace=grace, tell=(lambda line: None) if quiet else show.note, ready=ready
    )
