"""The Python API: each function does what the command of the same name does, with the same defaults.

A config is anything that :func:`finray.load_config` takes: a YAML file, the name of a preset, a mapping, or a
:class:`~finray.config.schema.Config`; without one it is ``finray.yaml`` in the working directory. Paths may be strings.
"""

from __future__ import annotations

import functools
import re
import secrets
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar

from rich.console import Console

from finray.config import load
from finray.config.load import ConfigLike, Overrides
from finray.config.paths import PREPARED, run_path, run_url
from finray.config.requests import (
    EvaluationRequest,
    ExportRequest,
    GenerationRequest,
    PushRequest,
    option_texts,
)
from finray.config.schema import Config
from finray.data.sources.memory import ROWS, write_rows
from finray.records import Note, Record
from finray.results import PlainConsole
from finray.tracking.console import RunView

if TYPE_CHECKING:
    # At run time each function imports what it needs: a plan needs no Ray, and `import finray` needs nothing.
    from finray.evaluation.generate import Answers
    from finray.evaluation.labels import TextLabels
    from finray.evaluation.outcome import Comparison
    from finray.evaluation.prompts import Prompt
    from finray.inspection.result import Inspection
    from finray.models.export import Exported
    from finray.planning.result import Plan
    from finray.publishing.gguf import GgufExported
    from finray.publishing.onnx import OnnxExported
    from finray.publishing.push import Pushed
    from finray.publishing.restore import Pulled
    from finray.reporting.report import Reported
    from finray.reporting.run import PreparedData, TrainResult

# tqdm would ask a notebook to install ipywidgets, for bars that finray does not show.
warnings.filterwarnings("ignore", message="IProgress not found")

Observer = Callable[[Record], object]
ModelLike: TypeAlias = "str | Path | TrainResult"
P = ParamSpec("P")
R = TypeVar("R")
RequestT = TypeVar("RequestT")

# Where a config may hold rows instead of the name of a source.
_SOURCES = re.compile(r"data(\.source|\.eval_source|\.mix\.\d+\.source)?")


def _arguments(
    request: Callable[P, RequestT], options: type, **documented: str
) -> Callable[[Callable[[RequestT], R]], Callable[P, R]]:
    """A function of the API whose arguments are the fields of a request.

    Args:
        request: its class.
        options: the class of those fields that the command has too.
        documented: what the others mean, and what is given in another way than on the command line.
    """

    def decorate(function: Callable[[RequestT], R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return function(request(*args, **kwargs))

        call.__signature__ = signature(request)  # type: ignore[attr-defined]
        texts = option_texts(options) | documented
        lines = "".join(f"        {name}: {texts[name]}\n" for name in signature(request).parameters)
        before, raises, after = str(function.__doc__).partition("    Raises:")
        call.__doc__ = f"{before}    Args:\n{lines}\n{raises}{after}"
        return call

    return decorate


def load_config(config: ConfigLike = None, overrides: Overrides = (), **changed: Any) -> Config:
    """Load a config from a file, a preset, a mapping or another config, and apply overrides.

    A source may also be rows: a list of dicts, a ``datasets.Dataset``, or a pandas or Arrow table. They are written to
    a file in ``<run.output_dir>/.prepared/rows/``, named by a hash of its content.

    Args:
        config: a YAML file, the name of a preset, a mapping of sections, or a :class:`Config`. With None the config
            consists of the overrides; without any it is ``finray.yaml`` in the working directory.
        overrides: strings ``section.field=value`` (values are YAML), or a mapping: ``{"train.max_steps": 4}`` and
            ``{"train": {"max_steps": 4}}`` set the same field. A number reaches into a list: ``data.mix.0.weight``.
        changed: overrides as keywords, ``train={"max_steps": 4}``. Here and in mappings, ``model``, ``run``,
            ``adapter`` (its method) and ``data`` (its source, or rows) may be given as a single value.

    Raises:
        ConfigError: with every problem found, each with its dotted path.
        DataError: rows cannot be written.
    """
    held: dict[str, Any] = {}
    settings = load.load_config(
        _without_rows(config, held) if isinstance(config, Mapping) else config,
        _without_rows(overrides, held) if isinstance(overrides, Mapping) else overrides,
        **_without_rows(changed, held),
    )
    if not held:
        return settings
    data = settings.data
    named = {"data.source": data.source, "data.eval_source": data.eval_source}
    named |= {f"data.mix.{number}.source": entry.source for number, entry in enumerate(data.mix)}
    folder = run_path(settings).parent / PREPARED / ROWS
    written = {path: str(write_rows(held[name], folder)) for path, name in named.items() if name in held}
    return load.load_config(settings, written)


def _without_rows(value: Any, held: dict[str, Any], path: str = "") -> Any:
    """A mapping in which rows are replaced by unique names."""
    if path == "data.mix" and isinstance(value, list | tuple):
        return [_without_rows(item, held, f"{path}.{number}") for number, item in enumerate(value)]
    if isinstance(value, Mapping) and not hasattr(value, "column_names"):
        return {key: _without_rows(item, held, f"{path}.{key}" if path else str(key)) for key, item in value.items()}
    if _SOURCES.fullmatch(path) and value is not None and not isinstance(value, str | PurePath):
        name = f"rows in memory {len(held)} {secrets.token_hex(4)}"
        held[name] = value
        return name
    return value


def train(
    config: ConfigLike = None,
    overrides: Overrides = (),
    *,
    fresh: bool = False,
    quiet: bool = False,
    observers: Observer | Iterable[Observer] = (),
    trust_run: bool = False,
    **changed: Any,
) -> TrainResult:
    """Fine-tune a model. The same call again continues a run that was stopped.

    Args:
        config: the model, the data and the training settings.
        overrides: as for :func:`finray.load_config`.
        fresh: move an earlier run of this name aside and start over.
        quiet: show no progress; warnings are still shown.
        observers: called with each record (:mod:`finray.records`), in a thread of this process. They cannot change the
            run: their return value is ignored, and one that raises is named in a warning and not called again.
        trust_run: accept the code and the local files that the run's config, or the model, names.
        changed: more overrides, ``train={"max_steps": 20}``.

    Raises:
        FinrayError: says what happened, where, and the repair.
    """
    from finray.runtime.driver import train as run

    _trust(config, trust_run)
    settings = load_config(config, overrides, **changed)
    with RunView(_console(), quiet=quiet) as view:
        return run(settings, fresh=fresh, handle=with_observers(view.handle, observers))


def prepare(
    config: ConfigLike = None,
    overrides: Overrides = (),
    *,
    export_jsonl: str | Path | None = None,
    quiet: bool = False,
    trust_run: bool = False,
    **changed: Any,
) -> PreparedData:
    """Tokenize the data of a config, without training.

    Args:
        config: defines the data.
        overrides: as for :func:`finray.load_config`.
        export_jsonl: a directory to which the rows are also written as text, by split.
        quiet: show no progress.
        trust_run: accept the code and the local files that the run's config, or the model, names.
        changed: more overrides.

    Raises:
        FinrayError: a problem with the data, the tokenizer, the storage or the cluster.
    """
    from finray.runtime.prepare import prepare_and_report

    _trust(config, trust_run)
    settings = load_config(config, overrides, **changed)
    with RunView(_console(), quiet=quiet) as view:
        return prepare_and_report(settings, export_jsonl=export_jsonl, handle=view.handle)


def plan(
    config: ConfigLike = None,
    overrides: Overrides = (),
    *,
    gpu: str | None = None,
    offline: bool = False,
    fresh: bool = False,
    trust_run: bool = False,
    **changed: Any,
) -> Plan:
    """Plan a run without starting it: what it needs, and what would prevent it from starting.

    Args:
        config: defines the run.
        overrides: as for :func:`finray.load_config`.
        gpu: GPU of each worker, such as ``h100-80gb``; None uses the GPUs of the cluster or this machine.
        offline: list what is on an unreachable Hub as not checked. To keep libraries from connecting, set
            ``HF_HUB_OFFLINE=1`` before the first import.
        fresh: as for :func:`finray.train`; by default an existing run of this name would be continued.
        trust_run: accept the code and the local files that the run's config, or the model, names.
        changed: more overrides.

    Raises:
        ConfigError: the config is not valid. All other problems are in the plan.
    """
    from finray.runtime.cluster import plan as make_plan

    _trust(config, trust_run)
    return make_plan(load_config(config, overrides, **changed), gpu=gpu, offline=offline, fresh=fresh)


def inspect(
    config: ConfigLike = None,
    overrides: Overrides = (),
    *,
    html: str | Path | None = None,
    rows: int = 3,
    row: Sequence[str | int] = (),
    compare: int = 1000,
    trust_run: bool = False,
    **changed: Any,
) -> Inspection:
    """Inspect the data as training will see it: rows as tokens, which of them are trained on, and problems.

    Args:
        config: defines the data.
        overrides: as for :func:`finray.load_config`.
        html: write everything to this file as one HTML page.
        rows: number of examples to show, spread over the training rows.
        row: rows to show instead: ``FILE:NUMBER`` in the source, or an index into the training rows.
        compare: number of rows to compare with what a server renders; 0 means all.
        trust_run: accept the code and the local files that the run's config, or the model, names.
        changed: more overrides.

    Raises:
        FinrayError: a problem with the data, the tokenizer or the storage. If training and serving would differ, the
            inspection holds the differences and the ``refusal`` instead.
    """
    from finray.inspection.inspect import inspect as run
    from finray.inspection.page import page
    from finray.reporting.page import write

    _trust(config, trust_run)
    settings = load_config(config, overrides, **changed)
    shown = [str(name) for name in row]
    inspection = run(settings, examples=rows, chosen=shown, compared=compare or None)
    if html is not None:
        write(page(inspection), Path(html).expanduser())
    return inspection


@dataclass(frozen=True, slots=True)
class _Generate(GenerationRequest):
    model: ModelLike
    prompts: str | Mapping[str, Any] | Iterable[str | Mapping[str, Any] | Sequence[Mapping[str, Any]]] = ()


@_arguments(
    _Generate,
    GenerationRequest,
    model="run, checkpoint or model directory, a Hub id, or the result of :func:`train`",
    prompts="a text or a conversation (a list of messages with ``role`` and ``content``), or several of these; or rows "
    "with ``prompt`` or ``messages``",
    file="file of more prompts: one per line, or rows in a format of training",
    tools="functions that the model may call, as in the column ``tools`` of training data; or a JSON file of them",
    stop="texts before which an answer stops",
)
def generate(request: _Generate) -> Answers | TextLabels:
    """Generate answers with a trained model; a classifier gives labels.

    Returns:
        A sequence of texts, one per prompt; of a classifier, of labels.

    Raises:
        FinrayError: the model cannot be loaded, or there is no prompt.
    """
    model, system, tools = request.model, request.system, request.tools
    _trust(model, request.trust_run)
    from finray.data.formats.messages import tools_of
    from finray.evaluation.labels import is_classifier, read_texts
    from finray.evaluation.prompts import given_prompts, read_prompts, read_tools

    asked = given_prompts(request.prompts, system)
    offered = read_tools(Path(tools).expanduser()) if isinstance(tools, str | Path) else tools_of(tools and list(tools))
    asked = [replace(prompt, tools=prompt.tools or offered) for prompt in asked]
    if request.file is not None or not asked:
        file = None if request.file is None else Path(request.file).expanduser()
        if is_classifier(_directory(model)) and system is None and not offered:
            asked += read_texts(_directory(model), [], file)
        else:
            asked += read_prompts([], file, system=system, tools=offered)
    return answer(model, asked, request)


def answer(
    model: ModelLike,
    prompts: Sequence[Prompt],
    request: GenerationRequest,
    *,
    notify: Callable[[str], None] = lambda line: None,
    write: Callable[[str], None] | None = None,
) -> Answers | TextLabels:
    """Answers to prompts that were read; see :func:`finray.evaluation.generate.generate_text`."""
    from finray.evaluation.engines.sampling import Sampling
    from finray.evaluation.generate import generate_text

    options: dict[str, Any] = {name: getattr(request, name) for name in ("raw", "base", "engine", "merge", "compare")}
    sampling = Sampling.of(request, request.max_new_tokens)
    options |= {"batch_size": request.batch_size, "notify": notify, "write": write}
    return generate_text(_directory(model), prompts, sampling=sampling, **options)


@dataclass(frozen=True, slots=True)
class _Evaluate(EvaluationRequest):
    model: ModelLike
    overrides: Overrides = ()
    quiet: bool = field(default=False, kw_only=True)


@_arguments(
    _Evaluate,
    EvaluationRequest,
    model="run, checkpoint, adapter or model directory, a Hub id, or the result of :func:`train`",
    overrides="of the run's config, as for :func:`finray.load_config`",
    baselines="models to compare with; None: the adapter's base, or the model that a run started from (``base``)",
    metrics="names of scores; None: ``evaluation.metrics``",
    harness="lm-eval tasks to run as well: names or task files",
    stop="texts before which an answer stops",
    quiet="show no progress",
)
def evaluate(request: _Evaluate) -> Comparison:
    """Score a model on rows, and compare it with others. The same call continues an interrupted evaluation.

    Raises:
        FinrayError: there are no rows, settings contradict each other, or files cannot be loaded or written.
    """
    for place in (request.model, *(request.baselines or ())):
        _trust(place, request.trust_run)
    from finray.runtime.spread import evaluate as compare
    from finray.tracking.console import steps

    with steps(_console(), quiet=request.quiet) as update:
        return compare(_directory(request.model), request.overrides, request, progress=update)


@dataclass(frozen=True, slots=True)
class _Export(ExportRequest):
    run: ModelLike
    output: str | Path


@_arguments(
    _Export,
    ExportRequest,
    run="run, checkpoint or model directory, or the result of :func:`train`",
    output="directory to create",
)
def export(request: _Export) -> Exported | GgufExported | OnnxExported:
    """Write a model that Transformers or PEFT loads, and check it by loading it.

    Raises:
        FinrayError: the model cannot be loaded, the output exists, or the written model differs from the trained one.
    """
    _trust(request.run, request.trust_run)
    return export_model(request.run, request.output, request)


def export_model(run: ModelLike, output: str | Path, request: ExportRequest) -> Exported | GgufExported | OnnxExported:
    """Write a model in the format that is asked for; see :func:`export`."""
    if request.onnx:
        from finray.publishing.onnx import export_onnx

        return export_onnx(_directory(run), Path(output).expanduser(), base=request.base)
    if request.gguf is not None:
        from finray.publishing.gguf import export_gguf

        script = None if request.converter is None else Path(request.converter).expanduser()
        folder = Path(output).expanduser()
        return export_gguf(_directory(run), folder, kind=request.gguf, converter=script, base=request.base)
    from finray.evaluation.artifacts import export_model as write

    options: dict[str, Any] = {"dtype": request.dtype, "max_shard_size": request.max_shard_size}
    return write(_directory(run), output, merge=request.merge, base=request.base, **options)


def pull(name: str, *, output: str | Path) -> Pulled:
    """Bring back the last checkpoint that a run has pushed; :func:`train` with the same config continues it.

    Args:
        name: on the Hub, ``OWNER/NAME``.
        output: the run directory to create.

    Raises:
        FinrayError: the directory exists, the Hub refuses, or there is no whole checkpoint of a run.
    """
    from finray.publishing.restore import pull as run_pull

    return run_pull(name, output=output)


@dataclass(frozen=True, slots=True)
class _Push(PushRequest):
    run: ModelLike
    to: str | None = None


@_arguments(
    _Push,
    PushRequest,
    run="run, checkpoint or model directory, or the result of :func:`train`",
    to="name on the Hub, ``OWNER/NAME``; None uses ``export.push_to_hub``, else the run's name under your account",
)
def push(request: _Push) -> Pushed:
    """Push a model to the Hugging Face Hub, with a model card. The same call finishes a push that was killed.

    Raises:
        FinrayError: the Hub does not allow the push (checked first), or does not answer.
    """
    _trust(request.run, request.trust_run)
    from finray.publishing.push import push as run_push

    options: dict[str, Any] = {"merged": request.merged, "public": request.public, "dtype": request.dtype}
    return run_push(_directory(request.run), to=request.to, base=request.base, **options)


def report(
    runs: str | Path | TrainResult | Iterable[str | Path | TrainResult], output: str | Path | None = None
) -> Reported:
    """Write an HTML report of a run, or of several side by side.

    Args:
        runs: run directories, their URLs, or the result of :func:`train`.
        output: the file; None writes ``report.html`` into the run, or into the working directory for several runs.

    Raises:
        FinrayError: there is no such run, or the file cannot be written.
    """
    from finray.reporting.report import report as write
    from finray.reporting.run import TrainResult

    several = [runs] if isinstance(runs, str | Path | TrainResult) else list(runs)
    return write([_directory(run) for run in several], output)


def _trust(place: ConfigLike | TrainResult, wanted: bool) -> None:
    """Accept what a run or a model names, where the caller wants that; says on standard error what it is."""
    if wanted:
        from finray.checkpoint.rundir import trust_run
        from finray.config.redact import redact_text

        for line in trust_run(place) if isinstance(place, str | PurePath) else ():
            print(redact_text(line), file=sys.stderr)


def _directory(run: str | Path | TrainResult) -> str | Path:
    """The run of a result: its URL if it has one, since the directory is a copy then."""
    from finray.checkpoint.rundir import RunDir, saved_config

    return run if isinstance(run, str | Path) else run_url(saved_config(RunDir(run.run_dir))) or run.run_dir


def _console() -> Console:
    """Standard output or the cell of a notebook; wide in a log, so that lines stay whole."""
    console = PlainConsole()
    return console if console.is_jupyter or sys.stdout.isatty() else PlainConsole(width=160)


def with_observers(
    view: Callable[[Record], None], observers: Observer | Iterable[Observer]
) -> Callable[[Record], None]:
    """Hands records to the view and to observers that cannot disturb the run."""
    watching = [observers] if callable(observers) else list(observers)

    def handle(record: Record) -> None:
        view(record)
        for observer in list(watching):
            try:
                observer(record)
            except Exception as error:
                # Whatever it raises: a run is worth more than who watches it.
                watching.remove(observer)
                name = getattr(observer, "__qualname__", None) or type(observer).__qualname__
                failed = f"the observer {name} failed: {type(error).__name__}: {error}"
                view(Note(f"{failed}; training continues without it", level="warning"))

    return handle
