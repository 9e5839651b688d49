"""The labels of a run's rows: class weights, and problems with the labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from finray.config.classification import ClassificationConfig
from finray.config.objectives import objective_spec, spec_of
from finray.config.resolved import REWARD
from finray.config.schema import Config
from finray.config.tasks import CLASSIFIER_METRICS, SEQUENCE_CLASSIFICATION
from finray.data.dataset.prepared import PreparedDataset, PreparedSplit, Splits
from finray.data.formats.labels import NO_VECTOR, Label, LabelSet
from finray.errors import ConfigError, DataError, FinrayError, did_you_mean
from finray.limits import cut

# Rows from which on as many classes as rows are a sign of a wrong column.
_SOME_ROWS = 20
# A class that has so many times as many rows as another is much more common.
UNBALANCED = 10
# Up to so many rows may have a class in common by chance.
_FEW_ROWS = 3
# Up to so many different numbers are more often classes.
_FEW_NUMBERS = 10


@dataclass(frozen=True, slots=True)
class FoundLabels:
    """What was found."""

    # What is predicted; None where the task learns from no labels, or the rows have none.
    labels: LabelSet | None = None
    weights: tuple[float, ...] = ()  # of the classes, in the order of their ids; none where all have the same
    problems: list[FinrayError] = field(default_factory=list)  # what keeps the run from starting
    warnings: list[tuple[str, str]] = field(default_factory=list)  # message and field


def find_labels(dataset: PreparedDataset, splits: Splits, config: Config) -> FoundLabels:
    """Look at the labels of all rows of a run.

    Args:
        dataset: the prepared rows.
        splits: of the run.
        config: the run's.
    """
    labels = dataset.label_set
    if objective_spec(config).is_reward:
        return _rewarded(splits, config)
    if labels is None or not spec_of(config).reads_labels:
        return FoundLabels()
    result, row_labels = FoundLabels(labels), splits.train.labels
    counts = count_classes(row_labels)
    if len(set(row_labels)) == 1:
        # Also of a regression: there is no difference to be explained.
        result.problems.append(
            DataError(
                f"all {len(row_labels):,} rows to train on have the label {_shown(row_labels[0])}: there is nothing to "
                "learn",
                where="data.source",
                repair="set the label column in data.field_mapping, or add rows with other labels",
            )
        )
    elif labels.problem == "multi_label" and (everywhere := _everywhere(counts, len(row_labels))):
        # Two ids in any order are probably one-hot vectors of two classes.
        is_vector = len(counts) == len(everywhere) == 2
        all_of = "each of the classes" if len(everywhere) == len(counts) else f"the class {_shown(everywhere[0])}"
        result.problems.append(
            DataError(
                f"all {len(row_labels):,} rows to train on have {all_of}"
                + (": labels such as [0, 1] are read as ids, not as a vector" if is_vector else ": nothing to learn"),
                where="data.source",
                repair=f"{NO_VECTOR}; of rows with one class each, write that class alone"
                if is_vector
                else "remove the class from the labels, or add rows without it",
            )
        )
    elif labels.problem == "single_label" and len(counts) == len(row_labels) >= _SOME_ROWS:
        result.warnings.append(
            ("each row has a class of its own: is it the column of the labels that is read?", "data.field_mapping")
        )
    if labels.problem == "single_label" and any("." in name for name in labels.names) and all(map(_is_number, counts)):
        text = "the classes are numbers, some with decimals; classification.problem: regression learns them as numbers"
        result.warnings.append((text, "classification.problem"))
    values = {label for label in row_labels if isinstance(label, float)}
    if config.classification.problem is None and 1 < len(values) <= _FEW_NUMBERS and all(map(float.is_integer, values)):
        text = "the labels are a few whole numbers with decimals (such as 1.0), and are learned as numbers"
        result.warnings.append((f"{text}; write them without decimals to learn classes", "classification.problem"))
    numbers = [name for name in labels.names if _is_number(name)]
    if labels.problem != "regression" and 0 < len(numbers) < len(labels.names):
        text = f"some classes are numbers, others names: {cut(', '.join(labels.names), 100)}"
        result.warnings.append((text, "data.source"))
    for names in _alike(labels.names):
        text = f"classes differ only in case or white space: {cut(', '.join(f'`{name}`' for name in names), 100)}"
        result.warnings.append((text, "data.source"))
    if missing := [name for name in labels.names if not counts[name]]:
        text = f"no training row has the class {cut(', '.join(missing), 100)}"
        result.warnings.append((text, "classification.labels"))
    if labels.problem == "single_label" and len(row_labels) >= _SOME_ROWS and not config.classification.class_weights:
        (most, many), (least, few) = counts.most_common(1)[0], counts.most_common()[-1]
        if many >= UNBALANCED * few:
            shares = ", ".join(
                f"{cut(name, 40)} {rows / len(row_labels):.1%}" for name, rows in ((most, many), (least, few))
            )
            text = f"the classes are unbalanced ({shares} of the rows), so the rarest may never be predicted; "
            text += "classification.class_weights: balanced gives each class the same weight"
            result.warnings.append((text, "classification.class_weights"))
    for name, split, by_ratio in (
        ("evaluation", splits.eval, bool(config.data.eval_ratio)),
        ("test", splits.test, bool(config.data.test_ratio)),
    ):
        if split is not None and not by_ratio:
            result.problems.extend(_unknown(name, split, labels))
    if (misfit := _misfit(config, labels)) is not None:
        result.problems.append(misfit)
    try:
        weights = class_weights(config.classification, labels, counts, rows=len(row_labels))
    except ConfigError as error:
        result.problems.append(error)
        return result
    return FoundLabels(labels, weights, result.problems, result.warnings)


def _rewarded(splits: Splits, config: Config) -> FoundLabels:
    """The one output of a reward model. The margins of pairs are read if the loss needs them: they may not be there."""
    result = FoundLabels(REWARD)
    read = (splits.train, splits.eval) if config.preference.margins else ()
    for split in filter(None, read):
        try:
            split.values("margin")
        except DataError as error:
            error.repair = "give every row a column `margin`, or `score_chosen` and `score_rejected`, or leave "
            error.repair += "preference.margins out"
            result.problems.append(error)
    return result


def count_classes(labels: Iterable[Label]) -> Counter[str]:
    """Rows of each class; nothing for numbers."""
    return Counter(name for label in labels for name in _classes(label))


def class_weights(
    section: ClassificationConfig, labels: LabelSet, counts: Counter[str], *, rows: int
) -> tuple[float, ...]:
    """The weight of each class in the loss; none where all have the same.

    ``balanced`` is n / (C n_c) for C classes, of which one has n_c of n rows: scikit-learn's ``compute_class_weight``.
    Raises ConfigError: the section does not fit the labels.
    """
    if labels.problem == "regression":
        for name in ("class_weights", "label_smoothing"):
            if getattr(section, name):
                raise ConfigError(
                    "the labels have decimals, so this is a regression, which has no classes",
                    where=f"classification.{name}",
                    repair="leave it out, or use names or whole numbers as labels",
                )
    if section.class_weights is None:
        return ()
    if section.class_weights == "balanced":
        if missing := [name for name in labels.names if not counts[name]]:
            raise ConfigError(
                f"no training row has the class {cut(', '.join(missing), 100)}, so its balanced weight cannot be "
                "computed",
                where="classification.class_weights",
                repair="set the weights yourself, or remove the class from classification.labels",
            )
        return tuple(rows / (len(labels.names) * counts[name]) for name in labels.names)
    for name in section.class_weights:
        if name not in labels.names:
            raise ConfigError(
                f"unknown class `{name}`{did_you_mean(name, labels.names)}",
                where="classification.class_weights",
                repair=f"the classes are {cut(', '.join(labels.names))}",
            )
    return tuple(float(section.class_weights.get(name, 1.0)) for name in labels.names)


def _everywhere(counts: Counter[str], rows: int) -> list[str]:
    """The classes that every row has, if none lacks any or there are more than a few rows."""
    everywhere = [name for name in counts if counts[name] == rows]
    return everywhere if len(everywhere) == len(counts) or rows > _FEW_ROWS else []


def _unknown(name: str, split: PreparedSplit, labels: LabelSet) -> list[FinrayError]:
    """What held-out rows have of labels that the training rows lack: the first such row."""
    row_labels, names = split.labels, set(labels.names)
    unknown = count_classes(row_labels).keys() - names
    if not unknown:
        return []
    row, first = next((at, name) for at, label in enumerate(row_labels) for name in _classes(label) if name in unknown)
    more = f" (and {len(unknown) - 1:,} other label{'s' if len(unknown) > 2 else ''})" if len(unknown) > 1 else ""
    return [
        DataError(
            f"the label `{cut(first, 60)}` of the {name} rows is not in the training rows{more}, which have "
            f"{cut(', '.join(labels.names), 200)}",
            where=split.where(row),
            repair="fix the row, remove it, or list all classes in classification.labels",
        )
    ]


def _misfit(config: Config, labels: LabelSet) -> ConfigError | None:
    """What is wrong with ``evaluation.metric``, which is one of the task's, for these labels."""
    metric, metrics = config.evaluation.metric, CLASSIFIER_METRICS[labels.problem]
    if metric in (None, "eval_loss") or config.model.task != SEQUENCE_CLASSIFICATION.name:
        return None
    if not any(fnmatchcase(metric, pattern) for pattern in SEQUENCE_CLASSIFICATION.metrics or ()):
        # Found before anything is read.
        return None
    if metric in [name.replace("*", pattern) for name in metrics for pattern in (labels.names or ("",))]:
        return None
    classes = f"; the classes are {cut(', '.join(labels.names), 200)}" if labels.names else ""
    return ConfigError(
        f"there is no metric `{metric}` for {labels.problem} labels{classes}",
        where=f"evaluation.metric={metric}",
        repair=f"use one of: eval_loss, {', '.join(metrics)}",
    )


def _alike(names: Iterable[str]) -> list[list[str]]:
    """Classes that are probably meant to be one."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault("".join(name.split()).casefold(), []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def _classes(label: Label) -> tuple[str, ...]:
    return () if isinstance(label, float) else (label,) if isinstance(label, str) else label


def _is_number(name: str) -> bool:
    try:
        float(name)
    except ValueError:
        return False
    return True


def _shown(label: Label) -> str:
    return cut(f"`{label}`" if isinstance(label, str) else str(label), 60)
