"""The command line: parse, call the API, print.

Exit codes: 0 success, 1 a bug in finray, 2 an error that the user can fix (one message, no traceback), 130
interrupted, 143 ended by SIGTERM, 129 by SIGHUP.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from finray.cli import chat, cluster, convert, data, failure, jobs, jobspec, look, runs, show
from finray.cli import config as config_commands
from finray.cli import doctor as doctor_command
from finray.cli import serve as serving
from finray.cli.helping import explain
from finray.cli.options import takes
from finray.config.environment import limit_spinning
from finray.config.load import suggest_owner
from finray.config.names import HERE_IS, not_yet
from finray.config.redact import redact_text
from finray.config.requests import (
    DTYPE,
    EvaluationRequest,
    ExportRequest,
    GenerationRequest,
    PushRequest,
    storable,
)
from finray.errors import ConfigError
from finray.files import require_writable_file
from finray.limits import arm
from finray.results import PlainConsole
from finray.runtime import signals
from finray.tracking.console import steps

# Of `finray --help`, in the order in which they are needed.
PANELS = {
    "Before training": ("init", "convert", "plan", "inspect", "prepare", "config", "doctor"),
    "Training": ("train", "watch", "runs", "report", "sync"),
    "The trained model": ("evaluate", "generate", "chat", "serve", "export", "push", "pull"),
    "Clusters and jobs": ("cluster", "submit", "jobs", "jobspec"),
    "More": ("cache", "import-gguf", "version"),
}


# What other systems call these.
_ELSEWHERE = {
    **dict.fromkeys(("sft", "finetune", "fine-tune", "fit", "run", "launch"), "train"),
    **dict.fromkeys(("preprocess", "tokenize"), "prepare"),
    **dict.fromkeys(("inference", "predict", "infer"), "generate"),
    **dict.fromkeys(("merge", "merge-lora", "merge_lora"), "export"),
    **{"eval": "evaluate", "api": "serve", "list": "runs", "ps": "jobs", "upload": "push", "download": "pull"},
}


class _Commands(TyperGroup):
    """The commands. A config field given as an option is answered with how fields are set."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        """The names of the commands, as in :data:`PANELS`."""
        order = [name for names in PANELS.values() for name in names]
        return sorted(super().list_commands(ctx), key=lambda name: order.index(name))

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> Any:  # type: ignore[override]
        """The command that the words name. For names of other systems the error says whether finray has them."""
        try:
            return super().resolve_command(ctx, args)
        except Exception as error:
            # Typer keeps the class of this error to itself.
            unknown: Any = error
            if method := not_yet(args[0]):
                unknown.message = f"No such command {args[0]!r}: {method}; {HERE_IS}: finray train"
            elif args[0] in _ELSEWHERE:
                unknown.message = f"No such command {args[0]!r}. Did you mean {_ELSEWHERE[args[0]]!r}?"
            raise

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]
        """A command, with its panel."""
        command: Any = super().get_command(ctx, cmd_name)
        if command is not None:
            command.rich_help_panel = next((panel for panel, names in PANELS.items() if cmd_name in names), None)
            explain(command, cmd_name)
        return command

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        """Run the command that was named."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            # Typer keeps the classes of these errors to itself, and prints their messages.
            unknown: Any = error
            if type(error).__module__.startswith(("click", "typer")) and hasattr(error, "message"):
                unknown.message = redact_text(unknown.message)
            if type(error).__name__ == "NoSuchOption" and any(
                p.name == "overrides" for p in unknown.ctx.command.params
            ):
                name = unknown.option_name.lstrip("-").replace("-", "_")
                unknown.message += f"; fields are set as words, section.field=value{suggest_owner(name)}"
            raise


app = typer.Typer(
    name="finray",
    cls=_Commands,
    help="Fine-tune language models on Ray.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(config_commands.app, name="config")
app.command("init")(config_commands.init)
app.command("convert")(convert.convert)
app.command("jobspec")(jobspec.jobspec)
app.command("submit")(jobs.submit)
app.add_typer(jobs.app, name="jobs")
app.command("plan")(show.command(look.plan))
app.command("prepare")(show.command(data.prepare))
app.command("inspect")(show.command(look.inspect))
app.command("chat")(show.command(chat.chat))
app.command("report")(show.command(runs.report))
app.add_typer(runs.app, name="runs")
app.command("watch")(show.command(runs.watch))
app.command("serve")(show.command(serving.serve))
app.add_typer(data.cache, name="cache")
app.add_typer(cluster.app, name="cluster")
app.command("doctor")(show.command(doctor_command.doctor))

_INTERRUPTED = 130

RunPath = Annotated[
    str, typer.Argument(help="Run, checkpoint or model directory, or the URL of a run.", show_default=False)
]


Dtype = Annotated[str, typer.Option(callback=storable, help=DTYPE.help)]


def _print_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def finray(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Fine-tune language models on Ray."""


@app.command()
@show.command
def train(
    config: show.ConfigName = None,
    overrides: show.Overrides = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Move an earlier run of this name aside and start over.")
    ] = False,
    trust_run: show.TrustRun = False,
) -> None:
    """Fine-tune a model. Running the same command again continues a run that was stopped."""
    settings = show.load(config, overrides, trusted=trust_run)
    from finray.runtime.driver import train as run_training

    with show.run_view() as view:
        result = run_training(settings, fresh=fresh, handle=view.handle, hide_torch=True)
    show.result(result)


@app.command()
@show.command
@takes(GenerationRequest)
def generate(
    model: Annotated[
        str, typer.Argument(help="Run (directory or URL), checkpoint, model directory or Hub id.", show_default=False)
    ],
    request: GenerationRequest,
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts.", show_default=False)] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write JSONL to this file instead of printing.")
    ] = None,
) -> None:
    """Answer prompts with a trained model, or label texts with a trained classifier."""
    show.trust(model, request.trust_run)
    limit_spinning()
    from finray.api import answer
    from finray.evaluation.labels import is_classifier, read_texts
    from finray.evaluation.prompts import read_prompts, read_tools

    if output is not None:
        if output.is_dir():
            raise ConfigError("is a directory", where=f"--output {output}", repair="give a file in it")
        require_writable_file(output)
    file, system = None if request.file is None else Path(request.file), request.system
    tools = () if request.tools is None else read_tools(Path(str(request.tools)))
    lines = () if sys.stdin.isatty() else sys.stdin
    if file == Path("-"):
        prompts, file = [*(prompts or []), *(line.rstrip("\n") for line in sys.stdin if line.strip())], None
    if is_classifier(model) and system is None and request.tools is None:
        asked = read_texts(model, prompts or [], file, lines=lines)
    else:
        asked = read_prompts(prompts or [], file, system=system, tools=tools, lines=lines, notify=show.remark)
    # A single answer is streamed to a terminal.
    streams = output is None and len(asked) == 1 and not (request.compare or show.mode().json) and sys.stdout.isatty()
    answers = answer(model, asked, request, notify=show.remark, write=show.write if streams else None)
    if streams:
        show.write("\n")
    elif output is None:
        show.result(answers)
    else:
        answers.write(output)
        show.lines({"output": str(output), "rows": len(answers)}, f"wrote {len(answers)} answers to {output}")


@app.command()
@show.command
@takes(EvaluationRequest)
def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            help="Run (directory or URL), checkpoint, adapter, model directory or Hub id.", show_default=False
        ),
    ],
    request: EvaluationRequest,
    overrides: show.Overrides = None,
    samples: Annotated[int, typer.Option(min=0, help="Number of answers shown side by side.")] = 3,
) -> None:
    """Score a model on held-out rows, and compare it with its base. The same command continues where it was stopped."""
    for place in (model, *(request.baselines or ())):
        show.trust(place, request.trust_run)
    limit_spinning()
    from finray.runtime.spread import evaluate as run_evaluation

    with steps(show.console(), quiet=show.mode().quiet) as update:
        comparison = run_evaluation(model, overrides or (), request, progress=update)
    show.result(comparison, samples=samples)


@app.command()
@show.command
@takes(ExportRequest)
def export(
    run: RunPath,
    request: ExportRequest,
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory to create.")],
) -> None:
    """Write a model that Transformers or PEFT loads, and check it by loading it."""
    show.trust(run, request.trust_run)
    from finray.api import export_model

    show.result(export_model(run, output, request))


@app.command()
@show.command
def sync(
    run: Annotated[Path, typer.Argument(help="Run directory.", show_default=False)],
    to: Annotated[str | None, typer.Option(help="mlflow or wandb (default: the trackers in the run's config).")] = None,
    trust_run: show.TrustRun = False,
) -> None:
    """Send a run's records to W&B or MLflow: those that are missing there, or all."""
    show.trust(run, trust_run)
    from finray.reporting.sync import sync_run

    results = sync_run(run, to)
    if show.mode().json:
        show.document([result.plain() for result in results])
    else:
        for result in results:
            show.result(result)


@app.command()
@show.command
@takes(PushRequest)
def push(
    run: RunPath,
    request: PushRequest,
    to: Annotated[
        str | None,
        typer.Option(
            help="Name on the Hub, OWNER/NAME (default: export.push_to_hub, else the run's name under your account)."
        ),
    ] = None,
) -> None:
    """Push a finished model to the Hugging Face Hub, with a model card. The same command finishes a killed push."""
    show.trust(run, request.trust_run)
    from finray.publishing.push import push as run_push

    options: dict[str, Any] = {"merged": request.merged, "public": request.public, "dtype": request.dtype}
    show.result(run_push(run, to=to, base=request.base, notify=show.remark, **options))


@app.command()
@show.command
def pull(
    name: Annotated[str, typer.Argument(help="Model on the Hub, OWNER/NAME, to which a run pushes its checkpoints.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Run directory to create, such as runs/my-run.")],
) -> None:
    """Bring back the last checkpoint that a run has pushed; the same `finray train` continues it, on any machine."""
    from finray.publishing.restore import pull as run_pull

    show.result(run_pull(name, output=output))


@app.command("import-gguf")
@show.command
def import_gguf(
    file: Annotated[Path, typer.Argument(help="GGUF file.", show_default=False)],
    output: Annotated[Path, typer.Argument(help="Directory to create.", show_default=False)],
    dtype: Dtype = "bf16",
) -> None:
    """Convert a GGUF file to a model directory with dequantized weights in safetensors."""
    from finray.models.export import convert_gguf

    convert_gguf(file, output, dtype=dtype)
    show.lines({"folder": str(output), "dtype": dtype}, f"wrote {output}")


@app.command("version")
@show.command
def print_version() -> None:
    """Print the version."""
    version()


def version() -> None:
    """Print the version."""
    from finray import __version__

    show.lines({"version": __version__}, __version__)


def _require_directory() -> None:
    # Libraries that torch loads end the process without it.
    try:
        Path.cwd()
    except OSError:
        raise ConfigError(
            "the working directory does not exist any more", where=os.environ.get("PWD"), repair="change to another one"
        ) from None


def main() -> None:
    """Entry point: run the application and turn any exception into one message."""
    for name, kind in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        # Closed by who started the command, as with `>&-`.
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, kind, encoding="utf-8"))  # noqa: PTH123, SIM115
    if not re.fullmatch(r"[1-9]\d{0,3}", os.environ.get("COLUMNS", "80")):
        # No width: the terminal has one.
        del os.environ["COLUMNS"]
    errors = PlainConsole(stderr=True)
    arm()
    try:
        _require_directory()
        with signals.owned():
            app()
    except SystemExit as stop:
        # Typer turns a keyboard interrupt into this, and a pipe whose reader has left.
        cause: BaseException | None = stop
        while cause is not None and not isinstance(cause, KeyboardInterrupt | BrokenPipeError):
            cause = cause.__cause__ or cause.__context__
        if isinstance(cause, BrokenPipeError):
            sys.exit(failure.report(cause, errors))
        if stop.code != _INTERRUPTED or cause is None:
            try:
                sys.stdout.flush()
            except OSError as error:
                sys.exit(failure.report(error, errors))
            raise
        notes = getattr(cause, "__notes__", [])
        reason = "; ".join([str(cause) or "interrupted", *notes])
        # A job was not started by the command that it runs.
        command = os.environ.get("FINRAY_COMMAND") or redact_text(shlex.join(["finray", *sys.argv[1:]]))
        text = f"{reason}; the same command {'continues' if notes else 'starts over'}: {command}"
        errors.print(text, highlight=False, markup=False, soft_wrap=True)
        sys.exit(getattr(cause, "exit_code", _INTERRUPTED))
    except Exception as error:
        sys.exit(failure.report(error, errors))


if __name__ == "__main__":
    main()
