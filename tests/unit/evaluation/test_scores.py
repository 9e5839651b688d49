"""Scores beside their reference libraries, on a thousand random pairs, and what is said where one is not to be had."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoTokenizer

from finray.config.evaluation import ScoringConfig
from finray.errors import ConfigError, DataError, FinrayError
from finray.evaluation.scores.base import Answered, OwnScore, Score, blaming, score_named
from finray.evaluation.scores.bertscore import _LAYERS, BERTScore
from finray.evaluation.scores.match import _last_boxed, normalized, number_in
from tests.support.labelled import bert_tokenizer
from tests.support.pairs import json_pairs, pairs

pytestmark = pytest.mark.long


def answered(pairs: Sequence[tuple[str, str]]) -> list[Answered]:
    return [Answered((answer,), reference) for answer, reference in pairs]


def rows() -> list[Answered]:
    return answered(pairs())


def score(name: str, **settings: Any) -> Score:
    return score_named(name, ScoringConfig(**settings))


@pytest.mark.parametrize(
    ("answers", "references", "expected"),
    [
        (["Paris", "no", "4", "x"], ["Paris", "yes", "4", "X"], 0.5),
        ([" Paris\n"], ["Paris "], 1.0),
        (["", "a b"], ["a", "ab"], 0.0),
        ([], [], 0.0),
    ],
)
def test_exact_match_is_the_share_of_equal_answers(answers: list[str], references: list[str], expected: float) -> None:
    assert score("exact_match").value(answered(list(zip(answers, references, strict=True)))) == expected


@pytest.mark.parametrize("name", ["rouge1", "rouge2", "rougeL", "rougeLsum"])
def test_rouge_is_that_of_rouge_score(name: str) -> None:
    from rouge_score import rouge_scorer

    reference = rouge_scorer.RougeScorer(["rouge1", "rouge2", "rougeL", "rougeLsum"])
    each = []
    for answer, wanted in pairs():
        found = reference.score(wanted, answer)
        each.append(found[name].fmeasure)
    statistics = score(name).statistics(rows())
    assert statistics is not None
    np.testing.assert_array_equal(statistics[:, 0], each)
    assert score(name).value(rows()) == pytest.approx(float(np.mean(each)), rel=1e-12)
    assert len(set(each)) > 30


@pytest.mark.parametrize("name", ["bleu", "chrf"])
@pytest.mark.parametrize("part", [slice(None), slice(0, 40), slice(3, 4), slice(7, 8), slice(11, 12)])
def test_bleu_and_chrf_are_those_of_sacrebleu(name: str, part: slice) -> None:
    import sacrebleu

    some = pairs()[part]
    reference = {"bleu": sacrebleu.corpus_bleu, "chrf": sacrebleu.corpus_chrf}[name]
    expected = reference([answer for answer, _ in some], [[wanted for _, wanted in some]]).score
    assert score(name).value(answered(some)) == expected
    if part == slice(None):
        assert 5 < expected < 95


def test_fields_of_json_have_the_micro_f1_of_scikit_learn() -> None:
    from sklearn.metrics import f1_score
    from sklearn.preprocessing import MultiLabelBinarizer

    def flat(value: Any, path: str = "$") -> set[str]:
        if isinstance(value, dict) and value:
            return set().union(*(flat(one, f"{path}.{json.dumps(key)}") for key, one in value.items()))
        if isinstance(value, list) and value:
            return set().union(*(flat(one, f"{path}[{place}]") for place, one in enumerate(value)))
        kind = "number" if type(value) in (int, float) else type(value).__name__
        return {f"{path}={kind}:{float(value) if kind == 'number' else value}"}

    def fields(text: str) -> set[str]:
        try:
            return flat(json.loads(text, parse_constant=lambda name: 1 / 0))
        except (ValueError, ZeroDivisionError):
            return set()

    found = json_pairs()
    wanted, given = [fields(reference) for _, reference in found], [fields(answer) for answer, _ in found]
    binarizer = MultiLabelBinarizer().fit(wanted + given)
    expected = f1_score(binarizer.transform(wanted), binarizer.transform(given), average="micro")
    assert score("json_f1").value(answered(found)) == pytest.approx(expected, rel=1e-12)
    assert 0.2 < expected < 0.8
    valid = sum(bool(fields(answer)) for answer, _ in found) / len(found)
    assert score("json_valid").value(answered(found)) == pytest.approx(valid)
    assert 0.5 < valid < 0.95


@pytest.mark.parametrize("text", ["[" * 100_000 + "]" * 100_000, '{"a": ' * 5000 + "1" + "}" * 5000])
def test_json_that_is_nested_without_end_is_wrong_and_no_crash(text: str) -> None:
    assert score("json_f1").value([Answered((text,), '{"a": 1}')]) == 0.0
    score("json_valid").value([Answered((text,), "{}")])


def test_normalised_match_is_squads() -> None:
    """By SQuAD's own four steps, in its order: lower case, punctuation, articles, white space."""
    import re
    import string

    def squads(text: str) -> str:
        letters = "".join(one for one in text.lower() if one not in set(string.punctuation))
        return " ".join(re.sub(re.compile(r"\b(a|an|the)\b", re.UNICODE), " ", letters).split())

    assert [normalized(text) for pair in pairs() for text in pair] == [
        squads(text) for pair in pairs() for text in pair
    ]
    found = score("normalised_match").value(rows())
    assert score("exact_match").value(rows()) < found < 0.9
    assert normalized("  The U.S.,  an Élan!\n") == "us élan"
    of = [("The U.S.", "us"), ("a dog", "cat"), ("", "an"), ("dog", "dogs")]
    assert score("normalised_match").statistics(answered(of)).tolist() == [[1.0], [0.0], [1.0], [0.0]]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("She has 5 + 4 = 9.\n#### 9", "9"),
        ("#### 1,234.50", "1234.5"),
        ("#### $18.", "18"),
        ("####-3", "-3"),
        ("#### 7\n\nQuestion: 4 and 5?\n#### 9", "7"),
        ("so \\boxed{12} and so \\boxed{ 1,000 }", "1000"),
        ("\\boxed{\\frac{3}{4}}", "0.75"),
        ("\\boxed{x = \\dfrac{-1}{4}}", "-0.25"),
        ("\\boxed{\\text{about } 6} of 9", "6"),
        ("it is 3, then 4.", "4"),
        ("$1,234,567.89 in all", "1234567.89"),
        ("a loss of -2.50", "-2.5"),
        ("it is \N{MINUS SIGN}5", "-5"),
        ("no number", None),
        ("", None),
        ("####", None),
        ("\\boxed{12", "12"),
    ],
)
def test_the_number_that_a_text_comes_to(text: str, number: str | None) -> None:
    found = number_in(text)
    assert (None if found is None else float(found)) == (None if number is None else float(number))


def test_what_is_boxed_is_what_lm_evals_math_finds() -> None:
    """A thousand texts with boxes of nested braces, and text around them that is not ASCII."""
    import random

    from lm_eval.tasks.hendrycks_math.utils import last_boxed_only_string, remove_boxed

    draw = random.Random(7)
    inside = ["12", "-3.5", "1,234", "x = 7", "\\text{about } 6", "{2}^{10}", "\\frac{3}{4}", "東 8 京", "\\{9\\}"]
    for _ in range(1000):
        boxes = [f"\\boxed{{{draw.choice(inside)}}}" for _ in range(draw.randint(1, 3))]
        text = (
            draw.choice(["", "é 4 then ", "{5} "]) + " so ".join(boxes) + draw.choice(["", ".", " of 99", " {", " }"])
        )
        theirs = remove_boxed(last_boxed_only_string(text))
        assert number_in(text) == number_in(f"\\boxed{{{theirs}}}")
        assert _last_boxed(text) == theirs


def test_numeric_answers_are_those_of_lm_evals_gsm8k() -> None:
    """Its strict and its flexible filter, with the regular expressions of its task file, where they find a number."""
    import random
    import re

    draw = random.Random(5)
    found = []
    for _ in range(1000):
        right = draw.choice(["9", "1,234", "-3", "0.5", "72", "1000"])
        given = draw.choice([right, right.replace(",", ""), draw.choice(["9", "8", "1,234"])])
        before = draw.choice(["", "é 4 then 5. ", "東京 12\n", "so 3 * 4 = 12, "])
        found.append(
            (draw.choice([f"{before}#### {given}", f"{before}it is {given}", before]), f"5 of 7\n#### {right}")
        )

    def theirs(text: str) -> str:
        strict = re.findall(r"#### (\-?[0-9\.\,]+)", text)
        loose = re.findall(r"(-?[$0-9.,]{2,})|(-?[0-9]+)", text)
        said = strict[0] if strict else next((one for one in loose[-1] if one), "") if loose else "[invalid]"
        return re.sub(r"\.$", "", re.sub(r"[,$]", "", said))

    expected = [float(theirs(answer) == theirs(reference)) for answer, reference in found]
    statistics = score("numeric_answer").statistics(answered(found))
    assert statistics is not None
    np.testing.assert_array_equal(statistics[:, 0], expected)
    assert 300 < sum(expected) < 800
    # Without a number in the reference no answer is right.
    none = score("numeric_answer").statistics(answered([("5", "no"), ("a", "b"), ("none", "5")]))
    assert none is not None
    assert none.tolist() == [[0.0]] * 3


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT with random weights and the words of the pairs."""
    folder = tmp_path_factory.mktemp("encoder")
    letters = sorted({letter for pair in pairs() for text in pair for letter in text.lower() if not letter.isspace()})
    tokenizer = bert_tokenizer(["cat", "mat", *letters, *(f"##{letter}" for letter in letters)], most=64)
    tokenizer.save_pretrained(str(folder))
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
    config = AutoConfig.for_model("bert", vocab_size=len(tokenizer), max_position_embeddings=64, **sizes)
    model = AutoModel.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data.mul_(6.0)
    model.save_pretrained(str(folder))
    return folder


@pytest.mark.parametrize("layer", [2, 3])
def test_bertscore_is_that_of_bert_score(encoder: Path, layer: int) -> None:
    from collections import defaultdict

    from bert_score.utils import bert_cos_score_idf

    tokenizer = AutoTokenizer.from_pretrained(encoder)
    # bert-score 0.3.13 asks for what Transformers 5 no longer has, for empty texts only.
    tokenizer.build_inputs_with_special_tokens = lambda ids: [tokenizer.cls_token_id, *ids, tokenizer.sep_token_id]
    model = AutoModel.from_pretrained(encoder).eval()
    model.encoder.layer = model.encoder.layer[:layer]
    weights: dict[int, float] = defaultdict(lambda: 1.0)
    weights[tokenizer.sep_token_id] = weights[tokenizer.cls_token_id] = 0
    some = pairs()
    expected = bert_cos_score_idf(
        model, [wanted for _, wanted in some], [answer for answer, _ in some], tokenizer, weights, device="cpu"
    )
    bertscore: Any = score("bertscore", encoder=str(encoder), encoder_layer=layer)
    found = bertscore.precision_recall_f1(some)
    np.testing.assert_allclose(found, expected.numpy(), atol=2e-6)
    assert found[3].tolist() == found[7].tolist() == found[11].tolist() == [0, 0, 0]
    assert len(set(np.round(found[:, 2], 4))) > 300
    for column, name in enumerate(("bertscore_precision", "bertscore_recall", "bertscore")):
        value = score(name, encoder=str(encoder), encoder_layer=layer).value(answered(some))
        assert value == pytest.approx(float(expected[:, column].mean()), abs=1e-6)


@pytest.mark.parametrize("pickled", [False, True])
def test_an_encoder_that_cannot_be_loaded_is_named(encoder: Path, tmp_path: Path, pickled: bool) -> None:
    shutil.copytree(encoder, tmp_path / "broken")
    weights = tmp_path / "broken" / "model.safetensors"
    if pickled:
        # Plain tensors, which Transformers would read.
        torch.save(load_file(weights), tmp_path / "broken" / "pytorch_model.bin")
        weights.unlink()
    else:
        weights.write_bytes(b"no weights")
    with pytest.raises(FinrayError, match="encoder") as caught:
        score("bertscore", encoder=str(tmp_path / "broken")).value(answered([("a", "b")]))
    assert str(tmp_path / "broken") in str(caught.value)


def test_bertscore_takes_the_last_layer_of_an_unknown_encoder(encoder: Path) -> None:
    some = rows()[:50]
    last, second = (score("bertscore", encoder=str(encoder), encoder_layer=layer).value(some) for layer in (3, 2))
    assert score("bertscore", encoder=str(encoder)).value(some) == last != second
    with pytest.raises(ConfigError, match="has 3 layers"):
        score("bertscore", encoder=str(encoder), encoder_layer=4).value(some)


def test_bertscore_takes_the_layers_of_bert_score() -> None:
    from bert_score.utils import model2layers

    assert {name: model2layers[name] for name in _LAYERS} == _LAYERS


def test_an_encoder_is_checked_before_anything_is_answered(tmp_path: Path) -> None:
    for name in ("bertscore", "bertscore_recall"):
        with pytest.raises(FinrayError, match="none"):
            score(name, encoder=str(tmp_path / "none"))


def test_another_encoder_has_its_own_bertscore_and_computes_with_four_bytes(encoder: Path, tmp_path: Path) -> None:
    some = rows()[:20]
    for name, dtype in (("half", torch.bfloat16), ("whole", torch.float32)):
        shutil.copytree(encoder, tmp_path / name)
        model = AutoModel.from_pretrained(encoder, dtype=torch.bfloat16).to(dtype)
        model.save_pretrained(str(tmp_path / name))
    names = [str(encoder), str(tmp_path / "half"), str(tmp_path / "whole")]
    first, half, whole = (score("bertscore", encoder=name).statistics(some) for name in names)
    np.testing.assert_array_equal(half, whole)
    assert first is not None
    assert half is not None
    assert 0 < np.abs(first - half).max() < 0.2


def test_bertscore_of_a_text_that_is_too_long_is_that_of_its_beginning(encoder: Path) -> None:
    """Of what the tokenizer says that the encoder reads, less its two special tokens."""
    bertscore: Any = score("bertscore", encoder=str(encoder))
    long, kept = " ".join(["the cat mat"] * 40), " ".join((["the", "cat", "mat"] * 40)[:62])
    found = bertscore.precision_recall_f1([(long, "the cat"), (kept, "the cat"), ("the mat", long), ("the mat", kept)])
    np.testing.assert_allclose(found[0], found[1], atol=1e-6)
    np.testing.assert_allclose(found[2], found[3], atol=1e-6)


@pytest.mark.parametrize(
    ("name", "begin"), [("RobertaTokenizer", " "), ("GPT2TokenizerFast", " "), ("BertTokenizer", "")]
)
def test_a_byte_level_tokenizer_gets_a_text_as_inside_of_another(name: str, begin: str) -> None:
    asked: list[dict[str, Any]] = []

    class Letters:
        model_max_length = int(1e30)

        def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
            asked.append(options)
            return {"input_ids": [0, *map(ord, text), 2]}

    tokenizer = type(name, (Letters,), {})()
    for text, expected in ((" a b\n", f"{begin}a b"), ("", ""), (" ", "")):
        assert BERTScore._ids(tokenizer, text) == [0, *map(ord, expected), 2]
    # Rust's tokenizers refuse a larger limit.
    assert asked == [{"truncation": True, "max_length": 65536}] * 3


def test_a_function_of_your_own_is_better_the_less_it_is_where_its_name_says_so_and_else_it_is_not_known() -> None:
    """As in training, and in a report."""
    for name, more in (("my:word_error_rate", False), ("my.errors:closeness", None), ("my:eval_loss", False)):
        assert OwnScore(lambda answers, references: 0.0, name).higher_is_better is more


def test_choices_are_judged_as_by_lm_eval() -> None:
    """By its own code for tasks of this kind; with lengths in bytes, which are not the characters of `acc_norm`."""
    import random
    from types import SimpleNamespace

    from lm_eval.api.task import ConfigurableTask

    draw, metrics = random.Random(6), ("acc", "acc_bytes", "acc_norm")
    texts = ["a", "no", "yes", "東京", "Straße", "Привет мир", "the cat sat", "🙂", "é, and more of it", "12"]
    found: dict[str, list[float]] = {name: [] for name in metrics}
    some = []
    for _ in range(1000):
        choices = draw.sample(texts, draw.randint(2, 5))
        # Rounded, so that some are equal.
        likelihoods = tuple(round(-draw.expovariate(0.05), draw.choice([0, 3])) for _ in choices)
        right = draw.randrange(len(choices))
        task = SimpleNamespace(
            config=SimpleNamespace(process_results=None),
            _metric_fn_list=dict.fromkeys(metrics),
            OUTPUT_TYPE="multiple_choice",
            multiple_input=False,
            multiple_target=False,
            doc_to_choice=lambda doc: doc["choices"],
            doc_to_target=lambda doc: doc["right"],
        )
        doc = {"choices": choices, "right": right}
        theirs = ConfigurableTask.process_results(task, doc, [(value, False) for value in likelihoods])
        for name in metrics:
            found[name].append(theirs[name])
        lengths = tuple(len(choice.encode()) for choice in choices)
        some.append(Answered((), choices[right], log_likelihoods=likelihoods, choice_lengths=lengths, right=right))
    for name, theirs in (("multiple_choice", "acc"), ("multiple_choice_by_length", "acc_bytes")):
        statistics = score(name).statistics(some)
        assert statistics is not None
        assert statistics[:, 0].tolist() == found[theirs]
    assert found["acc"] != found["acc_bytes"] != found["acc_norm"]


def total_letters(answers: list[str], references: list[str]) -> float:
    return float(sum(map(len, answers)))


def letters(answers: list[str], references: list[str]) -> list[int]:
    return [len(answer) for answer in answers]


FUNCTIONS = {
    "nonsense": (lambda answers, references: "good", "must return one number, or one for each of the 2 rows"),
    "too_short": (lambda answers, references: [1.0], "must return one number, or one for each of the 2 rows"),
    "without_a_value": (lambda answers, references: [1.0, None], "returned no finite number for row 2\n"),
    "not_a_number": (lambda answers, references: float("nan"), "returned no finite number\n"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_ones_own_that_gives_no_numbers_is_named(name: str) -> None:
    function, said = FUNCTIONS[name]
    with pytest.raises(ConfigError, match=f"{name}`? {said}"):
        OwnScore(function, f"mine:{name}").statistics(answered([("a", "b"), ("c", "d")]))


def test_a_function_of_ones_own_gives_a_number_or_one_for_each_row() -> None:
    some = answered([("abc", ""), ("de", ""), ("f", "")])
    one, each = (score(f"{__name__}:{name}") for name in ("total_letters", "letters"))
    assert one.value(some) == 6.0
    assert one.statistics(some) is None
    assert each.value(some) == 2.0
    assert each.statistics(some).tolist() == [[3], [2], [1]]  # type: ignore[union-attr]


@pytest.mark.parametrize("error", [KeyError("river"), SystemExit(0), ZeroDivisionError("division by zero")])
def test_what_a_metric_raises_is_an_error_that_names_it(error: BaseException) -> None:
    """Also the end of the process, which would print nothing and look like success; its place is told too."""
    with pytest.raises(ConfigError, match=r"KeyError: 'river' \(test_scores.py, line \d+\)"), blaming("mine:f"):
        OwnScore(lambda answers, references: {}["river"], "mine:f").value(answered([("a", "b")]))
    with pytest.raises(DataError, match="no rows"), blaming("mine:f"):
        raise DataError("no rows")
    with pytest.raises(ConfigError, match="the metric `mine:f` failed: " + type(error).__name__), blaming("mine:f"):
        raise error


def test_what_a_metric_prints_is_not_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    with blaming("mine:f"):
        print("so far so good")
    assert capsys.readouterr() == ("", "so far so good\n")


@pytest.mark.parametrize(
    "name", ["exact_match", "normalised_match", "numeric_answer", "json_valid", "json_f1", "bleu", "chrf", "rouge1"]
)
def test_a_score_of_rows_is_the_total_of_their_statistics(name: str) -> None:
    """What bootstrap and permutation rely on: sums over rows are all that a score depends on."""
    found, some = score(name), rows()[:60]
    statistics = found.statistics(some)
    assert statistics is not None
    assert statistics.shape[0] == 60
    for part in (slice(0, 20), slice(20, 60)):
        value = found.value(some[part])
        assert found.total(statistics[part].sum(0), len(some[part])) == pytest.approx(value)
    assert found.value([]) == 0.0
