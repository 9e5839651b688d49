"""Rows of preferences in every form that data sets have, as pairs that begin with the same tokens, and their checks."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from finray.data.formats.convert import FormatChoice, converter_of
from finray.data.formats.examples import Chat, Completion, Example, Preference, PreferenceKind, Unpaired
from finray.data.formats.preference_checks import contradictions, length_bias, only_class
from finray.data.tokenize import encode
from finray.data.tokenize.encode import Tokenizer
from finray.errors import ConfigError, DataError
from tests.support import families
from tests.support.talk import mask_of


def converted(
    *rows: dict[str, Any], kind: PreferenceKind = "preference", has_chat_template: bool = True, **choice: Any
) -> list[Example]:
    """The examples of rows, of whose first one the columns count."""
    settings = {"format": "auto", "field_mapping": {}, **choice}
    row_format = FormatChoice(preferences=kind, **settings).decide(rows[0])
    convert = converter_of(row_format, has_chat_template=has_chat_template)
    return [example for row in rows for example in convert(row)]


def words(example: Chat | Completion) -> tuple[Any, Any]:
    """Prompt and answer: messages as (role, content), or texts."""
    if isinstance(example, Completion):
        return example.prompt, example.completion
    turns = [(item.role, item.content) for item in example.messages]
    return turns[: example.prompt_messages], turns[example.prompt_messages :]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


Q, GOOD, BAD = "what barks", "a dog", "a tree"
ASKED, BETTER, WORSE = [("user", Q)], [("assistant", GOOD)], [("assistant", BAD)]
TWO = {"chosen": GOOD, "rejected": BAD}
WHOLE = {"chosen": [user(Q), assistant(GOOD)], "rejected": [user(Q), assistant(BAD)]}
SAID = {"chosen": {"from": "gpt", "value": GOOD}, "rejected": {"from": "gpt", "value": BAD}}
EARLIER = [("user", "hi"), ("assistant", "yes"), ("user", Q)]
HH = "\n\nHuman: hi\n\nAssistant: yes\n\nHuman: what barks\n\nAssistant:"
# Each form, with its prompt and its margin.
FORMS: dict[str, tuple[dict[str, Any], Any, float | None]] = {
    "TRL, text": ({"prompt": Q, **TWO}, ASKED, None),
    "TRL, conversation": (
        {"prompt": [user(Q)], "chosen": [assistant(GOOD)], "rejected": [assistant(BAD)]},
        ASKED,
        None,
    ),
    "TRL, implicit conversation": (WHOLE, ASKED, None),
    "TRL, whole conversations beside the prompt": (
        {"prompt": Q, **{name: [{"role": "system", "content": "be small"}, *said] for name, said in WHOLE.items()}},
        [("system", "be small"), *ASKED],
        None,
    ),
    "TRL, messages as JSON text": ({name: json.dumps(value) for name, value in WHOLE.items()}, ASKED, None),
    "TRL, with a margin": ({"prompt": Q, **TWO, "margin": "0.5"}, ASKED, 0.5),
    "Anthropic": ({"chosen": f"{HH} a dog", "rejected": f"{HH} a tree"}, EARLIER, None),
    "UltraFeedback": (
        {"prompt": Q, **WHOLE, "messages": WHOLE["chosen"], "score_chosen": 8.5, "score_rejected": 6},
        ASKED,
        2.5,
    ),
    "LLaMA-Factory, sharegpt": ({"conversations": [{"from": "human", "value": Q}], **SAID}, ASKED, None),
    "LLaMA-Factory, alpaca": ({"instruction": "what", "input": "barks", **TWO}, [("user", "what\nbarks")], None),
    "Axolotl, chat_template.default": (
        {"messages": [user("hi"), assistant("yes"), user(Q)], "chosen": assistant(GOOD), "rejected": assistant(BAD)},
        EARLIER,
        None,
    ),
    "Axolotl, argilla_chat": ({**WHOLE, "chosen-rating": 5, "rejected-rating": 1}, ASKED, 4.0),
    "Axolotl, intel": ({"system": "be small", "question": Q, **TWO}, [("system", "be small"), *ASKED], None),
    "Axolotl, argilla": ({"instruction": Q, "chosen_response": GOOD, "rejected_response": BAD}, ASKED, None),
    "Axolotl, icr": ({"input": Q, **TWO}, ASKED, None),
    "Axolotl, ultra": ({"system": None, "prompt": Q, **WHOLE}, ASKED, None),
    # Several answers: the best and the worst.
    "scores": ({"prompt": Q, "completions": ["no", BAD, GOOD, "one"], "scores": [2, -1, 3.5, 3.5]}, ASKED, None),
    "distilabel": ({"instruction": Q, "generations": [BAD, GOOD], "ratings": [2, 4]}, ASKED, None),
    "nectar": (
        {
            "prompt": Q,
            "answers": [{"answer": "no", "rank": 2}, {"answer": BAD, "rank": 3}, {"answer": GOOD, "rank": 1}],
        },
        ASKED,
        None,
    ),
    "UltraFeedback, completions": (
        {
            "instruction": Q,
            "completions": [{"response": GOOD, "overall_score": 8.0}, {"response": BAD, "overall_score": 3.0}],
        },
        ASKED,
        None,
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_pair_of_each_form(form: str) -> None:
    row, asked, margin = FORMS[form]
    (pair,) = converted(row)
    assert isinstance(pair, Preference)
    assert (words(pair.chosen), words(pair.rejected)) == ((asked, BETTER), (asked, WORSE))
    assert (pair.margin, pair.notes) == (margin, frozenset())
    # The same columns under other names, mapped.
    renamed = {f"my {name}": value for name, value in row.items()}
    mapping = {name: f"my {name}" for name in row if name not in ("messages", "system") or "prompt" not in row}
    (mapped,) = converted(renamed, field_mapping=mapping)
    assert mapped == pair
    # For KTO: an answer that is wanted, and one that is not.
    assert converted(row, kind="unpaired") == [Unpaired(pair.chosen, True), Unpaired(pair.rejected, False)]


def test_the_prompt_of_whole_dialogues_is_what_both_begin_with() -> None:
    later = [user("why"), assistant("so")]
    (pair,) = converted({"chosen": [*WHOLE["chosen"], *later], "rejected": [*WHOLE["rejected"], *later]})
    assert isinstance(pair, Preference)
    rest = [("user", "why"), ("assistant", "so")]
    assert (words(pair.chosen), words(pair.rejected)) == ((ASKED, [*BETTER, *rest]), (ASKED, [*WORSE, *rest]))
    (pair,) = converted(
        {"chosen": [*WHOLE["chosen"], *later], "rejected": [*WHOLE["chosen"], user("why"), assistant("no")]}
    )
    assert isinstance(pair, Preference)
    assert words(pair.rejected) == ([*ASKED, *BETTER, ("user", "why")], [("assistant", "no")])


@pytest.mark.parametrize(
    ("first", "second", "prompt"),
    [
        ("The sky is blue.", "The sky is green.", "The sky is"),
        ("The sky is blue.", "The sky is black.", "The sky is"),
        ("one two", "one two three", "one"),
        (f"{HH} a dog", f"{HH} no", HH),
        ("天空是蓝", "天空是绿", "天空是"),
    ],
)
def test_texts_without_a_prompt_are_cut_between_words(first: str, second: str, prompt: str) -> None:
    (pair,) = converted({"chosen": first, "rejected": second}, has_chat_template=False)
    assert pair == Preference(Completion(prompt, first[len(prompt) :]), Completion(prompt, second[len(prompt) :]))


@pytest.mark.parametrize("has_chat_template", [True, False])
def test_answers_to_one_prompt_that_are_wanted_or_not(has_chat_template: bool) -> None:
    said = {"has_chat_template": has_chat_template, "kind": "unpaired"}
    for row in (
        {"prompt": Q, "completion": GOOD, "label": True},
        {"prompt": Q, "completion": GOOD, "kto_tag": "True"},
        {"prompt": Q, "completion": GOOD, "desirable": 1},
    ):
        (example,) = converted(row, **said)
        assert isinstance(example, Unpaired)
        assert example.is_wanted
        assert words(example.answer) == ((ASKED, BETTER) if has_chat_template else (Q, GOOD))
        assert not example.notes
    conversation = [user("hi"), assistant("yes"), user(Q), assistant(BAD)]
    for row in ({"messages": conversation, "label": 0}, {"conversations": conversation, "kto_tag": False}):
        (example,) = converted(row, **said)
        assert isinstance(example, Unpaired)
        assert (words(example.answer), example.is_wanted) == ((EARLIER, WORSE), False)


@pytest.mark.parametrize(
    ("row", "kind", "said"),
    [
        ({"prompt": Q, "chosen": GOOD}, "preference", "no column with a worse answer (columns: prompt, chosen)"),
        ({"prompt": Q, "completion": GOOD}, "unpaired", "no column with a label that says"),
        ({"prompt": Q, "completion": GOOD, "label": True}, "preference", "train.objective to kto"),
        ({"text": Q, "label": True}, "unpaired", "no column with an answer"),
        ({"completions": [GOOD, BAD], "scores": [1, 2]}, "preference", "no column with a prompt"),
        ({"prompt": Q, "completions": [GOOD, BAD]}, "preference", "the 2 answers in `completions` have no scores"),
        ({"prompt": Q, "completions": [GOOD], "scores": [1]}, "preference", "two answers or more"),
        ({"prompt": Q, "completions": [GOOD, BAD], "scores": [1, "x"]}, "preference", "'x', which is no number"),
        ({"prompt": Q, "chosen": GOOD, "rejected": None}, "preference", "the column `rejected` is missing or null"),
        ({"prompt": Q, **TWO, "margin": None}, "preference", "the column `margin` is missing or null"),
        ({"prompt": Q, "completion": GOOD, "label": 2}, "unpaired", "the column `label` holds 2"),
        ({"messages": [user(Q)], "label": 1}, "unpaired", "does not end with an answer"),
        ({**WHOLE, "rejected": [user("other"), assistant(BAD)]}, "preference", "turns that both have in common"),
        ({**WHOLE, "rejected": [user(Q), assistant(BAD), user("why")]}, "preference", "the last one `user`"),
        ({"chosen": "a b", "rejected": "c d"}, "preference", "begin with different words"),
        (
            {"prompt": Q, "chosen": [{"role": "assitant", "content": GOOD}], "rejected": BAD},
            "preference",
            "unknown role",
        ),
        ({"instruction": Q, "chosen": [1, 2], "rejected": BAD}, "preference", "a message with a text"),
    ],
)
def test_what_is_no_preference_is_refused_with_a_reason(row: dict[str, Any], kind: PreferenceKind, said: str) -> None:
    with pytest.raises(DataError) as caught:
        converted(row, kind=kind, has_chat_template="chosen" not in row or row["chosen"] != "a b")
    assert caught.value.repair
    assert said in f"{caught.value.message}; {caught.value.repair}"


def test_mappings_and_templates_that_make_no_preferences() -> None:
    with pytest.raises(DataError, match="`reply` is no field of rows of preferences"):
        converted({"prompt": Q, **TWO}, field_mapping={"reply": "chosen"})
    with pytest.raises(ConfigError, match="templates make a prompt and one answer"):
        converted({"prompt": Q, **TWO}, input_template="{prompt}", output_template="{chosen}")
    assert not converted({"prompt": Q, "completions": [GOOD, BAD], "scores": [1, 1.0]}), "neither is better"


def test_a_pair_that_teaches_nothing_is_counted() -> None:
    same, inverted = converted(
        {"prompt": Q, "chosen": GOOD, "rejected": GOOD, "score_chosen": 1, "score_rejected": 1},
        {"prompt": Q, **TWO, "score_chosen": 1, "score_rejected": 4},
    )
    assert (same.notes, inverted.notes) == ({"equal_answers"}, {"inverted_margins"})


# Tokens


def encoded(name: str, example: Example, *, max_length: int = 512, **settings: Any) -> Any:
    tokenizer = Tokenizer(
        families.tokenizer(name),
        **{"train_on": "assistant", "max_length": max_length, "on_too_long": "drop", **settings},
    )
    (result,) = tokenizer.encode([example])
    return result


@pytest.mark.parametrize("train_on", ["assistant", "completion", "all"])
@pytest.mark.parametrize("name", ["chatml", "llama-3", "qwen-3", "gemma-3", "mistral-v0.3"])
def test_both_answers_continue_the_tokens_that_a_server_renders(name: str, train_on: str) -> None:
    row = {
        "prompt": [user("hi"), assistant("yes"), user(Q)],
        "chosen": [assistant(GOOD)],
        "rejected": [assistant("a tree runs")],
        "margin": -0.25,
    }
    (pair,) = converted(row)
    result = encoded(name, pair, train_on=train_on)
    assert result.together
    assert result.notes >= {"inverted_margins"}
    plain = families.tokenizer(name)
    served = list(plain.apply_chat_template(row["prompt"], add_generation_prompt=True)["input_ids"])
    for tokens, answer in zip(result.rows, (row["chosen"], row["rejected"]), strict=True):
        whole = list(plain.apply_chat_template([*row["prompt"], *answer])["input_ids"])
        assert whole[: len(tokens.ids)] == tokens.ids
        assert tokens.ids[: len(served)] == served
        assert mask_of(tokens) == [at >= len(served) for at in range(len(tokens.ids))]
        assert tokens.values == {"margin": -0.25}
        assert tokens.ids[-1] == plain.eos_token_id


def test_a_token_across_the_border_of_one_answer_is_cut_in_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """`walk` and `walks` are tokens of their own, so one answer would change the last token of its prompt."""
    pair = Preference(Completion("a dog walk", "s"), Completion("a dog walk", " no"))
    tokenizer = families.tokenizer("chatml")
    alone = tokenizer("a dog walk")["input_ids"]
    assert tokenizer("a dog walks")["input_ids"][: len(alone)] != alone
    result = encoded("chatml", pair)
    for tokens, answer in zip(result.rows, ("s", " no"), strict=True):
        assert tokens.ids == [*alone, *tokenizer(answer)["input_ids"], tokenizer.eos_token_id]
        assert mask_of(tokens) == [at >= len(alone) for at in range(len(tokens.ids))]
    # The control: where a prompt has other tokens however it is cut, there is no pair.
    monkeypatch.setattr(encode, "_prompt_of", lambda row: row.ids)
    with pytest.raises(DataError, match="different tokens"):
        encoded("chatml", pair)


def test_a_pair_of_which_one_answer_is_too_long_is_none() -> None:
    pair = Preference(Completion("a dog", " runs"), Completion("a dog", " runs" * 20))
    result = encoded("chatml", pair, max_length=12)
    assert (result.rows, result.dropped) == ([], 1)
    cut = encoded("chatml", pair, max_length=12, on_too_long="truncate")
    assert [row.truncated for row in cut.rows] == [False, True]
    assert cut.together
    unpaired = encoded("chatml", Unpaired(pair.chosen, False))
    assert [row.values for row in unpaired.rows] == [{"label": 0.0}]
    short = encoded("chatml", Unpaired(pair.rejected, True), max_length=12, on_too_long="truncate")
    assert [(row.truncated, row.values) for row in short.rows] == [(True, {"label": 1.0})]
    assert not unpaired.together


def test_an_answer_of_several_turns_that_a_template_renders_apart_is_refused() -> None:
    """Qwen 3 takes the reasoning out of the first as soon as the second follows."""
    thought = {**assistant(GOOD), "reasoning_content": "it barks"}
    (pair,) = converted({"prompt": [user(Q)], "chosen": [thought, user("why"), assistant("so")], "rejected": BAD})
    with pytest.raises(DataError, match="no single row"):
        encoded("qwen-3", pair)
    assert encoded("chatml", pair).together


# Checks


def test_pairs_that_contradict_each_other() -> None:
    swapped = {"prompt": Q, "chosen": BAD, "rejected": GOOD}
    rows = [{"prompt": Q, **TWO}, {"prompt": "why", **TWO}, swapped, {"prompt": Q, **TWO}]
    each = [[(row["prompt"], row[side]) for row in rows] for side in ("chosen", "rejected")]
    assert contradictions(*each) == [(0, 2), (2, 3)]
    assert not contradictions([GOOD, GOOD], [GOOD, BAD])


def test_length_alone_predicts_the_preference() -> None:
    generator = np.random.default_rng(4)
    rejected = generator.integers(1, 200, 400)
    chosen = rejected + np.where(generator.random(400) < 0.8, 3, -3)
    bias = length_bias(chosen, rejected)
    count, z = int((chosen > rejected).sum()), 1.959964
    centre = (count + z * z / 2) / (400 + z * z)
    half = z / (400 + z * z) * math.sqrt(count * (400 - count) / 400 + z * z / 4)
    assert (bias.share, bias.low, bias.high) == pytest.approx((count / 400, centre - half, centre + half), abs=1e-6)
    assert bias.is_telling
    assert length_bias(rejected, chosen).is_telling, "shorter ones, too"
    # Controls: no difference, too few pairs to say, and pairs that all have one length.
    assert not length_bias(generator.integers(1, 200, 400), rejected).is_telling
    assert not length_bias([5, 6], [1, 1]).is_telling
    assert not length_bias([5, 6], [5, 6]).is_telling


def test_a_set_of_one_class() -> None:
    assert [only_class(labels) for labels in ([True, True], [False], [True, False], [])] == [True, False, None, None]
