"""The judge of classifiers: each model's predictions, and scores as statistics per row.

Statistics use the evaluated model's class ids, whatever the order in another model.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from importlib.metadata import version

import numpy as np
import numpy.typing as npt

from finray.config.requests import EvaluationRequest
from finray.config.resolved import LabelSet
from finray.config.schema import ModelConfig
from finray.data.dataset.prepared import PreparedSplit
from finray.data.formats.labels import Label
from finray.data.sampling.collate import Row
from finray.errors import ConfigError, DataError
from finray.evaluation.artifacts import inference_device
from finray.evaluation.classify import Classification, Classified, classify
from finray.evaluation.estimates import Judged, Mean
from finray.evaluation.outcome import Prediction, Rate, ScoreEstimate
from finray.evaluation.result_cache import ResultCache
from finray.evaluation.scores.base import Bounds, FloatArray, Score, SummedScore, bounds_of
from finray.evaluation.statistics import Interval, auroc_interval, auroc_rows, interval, spearman_interval
from finray.evaluation.subjects import Case, Subject
from finray.limits import cut
from finray.models.artifacts import load_artifact
from finray.models.packing_cache import packing_of
from finray.objectives.classifier_scores import CONFUSION_METRICS, ScoreSums, f1_scores
from finray.pretrained.tokenizers import load_tokenizer

# Maximum size of a score's statistics; with more classes or rows only the value is given.
_MOST_NUMBERS = 2**24
# What an evaluation request can say about answers; a classifier has none.
_OF_ANSWERS = ["metrics", "harness", "replicas", "engine", "max_new_tokens", "temperature", "top_p", "top_k", "stop"]
_OF_ANSWERS += ["repetition_penalty", "batch_size"]
# Name of the baseline that ignores the text.
COMMONEST = "commonest"
# Classes that a note names.
_NAMED = 5


class FromCounts(SummedScore):
    """A score of the confusion matrix (C, C), which is a sum over rows."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._of = CONFUSION_METRICS[name]
        if name == "matthews_corrcoef":
            self.is_share, self.bounds = False, (-1.0, 1.0)

    def total(self, sums_K: FloatArray, rows: int) -> float:  # noqa: ARG002
        """The score, as in evaluations during training."""
        classes = math.isqrt(len(sums_K))
        return self._of(sums_K.reshape(classes, classes))


class FromCases(SummedScore):
    """An F1 of several labels per row: from hits, wrong and missed ones of each class (3C)."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._place = ("f1_macro", "f1_weighted").index(name)

    def total(self, sums_K: FloatArray, rows: int) -> float:  # noqa: ARG002
        """The score, as in evaluations during training."""
        hits, wrong, missed = sums_K.reshape(3, -1)
        return f1_scores(hits, wrong, missed, np.ones(len(hits), dtype=bool))[self._place]


class Pearson(SummedScore):
    """Pearson's correlation, from sums of x, y, x², y² and xy."""

    is_share = False
    bounds: Bounds | None = (-1.0, 1.0)

    def total(self, sums_K: FloatArray, rows: int) -> float:
        """The correlation; 0 if all numbers are equal."""
        x, y, xx, yy, xy = (sums_K / rows).tolist()
        spread = (xx - x * x) * (yy - y * y)
        return (xy - x * y) / math.sqrt(spread) if spread > 0 else 0.0

    @staticmethod
    def rows(x_N: FloatArray, y_N: FloatArray) -> FloatArray | None:
        """(N, 5): what each row adds to the sums; None if there is no correlation, as of equal numbers."""
        if not np.ptp(x_N) or not np.ptp(y_N):
            return None
        # Around the means: sums of large squares would lose their difference.
        x_N, y_N = x_N - x_N.mean(), y_N - y_N.mean()
        return np.stack((x_N, y_N, x_N * x_N, y_N * y_N, x_N * y_N), axis=1)


def judge(case: Case) -> Judged:
    """Score rows with classifiers; without baselines, compare with always predicting the most common label.
    Raises FinrayError: answers are requested, a model cannot be loaded, or a row has a label unknown to it."""
    request = case.request
    require_no_answers(request, "a classifier predicts labels", "accuracy, F1 and the other metrics")
    rows = case.rows
    assert rows is not None
    name = case.config.model.task if case.run is not None else case.tuned.artifact.notes.get("task", case.spec.name)
    if name != case.spec.name:
        case.notes.append(f"the loss and the scores are those of `{case.spec.name}`, not of the task `{name}`")
    truths = [rows.split.labels[number] for number in rows.numbers]
    held = [rows.split.row(number) for number in rows.numbers]
    classified = {subject.name: _of_labels(case, subject, truths) for subject in case.subjects}
    labels = classified[case.tuned.name].labels
    predictions = {name: _in_order(rows, labels.names) for name, rows in classified.items()}
    if request.baselines is None and rows.train is not None:
        predictions = {COMMONEST: (Classification(commonest(rows.train, labels)),) * len(held), **predictions}
    sums = ScoreSums(labels.problem, labels.names)
    totals, statistics, others = _statistics(sums, truths, predictions)
    if "f1_macro" not in totals and labels.problem != "regression":
        case.notes.append(f"{len(sums.names)} classes are too many: F1, precision and recall have no intervals")
    metrics = {name: model.scores.metrics for name, model in classified.items() if model.scores is not None}
    contrasts = {name: _contrasts(labels, truths, rows) for name, rows in predictions.items()}

    def estimate(model: str, name: str, value: float) -> ScoreEstimate:
        if name == "spearman":
            return ScoreEstimate(value, spearman_interval(value, len(held)))
        if name == "roc_auc":
            return ScoreEstimate(value, auroc_interval(value, contrasts[model].get(name)))
        if name not in others[model]:
            return ScoreEstimate(value, Interval(None, None, "none: there are too many classes and rows"))
        score, statistics_NK = others[model][name]
        # Of precision and recall, the rows of their class.
        few = len(statistics_NK) if len(statistics_NK) < len(held) else None
        span = interval(statistics_NK, score.total, seed=request.seed, bounds=bounds_of(score))
        return ScoreEstimate(value, span, score.is_share, rows=few)

    values = {
        model: {
            name: estimate(model, name, value) for name, value in metrics.get(model, {}).items() if name not in totals
        }
        for model in predictions
    }
    confusion = {
        name: model.scores.confusion for name, model in classified.items() if model.scores and model.scores.confusion
    }
    totals |= {"roc_auc": Mean((0.0, 1.0)), "spearman": Pearson()}
    judged = Judged(totals, statistics, values, classes=labels.names, confusion=confusion, contrasts=contrasts)
    tokenizer = load_tokenizer(ModelConfig(name=str(case.tuned.artifact.folder)))
    if labels.problem != "regression":
        _note_never_predicted(case, truths, predictions[case.tuned.name])

    @cache
    def texts() -> dict[int, str]:
        return rows.texts(case.config)

    def prediction(index: int) -> Prediction:
        predicted = {name: each[index] for name, each in predictions.items()}
        sure = {name: {"probability": max(row.probabilities)} for name, row in predicted.items() if row.probabilities}
        return Prediction(
            rows.numbers[index],
            rows.split.where(rows.numbers[index]),
            # Decoded tokens may be in lower case, or have other spaces.
            texts().get(index) or tokenizer.decode(held[index][0].tolist(), skip_special_tokens=True),
            _shown(truths[index]),
            {name: [_shown(row.label)] for name, row in predicted.items()},
            {name: {**scores, **sure.get(name, {})} for name, scores in judged.of_row(index).items()},
        )

    judged.prediction = prediction
    return judged


def _note_never_predicted(case: Case, truths: Sequence[Label], predicted: Sequence[Classification]) -> None:
    """Note the classes that rows have and no prediction, with their number of rows, the most common first."""
    counts = Counter(name for label in truths for name in _names(label))
    predicted_names = {name for prediction in predicted for name in _names(prediction.label)}
    never = [f"{cut(name, 40)} ({count:,})" for name, count in counts.most_common() if name not in predicted_names]
    if never:
        more = f" and {len(never) - _NAMED:,} more" if len(never) > _NAMED else ""
        what = f"{case.tuned.name} never predicts these classes (with their rows)"
        case.notes.append(f"{what}: {', '.join(never[:_NAMED])}{more}")


def _names(label: Label) -> tuple[str, ...]:
    return label if isinstance(label, tuple) else (str(label),)


def require_no_answers(request: EvaluationRequest, does: str, scores: str) -> None:
    """Refuse options of answers. Raises ConfigError: one is given."""
    usual, given = asdict(EvaluationRequest()), asdict(request)
    nothing: tuple[object, ...] = (None, (), [])
    if wrong := [name for name in _OF_ANSWERS if given[name] != usual[name] and given[name] not in nothing]:
        raise ConfigError(
            f"{does}; it does not write answers",
            where=f"--{wrong[0].replace('_', '-')}",
            repair=f"leave it out: {scores} are always computed",
        )


def _of_labels(case: Case, subject: Subject, truths: Sequence[Label]) -> Classified:
    rows = case.rows_for(subject.artifact)
    assert rows is not None
    # The tokenizer of another model reads the same rows otherwise.
    read = {number: rows.split.row(number) for number in rows.numbers}
    labels = case.resolved.label_set if case.resolved is not None and subject is case.tuned else None
    return classified_rows(case, subject, rows.fingerprint, read, truths, labels)


def classified_rows(
    case: Case,
    subject: Subject,
    fingerprint: str,
    rows: Mapping[int, Row],
    truths: Sequence[Label] | None,
    labels: LabelSet | None,
) -> Classified:
    """A model's predictions for rows, by number, each saved as it is computed: a killed evaluation continues with what
    it has. See :func:`classify` for ``truths`` and ``labels``."""
    read = list(rows.values())
    packs = packing_of(subject.artifact.model).is_told
    key = {"model": subject.identity, "rows": fingerprint, "dtype": str(case.dtype), "packs": packs}
    cache = ResultCache(case.folder, "labels", key)
    numbers = list(rows)
    logits = {row: cache.values[number] for row, number in enumerate(numbers) if number in cache.values}
    model = load_artifact(subject.artifact, dtype=case.dtype).to(inference_device())
    began = time.perf_counter()
    with cache.writer(made_by={"name": "transformers", "version": version("transformers")}) as save:
        classified = classify(
            model,
            read,
            truths,
            packs=packs,
            labels=labels,
            progress=partial(case.progress, f"{subject.name} labels", total=len(read)),
            cached=logits,
            save=lambda row, line: save(numbers[row], line),
        )
    if computed := [len(ids) for row, (ids, _) in enumerate(read) if row not in logits]:
        seconds = time.perf_counter() - began
        case.rates.append(Rate(subject.name, "labels", len(computed), sum(computed), seconds))
    return classified


def commonest(train: PreparedSplit, labels: LabelSet) -> Label:
    """The best constant prediction: the mean, the most common class, or the classes that most rows have."""
    seen = train.labels
    if labels.problem == "regression":
        return float(np.mean([float(label) for label in seen if not isinstance(label, tuple)]))
    counts = Counter(name for label in seen for name in (label if isinstance(label, tuple) else (str(label),)))
    if labels.problem == "multi_label":
        return tuple(name for name in labels.names if 2 * counts[name] > len(seen))
    return counts.most_common(1)[0][0]


# By model: scores with an interval that are not compared, and the statistics of each row.
_Others = dict[str, dict[str, tuple[Score, FloatArray]]]


def _statistics(
    sums: ScoreSums, truths: Sequence[Label], predictions: Mapping[str, Sequence[Classification]]
) -> tuple[dict[str, Score], dict[str, dict[str, FloatArray]], _Others]:
    """The scores that are compared, with each model's statistics of the rows; and others, with theirs."""
    statistics: dict[str, dict[str, FloatArray]] = {name: {} for name in predictions}
    others: _Others = {name: {} for name in predictions}
    if sums.problem == "regression":
        error = Mean((0.0, None), higher_is_better=False)
        y = np.array([_number(truth) for truth in truths])
        for name, predicted in predictions.items():
            x = np.array([_number(prediction.label) for prediction in predicted])
            statistics[name]["mean_squared_error"] = np.square(x - y)[:, None]
            if (correlated := Pearson.rows(x, y)) is not None:
                statistics[name]["pearson"] = correlated
            others[name]["eval_loss"] = error, statistics[name]["mean_squared_error"]
        return {"mean_squared_error": error, "pearson": Pearson()}, statistics, others
    place = {name: number for number, name in enumerate(sums.names)}
    truth_NC, classes, rows = _marked(truths, place), len(place), len(truths)
    has_counts = rows * classes**2 <= _MOST_NUMBERS
    is_single = sums.problem == "single_label"
    compared = ("f1_macro", "f1_weighted", "matthews_corrcoef") if is_single else ("f1_macro", "f1_weighted")
    totals: dict[str, Score] = {"accuracy": Mean(is_share=True)}
    if has_counts:
        totals |= {name: FromCounts(name) if is_single else FromCases(name) for name in compared}
    totals["eval_loss"] = Mean((0.0, None), higher_is_better=False)
    for name, predicted in predictions.items():
        try:
            predicted_NC = _marked([prediction.label for prediction in predicted], place)
        except KeyError as error:
            raise DataError(
                f"`{name}` predicts {error.args[0]!r}, but the classes are {', '.join(sums.names)}",
                where="--baseline",
                repair="compare with a classifier that has the same labels",
            ) from None
        statistics[name]["accuracy"] = (predicted_NC == truth_NC).all(1).astype(np.float64)[:, None]
        if predicted[0].probabilities:
            statistics[name]["eval_loss"] = _losses(
                truth_NC, np.array([prediction.probabilities for prediction in predicted]), is_single
            )
        if not has_counts:
            continue
        hits_NC = truth_NC & predicted_NC
        if is_single:
            cells_NK = np.zeros((rows, classes**2))
            cells_NK[np.arange(rows), truth_NC.argmax(1) * classes + predicted_NC.argmax(1)] = 1
        else:
            cases = (hits_NC, predicted_NC & ~truth_NC, truth_NC & ~predicted_NC)
            cells_NK = np.concatenate(cases, axis=1).astype(np.float64)
        statistics[name] |= dict.fromkeys(compared, cells_NK)
        for label, at in place.items():
            for kind, there in (("precision", predicted_NC), ("recall", truth_NC)):
                # A share of the rows that are predicted to be, or are, of this class.
                share = hits_NC[there[:, at], at].astype(np.float64)[:, None]
                others[name][f"{kind}_{label}"] = Mean(is_share=True), share
    return totals, statistics, others


def _in_order(classified: Classified, names: Sequence[str]) -> tuple[Classification, ...]:
    """Predictions with probabilities in the order of ``names``, whatever the order of the classifier's own ids."""
    ids = {name: number for number, name in enumerate(classified.labels.names)}
    if classified.labels.problem == "regression" or tuple(ids) == tuple(names):
        return classified.predictions
    return tuple(
        replace(row, probabilities=tuple(row.probabilities[ids[name]] if name in ids else 0.0 for name in names))
        for row in classified.predictions
    )


def _contrasts(labels: LabelSet, truths: Sequence[Label], predicted: Sequence[Classification]) -> dict[str, FloatArray]:
    """Numbers of the rows by which a model's AUROC or rank correlation is compared, where it has one."""
    from scipy.stats import rankdata

    if labels.problem == "regression":
        x = np.array([_number(prediction.label) for prediction in predicted])
        # Pearson's correlation of the ranks is Spearman's.
        y = np.array([_number(truth) for truth in truths])
        rows_NK = Pearson.rows(rankdata(x), rankdata(y))
        return {} if rows_NK is None else {"spearman": rows_NK}
    scores_NC = np.array([prediction.probabilities for prediction in predicted])
    if not scores_NC.size:
        return {}
    truth_NC = _marked(truths, {name: number for number, name in enumerate(labels.names)})
    if labels.problem == "single_label" and len(labels.names) == 2:
        # The second class's probabilities say all.
        truth_NC, scores_NC = truth_NC[:, 1:], scores_NC[:, 1:]
    area = auroc_rows(truth_NC, scores_NC)
    return {} if area is None else {"roc_auc": area[1]}


def _losses(truth_NC: npt.NDArray[np.bool_], probabilities_NC: FloatArray, is_single: bool) -> FloatArray:
    """(N, 1): each row's loss in nats, without class weights: cross-entropy, or its mean over classes of yes or no."""
    if is_single:
        shares: FloatArray = probabilities_NC[truth_NC].clip(1e-300)[:, None]
    else:
        # A probability is 1 here from a logit of 37 on.
        shares = np.where(truth_NC, probabilities_NC, 1 - probabilities_NC).clip(1e-16)
    losses: FloatArray = -np.log(shares).mean(1, keepdims=True)
    return losses


def _marked(labels: Sequence[Label], place: Mapping[str, int]) -> npt.NDArray[np.bool_]:
    """(N, C): which classes each row has; raises KeyError for an unknown one."""
    marked_NC = np.zeros((len(labels), len(place)), dtype=bool)
    for row, label in enumerate(labels):
        for name in _names(label):
            marked_NC[row, place[name]] = True
    return marked_NC


def _number(label: Label) -> float:
    assert not isinstance(label, tuple)
    return float(label)


def _shown(label: Label) -> str:
    return ", ".join(label) if isinstance(label, tuple) else f"{label:.4g}" if isinstance(label, float) else str(label)
