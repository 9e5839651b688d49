"""``finray evaluate``: one or several models on the same rows, with intervals, paired tests and one sentence."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from finray.checkpoint.rundir import CONFIG_FILE, RunDir, saved_config
from finray.config.load import Overrides, load_config
from finray.config.paths import PREPARED, prepared_dir, with_absolute_paths
from finray.config.resolved import LabelSet
from finray.config.schema import Config, ModelConfig
from finray.config.scoring import ScoringConfig
from finray.config.tasks import CAUSAL_LM, SEQUENCE_CLASSIFICATION
from finray.data.sampling.splits import sample
from finray.errors import ConfigError, DataError, FinrayError, ModelError
from finray.evaluation import harness as lm_eval
from finray.evaluation.artifacts import find_artifact, inference_device, inference_dtype
from finray.evaluation.classifiers import COMMONEST, judge, prediction_scores, shown
from finray.evaluation.engines import Engine, Sampling, make_engine
from finray.evaluation.estimates import Loss, compared_with, evaluated, sentences
from finray.evaluation.outcome import Comparison, Estimate, Evaluated, Prediction, write
from finray.evaluation.overlap import overlap
from finray.evaluation.rows import Lazy, Rows, of_file, of_run, splits_of
from finray.evaluation.scores.base import Answered, FloatArray, Score, score_named, short_name
from finray.evaluation.statistics import Interval
from finray.evaluation.work import Progress, Subject, Work
from finray.files import require_writable
from finray.models.artifacts import Artifact
from finray.pretrained.tokenizers import check_exists, load_tokenizer, not_loaded, source_options


def evaluate(
    model: str | Path,
    overrides: Overrides = (),
    *,
    split: str | None = None,
    file: str | Path | None = None,
    baselines: Sequence[str] | None = None,
    metrics: Sequence[str] | None = None,
    max_rows: int | None = None,
    max_new_tokens: int | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    batch_size: int | None = None,
    engine: str = "auto",
    harness: Sequence[str] = (),
    output: str | Path | None = None,
    base: str | None = None,
    progress: Progress = lambda what, done, *, total, rate="": None,
) -> Comparison:
    """Score a model, and compare it with others on the same rows.

    Rows are prepared as for training, so that a prompt is the very tokens of training up to the last answer. Rows that
    are learned as a whole have no prompt; of them it is the losses alone. What was computed is kept as it comes, and
    the same call goes on with it.

    Args:
        model: a run, checkpoint, adapter or model directory, or a Hub id.
        overrides: of the run's config, ``section.field=value``.
        split: of the run: ``train``, ``eval`` or ``test``; None for the test split, else that of evaluation.
        file: rows of a file instead, in any format that training reads.
        baselines: models to compare with; None for an adapter's base, or what a run started from. ``base`` names that.
        metrics: names of scores; None takes ``evaluation.metrics``.
        max_rows: a seeded sample of so many rows; None takes ``evaluation.max_rows``.
        max_new_tokens: of each answer; None takes ``evaluation.max_new_tokens``.
        temperature: 0 is greedy decoding.
        top_p: share of probability to sample from.
        seed: of sampling tokens and of the statistics.
        batch_size: rows at work at the same time; None takes ``evaluation.batch_size``.
        engine: that answers, or ``auto``.
        harness: tasks of lm-eval to run, too.
        output: directory to write to; None for one beside the weights.
        base: overrides the base model that an adapter names.
        progress: told how far each part has come.

    Raises:
        FinrayError: there is nothing to evaluate, something does not fit, or something cannot be loaded or written.
    """
    run = _run_of(model)
    if harness:
        lm_eval.require()
    artifact = _artifact(model, base=base)
    config = _config_of(model, run, artifact, file, overrides)
    asked_for = config.evaluation
    names = list(asked_for.metrics if metrics is None else metrics)
    scoring = asked_for.scoring or ScoringConfig()
    tuned = Subject(_name_of(model, run), artifact)
    if tuned.artifact.model.task == SEQUENCE_CLASSIFICATION.name:
        if metrics or harness:
            raise ConfigError(
                "a classifier gives labels and no answers",
                where="--metrics" if metrics else "--harness",
                repair="leave it out: accuracy, F1 and the others are always there",
            )
        return _of_classifier(
            tuned,
            run,
            config,
            split=split,
            file=file,
            baselines=baselines,
            max_rows=max_rows,
            seed=seed,
            folder=_folder(model, run, artifact, split, file, output),
            progress=progress,
        )
    if tuned.artifact.model.task != CAUSAL_LM.name:
        raise ModelError(f"a model of the task `{tuned.artifact.model.task}` has no answers", where=str(model))
    subjects = [*_baselines(baselines, tuned, run, config), tuned]
    for one in subjects:
        check_exists(one.artifact.model.name)
    scores = {short_name(name): score_named(name, scoring) for name in names}
    needs_columns = any("columns" in one.needs for one in scores.values())
    attempts = scoring.attempts if needs_columns else 1
    most = asked_for.max_new_tokens if max_new_tokens is None else max_new_tokens
    sampling = Sampling(most, temperature, top_p, seed)
    if attempts > 1 and not temperature:
        raise ConfigError(
            f"{attempts} greedy answers are one answer {attempts} times",
            where="--temperature",
            repair="--temperature 0.8",
        )
    folder = _folder(model, run, tuned.artifact, split, file, output)
    notes: list[str] = []
    count = asked_for.max_rows if max_rows is None else max_rows
    has_rows = run is not None or file is not None
    if not has_rows and not harness:
        raise DataError("there are no rows to evaluate", where=str(model), repair="name a file of rows with --file")
    rows = _rows(run, config, split, file, count, notes) if has_rows else None
    if rows is not None and not rows.asks:
        if metrics:
            raise ConfigError(
                f"{', '.join(names)}: these rows are learned as a whole and ask for no answer",
                where="--metrics" if metrics else "evaluation.metrics",
                repair="leave --metrics out: plain text has a loss",
            )
        scores = {}
    choices = _choices(rows, scores, scoring, config) if rows is not None else {}
    columns = dict(rows.columns(str(config.data.source))) if rows and needs_columns else {}
    resolved = None if run is None else run.resolved()
    precision = config.train.precision if resolved is None else resolved.precision
    dtype = inference_dtype(precision if run is not None else None, inference_device())

    statistics: dict[str, dict[str, FloatArray]] = {}
    values: dict[str, dict[str, float]] = {}
    answered: dict[str, list[tuple[str, ...]]] = {}
    harnessed: dict[str, dict[str, lm_eval.Found]] = {}
    engines: list[dict[str, str]] = []
    text: Any = None
    for artifact, group in _by_artifact(subjects):
        loaded: list[Engine] = []

        def open_engine(artifact: Artifact = artifact, loaded: list[Engine] = loaded) -> Engine:
            # Not before something is left to be computed.
            if not loaded:
                size = asked_for.batch_size if batch_size is None else batch_size
                loaded.append(make_engine(engine, artifact, batch_size=size, dtype=dtype, tell=notes.append))
            return loaded[0]

        tokenizer = load_tokenizer(ModelConfig(name=str(artifact.folder)))
        text = tokenizer if artifact is tuned.artifact else text
        own = _rows_for(rows, artifact, tuned.artifact, config, run) if rows is not None else None
        try:
            for subject in group:
                work = Work(subject, own, folder, engine, str(dtype), sampling, progress, open_engine)
                if own is not None:
                    values[subject.name], statistics[subject.name] = {}, {}
                    losses = work.losses()
                    statistics[subject.name]["loss"] = losses
                    likelihoods = work.likelihoods(choices, tokenizer) if choices else []
                    needs_answers = any("answers" in one.needs for one in scores.values())
                    said = work.answers(attempts) if own.asks and needs_answers else []
                    answered[subject.name] = said
                    answers = [
                        Answered(
                            said[index] if said else (),
                            tokenizer.decode(own.reference(index), skip_special_tokens=True),
                            columns.get(index, {}),
                            *(likelihoods[index] if choices else ()),
                        )
                        for index in range(len(own))
                    ]
                    for name, score in scores.items():
                        found = score.statistics(answers)
                        if found is None:
                            values[subject.name][name] = score.value(answers)
                        else:
                            statistics[subject.name][name] = found
                if harness:
                    progress(f"{subject.name} harness", 0, total=len(harness))
                    harnessed[subject.name] = lm_eval.run(open_engine(), harness, adapter=subject.adapter, seed=seed)
                    progress(f"{subject.name} harness", len(harness), total=len(harness))
                engines += work.made_by
            engines += [{"name": used.name, "version": used.version} for used in loaded]
        finally:
            for used in loaded:
                used.close()

    order = list(scores)
    totals: dict[str, Score] = {**scores, "loss": Loss()}
    models = (
        [evaluated(one.name, order, totals, statistics, values, None, seed) for one in subjects]
        if rows
        else [Evaluated(one.name, {}) for one in subjects]
    )
    compared = compared_with(models, totals, statistics, seed) if rows else []
    models, more = lm_eval.joined(models, harnessed, seed=seed)
    compared += more
    seen = (
        None
        if rows is None or rows.train is None or rows.name == "train"
        else overlap(rows.split, rows.numbers, rows.train)
    )
    if rows is not None and rows.name == "train":
        notes.append("these are the rows that the model was trained on: their scores say what it remembers")
    elif rows is not None and rows.train is None:
        notes.append("the training data is not known, so rows of it were not looked for")
    held_out: list[Evaluated] = []
    if seen is not None and seen.rows and len(seen.rows) < len(rows or ()):
        kept = np.array([index not in seen.rows for index in range(len(rows or ()))])
        held_out = [evaluated(one.name, order, totals, statistics, {}, kept, seed) for one in subjects]
    made_by = {
        "model": tuned.identity,
        "baselines": {one.name: one.identity for one in subjects[:-1]},
        "data": None if rows is None else _data(rows, config, count),
        "engine": [one for place, one in enumerate(engines) if one not in engines[:place]],
        "dtype": str(dtype).removeprefix("torch."),
        "sampling": {name: getattr(sampling, name) for name in ("max_new_tokens", "temperature", "top_p", "seed")},
        "metrics": names,
        "scoring": scoring.model_dump(),
        "harness": list(harness),
        "versions": _versions(),
    }
    predictions: Sequence[Prediction] = ()
    if rows is not None and any(answered.values()):
        predictions = Lazy(len(rows), partial(_prediction, rows, text, answered, statistics, order))
    comparison = Comparison(
        tuple(models),
        tuple(compared),
        sentences(models, compared, totals),
        0 if rows is None else len(rows),
        predictions,
        folder,
        seen,
        tuple(held_out),
        made_by,
        tuple(dict.fromkeys(notes)),
    )
    write(comparison)
    return comparison


def _of_classifier(
    tuned: Subject,
    run: RunDir | None,
    config: Config,
    *,
    split: str | None,
    file: str | Path | None,
    baselines: Sequence[str] | None,
    max_rows: int | None,
    seed: int,
    folder: Path,
    progress: Progress,
) -> Comparison:
    """As :func:`evaluate`, of a classifier: beside others, or beside what the commonest label comes to."""
    if run is None and file is None:
        raise DataError("there are no rows to evaluate", where=tuned.name, repair="name a file of rows with --file")
    notes: list[str] = []
    count = config.evaluation.max_rows if max_rows is None else max_rows
    rows = _rows(run, config, split, file, count, notes, labelled=True)
    subjects = [Subject(Path(one).name, _artifact(one)) for one in baselines or () if one not in ("none", "")]
    if baselines is None and rows.train is not None:
        # The base of an adapter has no head, and a random one says nothing.
        subjects = [Subject(COMMONEST, tuned.artifact)]
    subjects.append(tuned)
    resolved = None if run is None else run.resolved()
    known = None if resolved is None or resolved.problem is None else LabelSet(resolved.problem, resolved.labels)
    dtype = inference_dtype(None if resolved is None else resolved.precision, inference_device())
    judged = judge(subjects, rows, labels=known, dtype=dtype, tell=notes.append, progress=progress)
    totals, order = dict(judged.totals), list(judged.totals)
    models = [evaluated(one.name, order, totals, judged.statistics, {}, None, seed) for one in subjects]
    for one in models:
        none = Interval(None, None, "none: it is not a sum over rows")
        one.scores.update(
            {name: Estimate(value, none, False) for name, value in judged.values.get(one.name, {}).items()}
        )
    compared = compared_with(models, totals, judged.statistics, seed)
    if rows.name == "train":
        notes.append("these are the rows that the model was trained on: their scores say what it remembers")
    seen = None if rows.train is None or rows.name == "train" else overlap(rows.split, rows.numbers, rows.train)
    held_out: list[Evaluated] = []
    if seen is not None and 0 < len(seen.rows) < len(rows):
        kept = np.array([index not in seen.rows for index in range(len(rows))])
        held_out = [evaluated(one.name, order, totals, judged.statistics, {}, kept, seed) for one in subjects]
    tokenizer = load_tokenizer(ModelConfig(name=str(tuned.artifact.folder)))
    labels = rows.split.labels

    def prediction(index: int) -> Prediction:
        number = rows.numbers[index]
        return Prediction(
            number,
            rows.split.where(number),
            tokenizer.decode(rows.split.row(number)[0].tolist(), skip_special_tokens=True),
            shown(labels[number]),
            {name: [shown(said[index].label)] for name, said in judged.predictions.items()},
            prediction_scores(judged, index),
        )

    comparison = Comparison(
        tuple(models),
        tuple(compared),
        sentences(models, compared, totals),
        len(rows),
        Lazy(len(rows), prediction),
        folder,
        seen,
        tuple(held_out),
        {
            "model": tuned.identity,
            "baselines": {one.name: one.identity for one in subjects[:-1] if one.name != COMMONEST},
            "data": _data(rows, config, count),
            "dtype": str(dtype).removeprefix("torch."),
            "versions": _versions(),
        },
        tuple(dict.fromkeys(notes)),
        judged.labels.names,
        judged.confusion,
    )
    write(comparison)
    return comparison


def _versions() -> dict[str, str]:
    own = {name: version(name) for name in ("finray", "torch", "transformers", "peft")}
    return {"python": platform.python_version(), **own}


# --- what is evaluated -----------------------------------------------------------------------------------


def _run_of(model: str | Path) -> RunDir | None:
    path = Path(model).expanduser()
    if not path.is_dir():
        return None
    path = path.resolve()
    return next((RunDir(one) for one in (path, path.parent) if (one / CONFIG_FILE).is_file()), None)


def _name_of(model: str | Path, run: RunDir | None) -> str:
    return "tuned" if run is not None else Path(model).name


def _artifact(model: str | Path, *, base: str | None = None) -> Artifact:
    """The weights of a directory or a Hub id.

    Raises:
        FinrayError: there are none.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return find_artifact(path, base=base)
    try:
        check_exists(str(model))
    except ModelError as error:
        raise ModelError(
            error.message, where=str(model), repair="name a run, checkpoint or model directory, or a Hub id"
        ) from None
    return Artifact(Path(model), None, {})


def _config_of(
    model: str | Path, run: RunDir | None, artifact: Artifact, file: str | Path | None, overrides: Overrides
) -> Config:
    """The config of the run, or one for these weights; rows of a file are read as the run reads its own."""
    if run is not None:
        config = saved_config(run)
    else:
        config = load_config({"model": {"name": str(model)}, "data": {"source": str(file or "none")}})
        config = config.model_copy(update={"model": artifact.model})
    if file is not None:
        if not Path(file).expanduser().is_file():
            raise DataError("the file does not exist", where=f"--file {file}")
        own: dict[str, Any] = {"source": str(file), "mix": [], "group_by": None, "train_split": "train"}
        own |= dict.fromkeys(("eval_source", "eval_split", "test_split", "subset", "revision"))
        # A reference that is cut off would be another one.
        own |= {"eval_ratio": 0.0, "test_ratio": 0.0, "on_too_long": "drop"}
        own["max_length"] = max(config.data.max_length, _context(artifact.model))
        config = config.model_copy(update={"data": config.data.model_copy(update=own)})
    return with_absolute_paths(load_config(config, overrides))


def _context(model: ModelConfig) -> int:
    """Tokens that a model reads; 0 where it does not say."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(**source_options(model)).get_text_config()
    except Exception as error:
        # Files that others have written: there is no list of errors.
        raise not_loaded("model's configuration", model, error) from None
    return min(getattr(config, "max_position_embeddings", None) or 0, 2**24)


def _baselines(named: Sequence[str] | None, tuned: Subject, run: RunDir | None, config: Config) -> list[Subject]:
    """The models to compare with.

    Raises:
        FinrayError: one of them is not there.
    """
    own: Subject | None = None
    if tuned.artifact.is_adapter:
        own = Subject("base", tuned.artifact, adapter=False)
    elif run is not None:
        own = Subject("base", _artifact(config.model.name))
    if named is None:
        return [] if own is None else [own]
    found: list[Subject] = []
    for name in named:
        if name == "base" and own is not None:
            found.append(own)
        elif name not in ("none", ""):
            short = Path(name).name if Path(name).name not in ("", "final") else str(name)
            found.append(Subject(short if short != tuned.name else name, _artifact(name)))
    if len({one.name for one in found}) < len(found):
        found = [replace(one, name=str(named[place])) for place, one in enumerate(found)]
    return found


def _by_artifact(subjects: Sequence[Subject]) -> Iterator[tuple[Artifact, list[Subject]]]:
    """Models that share their weights together, so that these are loaded once."""
    left = list(subjects)
    while left:
        artifact = left[0].artifact
        yield artifact, [one for one in left if one.artifact is artifact]
        left = [one for one in left if one.artifact is not artifact]


def _folder(
    model: str | Path,
    run: RunDir | None,
    artifact: Artifact,
    split: str | None,
    file: str | Path | None,
    output: str | Path | None,
) -> Path:
    """Where results go, made and known to be writable.

    Raises:
        FinrayError: nothing can be written there.
    """
    if output is not None:
        folder = Path(output).expanduser()
    elif run is None:
        known = artifact.folder if Path(model).expanduser().is_dir() else Path(str(model).replace("/", "--"))
        folder = known / "evaluation"
    else:
        path = Path(model).expanduser().resolve()
        folder = run.path / "evaluation" / ("" if path in (run.path, run.final) else path.name)
    if output is None and (file is not None or split is not None):
        folder /= split or Path(str(file)).stem
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FinrayError(
            f"the scores cannot be written: {(error.strerror or str(error)).lower()}",
            where=str(folder),
            repair="name another directory with --output",
        ) from None
    require_writable(folder)
    return folder


def _rows(
    run: RunDir | None,
    config: Config,
    split: str | None,
    file: str | Path | None,
    most: int | None,
    notes: list[str],
    *,
    labelled: bool = False,
) -> Rows:
    train = None
    if file is not None and split is not None:
        raise ConfigError("a file has no splits", where="--split", repair="give --split or --file")
    if file is None:
        assert run is not None
        name, held, dataset, train = of_run(run, config, split)
    else:
        root = None if run is None or config.prepare.dir else run.path.parent / PREPARED
        held, dataset = of_file(config, root=root)
        name = Path(file).name
        if run is not None:
            try:
                train = splits_of(run, saved_config(run))[0].train
            except FinrayError as error:
                notes.append(f"rows of the training data were not looked for: {error.message}")
        lost = int(held.source_rows.max()) + 1 - len(np.unique(held.source_rows))
        if lost > 0:
            notes.append(f"{lost} rows are longer than data.max_length={config.data.max_length} and were left out")
    if (dataset.kind() == "labelled") != labelled:
        what = "rows with prompts and answers are not for" if labelled else "rows with labels are for"
        repair = "name rows with a text and a label" if labelled else "name rows with prompts and answers"
        raise DataError(f"{what} a classifier", where="data.format", repair=repair)
    asks = config.data.train_on != "all" and dataset.kind() != "text"
    return Rows(name, held, tuple(sample(len(held), most, seed=config.run.seed).tolist()), dataset, asks, train)


def _rows_for(rows: Rows, artifact: Artifact, tuned: Artifact, config: Config, run: RunDir | None) -> Rows:
    """The rows as a model's own tokenizer and chat template make them; the same ones where these are the same."""
    if artifact is tuned or (run is not None and str(artifact.folder) == config.model.name):
        return rows
    ours, theirs = (load_tokenizer(ModelConfig(name=str(one.folder))) for one in (tuned, artifact))
    if ours.get_vocab() == theirs.get_vocab() and ours.chat_template == theirs.chat_template:
        return rows
    own = config.model_copy(update={"model": ModelConfig(name=str(artifact.folder))})
    held, dataset = of_file(own, root=None if config.prepare.dir else prepared_dir(config))
    return Rows(rows.name, held, (), dataset, rows.asks, None).like(rows.keys())


def _choices(
    rows: Rows | None, scores: dict[str, Score], scoring: ScoringConfig, config: Config
) -> dict[int, list[str]]:
    """The choices of each row, where a score compares likelihoods.

    Raises:
        FinrayError: there are none, or the reference is not among them.
    """
    if rows is None or not any("choices" in one.needs for one in scores.values()):
        return {}
    if scoring.choices:
        return dict.fromkeys(range(len(rows)), scoring.choices)
    found: dict[int, list[str]] = {}
    for index, columns in rows.columns(str(config.data.source)):
        choices = columns.get("choices")
        if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(one, str) for one in choices):
            raise DataError(
                f"the row has no list of texts in a column `choices` (columns: {', '.join(columns)})",
                where=rows.split.where(rows.numbers[index]),
                repair="write one, or set evaluation.scoring.choices",
            )
        found[index] = choices
    return found


# --- what comes of it ------------------------------------------------------------------------------------


def _prediction(
    rows: Rows,
    tokenizer: Any,
    answered: dict[str, list[tuple[str, ...]]],
    statistics: dict[str, dict[str, FloatArray]],
    order: list[str],
    index: int,
) -> Prediction:
    # Role marks are special tokens of most templates: without them nobody sees who speaks.
    values = {
        model: {name: float(own[name][index, 0]) for name in order if name in own and own[name].shape[1] == 1}
        for model, own in statistics.items()
    }
    return Prediction(
        rows.numbers[index],
        rows.split.where(rows.numbers[index]),
        tokenizer.decode(rows.prompt(index), skip_special_tokens=False),
        tokenizer.decode(rows.reference(index), skip_special_tokens=True),
        {name: list(said[index]) for name, said in answered.items() if said},
        values,
    )


def _data(rows: Rows, config: Config, most: int | None) -> dict[str, Any]:
    return {
        "source": config.data.source,
        "split": rows.name,
        "fingerprint": rows.dataset.name,
        "content": rows.dataset.content,
        "rows": len(rows),
        "of": len(rows.split),
        "max_rows": most,
        "sample_seed": config.run.seed,
    }
