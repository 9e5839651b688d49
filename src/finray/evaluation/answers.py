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
from finray.evaluation import harness
from finray.evaluation.engines import Engine, Sampling, joins_gpus, make_engine, require_engine
from finray.evaluation.estimates import Judged, Loss
from finray.evaluation.kept import Kept
from finray.evaluation.outcome import Estimate, Prediction
from finray.evaluation.rows import Rows
from finray.evaluation.scores.base import blaming, score_named
from finray.evaluation.statistics import Interval
from finray.evaluation.subjects import Case, Subject
from finray.evaluation.work import Work
from finray.models.artifacts import Artifact
from finray.pretrained.tokenizers import load_tokenizer
from finray.tasks.causal_lm import CausalLM

_ONE_NUMBER = Interval(None, None, "none: the function returns a single number")


def judge(case: Case) -> Judged:
    """Let models answer the rows; results are saved as they are computed, and nothing is computed twice.

    For rows that are trained on as a whole, only losses are computed.

    Raises:
        FinrayError: a score does not fit, a package is missing, or files cannot be loaded or written.
    """
    request, settings, config = case.request, case.config.evaluation, case.config
    scoring = settings.scoring or ScoringConfig()
    options = ["checker", "run_code"] if "pass_at_k" in settings.metrics else []
    options += ["encoder"] if any(one.startswith("bertscore") for one in settings.metrics) else []
    require_trusted(config, "evaluation.metrics", *(f"evaluation.scoring.{one}" for one in options))
    scores = {metric_name(name): score_named(name, scoring) for name in settings.metrics}
    needs = frozenset[str]().union(*(one.needs for one in scores.values()))
    attempts = scoring.attempts if "columns" in needs else 1
    sampling = Sampling(
        settings.max_new_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        seed=request.seed,
        top_k=request.top_k,
        stop=tuple(request.stop),
        repetition_penalty=request.repetition_penalty,
    )
    if attempts > 1 and not request.temperature:
        raise ConfigError(
            f"{attempts} attempts with greedy decoding give the same answer {attempts} times",
            where="--temperature",
            repair="--temperature 0.8",
        )
    if request.harness:
        harness.require()
    require_engine(request.engine)
    rows = case.rows
    if rows is not None and not rows.asks:
        if request.metrics:
            raise ConfigError(
                f"{', '.join(request.metrics)}: these rows are plain text, so there are no answers to score",
                where="--metrics",
                repair="leave --metrics out: plain text is scored by its loss",
            )
        scores, needs = {}, frozenset()
    choices = _choices(rows, scoring, config) if rows is not None and "choices" in needs else {}
    columns = dict(rows.columns(config)) if rows is not None and "columns" in needs else {}
    loss, task = Loss(), None if rows is None else _own_task(case)
    if task is not None:
        # It may be any number.
        loss.bounds = (None, None)
    used, answered = list[dict[str, str]](), dict[str, list[tuple[str, ...]]]()
    found = Judged(
        {**scores, "loss": loss},
        {one.name: {} for one in case.subjects},
        {one.name: {} for one in case.subjects},
        made_by={
            "engine": [],
            "sampling": asdict(sampling),
            "metrics": list(settings.metrics),
            "scoring": scoring.model_dump(),
            "harness": list(request.harness),
        },
    )
    for artifact, group in case.by_artifact():
        tokenizer, own = load_tokenizer(artifact.tokenizer), case.rows_for(artifact)
        with _engine(case, artifact) as opened:
            for subject in group:
                if own is not None:
                    work = Work(subject, own, case, sampling, opened, task)
                    statistics = found.statistics[subject.name]
                    statistics["loss"] = work.losses()
                    answers = work.answered(needs, attempts, choices, columns, tokenizer) if scores else []
                    answered[subject.name] = [one.answers for one in answers]
                    for name, score in scores.items():
                        with blaming(name):
                            if (each := score.statistics(answers)) is not None:
                                statistics[name] = each
                                found.counts.setdefault(subject.name, {})[name] = dict(getattr(score, "counts", {}))
                                shown = name.replace("_", " ")
                                case.notes.extend(
                                    f"{subject.name} {shown}: {one}" for one in getattr(score, "notes", ())
                                )
                            else:
                                value = score.value(answers)
                                found.values[subject.name][name] = Estimate(value, _ONE_NUMBER, 0 <= value <= 1)
                    used += work.made_by
                if request.harness:
                    found.harness[subject.name] = _harness(case, subject, engine := opened())
                    used.append({"name": engine.name, "version": engine.version})
    found.made_by["engine"] = [one for place, one in enumerate(used) if one not in used[:place]]
    if rows is not None and "answers" in needs:
        found.prediction = _shown(case, rows, answered, found)
    return found


def _own_task(case: Case) -> type[CausalLM] | None:
    """The user's task of a run, if it is causal language modelling with another loss; notes say whose loss it is."""
    name = case.config.model.task if case.run is not None else case.tuned.artifact.notes.get("task", CAUSAL_LM.name)
    if name in SPECS:
        return None
    engine, why = case.request.engine, "is known of its run only"
    if case.run is not None:
        why = "is computed by finray's own engine only (--engine transformers, without --replicas)"
        if case.spread is None and (engine == "transformers" or (engine == "auto" and not joins_gpus(engine))):
            require_trusted(case.config, "model.task")
            found, usual = task_class(name), ("__init__", "metric_count", "metrics")
            is_alike = isinstance(found, type) and issubclass(found, CausalLM)
            if is_alike and all(getattr(found, one) is getattr(CausalLM, one) for one in usual):
                case.notes.append(f"the loss is that of the task `{name}`")
                return cast("type[CausalLM]", found)
            why = "needs what the training knows"
    case.notes.append(f"the loss is the cross-entropy of the answers' tokens: that of the task `{name}` {why}")
    return None


def _harness(case: Case, subject: Subject, engine: Engine) -> dict[str, harness.Found]:
    """The metrics of lm-eval's tasks."""
    what, tasks = f"{subject.name} harness", case.request.harness
    case.progress(what, 0, total=len(tasks))
    seed = case.request.seed
    computed = {"engine": case.request.engine, "dtype": str(case.dtype), "reads": engine.max_length, "seed": seed}
    kept = Kept(case.folder, "harness", {"model": subject.identity, **computed})
    metrics = harness.run(engine, tasks, adapter=subject.adapter, seed=seed, kept=kept, notify=case.notes.append)
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


def _choices(rows: Rows, scoring: ScoringConfig, config: Config) -> dict[int, list[str]]:
    """The choices of each row.

    Raises:
        DataError: a row has none.
    """
    if scoring.choices:
        return dict.fromkeys(range(len(rows)), scoring.choices)
    found: dict[int, list[str]] = {}
    for index, columns in rows.columns(config):
        choices = columns.get("choices")
        if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(one, str) for one in choices):
            raise DataError(
                f"the row has no column `choices` with a list of texts (columns: {', '.join(columns)})",
                where=rows.split.where(rows.numbers[index]),
                repair="add the column, or set evaluation.scoring.choices",
            )
        found[index] = choices
    return found


def _shown(
    case: Case, rows: Rows, answered: dict[str, list[tuple[str, ...]]], judged: Judged
) -> Callable[[int], Prediction]:
    tokenizer = load_tokenizer(case.tuned.artifact.tokenizer)

    def prediction(index: int) -> Prediction:
        number = rows.numbers[index]
        return Prediction(
            number,
            rows.split.where(number),
            # Role markers are special tokens in most templates: without them the speakers cannot be told apart.
            tokenizer.decode(rows.prompt(index), skip_special_tokens=False),
            tokenizer.decode(rows.reference(index), skip_special_tokens=True),
            {name: list(texts[index]) for name, texts in answered.items()},
            judged.of_row(index),
        )

    return prediction
