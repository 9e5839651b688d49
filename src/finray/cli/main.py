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
from finray.config.load import suggest_owner
from finray.config.names import HERE_IS, not_yet
from finray.config.redact import redact_text
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
    """The commands; one that is given a field as an option says how fields are set."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        """The names of the commands, as in :data:`PANELS`."""
        order = [name for names in PANELS.values() for name in names]
        return sorted(super().list_commands(ctx), key=lambda name: order.index(name))

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> Any:  # type: ignore[override]
        """The command that words name; of what other systems have it is said whether finray has it."""
        try:
            return super().resolve_command(ctx, args)
        except Exception as error:
            # Typer keeps the class of this error to itself.
            unknown: Any = error
            if what := not_yet(args[0]):
                unknown.message = f"No such command {args[0]!r}: finray has no {what} yet; {HERE_IS}: finray train"
            elif args[0] in _ELSEWHERE:
                unknown.message = f"No such command {args[0]!r}. Did you mean {_ELSEWHERE[args[0]]!r}?"
            raise

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]
        """A command, with its panel."""
        found: Any = super().get_command(ctx, cmd_name)
        if found is not None:
            found.rich_help_panel = next((panel for panel, names in PANELS.items() if cmd_name in names), None)
            explain(found, cmd_name)
        return found

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


def _storable(dtype: str) -> str:
    if dtype not in ("fp32", "bf16", "fp16"):
        raise ConfigError(f"weights cannot be stored as `{dtype}`", where="--dtype", repair="use fp32, bf16 or fp16")
    return dtype


Dtype = Annotated[str, typer.Option(callback=_storable, help="Dtype of the written weights: fp32, bf16 or fp16.")]


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
def generate(
    model: Annotated[
        str, typer.Argument(help="Run (directory or URL), checkpoint, model directory or Hub id.", show_default=False)
    ],
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts.", show_default=False)] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            help="File of prompts: one per line, or rows in a format of training (JSONL, CSV, Parquet); - reads stdin."
        ),
    ] = None,
    system: Annotated[
        str | None, typer.Option(help="System message before each prompt, instead of the one used in training.")
    ] = None,
    tools: Annotated[
        Path | None, typer.Option(help="JSON list of functions that the model may call, as in a row's `tools`.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write JSONL to this file instead of printing.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens in an answer.")] = 128,
    temperature: show.Temperature = 0.0,
    top_p: show.TopP = 1.0,
    top_k: show.TopK = 0,
    seed: show.Seed = 0,
    stop: show.Stop = None,
    repetition_penalty: show.RepetitionPenalty = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Number of prompts answered at the same time.")] = 32,
    engine: Annotated[
        str, typer.Option(help="Engine that runs the model: transformers, vllm, or auto (vllm where it is installed).")
    ] = "auto",
    merge: Annotated[bool, typer.Option("--merge", help="Merge an adapter into the weights first, for speed.")] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also show the answers of the adapter's base model.")
    ] = False,
    raw: Annotated[bool | None, typer.Option(help="Do not apply the chat template.")] = None,
    base: show.BaseModel = None,
    trust_run: show.TrustRun = False,
) -> None:
    """Answer prompts with a trained model, or label texts with a trained classifier."""
    show.trust(model, trust_run)
    from finray.evaluation.engines.sampling import Sampling
    from finray.evaluation.generate import generate_text
    from finray.evaluation.labels import is_classifier, read_texts
    from finray.evaluation.prompts import read_prompts, read_tools

    if output is not None:
        if output.is_dir():
            raise ConfigError("is a directory", where=f"--output {output}", repair="give a file in it")
        require_writable_file(output)
    offered = () if tools is None else read_tools(tools)
    lines = () if sys.stdin.isatty() else sys.stdin
    if file == Path("-"):
        prompts, file = [*(prompts or []), *(line.rstrip("\n") for line in sys.stdin if line.strip())], None
    if is_classifier(model) and system is None and tools is None:
        requests = read_texts(model, prompts or [], file, lines=lines)
    else:
        requests = read_prompts(prompts or [], file, system=system, tools=offered, lines=lines, notify=show.remark)
    sampling = Sampling(max_new_tokens, temperature, top_p, seed, top_k, tuple(stop or ()), repetition_penalty)
    # A single answer is streamed to a terminal.
    streams = output is None and len(requests) == 1 and not compare and not show.mode().json and sys.stdout.isatty()
    answers = generate_text(
        model,
        requests,
        sampling=sampling,
        batch_size=batch_size,
        raw=raw,
        base=base,
        engine=engine,
        merge=merge,
        compare=compare,
        notify=show.remark,
        write=show.write if streams else None,
    )
    if streams:
        show.write("\n")
    elif output is None:
        show.result(answers)
    else:
        answers.write(output)
        show.lines({"output": str(output), "rows": len(answers)}, f"wrote {len(answers)} answers to {output}")


@app.command()
@show.command
def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            help="Run (directory or URL), checkpoint, adapter, model directory or Hub id.", show_default=False
        ),
    ],
    overrides: show.Overrides = None,
    split: Annotated[
        str | None, typer.Option(help="Split of the run: train, eval or test (default: test, else eval).")
    ] = None,
    file: Annotated[
        Path | None, typer.Option(help="Evaluate on the rows of this file instead, in any format that training reads.")
    ] = None,
    baselines: Annotated[
        list[str] | None,
        typer.Option(
            "--baseline",
            help="Model to compare with; `base` is the adapter's base model, `none` compares with nothing; may be "
            "repeated.",
        ),
    ] = None,
    metrics: Annotated[
        str | None, typer.Option(help="Scores, separated by commas (default: evaluation.metrics).")
    ] = None,
    max_rows: Annotated[int | None, typer.Option(min=1, help="Evaluate a seeded sample of this many rows.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Maximum number of tokens in an answer.")] = None,
    temperature: show.Temperature = 0.0,
    top_p: show.TopP = 1.0,
    top_k: show.TopK = 0,
    seed: show.Seed = 0,
    stop: show.Stop = None,
    repetition_penalty: show.RepetitionPenalty = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Number of rows processed at the same time.")] = None,
    engine: Annotated[str, typer.Option(help="Engine that runs the model: transformers, vllm, or auto.")] = "auto",
    replicas: Annotated[
        int,
        typer.Option(
            min=1, help="Number of engines on a Ray cluster (RAY_ADDRESS) that share the rows; 1 does not use Ray."
        ),
    ] = 1,
    harness: Annotated[
        str | None, typer.Option(help="lm-eval tasks, separated by commas: names or task files.")
    ] = None,
    samples: Annotated[int, typer.Option(min=0, help="Number of answers shown side by side.")] = 3,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Directory to write to (default: beside the weights).")
    ] = None,
    base: show.BaseModel = None,
    trust_run: show.TrustRun = False,
) -> None:
    """Score a model on held-out rows, and compare it with its base. The same command continues where it was stopped."""
    for one in (model, *(baselines or ())):
        show.trust(one, trust_run)
    from finray.evaluation.subjects import EvaluationRequest
    from finray.runtime.spread import evaluate as run_evaluation

    request = EvaluationRequest(
        split=split,
        file=file,
        baselines=baselines or None,
        metrics=_words(metrics) or None,
        max_rows=max_rows,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=stop or (),
        repetition_penalty=repetition_penalty,
        batch_size=batch_size,
        engine=engine,
        replicas=replicas,
        harness=_words(harness),
        output=output,
        base=base,
    )
    with steps(show.console(), quiet=show.mode().quiet) as update:
        comparison = run_evaluation(model, overrides or (), request, progress=update)
    show.result(comparison, samples=samples)


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]


@app.command()
@show.command
def export(
    run: RunPath,
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory to create.")],
    merge: Annotated[
        bool, typer.Option("--merge/--adapter", help="Merge the adapter into the model, or write the adapter alone.")
    ] = True,
    dtype: Dtype = "bf16",
    base: show.BaseModel = None,
    max_shard_size: Annotated[
        str | None, typer.Option(help="Maximum size of a file of weights, such as 5GB.", show_default=False)
    ] = None,
    gguf: Annotated[
        str | None, typer.Option(help="Write one GGUF file instead, and a Modelfile for Ollama: f16 or q8_0.")
    ] = None,
    converter: Annotated[
        Path | None, typer.Option(help="Path of llama.cpp's convert_hf_to_gguf.py (default: the installed one).")
    ] = None,
    onnx: Annotated[bool, typer.Option("--onnx", help="Write a classifier as an ONNX file in fp32 instead.")] = False,
    trust_run: show.TrustRun = False,
) -> None:
    """Write a model that Transformers or PEFT loads, and check it by loading it."""
    show.trust(run, trust_run)
    from finray.api import export as run_export

    made = run_export(
        run,
        output,
        merge=merge,
        dtype=dtype,
        base=base,
        max_shard_size=max_shard_size,
        gguf=gguf,
        converter=converter,
        onnx=onnx,
    )
    show.result(made)


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

    found = sync_run(run, to)
    if show.mode().json:
        show.document([one.plain() for one in found])
    else:
        for one in found:
            show.result(one)


@app.command()
@show.command
def push(
    run: RunPath,
    to: Annotated[
        str | None,
        typer.Option(
            help="Name on the Hub, OWNER/NAME (default: export.push_to_hub, else the run's name under your account)."
        ),
    ] = None,
    merged: Annotated[
        bool | None,
        typer.Option(
            "--merged/--adapter", help="Merge the adapter into its base model first (default: export.merged)."
        ),
    ] = None,
    public: Annotated[
        bool | None,
        typer.Option("--public/--private", help="Make the model public or private (default: export.public)."),
    ] = None,
    dtype: Dtype = "bf16",
    base: Annotated[
        str | None,
        typer.Option(help="Base model of the adapter: its name on the Hub, or its directory if it has moved."),
    ] = None,
    trust_run: show.TrustRun = False,
) -> None:
    """Push a finished model to the Hugging Face Hub, with a model card. The same command finishes a killed push."""
    show.trust(run, trust_run)
    from finray.publishing.push import push as run_push

    show.result(run_push(run, to=to, merged=merged, public=public, dtype=dtype, base=base, notify=show.remark))


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
        # Typer turns a keyboard interrupt into this.
        cause: BaseException | None = stop
        while cause is not None and not isinstance(cause, KeyboardInterrupt):
            cause = cause.__cause__ or cause.__context__
        if stop.code != _INTERRUPTED or cause is None:
            raise
        notes = getattr(cause, "__notes__", [])
        what = "; ".join([str(cause) or "interrupted", *notes])
        # A job was not started by the command that it runs.
        command = os.environ.get("FINRAY_COMMAND") or redact_text(shlex.join(["finray", *sys.argv[1:]]))
        text = f"{what}; the same command {'continues' if notes else 'starts over'}: {command}"
        errors.print(text, highlight=False, markup=False, soft_wrap=True)
        sys.exit(getattr(cause, "exit_code", _INTERRUPTED))
    except Exception as error:
        sys.exit(failure.report(error, errors))


if __name__ == "__main__":
    main()
