"""What users of three older systems put in, as they put it in: everything about data that they had, from their inputs.

The systems are a Ray Train framework with `HFDatasetConfig`, a Ray tutorial on a code model, and ZeRO-3 on
film reviews. What the Hub would serve is a local directory in its layout, or is served in place of it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
from tokenizers.processors import TemplateProcessing

from finray.config.schema import Config
from finray.data.dataset.export import export_rows
from finray.data.dataset.prepare import prepare_here
from finray.data.dataset.prepared import PreparedDataset
from tests.support.preparing import Preparing, Write, ids, lines
from tests.support.preparing import preparing as preparing
from tests.support.preparing import put as put
from tests.support.runs import finray, write_config
from tests.support.tiny import WORDS

Calls = list[tuple[tuple[Any, ...], dict[str, Any]]]


def words(number: int, count: int = 5) -> str:
    return " ".join(WORDS[(number * 7 + step * step) % len(WORDS)] for step in range(count))


def dolphin(count: int) -> list[dict[str, Any]]:
    """Rows with the columns of the set that the first system trains on by default."""
    return [{"instruction": f"say {at}", "input": words(at), "output": f"{words(at + 1)} {at}"} for at in range(count)]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[list[dict[str, Any]]], Calls]:
    """Stand for the Hub: `datasets.load_dataset` gives these rows, and its arguments are kept."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))

    def start(rows: list[dict[str, Any]]) -> Calls:
        calls: Calls = []
        whole = datasets.Dataset.from_list(rows)

        def load_dataset(*arguments: Any, **named: Any) -> datasets.Dataset:
            calls.append((arguments, named))
            (part,) = datasets.ReadInstruction.from_spec(named["split"]).to_absolute({"train": len(rows)})
            return whole.select(range(part.from_ or 0, len(rows) if part.to is None else part.to))

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        return calls

    return start


# --- HFDatasetConfig -------------------------------------------------------------------------------------------

# train_split_ratio .9 leaves a tenth, val_test_split_ratio .5 halves it.
RATIOS = {"eval_ratio": 0.05, "test_ratio": 0.05}
TEMPLATES = {
    "input_template": "### Instruction:\\n{instruction}\\n### Input:\\n{input}\\n",
    "output_template": "### Response:\\n{output}",
}


def test_name_config_and_split_are_those_that_the_hub_is_asked_for(preparing: Preparing, serve: Any) -> None:
    calls = serve(dolphin(4))
    name = "cognitivecomputations/dolphin"
    texts = preparing.texts(name, subset="flan1m-alpaca-uncensored", train_split="train", revision="v1", **TEMPLATES)
    assert len(texts) == 4
    asked = {"data_dir": None, "split": "train", "revision": "v1"}
    assert calls == [((name, "flan1m-alpaca-uncensored"), asked)]


def test_templates_with_written_out_newlines_and_renamed_columns(preparing: Preparing, put: Write) -> None:
    rows = [{"q": "what is", "ctx": "the {river}\\n", "a": 12}]
    source = put("rows.jsonl", lines(rows))
    split = preparing.splits(
        source,
        input_template="Instruction: {instruction}\\nContext:\\t{context}\\n",
        output_template="{answer}",
        field_mapping={"instruction": "q", "context": "ctx", "answer": "a"},
    ).train
    prompt = "Instruction: what is\nContext:\tthe {river}\\n\n"
    asked = preparing.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    answer = [*preparing.tokenizer("12", add_special_tokens=False)["input_ids"], preparing.tokenizer.eos_token_id]
    # Written-out newlines of the template are newlines; those of the data are data.
    assert ids(split) == [(asked + answer, [0] * len(asked) + [1] * len(answer))]


CONVERTER = """
def question_and_answer(row):
    if row["output"] == "":
        return None
    return {"prompt": row["instruction"] + ": ", "completion": row["output"].upper()}
"""


def test_a_converter_of_ones_own_and_the_exported_files(
    preparing: Preparing, put: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As its users would: the command line, a module in the working directory, JSONL of the splits for people."""
    monkeypatch.syspath_prepend(put("shaping.py", CONVERTER).parent)
    source = put("rows.jsonl", lines([*dolphin(40), {"instruction": "x", "input": "", "output": ""}]))
    plain = {
        "run": {"output_dir": str(tmp_path / "runs")},
        "model": {"name": str(preparing.model)},
        "data": {"source": "rows.jsonl", "converter": "shaping:question_and_answer", "max_length": 64, **RATIOS},
    }
    config = write_config(plain, tmp_path / "config.yaml")
    monkeypatch.chdir(source.parent)
    code, out, err = finray("prepare", config, "--export-jsonl", "exported")
    assert code == 0, err
    assert "36 rows to exported/training.jsonl" in out
    folder = source.parent / "exported"
    found = {name: rows_of(folder / f"{name}.jsonl") for name in ("training", "validation", "test")}
    assert {name: len(rows) for name, rows in found.items()} == {"training": 36, "validation": 2, "test": 2}
    assert (folder / ".data_ready").is_file()
    assert all(row.keys() == {"input", "output"} for rows in found.values() for row in rows)
    wanted = {(f"say {at}: ", row["output"].upper()) for at, row in enumerate(dolphin(40))}
    assert {(row["input"], row["output"]) for rows in found.values() for row in rows} == wanted


def rows_of(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def exported(preparing: Preparing, config: Config, folder: Path) -> PreparedDataset:
    location = prepare_here(config, root=folder.parent / f"prepared-{folder.name}")
    export_rows(config, location, folder)
    return PreparedDataset(location)


def test_training_on_the_exported_files_gives_the_same_tokens(preparing: Preparing, put: Write, tmp_path: Path) -> None:
    config = preparing.config(put("rows.jsonl", lines(dolphin(60))), **RATIOS, **TEMPLATES)
    # The directory of the old tool, with its name.
    folder = tmp_path / "datasets/dolphin/flan1m/train=90%-val=5%-test=5%"
    before = exported(preparing, config, folder).splits(config.data, seed=config.run.seed)
    after = preparing.splits(folder, format="prompt_completion", eval_split="validation", test_split="test")
    assert ids(after.train) == ids(before.train)
    assert ids(after.eval) == ids(before.eval)
    assert ids(after.test) == ids(before.test)
    assert len(ids(after.train)) == 54


# --- a code model on one directory of a Hub dataset -----------------------------------------------------------


def rust(at: int) -> dict[str, Any]:
    return {"content": f"fn f{at}() {{\n    {words(at, at % 40 + 1)}\n}}\n", "lang": "Rust", "size": at}


def test_a_directory_of_a_hub_set_and_a_slice_are_what_the_hub_is_asked_for(preparing: Preparing, serve: Any) -> None:
    calls = serve([rust(at) for at in range(300)])
    split = preparing.splits("bigcode/the-stack-smol:data/rust", train_split="train[:1%]", max_length=512).train
    (call,) = calls
    assert call == (
        ("bigcode/the-stack-smol", None),
        {"data_dir": "data/rust", "split": "train[:1%]", "revision": None},
    )
    # Plain language modelling: every token, and where a file ends.
    assert preparing.said(split) == [rust(at)["content"] for at in range(3)]
    assert all(all(mask) and row[-1] == preparing.tokenizer.eos_token_id for row, mask in ids(split))


# --- film reviews ----------------------------------------------------------------------------------------------


@pytest.fixture
def reviews(put: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The layout of stanfordnlp/imdb: Parquet below a configuration, three splits, a label that is not learned."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["neg", "pos"])})
    card = "---\nconfigs:\n- config_name: plain_text\n  data_files:\n"
    for name, count in (("train", 100), ("test", 10), ("unsupervised", 5)):
        card += f"  - split: {name}\n    path: plain_text/{name}-*\n"
        rows = [{"text": f"{name} {at} {words(at, 3 + at * 8)}", "label": at % 2} for at in range(count)]
        path = put(f"imdb/plain_text/{name}-00000-of-00001.parquet", b"")
        datasets.Dataset.from_list(rows, features=features).to_parquet(str(path))
    return put("imdb/README.md", f"{card}---\n").parent


def test_reviews_are_learned_whole_at_512_tokens_with_a_tenth_held_out(preparing: Preparing, reviews: Path) -> None:
    options = {"train_on": "all", "eval_ratio": 0.1, "max_length": 512}
    dataset = preparing.dataset(reviews, **options)
    (stream,) = dataset.manifest.splits["train"].streams
    assert stream.format == "text (text); not read: label"
    assert dataset.manifest.splits["train"].source_rows == 100
    splits = preparing.splits(reviews, **options)
    rows = ids(splits.train) + ids(splits.eval)
    assert all(all(mask) for _, mask in rows)
    assert max(len(row) for row, _ in rows) == 512
    # Long reviews continue in another row; the old tool threw the rest away.
    end = preparing.tokenizer.eos_token_id
    assert sum(end in row for row, _ in rows) == 100 < len(rows)
    held = set(splits.eval.source_rows.tolist()) if splits.eval is not None else set()
    assert not held & set(splits.train.source_rows.tolist())
    # A share of the rows, and all pieces of a review on one side.
    assert len(splits.eval or ()) == pytest.approx(len(rows) / 10, abs=8)


def test_the_named_test_split_of_the_reviews_and_their_labels(preparing: Preparing, reviews: Path) -> None:
    splits = preparing.splits(reviews, train_split="train[:5]", eval_split="test[:3]", max_length=512)
    assert [text.split()[:2] for text in preparing.said(splits.eval)] == [["test", str(at)] for at in range(3)]
    assert len(splits.train) == 5
    labelled = preparing.splits(reviews, format="labelled_text", max_length=512).train
    assert labelled.labels == [str(at % 2) for at in range(100)]


def test_a_tokenizer_that_begins_every_text_begins_an_exported_one_once(
    tokenizer: Any, put: Write, tmp_path: Path
) -> None:
    own = copy.deepcopy(tokenizer)
    own.bos_token = "<|endoftext|>"
    number = own.bos_token_id
    own.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{own.bos_token} $A", special_tokens=[(own.bos_token, number)]
    )
    own.chat_template = "{{ bos_token }}" + own.chat_template
    own.save_pretrained(str(tmp_path / "model"))
    (tmp_path / "model/config.json").write_text("{}")
    preparing = Preparing(tmp_path / "model", own, tmp_path / "prepared")
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    exported(preparing, preparing.config(put("rows.jsonl", lines([{"messages": chat}]))), tmp_path / "out")
    ((row, _),) = ids(preparing.splits(tmp_path / "out").train)
    assert row.count(number) == 1
