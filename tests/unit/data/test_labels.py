"""Labelled text: which columns are read, what labels are allowed, and what is prepared of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest
from transformers import PreTrainedTokenizerFast

from finray.config.identity import differences
from finray.config.load import build_config
from finray.config.resolved import Resolved
from finray.data.dataset.labels import FoundLabels, find_labels
from finray.data.dataset.prepare import check_inputs
from finray.data.formats.convert import FormatChoice, converter_of
from finray.data.formats.examples import Label, Labelled
from finray.data.formats.labels import LabelRules, LabelSet, in_order, label_of
from finray.data.sources.memory import write_rows
from finray.errors import ConfigError, DataError
from tests.support.labelled import CLASSIFIES, bert_tokenizer
from tests.support.labelled import classifying as classifying
from tests.support.preparing import Preparing, Write, lines
from tests.support.preparing import put as put


def read(row: dict[str, Any], mapping: dict[str, str] | None = None) -> Labelled:
    choice = FormatChoice("auto", mapping or {}, labels=LabelRules())
    (found,) = converter_of(choice.decide(row), has_chat_template=True)(row)
    assert isinstance(found, Labelled)
    return found


@pytest.mark.parametrize(
    ("row", "mapping", "expected"),
    [
        ({"text": "a", "label": 1}, {}, ("a", None)),
        # A chat's column beside it changes nothing: the task wants a label.
        ({"content": "a", "labels": "x", "messages": []}, {}, ("a", None)),
        ({"sentence1": "a", "sentence2": "b", "label": 1, "idx": 0}, {}, ("a", "b")),
        ({"premise": "a", "hypothesis": "b", "label": 1}, {}, ("a", "b")),
        ({"question": "a", "sentence": "b", "label": 1}, {}, ("a", "b")),
        ({"text": "a", "text_pair": "b", "label": 1}, {}, ("a", "b")),
        ({"sentence1": "a", "sentence2": "b", "score": 1.0}, {}, ("a", "b")),
        ({"u": "a", "v": "b", "y": 1}, {"text": "u", "text_pair": "v", "label": "y"}, ("a", "b")),
        ({"u": "a", "v": "b", "y": 1}, {"premise": "u", "hypothesis": "v", "label": "y"}, ("a", "b")),
        # Who names one text wants one.
        ({"premise": "a", "hypothesis": "b", "label": 1}, {"text": "hypothesis"}, ("b", None)),
        ({"data": {"t": "a"}, "label": 1}, {"text": "data.t"}, ("a", None)),
    ],
)
def test_the_columns_of_one_text_or_two(
    row: dict[str, Any], mapping: dict[str, str], expected: tuple[str, str | None]
) -> None:
    found = read(row, mapping)
    assert (found.text, found.text_pair) == expected


@pytest.mark.parametrize(
    ("row", "mapping", "said"),
    [
        ({"text": "a", "lable": 1}, {}, r"no column with the labels \(columns: text, lable\).*did you mean"),
        ({"body": "a", "label": 1}, {}, r"no column with the text \(columns: body, label\)"),
        ({"text": "a", "label": 1}, {"label": "y"}, r"`label` is mapped to `y`, which is not a column \(text, label\)"),
        ({"text": "a", "label": 1}, {"prompt": "text"}, "labelled text has no field `prompt`"),
    ],
)
def test_columns_that_are_missing_are_named_with_those_that_are_there(
    row: dict[str, Any], mapping: dict[str, str], said: str
) -> None:
    with pytest.raises(DataError, match=said):
        read(row, mapping)


def test_without_a_task_that_learns_from_labels_text_is_text() -> None:
    row = {"text": "a", "label": 1}
    assert FormatChoice("auto", {}).decide(row).kind == "text"
    assert FormatChoice("auto", {}, labels=LabelRules()).decide(row).kind == "labelled_text"


NAMED = LabelRules(names=("bad", "good"))


@pytest.mark.parametrize(
    ("value", "rules", "expected"),
    [
        ("x", LabelRules(), "x"),
        (-3, LabelRules(), "-3"),
        (True, LabelRules(), "true"),
        (0.5, LabelRules(), 0.5),
        (["b", 2], LabelRules(), ("b", "2")),
        # As in CSV.
        ('["b", 2]', LabelRules(), ("b", "2")),
        (" []", LabelRules("multi_label"), ()),
        ('["b"]', LabelRules("single_label"), '["b"]'),
        ("[b]", LabelRules(names=("[b]", "c")), "[b]"),
        (Decimal("0.5"), LabelRules(), 0.5),
        ([], LabelRules(), ()),
        ("x", LabelRules("multi_label"), ("x",)),
        ("2.5", LabelRules("regression"), 2.5),
        (3, LabelRules("regression"), 3.0),
        # Whole numbers are ids of the names, also as text, of which a CSV file is made.
        (1, NAMED, "good"),
        ("0", NAMED, "bad"),
        (False, NAMED, "bad"),
        ("good", NAMED, "good"),
        ([1, 0], NAMED, ("good", "bad")),
        # Unless the names are numbers themselves.
        (1, LabelRules(names=("5", "1")), "1"),
    ],
)
def test_a_label_is_a_name_names_or_a_number(value: Any, rules: LabelRules, expected: Label) -> None:
    found = label_of(value, rules)
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("value", "rules", "said"),
    [
        (2, NAMED, r"the label 2 is neither a class \(bad, good\)"),
        (-1, NAMED, "the label -1 is neither a class"),
        ("Good", NAMED, "the label 'Good' is neither a class"),
        (1.0, NAMED, "classes must be names or whole numbers"),
        (1.0, LabelRules("single_label"), "set classification.problem to regression"),
        ([1.0, 0.0], LabelRules(), "a list with 1.0; it must be a name or a whole number"),
        ([0, 1, 0], LabelRules(), "lists a class twice"),
        ([True, False], LabelRules(), "the label is a vector"),
        (["a"], LabelRules("single_label"), "set classification.problem to multi_label"),
        ("['a', 'b']", LabelRules(), "looks like a list, but is not JSON"),
        ("[b]", LabelRules("multi_label"), "looks like a list, but is not JSON"),
        ("", LabelRules(), "the label is empty"),
        ("many", LabelRules("regression"), "labels must be numbers"),
        (True, LabelRules("regression"), "labels must be numbers"),
        (float("inf"), LabelRules(), "must be a finite number"),
        (10**400, LabelRules("regression"), "labels must be numbers"),
        ("9" * 5000, NAMED, "is neither a class"),
        ({"a": 1}, LabelRules(), "must be a name or a whole number"),
    ],
)
def test_a_label_that_is_none_says_what_to_do(value: Any, rules: LabelRules, said: str) -> None:
    with pytest.raises(DataError, match=said):
        label_of(value, rules)


def test_classes_are_in_the_order_of_their_numbers_and_then_of_their_names() -> None:
    assert in_order(iter(["b", "10", "2", "a", "02", "-1", "2", "1.5"])) == ("-1", "02", "2", "10", "1.5", "a", "b")


PAIRS = [
    {"premise": "the cat sleeps", "hypothesis": "the dog reads a green stone", "label": "no"},
    {"premise": "water", "hypothesis": "bread", "label": "yes"},
]


def test_pairs_are_tokenized_as_transformers_does_with_their_token_types(classifying: Preparing, put: Write) -> None:
    for limit in (64, 8):
        dataset = classifying.dataset(put("rows.jsonl", lines(PAIRS)), model=CLASSIFIES, max_length=limit)
        split = dataset.all_rows("train")
        assert split is not None
        for at, row in enumerate(PAIRS):
            expected = bert_tokenizer()(row["premise"], row["hypothesis"], truncation=True, max_length=limit)
            ids, types = split.row(at)
            assert (ids.tolist(), types.tolist()) == (expected["input_ids"], expected["token_type_ids"])
            assert 1 in types
        assert split.supervised.tolist() == [1, 1]
        assert (split.labels, dataset.label_set) == (["no", "yes"], LabelSet("single_label", ("no", "yes")))
        assert dataset.manifest.splits["train"].truncated == (limit == 8)


def test_a_tokenizer_without_token_types_has_none(tmp_path: Path, put: Write) -> None:
    plain = PreTrainedTokenizerFast(
        tokenizer_object=bert_tokenizer().backend_tokenizer, model_input_names=["input_ids", "attention_mask"]
    )
    plain.save_pretrained(str(tmp_path / "plain"))
    (tmp_path / "plain" / "config.json").write_text("{}", encoding="utf-8")
    preparing = Preparing(tmp_path / "plain", plain, tmp_path / "prepared")
    split = preparing.splits(put("rows.jsonl", lines(PAIRS)), model=CLASSIFIES).train
    assert [row.tolist().count(1) for row in (split.row(0)[1], split.row(1)[1])] == [0, 0]


@pytest.mark.parametrize(
    ("labels", "classification", "problem", "names", "kept"),
    [
        ([10, 2, 2, 0], {}, "single_label", ("0", "2", "10"), ["10", "2", "2", "0"]),
        ([1, 0, 1], {"labels": ["bad", "good"]}, "single_label", ("bad", "good"), ["good", "bad", "good"]),
        # The names that the config has and the data lack keep their ids.
        (["a", "b"], {"labels": ["b", "c", "a"]}, "single_label", ("b", "c", "a"), ["a", "b"]),
        ([["x", "a"], [], ["a"]], {}, "multi_label", ("a", "x"), [("x", "a"), (), ("a",)]),
        ([1.5, 2.0, -1.0], {}, "regression", (), [1.5, 2.0, -1.0]),
        ([1, "2.5"], {"problem": "regression"}, "regression", (), [1.0, 2.5]),
    ],
)
def test_the_prepared_dataset_knows_its_labels(
    classifying: Preparing,
    put: Write,
    labels: list[Any],
    classification: dict[str, Any],
    problem: Any,
    names: tuple[str, ...],
    kept: list[Label],
) -> None:
    rows = [{"text": "a cat", "label": label} for label in labels]
    dataset = classifying.dataset(put("rows.jsonl", lines(rows)), model=CLASSIFIES, classification=classification)
    split = dataset.all_rows("train")
    assert split is not None
    assert (dataset.label_set, split.labels) == (LabelSet(problem, names), kept)
    some = split.take(split.source_rows[[1, 0]])
    assert some.labels == [kept[1], kept[0]]


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ([1, 2.5], r"names or whole numbers before, numbers with decimals here \(2.5\).*rows.jsonl:2"),
        (["a", "b", ["a"]], r"before, lists here.*rows.jsonl:3"),
    ],
)
def test_labels_of_different_kinds_are_refused_with_their_row(
    classifying: Preparing, put: Write, labels: list[Any], said: str
) -> None:
    rows = [{"text": "a cat", "label": label} for label in labels]
    source = put("rows.jsonl", lines(rows))
    # Dropped rows would hide which of the two kinds is meant.
    for on_bad_row in ("error", "drop"):
        error = classifying.refused(source, model=CLASSIFIES, on_bad_row=on_bad_row)
        assert all(part in str(error).replace("\n", " ") for part in said.replace("\\", "").split(".*")), str(error)


def test_splits_with_labels_of_different_kinds_are_refused_with_the_file(classifying: Preparing, put: Write) -> None:
    train = put("train.jsonl", lines([{"text": "a", "label": 1}]))
    held_out = put("held.jsonl", lines([{"text": "b", "label": 1.5}]))
    error = classifying.refused(train, model=CLASSIFIES, eval_source=str(held_out))
    assert "different types" in error.message
    assert error.where is not None
    assert error.where.endswith("held.jsonl")


def test_long_rows_are_dropped_or_refused_where_the_config_says_so(classifying: Preparing, put: Write) -> None:
    source = put("rows.jsonl", lines([{"text": "cat " * 20, "label": 1}, {"text": "dog", "label": 0}]))
    counts = classifying.dataset(source, model=CLASSIFIES, max_length=8, on_too_long="drop").manifest.splits["train"]
    assert (counts.rows, counts.dropped_too_long, counts.dropped_tokens) == (1, 1, 22)
    cut = classifying.dataset(source, model=CLASSIFIES, max_length=8).manifest.splits["train"]
    assert (cut.rows, cut.truncated, cut.truncated_tokens) == (2, 1, 14)
    error = classifying.refused(source, model=CLASSIFIES, max_length=8, on_too_long="error")
    assert "the row has 22 tokens" in error.message


def test_what_labels_are_read_as_changes_the_prepared_dataset(classifying: Preparing, put: Write) -> None:
    source = put("rows.jsonl", lines([{"text": "a", "label": 1}, {"text": "a", "label": 0}]))
    names = {
        json.dumps(section): classifying.dataset(source, model=CLASSIFIES, classification=section).name
        for section in ({}, {"labels": ["no", "yes"]}, {"labels": ["yes", "no"]}, {"problem": "regression"})
    }
    assert len(set(names.values())) == 4


def build(classification: dict[str, Any], **model: Any) -> Any:
    plain = {"model": {"name": "m", **CLASSIFIES, **model}, "data": {"source": "x"}, "classification": classification}
    return build_config(plain, source="test")


@pytest.mark.parametrize(
    ("classification", "said"),
    [
        ({"labels": ["a", "a"]}, "must not be blank or repeated"),
        ({"labels": ["a", " "]}, "must not be blank"),
        ({"labels": ["a"]}, "at least two classes"),
        ({"labels": [True, "a"]}, "in quotes"),
        ({"labels": ["a", "b"], "class_weights": {"c": 2}}, "c not in classification.labels"),
        ({"class_weights": {"c": 0}}, "must be greater than 0"),
        ({"problem": "regression", "labels": ["a", "b"]}, "no effect with classification.problem regression"),
        ({"problem": "regression", "class_weights": "balanced"}, "no effect"),
        ({"label_smoothing": 1.0}, "less than 1"),
    ],
)
def test_a_section_that_cannot_be_meant_is_refused(classification: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build(classification)


def test_the_section_has_no_effect_with_another_task_and_says_so() -> None:
    with pytest.raises(ConfigError, match="has no effect with model"):
        build({"label_smoothing": 0.1}, task="causal_lm")
    # Its defaults are in every config.
    assert build({}, task="causal_lm").classification.labels is None


def test_whole_numbers_are_names_of_classes_in_a_config() -> None:
    section = build({"labels": [1, 0], "class_weights": {0: 2.5}}).classification
    assert (section.labels, section.class_weights) == (["1", "0"], {"0": 2.5})


# --- what the labels of a run come to -------------------------------------------------------------------------------


def look(
    classifying: Preparing, put: Write, train: list[Any], held_out: Sequence[Any] = (), **classification: Any
) -> FoundLabels:
    """What is found of rows with these labels."""
    source = put("train.jsonl", lines([{"text": f"cat {at}", "label": label} for at, label in enumerate(train)]))
    eval_source = put("dev.jsonl", lines([{"text": f"dog {at}", "label": one} for at, one in enumerate(held_out)]))
    data = {"eval_source": str(eval_source)} if held_out else {}
    settings = {"model": CLASSIFIES, "classification": classification, **data}
    dataset = classifying.dataset(source, **settings)
    config = classifying.config(source, **settings)
    return find_labels(dataset, dataset.splits(config.data, seed=1), config)


def test_labels_that_the_training_rows_have_are_no_problem(classifying: Preparing, put: Write) -> None:
    found = look(classifying, put, ["a", "b", "b"], ["b", "a"])
    assert found == FoundLabels(LabelSet("single_label", ("a", "b")))
    # Numbers that are held out need not be those of the training rows.
    assert look(classifying, put, [0.5, 1.5], [2.5]) == FoundLabels(LabelSet("regression", ()))


def test_a_held_out_label_that_no_training_row_has_is_named_with_its_row(classifying: Preparing, put: Write) -> None:
    (problem,) = look(classifying, put, ["a", "b"], ["a", "c", "d", "d"]).problems
    assert "the label `c` of the evaluation rows is not in the training rows (and 1 other label)" in str(problem)
    assert problem.where is not None
    assert problem.where.endswith("dev.jsonl:2")
    # A name that the config has is a class, whatever the rows have.
    named = look(classifying, put, ["a", "b"], ["a", "c"], labels=["a", "b", "c"])
    assert (named.problems, [text for text, _ in named.warnings]) == ([], ["no training row has the class c"])


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ([[1, 0], [0, 1]] * 3, "each of the classes: labels such as [0, 1] are read as ids, not as a vector"),
        (["[1, 0]", "[0, 1]", "[0, 1]"], "are read as ids, not as a vector"),
        (["a", "a"], "all 2 rows to train on have the label `a`"),
        ([["a"], ["a"]], "all 2 rows to train on have the label ('a',)"),
        ([0.5, 0.5, 0.5], "all 3 rows to train on have the label 0.5"),
        ([["a", "b"], ["a", "c"], ["a"], ["c", "a"]], "all 4 rows to train on have the class `a`: nothing to learn"),
        ([[2, 5], [2, 3], [5], [3]], None),
        ([["a"], ["b"], ["a", "b"]], None),
    ],
)
def test_one_label_of_all_rows_and_vectors_of_two_classes_are_refused(
    classifying: Preparing, put: Write, labels: list[Any], said: str | None
) -> None:
    problems = [str(one) for one in look(classifying, put, labels).problems]
    assert len(problems) == (said is not None)
    assert said is None or said in problems[0]


def test_balanced_weights_are_those_of_scikit_learn(classifying: Preparing, put: Write) -> None:
    labels = ["a"] * 2 + ["b"] * 5 + ["c"] * 3
    weights = look(classifying, put, labels, class_weights="balanced", labels=["c", "a", "b"]).weights
    # compute_class_weight("balanced", classes=["c", "a", "b"], y=labels)
    assert weights == pytest.approx((1.1111111111, 1.6666666667, 0.6666666667))
    assert look(classifying, put, labels, class_weights={"b": 2}).weights == (1.0, 2.0, 1.0)


@pytest.mark.parametrize(
    ("labels", "classification", "said"),
    [
        (["a", "b"], {"class_weights": {"bb": 2}}, "unknown class `bb` .did you mean `b`"),
        (
            ["a", "b"],
            {"class_weights": "balanced", "labels": ["a", "b", "c"]},
            "has the class c, so its balanced weight",
        ),
        ([1.5, 2.5], {"class_weights": "balanced"}, "a regression, which has no classes"),
        ([1.5, 2.5], {"label_smoothing": 0.1}, "a regression, which has no classes"),
    ],
)
def test_a_section_that_does_not_fit_the_labels_is_refused(
    classifying: Preparing, put: Write, labels: list[Any], classification: dict[str, Any], said: str
) -> None:
    (problem,) = look(classifying, put, labels, **classification).problems
    assert isinstance(problem, ConfigError)
    with pytest.raises(ConfigError, match=said):
        raise problem


@pytest.mark.parametrize(
    ("labels", "classification", "said"),
    [
        ([f"row {at}" for at in range(20)], {}, "each row has a class of its own"),
        (["good", 1, "bad"], {}, "some classes are numbers, others names: 1, bad, good"),
        # As pandas writes whole numbers among which one is missing.
        ([1.0, 0.0, 1.0], {}, "a few whole numbers with decimals"),
        ([float(at) for at in range(10)], {}, "a few whole numbers with decimals"),
        (["good", "bad", " good", "Bad"], {}, "only in case or white space: ` good`, `good`"),
        (["1.5", "2", "2"], {}, "classification.problem: regression learns them as numbers"),
        # Few rows may well have a class each; and among some that do, two have one.
        ([f"row {at}" for at in range(19)], {}, None),
        ([f"row {at % 20}" for at in range(21)], {}, None),
        # More different numbers than classes have, some that are not whole, and numbers that were asked for.
        ([float(at) for at in range(11)], {}, None),
        ([1.0, 2.0, 2.5], {}, None),
        ([1.0, 2.0, 1.0], {"problem": "regression"}, None),
        ([1, 2, 2], {}, None),
        (["1.5", "two", "2"], {}, "some classes are numbers, others names"),
    ],
)
def test_labels_that_are_hardly_meant_so_are_a_warning(
    classifying: Preparing, put: Write, labels: list[Any], classification: dict[str, Any], said: str | None
) -> None:
    found = look(classifying, put, labels, **classification)
    assert not found.problems
    texts = [text for text, _ in found.warnings if "no training row" not in text]
    assert (said in texts[0]) if said else texts == []


def test_classes_of_unequal_size_are_a_warning_without_weights(classifying: Preparing, put: Write) -> None:
    labels = ["good"] * 40 + ["bad"] * 4
    (warning,) = look(classifying, put, labels).warnings
    assert warning[1] == "classification.class_weights"
    assert warning[0].startswith("the classes are unbalanced (good 90.9%, bad 9.1% of the rows)")
    assert look(classifying, put, labels, class_weights="balanced").warnings == []
    assert look(classifying, put, labels[1:]).warnings == []


def metric_problem(classifying: Preparing, put: Write, labels: list[Any], metric: str) -> str:
    """What is said of a metric to choose by."""
    source = put("rows.jsonl", lines([{"text": f"cat {at}", "label": one} for at, one in enumerate(labels)]))
    dataset, plain = classifying.dataset(source, model=CLASSIFIES), classifying.config(source, model=CLASSIFIES)
    config = plain.model_copy(update={"evaluation": plain.evaluation.model_copy(update={"metric": metric})})
    problems = find_labels(dataset, dataset.splits(config.data, seed=1), config).problems
    assert all(one.where == f"evaluation.metric={metric}" for one in problems)
    return " ".join(str(one) for one in problems)


def test_a_metric_of_another_kind_of_labels_is_refused(classifying: Preparing, put: Write) -> None:
    names, several, numbers = ["a", "b", "b"], [["a"], ["a", "b"]], [0.5, 1.5]
    for labels, metric in (
        *(
            (names, "eval_loss"),
            (names, "accuracy"),
            (names, "recall_b"),
            (several, "precision_a"),
            (names, "matthews_corrcoef"),
        ),
        *((numbers, "spearman"), (numbers, "eval_loss")),
    ):
        assert not metric_problem(classifying, put, labels, metric), metric
    for labels, metric, kind in (
        *((names, "spearman", "single_label"), (names, "recall_c", "single_label")),
        *((several, "matthews_corrcoef", "multi_label"), (numbers, "accuracy", "regression")),
    ):
        said = metric_problem(classifying, put, labels, metric)
        assert f"there is no metric `{metric}` for {kind} labels" in said
        assert ("the classes are a, b" in said) == (kind != "regression")
        assert "use one of: eval_loss, " in said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format": "alpaca"}, "`alpaca` makes rows without"),
        ({"format": "text"}, "`text` makes rows without"),
        ({"input_template": "{text}", "output_template": "{label}"}, "a template makes rows without"),
    ],
)
def test_a_format_without_labels_is_refused_before_anything_is_read(
    classifying: Preparing, put: Write, changes: dict[str, Any], said: str
) -> None:
    source = put("rows.jsonl", lines([{"text": "a", "label": 1}]))
    check_inputs(classifying.config(source, model=CLASSIFIES, format="labelled_text"))
    with pytest.raises(DataError, match=said):
        check_inputs(classifying.config(source, model=CLASSIFIES, **changes))


def test_a_continued_run_has_the_classes_that_it_began_with() -> None:
    """Whether the config names them or not; another order is another run."""
    resolved = Resolved(
        "fp32", None, None, True, "ddp", False, problem="single_label", labels=("no", "yes"), epochs=1.0
    )
    began, named, turned, smoothed = (
        build(one) for one in ({}, {"labels": ["no", "yes"]}, {"labels": ["yes", "no"]}, {"label_smoothing": 0.1})
    )
    assert differences(began, named, resolved) == []
    assert differences(began, turned, resolved) == [("classification.labels", ["no", "yes"], ["yes", "no"])]
    assert differences(began, smoothed, resolved) == [("classification.label_smoothing", 0.0, 0.1)]


# --- classes that `datasets` names ----------------------------------------------------------------------------------

SENTIMENT = datasets.Features(
    {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["negative", "awful", "Positive"])}
)
FEELINGS = datasets.Dataset.from_list(
    [{"text": f"cat {at}", "label": at % 3} for at in (2, 0, 1, 0)], features=SENTIMENT
)
SAID = ["Positive", "negative", "awful", "negative"]


def saved(folder: Path) -> Path:
    FEELINGS.save_to_disk(str(folder / "saved"))
    return folder / "saved"


def parquet(folder: Path) -> Path:
    FEELINGS.to_parquet(str(folder / "rows.parquet"))
    return folder / "rows.parquet"


def in_memory(folder: Path) -> Path:
    # Rows in another order than the table below them.
    return write_rows(FEELINGS.select([3, 0, 1, 2]).select([1, 2, 3, 0]).with_format("numpy"), folder / "rows")


def arrow_in_memory(folder: Path) -> Path:
    return write_rows(pa.parquet.read_table(parquet(folder)), folder / "rows")


@pytest.mark.parametrize("form", [saved, parquet, in_memory, arrow_in_memory], ids=lambda form: form.__name__)
def test_the_classes_of_a_data_set_that_names_them_have_its_names_in_its_order(
    classifying: Preparing, tmp_path: Path, form: Callable[[Path], Path]
) -> None:
    dataset = classifying.dataset(form(tmp_path), model=CLASSIFIES)
    split = dataset.all_rows("train")
    assert split is not None
    assert (dataset.label_set, split.labels) == (LabelSet("single_label", ("negative", "awful", "Positive")), SAID)


def test_what_the_config_says_of_labels_comes_before_the_names_of_a_data_set(
    classifying: Preparing, tmp_path: Path
) -> None:
    source = parquet(tmp_path)
    named = classifying.dataset(source, model=CLASSIFIES, classification={"labels": ["a", "b", "c"]})
    assert named.label_set == LabelSet("single_label", ("a", "b", "c"))
    numbers = classifying.dataset(source, model=CLASSIFIES, classification={"problem": "regression"})
    assert numbers.label_set == LabelSet("regression", ())


def test_lists_of_named_classes_are_several_classes(classifying: Preparing, tmp_path: Path) -> None:
    features = {"text": datasets.Value("string"), "topics": datasets.List(datasets.ClassLabel(names=["x", "b"]))}
    rows = [{"text": "a cat", "topics": topics} for topics in ([1, 0], [], [0])]
    datasets.Dataset.from_list(rows, features=datasets.Features(features)).to_parquet(str(tmp_path / "r.parquet"))
    dataset = classifying.dataset(tmp_path / "r.parquet", model=CLASSIFIES, field_mapping={"label": "topics"})
    split = dataset.all_rows("train")
    assert split is not None
    assert (dataset.label_set, split.labels) == (LabelSet("multi_label", ("x", "b")), [("b", "x"), (), ("x",)])


def test_each_source_is_read_by_its_own_names(classifying: Preparing, put: Write, tmp_path: Path) -> None:
    """Held-out rows whose ids stand in another order are the same classes; plain numbers have the training rows'."""
    other = FEELINGS.cast_column("label", datasets.ClassLabel(names=["awful", "Positive", "negative"]))
    other.to_parquet(str(tmp_path / "other.parquet"))
    for source, expected in (
        (tmp_path / "other.parquet", ["negative", "awful", "Positive", "awful"]),
        (put("plain.jsonl", lines([{"text": "a", "label": at} for at in (2, 0)])), ["Positive", "negative"]),
    ):
        splits = classifying.splits(parquet(tmp_path), model=CLASSIFIES, eval_source=str(source))
        assert splits.eval is not None
        assert (splits.train.labels, splits.eval.labels) == (SAID, expected)


def test_an_id_beyond_the_names_is_a_bad_row_by_its_place(classifying: Preparing, tmp_path: Path) -> None:
    """-1 is how `datasets` writes that a row has no label."""
    FEELINGS.map(lambda row: {"label": -1}).to_parquet(str(tmp_path / "test.parquet"))
    error = classifying.refused(tmp_path / "test.parquet", model=CLASSIFIES)
    assert "the label -1 is neither a class (negative, awful, Positive)" in error.message
    assert str(error.where).endswith("test.parquet:1")


@pytest.mark.parametrize(
    "metadata",
    [
        b"{",
        b"[]",
        b'{"info": {"features": {"label": {"_type": "ClassLabel", "names": ["a", "a"]}}}}',
        b'{"info": {"features": {"label": {"_type": "ClassLabel", "names": [1, 2, 3]}}}}',
        b'{"info": {"features": {"label": []}}}',
    ],
)
def test_metadata_that_name_no_classes_change_nothing(classifying: Preparing, tmp_path: Path, metadata: bytes) -> None:
    table = pa.table({"text": ["a", "b"], "label": [1, 0]}).replace_schema_metadata({"huggingface": metadata})
    pa.parquet.write_table(table, tmp_path / "rows.parquet")
    dataset = classifying.dataset(tmp_path / "rows.parquet", model=CLASSIFIES)
    assert dataset.label_set == LabelSet("single_label", ("0", "1"))


def test_a_second_text_that_only_later_rows_have_is_no_single_text(classifying: Preparing, put: Write) -> None:
    rows = [{"premise": f"cat {at}", "label": at % 2} for at in range(150)]
    source = put("rows.jsonl", lines([*rows, {**rows[0], "hypothesis": None}, {**rows[1], "hypothesis": "a dog"}]))
    mapped = {"model": CLASSIFIES, "field_mapping": {"text": "premise"}}
    error = classifying.refused(source, **mapped)
    assert "a second text, `hypothesis`, which the first rows of the source do not have" in str(error)
    assert str(error.where).endswith("rows.jsonl:152")
