"""`finray generate` of a classifier: labels and probabilities, which are those of plain Transformers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

import finray
from finray.evaluation.labels import is_classifier, read_texts
from tests.support.labelled import LABELS, bert_tokenizer, load_classifier, save_classifier
from tests.support.runs import finray as command

TEXTS = ["the cat sleeps", "a tree by the river", "nine ten"]
PAIRS = [("the cat", "a small stone house"), ("bread", "a dog")]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_classifier("bert", tmp_path_factory.mktemp("kinds"), bert_tokenizer())


@pytest.fixture(autouse=True)
def in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finray.evaluation.artifacts.cpu_has_bf16", lambda: False)


def right(adapter: Path, texts: tuple[str, ...]) -> list[float]:
    reader, model = AutoTokenizer.from_pretrained(adapter), load_classifier(adapter)
    with torch.no_grad():
        found: list[float] = model(**reader(*texts, return_tensors="pt")).logits[0].softmax(-1).tolist()
    return found


def check(adapter: Path, found: list[dict[str, Any]], asked: list[tuple[str, ...]]) -> None:
    for row, texts in zip(found, asked, strict=True):
        shares = right(adapter, texts)
        assert list(row["probabilities"]) == list(LABELS.values())
        assert list(row["probabilities"].values()) == pytest.approx(shares, abs=1e-5)
        assert row["label"] == LABELS[shares.index(max(shares))]
        assert tuple(row[name] for name in ("text", "text_pair") if name in row) == texts
    assert len({row["label"] for row in found}) > 1


@pytest.mark.long
def test_a_text_is_tried_with_one_command(adapter: Path, tmp_path: Path) -> None:
    code, out, err = command("generate", adapter, *TEXTS, "--json")
    assert code == 0, err
    check(adapter, json.loads(out)["labels"], [(one,) for one in TEXTS])
    code, out, err = command("generate", adapter, TEXTS[0])
    share = max(right(adapter, (TEXTS[0],)))
    assert (code, out.partition(" (")[0] in LABELS.values()) == (0, True)
    assert f"({out.partition(' (')[0]} {100 * share:.1f} %, " in out
    code, out, err = command("generate", adapter, *TEXTS, "--output", tmp_path / "found.jsonl")
    assert code == 0, err
    check(adapter, list(map(json.loads, (tmp_path / "found.jsonl").open())), [(one,) for one in TEXTS])
    # A plain file has a text in each line.
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    code, out, err = command("generate", adapter, "--file", tmp_path / "texts.txt", "--json")
    assert code == 0, err
    check(adapter, json.loads(out)["labels"], [(one,) for one in TEXTS])
    labels = finray.generate(adapter, TEXTS)
    assert list(labels) == [json.loads(line)["label"] for line in (tmp_path / "found.jsonl").open()]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl", "".join(json.dumps({"sentence1": one, "sentence2": two}) + "\n" for one, two in PAIRS)),
        ("rows.jsonl", "".join(json.dumps({"text": one, "text_pair": two, "label": 1}) + "\n" for one, two in PAIRS)),
        ("rows.csv", "premise,hypothesis,id\n" + "".join(f"{one},{two},7\n" for one, two in PAIRS)),
    ],
)
def test_rows_of_a_file_are_read_as_in_training(adapter: Path, tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    code, out, err = command("generate", adapter, "--file", tmp_path / name, "--json")
    assert code == 0, err
    found = json.loads(out)["labels"]
    assert [(row["text"], row["text_pair"]) for row in found] == PAIRS
    for row in found:
        shares = right(adapter, (row["text"], row["text_pair"]))
        assert list(row["probabilities"].values()) == pytest.approx(shares, abs=1e-5)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("a text", "--temperature", "1"), "--temperature: a classifier gives labels; it does not write answers"),
        (("a text", "--max-new-tokens", "5"), "--max-new-tokens: a classifier gives labels"),
        (("a text", "--engine", "vllm"), "--engine: a classifier gives labels"),
        (("a text", "--compare"), "--compare: a classifier gives labels"),
        (("a text", "--merge"), "--merge: a classifier gives labels"),
        (("a text", "--system", "be brief"), "prompt 1 is a conversation, or empty; a classifier labels texts"),
        (("cat " * 200,), "text 1 has 202 tokens; the model reads at most"),
        (("a\udcff",), "U+DCFF, which is not a valid character"),
        (("--file", "none.jsonl"), "none.jsonl"),
        (("--file", "rows.jsonl"), "rows.jsonl:1: there is no column with the text"),
        (("--file", "nulls.jsonl"), "nulls.jsonl:1: the row has no text"),
        (("--file", "empty.jsonl"), "there is no text"),
    ],
)
def test_what_a_classifier_cannot_do_is_said(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"body": "a"}\n')
    Path("empty.jsonl").touch()
    Path("nulls.jsonl").write_text('{"text": null}\n')
    code, out, err = command("generate", adapter, *words)
    assert (code, out) == (2, ""), err
    assert said in err


def test_a_text_without_finite_logits_has_no_label(adapter: Path, tmp_path: Path) -> None:
    for file in (*adapter.iterdir(),):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "adapter_model.safetensors")
    save_file({name: one * 3e38 for name, one in weights.items()}, tmp_path / "adapter_model.safetensors")
    code, _, err = command("generate", tmp_path, TEXTS[0])
    assert code == 2
    assert "not finite (NaN or infinite)" in err
    save_file({name: one * math.nan for name, one in weights.items()}, tmp_path / "adapter_model.safetensors")
    code, _, err = command("generate", tmp_path, TEXTS[0])
    assert (code, "are not finite (NaN or infinite)" in err) == (2, True)


def test_only_a_classifier_is_taken_for_one(
    adapter: Path, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_classifier(adapter)
    # By its configuration.
    assert is_classifier(adapter.parent / "base")
    assert not is_classifier(tiny_model_dir)
    assert not is_classifier(tmp_path)
    assert not is_classifier("org/model")
    run = tmp_path / "runs" / "run"
    (run / "final").mkdir(parents=True)
    (run / "final" / "finray.json").write_text((adapter / "finray.json").read_text())
    assert is_classifier(run)
    # By its name, with the columns of its training.
    plain = {"model": {"name": "m"}, "data": {"source": "s", "field_mapping": {"text": "body"}}}
    (run / "config.yaml").write_text(json.dumps(plain))
    (tmp_path / "rows.jsonl").write_text('{"body": "a text"}\n')
    monkeypatch.chdir(tmp_path)
    assert is_classifier("run")
    assert [one.text for one in read_texts("run", [], Path("rows.jsonl"))] == ["a text"]
