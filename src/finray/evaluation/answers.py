"""The judge of generative models: losses, answers and likelihoods of choices, and their scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, cast

from finray.config.evaluation import ScoringConfig
from finray.config.schema import Config
from finray.config.tasks import CAUSAL_LM, SPECS, metric_name, task_class
from finray.config.trust import require_trusted
from finray.errors import ConfigError, DataError
from finray.evaluation import harness, pairs
from finray.evaluation.engines import Engine, Sampling, joins_gpus, make_engine, require_engine
from finray.evaluation.estimates import Judged, Loss
from finray.evaluation.outcome import Prediction, ScoreEstimate
from finray.evaluation.result_cache import ResultCache
from finray.evaluation.rows import EvaluationRows
from finray.evaluation.scores.base import Answered, FloatArray, Score, blaming, score_named
from finray.evaluation.statistics import Interval
from finray.evaluation.subjects import Case, Subject
from finray.evaluation.work import Work
from finray.models.artifacts import Artifact
from finray.pretrained.tokenizers import load_tokenizer
from finray.tasks.causal_lm import CausalLM

_SINGLE_NUMBER = Interval(None, None, "none: the function returns a single number")


def judge(case: Case) -> Judged:
    """Let models answer the rows; results are saved as they are computed, and nothing is computed twice.

    For rows that are trained on as a whole, only losses are computed. Raises FinrayError: a score does not fit, a
    package is missing, or files cannot be loaded or written.
    """
    request, settings = case.request, case.config.evaluation
    scoring = settings.scoring or ScoringConfig()
    scores = _scores(case, scoring)
    needs = frozenset[str]().union(*(score.needs for score in scores.values()))
    attempts = scoring.attempts if "columns" in needs else 1
    sampling = _sampling(case, attempts)
    if request.harness:
        harness.require()
    require_engine(request.engine)
    rows = case.rows
    are_pairs = rows is not None and rows.are_pairs
    if are_pairs and settings.metrics == type(settings)().metrics and request.metrics is None:
        scores, needs = {}, frozenset()
    if rows is not None and not rows.asks:
        if request.metrics:
            raise ConfigError(
                f"{', '.join(request.metrics)}: these rows are plain text, so there are no answers to score",
                where="--metrics",
                repair="leave --metrics out: plain text is scored by its loss",
            )
        scores, needs = {}, frozenset()
    choices = _choices(rows, scoring, case.reading) if rows is not None and "choices" in needs else {}
    columns = dict(rows.columns(case.reading)) if rows is not None and "columns" in needs else {}
    loss, task = Loss(), None if rows is None or are_pairs else _user_task(case)
    if task is not None:
        # It may be any number.
        loss.bounds = (None, None)
    made_by: dict[str, Any] = {"engine": [], "sampling": asdict(sampling), "metrics": list(settings.metrics)}
    made_by |= {"scoring": scoring.model_dump(), "harness": list(request.harness or ())}
    names = [subject.name for subject in case.subjects]
    totals = {**(pairs.SCORES if are_pairs else {}), **scores, "loss": loss}
    judged = Judged(totals, {name: {} for name in names}, {name: {} for name in names})
    judged.made_by = made_by
    engines, answered = list[dict[str, str]](), dict[str, list[tuple[str, ...]]]()
    of_pairs = dict[str, FloatArray]()
    for artifact, group in case.by_artifact():
        tokenizer, model_rows = load_tokenizer(artifact.tokenizer), case.rows_for(artifact)
        with _engine(case, artifact) as opened:
            for subject in group:
                if model_rows is not None:
                    work = Work(subject, model_rows, case, sampling, opened, task)
                    losses_N2 = work.losses(following=int(are_pairs))
                    if are_pairs:
                        of_pairs[subject.name] = losses_N2.reshape(-1, 2, 2)
                        judged.statistics[subject.name] |= pairs.likelihoods(of_pairs[subject.name])
                        losses_N2 = losses_N2[::2]
                    judged.statistics[subject.name]["loss"] = losses_N2
                    answers = work.answered(needs, attempts, choices, columns, tokenizer) if scores else []
                    answered[subject.name] = [row.answers for row in answers]
                    _score(case, judged, subject.name, scores, answers)
                    engines += work.made_by
                if request.harness:
                    judged.harness[subject.name] = _harness(case, subject, engine := opened())
                    engines.append({"name": engine.name, "version": engine.version})
    made_by["engine"] = [name for place, name in enumerate(engines) if name not in engines[:place]]
    _reward(case, judged, of_pairs)
    if rows is not None and (are_pairs or "answers" in needs):
        judged.prediction = shown(case, rows, answered, judged)
    return judged


def _scores(case: Case, scoring: ScoringConfig) -> dict[str, Score]:
    """The scores that are asked for, by name. Raises FinrayError: one does not fit, or its package is missing."""
    metrics = case.config.evaluation.metrics
    options = ["checker", "run_code"] if "pass_at_k" in metrics else []
    options += ["encoder"] if any(name.startswith("bertscore") for name in metrics) else []
    require_trusted(case.config, "evaluation.metrics", *(f"evaluation.scoring.{name}" for name in options))
    return {metric_name(name): score_named(name, scoring) for name in metrics}


def _sampling(case: Case, attempts: int) -> Sampling:
    """How answers are sampled.
    Raises ConfigError: a value is out of range, or all attempts would give the same answer."""
    request = case.request
    if attempts > 1 and not request.temperature:
        raise ConfigError(
            f"{attempts} attempts with greedy decoding give the same answer {attempts} times",
            where="--temperature",
            repair="--temperature 0.8",
        )
    return Sampling.of(request, case.config.evaluation.max_new_tokens)


def _score(case: Case, judged: Judged, model: str, scores: dict[str, Score], answers: list[Answered]) -> None:
    """Add the scores of a model's answers: as statistics of rows, or as a number if a score has none."""
    for name, score in scores.items():
        with blaming(name):
            if (statistics_NK := score.statistics(answers)) is None:
                value = score.value(answers)
                judged.values[model][name] = ScoreEstimate(value, _SINGLE_NUMBER, 0 <= value <= 1)
                continue
            judged.statistics[model][name] = statistics_NK
            judged.counts.setdefault(model, {})[name] = dict(getattr(score, "counts", {}))
            shown = name.replace("_", " ")
            case.notes.extend(f"{model} {shown}: {note}" for note in getattr(score, "notes", ()))


def _reward(case: Case, judged: Judged, of_pairs: dict[str, FloatArray]) -> None:
    """Add the rewards of pairs by the run's objective: of the tuned model if they are relative to what the run began
    from, else of all models."""
    if not of_pairs or case.resolved is None or (is_relative := pairs.needs_reference(case.config)) is None:
        return
    reference = of_pairs.get(case.reference) if is_relative else None
    if is_relative and reference is None:
        case.notes.append(f"rewards are relative to `{case.reference}`: add --baseline {case.reference} for them")
        return
    for name in [case.tuned.name] if is_relative else of_pairs:
        judged.statistics[name] |= pairs.rewards(case.config, case.resolved, of_pairs[name], reference)


def _user_task(case: Case) -> type[CausalLM] | None:
    """The user's task of a run, if it is causal language modelling with another loss; notes say whose loss it is."""
    name = case.config.model.task if case.run is not None else case.tuned.artifact.notes.get("task", CAUSAL_LM.name)
    if name in SPECS:
        return None
    engine, why = case.request.engine, "is known of its run only"
    if case.run is not None:
        why = "is computed by finray's own engine only (--engine transformers, without --replicas)"
        if case.spread is None and (engine == "transformers" or (engine == "auto" and not joins_gpus(engine))):
            require_trusted(case.config, "model.task")
            task, usual = task_class(name), ("__init__", "collate", "outputs")
            is_alike = isinstance(task, type) and issubclass(task, CausalLM)
            if is_alike and all(getattr(task, member) is getattr(CausalLM, member) for member in usual):
                case.notes.append(f"the loss is that of the task `{name}`")
                return cast("type[CausalLM]", task)
            why = "needs what the training knows"
    case.notes.append(f"the loss is the cross-entropy of the answers' tokens: that of the task `{name}` {why}")
    return None


def _harness(case: Case, subject: Subject, engine: Engine) -> dict[str, harness.TaskMetric]:
    """The metrics of lm-eval's tasks."""
    what, tasks = f"{subject.name} harness", case.request.harness or ()
    case.progress(what, 0, total=len(tasks))
    seed = case.request.seed
    computed = {"engine": case.request.engine, "dtype": str(case.dtype), "reads": engine.max_length, "seed": seed}
    cache = ResultCache(case.folder, "harness", {"model": subject.identity, **computed})
    metrics = harness.run(engine, tasks, adapter=subject.adapter, seed=seed, cache=cache, notify=case.notes.append)
    case.progress(what, len(tasks), total=len(tasks))
    return metrics


@contextmanager
def _engine(case: Case, artifact: Artifact) -> Iterator[Callable[[], Engine]]:
    """Yields a function that returns a model's engine, which is loaded on first use."""
    loaded: list[Engine] = []

    def opened() -> Engine:
        if not loaded:
            size = case.config.evaluation.batch_size
            options: dict[str, Any] = {"batch_size": size, "dtype": case.dtype, "notify": case.notes.append}
            if case.spread is not None:
                require_trusted(case.config, "cluster.address")
                options |= {"replicas": case.request.replicas, "cluster": case.config.cluster}
            loaded.append((case.spread or make_engine)(case.request.engine, artifact, **options))
        return loaded[0]

    try:
        yield opened
    except KeyboardInterrupt as stop:
        stop.add_note("finished rows are kept")
        raise
    finally:
        for engine in loaded:
            engine.close()


def _choices(rows: EvaluationRows, scoring: ScoringConfig, config: Config) -> dict[int, list[str]]:
    """The choices of each row. Raises DataError: a row has none."""
    if scoring.choices:
        return dict.fromkeys(range(len(rows)), scoring.choices)
    by_row: dict[int, list[str]] = {}
    for index, columns in rows.columns(config):
        choices = columns.get("choices")
        if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(choice, str) for choice in choices):
            raise DataError(
                f"the row has no column `choices` with a list of texts (columns: {', '.join(columns)})",
                where=rows.split.where(rows.numbers[index]),
                repair="add the column, or set evaluation.scoring.choices",
            )
        by_row[index] = choices
    return by_row


def shown(
    case: Case, rows: EvaluationRows, answered: dict[str, list[tuple[str, ...]]], judged: Judged
) -> Callable[[int], Prediction]:
    """A function that makes a row, by its index, a text with the models' answers and scores."""
    tokenizer = load_tokenizer(case.tuned.artifact.tokenizer)

    def prediction(index: int) -> Prediction:
        number = rows.numbers[index]
        return Prediction(
            number,
            rows.split.where(number),
            # Role markers are special tokens in most templates: without them the speakers cannot be told apart.
            tokenizer.decode(rows.prompt(index), skip_special_tokens=False),
            tokenizer.decode(rows.reference(index), skip_special_tokens=True),
            {name: list(texts[index]) for name, texts in answered.items() if texts},
            judged.of_row(index),
            tokenizer.decode(rows.reference(index, 1), skip_special_tokens=True) if rows.are_pairs else None,
        )

    return prediction
