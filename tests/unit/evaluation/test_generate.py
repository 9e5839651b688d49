"""Answers of a model directory are those that plain Transformers gives one by one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from finray.cli import show
from finray.errors import ConfigError, DataError, FinrayError, ModelError
from finray.evaluation.engines.sampling import Sampling
from finray.evaluation.engines.transformers import TransformersEngine
from finray.evaluation.generate import Answers, Asking, generate_text
from finray.evaluation.outcome import Comparison
from finray.evaluation.prompts import Prompt
from finray.models.artifacts import Artifact
from finray.results import PlainConsole
from tests.support import evaluated, runs, tiny


@torch.no_grad()
def plain(model: Any, prompt: Sequence[int], tokens: int) -> list[int]:
    """Greedy search, one prompt and one token at a time."""
    ids = list(prompt)
    for _ in range(tokens):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def answer_of(folder: Path, ids: list[int]) -> str:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answer = plain(model, ids, 4)
    ends = [number for number, token in enumerate(answer) if token == tokenizer.eos_token_id]
    return str(tokenizer.decode(answer[: ends[0] if ends else None], skip_special_tokens=True))


def folder_of(source: Path, target: Path, *, template: bool = True, rows: str | None = None) -> Path:
    """A copy of the model directory, without its chat template or with finray's note of what it was trained on."""
    shutil.copytree(source, target)
    if not template:
        (target / "chat_template.jinja").unlink()
    if rows is not None:
        (target / "finray.json").write_text(f'{{"rows": "{rows}"}}')
    return target


@pytest.mark.parametrize(
    ("template", "rows", "raw", "is_raw"),
    [
        (True, None, None, False),
        (True, "chat", None, False),
        (True, "completion", None, True),
        (True, "text", None, True),
        (True, "text", False, False),
        (True, "chat", True, True),
        (False, None, None, True),
    ],
)
def test_a_prompt_is_given_as_the_model_was_trained(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    template: bool, rows: str | None, raw: bool | None, is_raw: bool,
) -> None:  # fmt: skip
    """As a user's turn of a chat model, as plain text where it learned from plain prompts; the caller may insist."""
    monkeypatch.setattr("finray.evaluation.artifacts.cpu_has_bf16", lambda: False)
    folder = folder_of(tiny_model_dir, tmp_path / "model", template=template, rows=rows)
    prompts = ["the cat sleeps", "how many"]
    found = generate_text(
        folder,
        # Where training writes a row in another way without a template, the prompt has that, too.
        [Prompt(prompts[0]), Prompt("how many of them", plain=prompts[1]) if is_raw else Prompt(prompts[1])],
        sampling=Sampling(max_new_tokens=4),
        batch_size=2,
        raw=raw,
    )
    tokenizer = tiny.train_tokenizer()
    chat = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    texts = prompts if is_raw else [chat.format(text) for text in prompts]
    assert list(found) == [answer_of(folder, tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]


def test_the_system_message_and_template_arguments_of_the_training_are_served(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finray.evaluation.artifacts.cpu_has_bf16", lambda: False)
    folder = folder_of(tiny_model_dir, tmp_path / "model", rows="chat")
    template = folder / "chat_template.jinja"
    template.write_text("{{ word }}" + template.read_text())
    notes = {"rows": "chat", "system": "the dog runs", "chat_template_arguments": {"word": "a bird"}}
    (folder / "finray.json").write_text(json.dumps(notes))
    found = generate_text(folder, [Prompt("how many")], sampling=Sampling(max_new_tokens=4), batch_size=1)
    text = (
        "a bird<|im_start|>system\nthe dog runs<|im_end|>\n<|im_start|>user\nhow many<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = tiny.train_tokenizer()(text, add_special_tokens=False)["input_ids"]
    assert list(found) == [answer_of(folder, ids)]


def test_answers_are_a_sequence_and_are_written_beside_what_was_asked(tmp_path: Path) -> None:
    messages = ({"role": "user", "content": "é"},)
    answers = Answers((Prompt("a"), Prompt(messages=messages)), ("one", "zwei ü"))
    assert (answers[1], answers[:1], len(answers)) == ("zwei ü", ("one",), 2)
    rows = [{"prompt": "a", "answer": "one"}, {"messages": list(messages), "answer": "zwei ü"}]
    assert answers.plain() == {"answers": rows}
    answers.write(tmp_path / "answers.jsonl")
    text = (tmp_path / "answers.jsonl").read_text(encoding="utf-8")
    assert [json.loads(line) for line in text.splitlines()] == rows
    assert "zwei ü" in text
    with pytest.raises(DataError, match="cannot be written") as caught:
        answers.write(tmp_path / "none" / "answers.jsonl")
    assert caught.value.where == str(tmp_path / "none" / "answers.jsonl")


def test_prompts_and_answers_are_printed_as_json_as_they_are_and_notes_with_secrets_masked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(show, "mode", lambda: show.Mode(json=True))
    monkeypatch.setenv("MY_TOKEN", "s3cr3t-value")
    text = "set api_key, s3cr3t-value, https://me:word@here/x?sig=abc or hf_" + "a" * 30
    messages = ({"role": "user", "content": text, "password": text},)
    answers = Answers((Prompt(text), Prompt(messages=messages)), (text, text), (text, text))
    show.result(answers)
    assert json.loads(capsys.readouterr().out) == answers.plain()
    row = {"prompt": text, "reference": text, "answers": {"base": text}, "scores": {}}
    kept = {"predictions": [row], "notes": [text], "api_key": "x"}
    show.result(SimpleNamespace(plain=lambda: kept, AS_IS=Comparison.AS_IS))  # type: ignore[arg-type]
    found = json.loads(capsys.readouterr().out)
    assert found["predictions"] == [row]
    assert "s3cr3t" not in str(found["notes"])
    assert found["api_key"] == "***"


def test_answers_are_shown_letter_by_letter_however_narrow_the_terminal_is() -> None:
    texts = ("x = [1, 'two'] " * 9 + "end", "  indented\n[/b] :smile: 3.5")
    shown = StringIO()
    Answers((Prompt("a"), Prompt("b")), texts).print(PlainConsole(file=shown, width=20, force_terminal=True))
    assert shown.getvalue() == "".join(f"{text}\n" for text in texts)
    shown = StringIO()
    base = ("say 7 " * 9 + "end", "no [b]")
    Answers((Prompt("a"), Prompt("b")), texts, base).print(PlainConsole(file=shown, width=20))
    lines = []
    for one, tuned in zip(base, texts, strict=True):
        lines += ["─" * 20, f"     base {one}", *f"    tuned {tuned.strip()}".split("\n")]
    assert shown.getvalue().splitlines() == lines


def test_the_base_models_answers_stand_beside_those_of_the_adapter(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finray.evaluation.artifacts.cpu_has_bf16", lambda: False)
    adapter = evaluated.train(tiny_model_dir, tmp_path) / "final"
    words = ("the cat sleeps", "how many")
    command = ("generate", adapter, *words, "--engine", "transformers", "--max-new-tokens", 4)
    code, out, err = runs.finray(*command, "--compare", "--json")
    assert code == 0, err
    rows = json.loads(out)["answers"]
    chat = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    ids = [tiny.train_tokenizer()(chat.format(text), add_special_tokens=False)["input_ids"] for text in words]
    assert [row["base"] for row in rows] == [answer_of(tiny_model_dir, one) for one in ids]
    alone = json.loads(runs.finray(*command, "--json")[1])["answers"]
    assert [row["answer"] for row in rows] == [row["answer"] for row in alone] != [row["base"] for row in rows]
    assert not any("base" in row for row in alone)
    shown = runs.finray(*command, "--compare")[1]
    assert [line[:10] for line in shown.splitlines() if line.startswith(("     base", "    tuned"))] == [
        *("     base ", "    tuned ") * 2
    ]
    for wrong, said in (
        ((*command, "--compare", "--merge"), "the base model of a merged adapter cannot answer"),
        (("generate", tiny_model_dir, "a", "--compare"), "there is no adapter to switch off"),
    ):
        code, _, err = runs.finray(*wrong)
        assert code == 2
        assert said in err


def test_a_file_of_answers_that_cannot_be_written_is_refused_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, opened = tmp_path / "answers.jsonl", os.open
    output.write_text("old\n")

    def refusing(path: Any, flags: int, *rest: Any, **more: Any) -> Any:
        if path == output and flags & os.O_WRONLY:
            raise PermissionError(13, "Permission denied")
        return opened(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refusing)
    code, _, err = runs.finray("generate", tmp_path / "no-model", "hello", "--output", output)
    assert code != 0
    assert "the file cannot be written: permission denied" in err
    assert str(output) in err
    assert output.read_text() == "old\n"
    for place in ("gone/answers.jsonl", "."):
        code, _, err = runs.finray("generate", tmp_path / "no-model", "hello", "--output", tmp_path / place)
        assert (code, "repair" in err) == (2, True)


@pytest.mark.parametrize(
    ("notes", "config", "refused"),
    [
        ({}, "{}", False),
        ({}, '{"architectures": null}', False),
        ({"auto_class": "AutoModelForSequenceClassification"}, "{}", True),
        ({}, '{"architectures": ["X", "BertForTokenClassification"]}', True),
        ({"auto_class": "AutoModelForCausalLM", "task": "mine"}, "{}", False),
        ({"auto_class": "MyOwn", "task": "my.module:Task"}, "{}", False),
    ],
)
def test_models_that_give_no_answers_are_known_by_their_task_or_class(
    tmp_path: Path, notes: Any, config: str, refused: bool
) -> None:
    (tmp_path / "config.json").write_text(config)
    plain: Any = SimpleNamespace(chat_template="x")
    with pytest.raises(ModelError, match="is a classifier") if refused else nullcontext():
        Asking.of(Artifact(tmp_path, None, notes), plain)


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Has a word for each engine that is closed."""
    found, close = list[str](), TransformersEngine.close
    monkeypatch.setattr(TransformersEngine, "close", lambda engine: (found.append("closed"), close(engine)))
    monkeypatch.setattr("finray.evaluation.artifacts.cpu_has_bf16", lambda: False)
    return found


def test_a_single_answer_is_written_as_it_comes_and_the_engine_is_closed_whatever_happens(
    tiny_model_dir: Path, closed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else vLLM's processes and a merged model would be left."""
    written: list[str] = []
    options: dict[str, Any] = {"sampling": Sampling(8), "batch_size": 2, "write": written.append}
    (text,) = generate_text(tiny_model_dir, [Prompt("how many")], **options)
    assert ("".join(written), len(written) > 1, closed) == (text, True, ["closed"])
    written.clear()
    several = generate_text(tiny_model_dir, [Prompt("where is"), Prompt("how many")], **options)
    assert (several[1], written) == (text, []), "several answers come in any order"

    def failing(*_: Any, **__: Any) -> Any:
        raise DataError("odd")

    monkeypatch.setattr(TransformersEngine, "generate", failing)
    with pytest.raises(DataError, match="odd"):
        generate_text(tiny_model_dir, [Prompt("a")], **options)
    assert len(closed) == 3


@pytest.mark.parametrize(
    ("raw", "template", "error", "said"),
    [
        (True, True, ConfigError, "plain text has neither messages nor tools"),
        (None, True, ModelError, "needs a chat template, but the model was trained without it"),
        (None, False, ModelError, "needs a chat template, but the model has none"),
    ],
)
def test_a_conversation_is_not_given_to_a_model_as_plain_text_or_by_a_template_it_was_not_trained_with(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    raw: bool | None, template: bool, error: type[FinrayError], said: str,
) -> None:  # fmt: skip
    folder = folder_of(tiny_model_dir, tmp_path / "model", template=template, rows="completion")
    monkeypatch.setattr("finray.evaluation.generate.make_engine", None)
    for prompt in (Prompt.of("a", "be brief"), Prompt("a", tools=({"name": "f"},))):
        with pytest.raises(error, match=said) as caught:
            generate_text(folder, [Prompt("a"), prompt], sampling=Sampling(), batch_size=1, raw=raw)
        assert ("--no-raw" in str(caught.value.repair)) == (raw is None and template)
