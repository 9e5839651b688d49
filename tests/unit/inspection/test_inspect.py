"""`finray inspect` from a config: prepared rows, the proof that they continue what is served, and refusals."""

from __future__ import annotations

import json
import re
import shutil
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from finray.config.load import build_config
from finray.data.dataset.columns import ColumnFiles
from finray.data.dataset.prepared import PreparedDataset
from finray.data.tokenize import chat
from finray.errors import DataError
from finray.inspection.inspect import generation_stops, inspect
from finray.inspection.page import page
from finray.inspection.result import findings
from finray.pretrained import tokenizers
from tests.support import tiny

TEMPLATES = Path(__file__).parents[2] / "data" / "chat_templates"
OPENS_REASONING = tiny.CHATML.replace("assistant\n' }}", "assistant\n<think>' }}")


def _config(model: Path, rows: Path, output: Path, *, template: str | None = None, **data: Any) -> Any:
    named: dict[str, Any] = {"name": str(model)}
    if template is not None:
        (output / "template.jinja").write_text(template, encoding="utf-8")
        named["chat_template"] = str(output / "template.jinja")
    section = {"source": str(rows), "max_length": 512, **data}
    return build_config({"run": {"output_dir": str(output)}, "model": named, "data": section}, source="test")


@pytest.fixture
def conversations(tmp_path: Path) -> Path:
    """Forty conversations, of one to three questions, some with reasoning in the answers."""
    rows = []
    for number in range(40):
        messages = []
        for turn in range(1 + number % 3):
            messages.append({"role": "user", "content": f"how many {tiny.WORDS[number]} {turn}"})
            thought = "<think>\nnever\n</think>\n\n" if number % 4 == 0 else ""
            messages.append({"role": "assistant", "content": f"{thought}{tiny.WORDS[number + turn]} {number}"})
        rows.append({"messages": messages})
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_every_answer_continues_the_served_prompt(tiny_model_dir: Path, conversations: Path, tmp_path: Path) -> None:
    found = inspect(_config(tiny_model_dir, conversations, tmp_path, eval_ratio=0.1), compared=None)
    assert found.format == "messages (messages), detected"
    assert [split.name for split in found.splits] == ["train", "eval"]
    assert [split.rows for split in found.splits] == [36, 4]
    assert found.parity.rows == found.parity.of == 36
    answers = [
        1 + (int(view.where.rpartition(":")[2]) - 1) % 3
        for view in _all(found, tiny_model_dir, conversations, tmp_path)
    ]
    assert found.parity.turns == found.parity.matching == sum(answers)
    assert {check.level for check in found.checks} <= {"ok", "note"}


def _all(found: Any, model: Path, rows: Path, output: Path) -> Any:
    """Every training row as tokens."""
    chosen = [str(number) for number in range(found.splits[0].rows)]
    return inspect(_config(model, rows, output, eval_ratio=0.1), chosen=chosen, compared=1).examples


def test_a_template_that_rewrites_history_gives_rows_that_are_proven(
    tiny_model_dir: Path, conversations: Path, tmp_path: Path
) -> None:
    template = (TEMPLATES / "qwen-3.jinja").read_text(encoding="utf-8")
    found = inspect(_config(tiny_model_dir, conversations, tmp_path, template=template), compared=None)
    assert found.parity.holds
    assert found.parity.turns == sum(1 + number % 3 for number in range(40))


def test_a_sample_is_compared_where_that_is_enough(tiny_model_dir: Path, conversations: Path, tmp_path: Path) -> None:
    found = inspect(_config(tiny_model_dir, conversations, tmp_path), compared=10)
    assert (found.parity.rows, found.parity.of, found.parity.holds) == (10, 40, True)


def test_data_that_is_refused_shows_the_difference(tiny_model_dir: Path, conversations: Path, tmp_path: Path) -> None:
    """The negative control of the proof: serving opens a block of reasoning that training does not have."""
    found = inspect(_config(tiny_model_dir, conversations, tmp_path, template=OPENS_REASONING))
    assert isinstance(found.refusal, DataError)
    assert found.splits == ()
    assert not found.parity.holds
    difference = found.parity.differences[0]
    assert difference.text("served").endswith("<|im_start|>assistant\n<think>")
    assert not difference.text("trained").endswith("<think>")
    assert difference.where.startswith("chats.jsonl:")


def test_rows_learned_whole_are_compared_too(tiny_model_dir: Path, conversations: Path, tmp_path: Path) -> None:
    whole = inspect(_config(tiny_model_dir, conversations, tmp_path, train_on="all"), compared=None)
    assert whole.parity.holds
    assert whole.parity.turns == sum(1 + number % 3 for number in range(40))
    other = inspect(_config(tiny_model_dir, conversations, tmp_path, train_on="all", template=OPENS_REASONING))
    assert other.refusal is None
    assert other.parity.matching < other.parity.turns


def test_another_mistake_is_raised_as_it_is(tiny_model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text('{"messages": []}\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"messages"):
        inspect(_config(tiny_model_dir, path, tmp_path))


@pytest.mark.parametrize(
    ("template", "said", "most"),
    [
        ("{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3, "used more than 0.5 seconds", 3),
        ("{{ raise_exception('no such role') }}", "no such role", 2 + 2 * 200),
    ],
    ids=["never ends", "refuses every row"],
)
def test_a_template_that_renders_no_row_is_not_tried_on_all_of_them(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, said: str, most: int
) -> None:
    monkeypatch.setattr(chat, "TEMPLATE_S", 0.5)
    tried: list[object] = []
    within = chat.within
    monkeypatch.setattr(chat, "within", lambda *given: tried.append(given) or within(*given))
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(row)}\n" * 500, encoding="utf-8")
    with pytest.raises(DataError, match=said):
        inspect(_config(tiny_model_dir, path, tmp_path, template=template))
    assert 1 <= len(tried) <= most


def test_completions_are_compared_with_the_tokenized_prompt(tiny_model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"{tiny.WORDS[number]} is", "completion": f" {tiny.WORDS[number + 1]}"} for number in range(12)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    found = inspect(_config(tiny_model_dir, path, tmp_path))
    assert (found.parity.turns, found.parity.matching) == (12, 12)


def test_plain_text_has_nothing_to_compare(tiny_model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"text": "the green house " * 40}) + "\n", encoding="utf-8")
    found = inspect(_config(tiny_model_dir, path, tmp_path, max_length=32))
    assert (found.parity.turns, found.parity.rows) == (0, found.splits[0].rows)
    assert found.parity.holds
    ends = next(check for check in found.checks if check.name == "Learned text ends with an end token")
    assert ends.level == "ok"


def test_what_begins_the_next_turn_ends_an_answer_if_the_generation_settings_say_so(
    tiny_model_dir: Path, conversations: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_model_dir, tmp_path / "model")
    template = tiny.CHATML.replace("<|im_end|>", "")
    opener = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    start = next(token["id"] for token in opener if token["content"] == "<|im_start|>")

    def ends() -> Any:
        found = inspect(_config(model, conversations, tmp_path, template=template), compared=None)
        assert found.parity.holds
        (check,) = (one for one in found.checks if one.name == "Learned text ends with an end token")
        return check, {one.level for one in findings(found)} - {"ok", "note"}

    check, levels = ends()
    assert (check.level, check.count, levels) == ("problem", 39, {"problem"})
    assert f"<|im_start|> ({start})" in check.finding
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, start]}), encoding="utf-8")
    check, levels = ends()
    assert (check.level, check.of, levels) == ("ok", 79, set())
    assert check.finding.endswith("<|im_start|> (79)")


def test_serving_stops_at_the_tokens_of_the_generation_settings(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _config(tiny_model_dir, tmp_path / "rows.jsonl", tmp_path)
    assert generation_stops(config.model) == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}), encoding="utf-8")
    assert generation_stops(config.model.model_copy(update={"name": str(tmp_path)})) == (5, 7)
    assert generation_stops(config.model.model_copy(update={"name": str(tmp_path / "none")})) == ()
    asked = list[str]()

    def download(name: str, file: str, *, revision: str) -> str:
        asked.extend((name, file, revision))
        return str(tmp_path / file)

    monkeypatch.setattr(tokenizers.hub, "refusal", lambda: asked.append("does it answer"))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert generation_stops(config.model.model_copy(update={"name": "org/model", "revision": "v1"})) == (5, 7)
    assert asked == ["does it answer", "org/model", "generation_config.json", "v1"]


def test_pairs_are_shown_side_by_side_and_what_is_odd_about_them_is_named(tiny_model_dir: Path, tmp_path: Path) -> None:
    things = ["a cat", "rain", "the old red fox and tea"]
    good = [
        {"prompt": f"what is {number}", "chosen": things[number % 3], "rejected": f"no {things[(number + 1) % 3]}"}
        for number in range(9)
    ]
    swapped = {"prompt": "what is 4", "chosen": good[4]["rejected"], "rejected": good[4]["chosen"]}
    same, lost = {"prompt": "hm", "chosen": "x", "rejected": "x"}, {**good[0], "prompt": "how " * 80}
    cut = {"prompt": "go on", "chosen": "tea", "rejected": "rain " * 80}
    longer = [
        {"prompt": f"tell {number}", "chosen": "it is " + "rain " * 4, "rejected": "rain"} for number in range(40)
    ]
    names = ("Answers lost (train)", "Equal answers (train)", "Pairs that contradict each other", "Length predicts")
    names = (*names, "One answer cut off")
    cases = ([good, []], [[*good, swapped, same, lost], names[:3]], [longer, names[3:4]], [[*good, cut], names[4:]])
    cases = (*cases, cases[2])
    for number, (rows, odd) in enumerate(cases):
        file = tmp_path / f"{number}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        section = {"source": str(file), "max_length": 64}
        plain = {"model": {"name": str(tiny_model_dir)}, "data": section}
        plain["train"] = {"objective": "orpo" if number == 4 else "dpo"}
        found = inspect(build_config({**plain, "run": {"output_dir": str(tmp_path)}}, source="test"), examples=2)
        of = {check.name: check for check in findings(found) if check.level in ("warning", "problem")}
        assert [name for name in names if any(one.startswith(name) for one in of)] == list(odd)
        # Both answers of both pairs continue what is served.
        assert (found.parity.rows, found.parity.holds) == (found.splits[0].rows, True)
        sides = [(view.side, view.where, view.index) for view in found.examples]
        half = found.splits[0].rows // 4
        assert sides[:2] == [("chosen", f"{number}.jsonl:1", 0), ("rejected", f"{number}.jsonl:1", 1)]
        assert [index for _, _, index in sides[2:]] == [2 * half, 2 * half + 1]
        if rows is longer:
            says = next(check.finding for name, check in of.items() if name.startswith(names[3]))
            assert ("length_normalized" in says) == (number == 2), "ORPO has it already"
        if cut in rows:
            assert of[names[4]].where == (f"{number}.jsonl:10",)
            assert of[names[4]].finding.startswith("1 of 10 pairs compare a whole answer with one that is cut off")
        if swapped in rows:
            assert of[names[2]].where == (f"{number}.jsonl:5 = {number}.jsonl:10",)
            assert found.splits[0].rows == 2 * (len(rows) - 1), "the pair that lost its answers is none"
            out = StringIO()
            found.print(Console(file=out, width=100))
            assert re.search(r"chosen +rejected *\n⟦a cat<\|im_end\|>⟧ +⟦no rain<\|im_end\|>⟧", out.getvalue())


def test_a_page_has_both_answers_beside_each_other_and_how_far_a_reference_prefers_the_chosen_one(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    file, shares = tmp_path / "pairs.jsonl", [-0.5, -2.0, -1.5, -1.0, -0.25]
    rows = [{"prompt": f"what is {number}", "chosen": "a cat", "rejected": "the old red fox"} for number in range(5)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plain = {"model": {"name": str(tiny_model_dir)}, "data": {"source": str(file)}, "train": {"objective": "dpo"}}
    config = build_config({**plain, "run": {"output_dir": str(tmp_path)}}, source="test")
    found = inspect(config)
    # The prompt once, and both answers.
    for label in ("Tokens", "Tokens of the chosen answer", "Tokens of the rejected answer"):
        assert page(found).count(f'aria-label="{label}"') == 3
    dataset = PreparedDataset(found.prepared)
    split = dataset.all_rows("train")
    assert split is not None
    chosen, rejected = split.supervised[:2].tolist()

    def reference(factor: float) -> tuple[list[str], list[float | None]]:
        """With another reference, by which each chosen token has the pair's number, and each rejected one -1."""
        sides = [(factor * share, -1.0) for share in shares]
        values = [np.full(n, x, np.float32) for pair in sides for n, x in zip((chosen, rejected), pair, strict=True)]
        made_by = {"column": "reference", "objective": "dpo", "factor": factor}
        ColumnFiles(dataset.folder, dataset.manifest, "train", made_by).write(0, values)
        found, out = inspect(config, examples=2), StringIO()
        found.print(Console(file=out, width=100))
        title = f"chosen, {shares[2] * chosen:.1f} nats"
        assert (title in out.getvalue()) is (title in page(found)) is (found.examples[0].reference is not None)
        lines = [check.finding for check in findings(found) if check.name == "Reference"]
        return lines, [view.reference for view in found.examples]

    ahead = [share * chosen + rejected for share in shares]
    assert reference(1.0) == (
        [
            f"the reference finds the chosen answer the more likely one in {sum(x > 0 for x in ahead) / 5:.1%} of 5 "
            f"pairs, by {sum(ahead) / 5:.3g} nats in the mean; chosen answers have {-sum(shares) / 5:.3g} nats per "
            "token"
        ],
        [shares[0] * chosen, -rejected, shares[2] * chosen, -rejected],
    )
    # Of two references both are named, and no row's numbers; one that does not know such answers is a warning.
    dataset.folder.sub("columns/odd").write("made_by.json", b"[1")
    lines, nats = reference(3.0)
    assert sorted("fine-tune it on the chosen answers first" in line for line in lines) == [False, True]
    assert nats == [None] * 4
