"""Answers in batches are those that plain Transformers gives one by one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from finray.errors import ConfigError, DataError
from finray.evaluation.engines.sampling import Sampling
from finray.evaluation.generate import Answers, generate, generate_text
from finray.evaluation.prompts import Prompt
from tests.support import tiny

# Of many lengths, not sorted, and none the beginning of another.
PROMPTS = [[5, 6, 7], [40, 41, 42, 43, 44, 45, 46, 47, 48], [300], [9, 200, 9, 200, 9], [77, 3], [8, 8, 8, 8, 8, 8]]


@pytest.fixture(scope="module")
def model() -> Any:
    """One whose answers depend on the whole prompt."""
    made = tiny.build_model("llama").eval()
    made.generation_config.eos_token_id = None
    return made


@torch.no_grad()
def plain(model: Any, prompt: Sequence[int], tokens: int) -> list[int]:
    """Greedy search, one prompt and one token at a time."""
    ids = list(prompt)
    for _ in range(tokens):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


class Words:
    """A tokenizer whose text shows every token."""

    def __init__(self, *, eos: int | None = None, pad: int | None = 0) -> None:
        self.eos_token_id, self.pad_token_id = eos, pad

    def decode(self, tokens: list[int], *, skip_special_tokens: bool = False) -> str:
        assert skip_special_tokens
        return " ".join(map(str, tokens))


@pytest.mark.parametrize("batch_size", [1, 2, 4, 6, 10])
def test_each_prompt_gets_its_own_answer_in_any_batch(model: Any, batch_size: int) -> None:
    told: list[int] = []
    answers = generate(
        *(model, Words(), PROMPTS), sampling=Sampling(max_new_tokens=5), batch_size=batch_size, progress=told.append
    )
    expected = [" ".join(map(str, plain(model, prompt, 5))) for prompt in PROMPTS]
    assert len(set(expected)) == len(expected), "answers differ, or a mix-up would not show"
    assert answers == expected
    assert told == [min(done + batch_size, 6) for done in range(0, 6, batch_size)]


class Recorder:
    """Stands for a model: keeps what it is asked, and answers each prompt with tokens that are given."""

    device = torch.device("cpu")

    def __init__(self, ends: Any = None, says: Sequence[int] = (7,)) -> None:
        self.generation_config = SimpleNamespace(eos_token_id=ends)
        self.says = says
        self.asked: list[dict[str, Any]] = []

    def generate(self, **asked: Any) -> torch.Tensor:
        self.asked.append({**asked, "random": torch.initial_seed()})
        ids = asked["input_ids"]
        return torch.cat([ids, torch.tensor([list(self.says)] * len(ids))], dim=1)


def test_a_batch_is_padded_on_the_left_longest_prompts_first() -> None:
    model = Recorder()
    generate(model, Words(pad=9), [[1], [2, 3, 4], [5, 6]], sampling=Sampling(max_new_tokens=3), batch_size=2)
    first, second = model.asked
    assert first["input_ids"].tolist() == [[2, 3, 4], [9, 5, 6]]
    assert first["attention_mask"].tolist() == [[1, 1, 1], [0, 1, 1]]
    assert second["input_ids"].tolist() == [[1]]
    assert (first["max_new_tokens"], first["pad_token_id"], first["use_cache"]) == (3, 9, True)


@pytest.mark.parametrize(
    ("tokenizer", "pad"),
    [(Words(eos=4, pad=None), 4), (Words(pad=None), 0), (Words(eos=4, pad=0), 0), (Words(eos=0), 0)],
)
def test_what_pads_where_the_tokenizer_has_nothing_for_it(tokenizer: Words, pad: int) -> None:
    model = Recorder()
    generate(model, tokenizer, [[1], [2, 3]], sampling=Sampling(), batch_size=2)
    assert model.asked[0]["pad_token_id"] == pad
    assert model.asked[0]["input_ids"].tolist() == [[2, 3], [pad, 1]]


@pytest.mark.parametrize(
    ("eos", "ends", "stop"),
    [(2, None, [2]), (2, 5, [2, 5]), (None, [6, 5], [5, 6]), (5, (6, 5), [5, 6]), (None, 0, [0])],
)
def test_an_answer_ends_at_the_tokenizers_end_and_at_those_of_the_generation_config(
    eos: int | None, ends: Any, stop: list[int]
) -> None:
    model = Recorder(ends, says=[30, 31, stop[-1], 32])
    assert generate(model, Words(eos=eos), [[1]], sampling=Sampling(), batch_size=1) == ["30 31"]
    assert model.asked[0]["eos_token_id"] == stop


def test_greedy_search_overrides_what_a_generation_config_sets() -> None:
    model = Recorder()
    generate(model, Words(), [[1]], sampling=Sampling(), batch_size=1)
    asked = model.asked[0]
    assert asked["do_sample"] is False
    assert [asked[name] for name in ("temperature", "top_p", "top_k")] == [None, None, None]
    assert asked["max_new_tokens"] == 128


def test_sampling_passes_its_settings_on_and_starts_from_its_seed() -> None:
    model = Recorder()
    generate(model, Words(), [[1]], sampling=Sampling(temperature=0.7, top_p=0.4, seed=21), batch_size=1)
    asked = model.asked[0]
    assert (asked["do_sample"], asked["temperature"], asked["top_p"], asked["random"]) == (True, 0.7, 0.4, 21)
    generate(model, Words(), [[1]], sampling=Sampling(temperature=1.0), batch_size=1)
    assert (model.asked[1]["top_p"], model.asked[1]["random"]) == (1.0, 0)


def test_a_seed_gives_the_same_sample_and_another_gives_another(model: Any) -> None:
    def sampled(seed: int) -> list[str]:
        sampling = Sampling(max_new_tokens=8, temperature=1.5, seed=seed)
        return generate(model, Words(), PROMPTS, sampling=sampling, batch_size=3)

    assert sampled(1) == sampled(1) != sampled(2)


def test_no_prompts_have_no_answers(model: Any) -> None:
    assert generate(model, Words(), [], sampling=Sampling(), batch_size=2) == []


# --- from a directory -----------------------------------------------------------------------------------------------


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
        folder, [Prompt(text) for text in prompts], sampling=Sampling(max_new_tokens=4), batch_size=2, raw=raw
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


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("max_new_tokens", [1, 2**31 - 1], [0, 2**31]),
        ("temperature", [0.0, 1e-3, 1e3], [9e-4, 1.1e3, -0.1, float("nan")]),
        ("top_p", [1e-9, 1.0], [0.0, 1.01]),
        ("seed", [0, 2**63 - 1], [-1, 2**63]),
    ],
)
def test_numbers_that_nothing_can_be_sampled_with_name_their_option(
    field: str, good: list[float], bad: list[float]
) -> None:
    for value in good:
        assert getattr(Sampling(**{field: value}), field) == value  # type: ignore[arg-type]
    for value in bad:
        with pytest.raises(ConfigError, match="cannot be used") as caught:
            Sampling(**{field: value})  # type: ignore[arg-type]
        assert caught.value.where == f"--{field.replace('_', '-')}"
