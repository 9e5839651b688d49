"""The Python API: each function does what the command of the same name does, with the same defaults.

A config is anything that :func:`finray.load_config` takes: a YAML file, the name of a preset, a mapping, or a
:class:`~finray.config.schema.Config`; without one it is ``finray.yaml`` in the working directory. Paths may be strings.
"""

from __future__ import annotations

import re
import secrets
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from rich.console import Console

from finray.config import load
from finray.config.load import ConfigLike, Overrides
from finray.config.paths import PREPARED, run_path, run_url
from finray.config.schema import Config
from finray.data.sources.memory import ROWS, write_rows
from finray.errors import ConfigError
from finray.records import Note, Record
from finray.results import PlainConsole
from finray.tracking.console import RunView

if TYPE_CHECKING:
    # At run time each function imports what it needs: a plan needs no Ray, and `import finray` needs nothing.
    from finray.evaluation.generate import Answers
    from finray.evaluation.labels import TextLabels
    from finray.evaluation.outcome import Comparison
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

# Where a config may hold rows instead of the name of a source.
_SOURCES = re.compile(r"data(\.source|\.eval_source|\.mix\.\d+\.source)?")


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
    named |= {f"data.mix.{number}.source": one.source for number, one in enumerate(data.mix)}
    folder = run_path(settings).parent / PREPARED / ROWS
    written = {path: str(write_rows(held[name], folder)) for path, name in named.items() if name in held}
    return load.load_config(settings, written)


def _without_rows(value: Any, held: dict[str, Any], path: str = "") -> Any:
    """A mapping in which rows are replaced by unique names."""
    if path == "data.mix" and isinstance(value, list | tuple):
        return [_without_rows(one, held, f"{path}.{number}") for number, one in enumerate(value)]
    if isinstance(value, Mapping) and not hasattr(value, "column_names"):
        return {key: _without_rows(one, held, f"{path}.{key}" if path else str(key)) for key, one in value.items()}
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
    shown = [str(one) for one in row]
    found = run(settings, examples=rows, chosen=shown, compared=compare or None)
    if html is not None:
        write(page(found), Path(html).expanduser())
    return found


def generate(
    model: str | Path | TrainResult,
    prompts: str | Mapping[str, Any] | Iterable[str | Mapping[str, Any] | Sequence[Mapping[str, Any]]] = (),
    *,
    file: str | Path | None = None,
    system: str | None = None,
    tools: str | Path | Sequence[Mapping[str, Any]] | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    stop: Sequence[str] | None = None,
    repetition_penalty: float | None = None,
    batch_size: int = 32,
    engine: str = "auto",
    merge: bool = False,
    compare: bool = False,
    raw: bool | None = None,
    base: str | None = None,
    trust_run: bool = False,
) -> Answers | TextLabels:
    """Generate answers with a trained model; a classifier gives labels.

    Args:
        model: run, checkpoint or model directory, a Hub id, or the result of :func:`train`.
        prompts: a text or a conversation (a list of messages with ``role`` and ``content``), or several of these; or
            rows with ``prompt`` or ``messages``.
        file: more prompts: one per line, or JSONL with ``prompt`` or ``messages``.
        system: system message before each prompt.
        tools: functions that the model may call, as in the column ``tools`` of training data; or a JSON file of them.
        max_new_tokens: maximum number of tokens in an answer.
        temperature: 0 means greedy decoding.
        top_p: sample from the most likely tokens with this total probability.
        top_k: sample from this many most likely tokens; 0 means all.
        seed: for sampling; every prompt has its own random numbers.
        stop: an answer stops before any of these texts.
        repetition_penalty: as Transformers' argument of this name; None uses that of the model's generation config.
        batch_size: number of prompts answered at the same time.
        engine: ``transformers``, ``vllm``, or ``auto`` (vLLM if it is installed).
        merge: merge an adapter into the weights first, for speed.
        compare: also generate the answers of the adapter's base model, as ``base`` of the result.
        raw: do not apply the chat template; None decides by how the model was trained.
        base: base model of the adapter, if it has moved.
        trust_run: accept the code and the local files that the run's config, or the model, names.

    Returns:
        A sequence of texts, one per prompt; of a classifier, of labels.

    Raises:
        FinrayError: the model cannot be loaded, or there is no prompt.
    """
    _trust(model, trust_run)
    from finray.data.formats.messages import tools_of
    from finray.evaluation.engines.sampling import Sampling
    from finray.evaluation.generate import generate_text
    from finray.evaluation.labels import is_classifier, read_texts
    from finray.evaluation.prompts import given_prompts, read_prompts, read_tools

    requests = given_prompts(prompts, system)
    offered = read_tools(Path(tools).expanduser()) if isinstance(tools, str | Path) else tools_of(tools and list(tools))
    requests = [replace(one, tools=one.tools or offered) for one in requests]
    if file is not None or not requests:
        path = None if file is None else Path(file).expanduser()
        if is_classifier(_directory(model)) and system is None and not offered:
            requests += read_texts(_directory(model), [], path)
        else:
            requests += read_prompts([], path, system=system, tools=offered)
    sampling = Sampling(max_new_tokens, temperature, top_p, seed, top_k, _texts(stop), repetition_penalty)
    options: dict[str, Any] = {"batch_size": batch_size, "raw": raw, "base": base, "engine": engine, "merge": merge}
    options["compare"] = compare
    return generate_text(_directory(model), requests, sampling=sampling, **options)


def _texts(given: str | Sequence[str] | None) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given or ())


def evaluate(
    model: str | Path | TrainResult,
    overrides: Overrides = (),
    *,
    split: str | None = None,
    file: str | Path | None = None,
    baselines: Sequence[str | Path] | None = None,
    metrics: Sequence[str] | None = None,
    max_rows: int | None = None,
    max_new_tokens: int | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    stop: Sequence[str] | None = None,
    repetition_penalty: float | None = None,
    batch_size: int | None = None,
    engine: str = "auto",
    replicas: int = 1,
    harness: Sequence[str] | None = None,
    output: str | Path | None = None,
    base: str | None = None,
    quiet: bool = False,
    trust_run: bool = False,
) -> Comparison:
    """Score a model on rows, and compare it with others. The same call continues an interrupted evaluation.

    Args:
        model: run, checkpoint, adapter or model directory, a Hub id, or the result of :func:`train`.
        overrides: of the run's config, as for :func:`finray.load_config`.
        split: of the run: ``train``, ``eval`` or ``test``; None uses the test split, else the evaluation split.
        file: evaluate on the rows of this file instead, in any format that training reads.
        baselines: models to compare with; None uses the adapter's base, or the model a run started from (``base``).
        metrics: names of scores; None uses ``evaluation.metrics``.
        max_rows: evaluate a seeded sample of this many rows; None uses ``evaluation.max_rows``.
        max_new_tokens: maximum number of tokens in an answer; None uses ``evaluation.max_new_tokens``.
        temperature: 0 means greedy decoding.
        top_p: sample from the most likely tokens with this total probability.
        top_k: sample from this many most likely tokens; 0 means all.
        seed: for sampling and the statistics.
        stop: an answer stops before any of these texts.
        repetition_penalty: as Transformers' argument of this name; None uses that of the model's generation config.
        batch_size: number of rows processed at the same time; None uses ``evaluation.batch_size``.
        engine: as for :func:`generate`.
        replicas: number of engines on a Ray cluster that share the rows; 1 runs in this process.
        harness: lm-eval tasks to run as well.
        output: directory to write to; None means ``evaluation/`` next to the weights.
        base: base model of the adapter, if it has moved.
        quiet: show no progress.
        trust_run: accept the code and the local files that the run's config, or the model, names.

    Raises:
        FinrayError: there are no rows, settings contradict each other, or files cannot be loaded or written.
    """
    for one in (model, *(baselines or ())):
        _trust(one, trust_run)
    from finray.evaluation.subjects import EvaluationRequest
    from finray.runtime.spread import evaluate as compare
    from finray.tracking.console import steps

    request = EvaluationRequest(
        split=split,
        file=file,
        baselines=None if baselines is None else [str(one) for one in baselines],
        metrics=metrics,
        max_rows=max_rows,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=_texts(stop),
        repetition_penalty=repetition_penalty,
        batch_size=batch_size,
        engine=engine,
        replicas=replicas,
        harness=harness or (),
        output=output,
        base=base,
    )
    with steps(_console(), quiet=quiet) as update:
        return compare(_directory(model), overrides, request, progress=update)


def export(
    run: str | Path | TrainResult,
    output: str | Path,
    *,
    merge: bool = True,
    dtype: str = "bf16",
    base: str | None = None,
    max_shard_size: str | None = None,
    gguf: str | None = None,
    converter: str | Path | None = None,
    onnx: bool = False,
    trust_run: bool = False,
) -> Exported | GgufExported | OnnxExported:
    """Write a model that Transformers or PEFT loads, and check it by loading it.

    Args:
        run: run, checkpoint or model directory, or the result of :func:`train`.
        output: directory to create.
        merge: merge the adapter into the model; False writes only the adapter.
        dtype: dtype of the written weights: fp32, bf16 or fp16.
        base: base model of the adapter, if it has moved.
        max_shard_size: maximum size of a file of weights, such as ``5GB``.
        gguf: write one GGUF file instead, and a Modelfile for Ollama: ``f16`` or ``q8_0``.
        converter: path of llama.cpp's ``convert_hf_to_gguf.py``; None uses the installed one.
        onnx: write a classifier as an ONNX file instead, always in fp32.
        trust_run: accept the code and the local files that the run's config, or the model, names.

    Raises:
        FinrayError: the model cannot be loaded, the output exists, or the written model differs from the trained one.
    """
    _trust(run, trust_run)
    if gguf is not None or onnx:
        kind = "GGUF" if gguf is not None else "ONNX"
        if gguf is not None and onnx:
            raise ConfigError(
                "a model is exported to GGUF or to ONNX", where="--onnx", repair="leave out one of the two"
            )
        if not merge:
            raise ConfigError(
                f"an adapter cannot be exported to {kind} by itself",
                where=f"--{kind.lower()}",
                repair="leave --adapter out",
            )
        if max_shard_size is not None:
            raise ConfigError(
                f"{'a GGUF' if gguf is not None else 'an ONNX'} model is a single file",
                where="--max-shard-size",
                repair="leave it out",
            )
    if onnx:
        from finray.publishing.onnx import export_onnx

        return export_onnx(_directory(run), Path(output).expanduser(), base=base)
    if gguf is not None:
        from finray.publishing.gguf import export_gguf

        script = None if converter is None else Path(converter).expanduser()
        return export_gguf(_directory(run), Path(output).expanduser(), kind=gguf, converter=script, base=base)
    from finray.evaluation.artifacts import export_model

    return export_model(_directory(run), output, merge=merge, dtype=dtype, base=base, max_shard_size=max_shard_size)


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


def push(
    run: str | Path | TrainResult,
    to: str | None = None,
    *,
    merged: bool | None = None,
    public: bool | None = None,
    dtype: str = "bf16",
    base: str | None = None,
    trust_run: bool = False,
) -> Pushed:
    """Push a model to the Hugging Face Hub, with a model card. The same call finishes a push that was killed.

    Args:
        run: run, checkpoint or model directory, or the result of :func:`train`.
        to: name on the Hub, ``OWNER/NAME``; None uses ``export.push_to_hub``, else the run's name under the user's
            account.
        merged: merge the adapter into its base model first; None uses ``export.merged``.
        public: make the model public; None uses ``export.public``.
        dtype: dtype of merged weights: fp32, bf16 or fp16.
        base: base model of the adapter: its name on the Hub, or its directory if it has moved.
        trust_run: accept the code and the local files that the run's config, or the model, names.

    Raises:
        FinrayError: the Hub does not allow the push (checked first), or does not answer.
    """
    _trust(run, trust_run)
    from finray.publishing.push import push as run_push

    return run_push(_directory(run), to=to, merged=merged, public=public, dtype=dtype, base=base)


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
    return write([_directory(one) for one in several], output)


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
