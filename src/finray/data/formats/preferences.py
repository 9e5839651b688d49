"""Rows of preferences: a better and a worse answer to a prompt, several with scores, or one that is wanted or not.

The forms are those of TRL, Anthropic HH, UltraFeedback, LLaMA-Factory and Axolotl. A row becomes one row for each
answer, in a format that ``convert.py`` reads; the two conversations, or texts, are then a pair.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile
from typing import Any

from finray.data.formats.examples import (
    OF_CHATS,
    Chat,
    Completion,
    Example,
    Kind,
    Preference,
    PreferenceKind,
    RowFormat,
    Text,
    Unpaired,
    detect,
    root_of,
)
from finray.data.formats.messages import decoded
from finray.errors import DataError
from finray.limits import cut, shown

Columns = Mapping[str, Any]

# Fields, with the columns that may hold them.
_PAIR = {"chosen": ("chosen", "chosen_response"), "rejected": ("rejected", "rejected_response")}
_GROUP = {"answers": ("answers", "completions", "responses", "generations")}
_ORDER = {"scores": ("scores", "score", "ratings"), "ranks": ("ranks", "rank")}
_MARGIN = {
    "margin": ("margin",),
    "score_chosen": ("score_chosen", "chosen_score", "chosen_rating", "chosen-rating"),
    "score_rejected": ("score_rejected", "rejected_score", "rejected_rating", "rejected-rating"),
}
_WANTED = {"label": ("label", "kto_tag", "desirable")}
# The first of these that is there holds the prompt.
_PROMPT = {
    "conversations": ("conversations", "conversation"),
    "prompt": ("prompt",),
    "messages": ("messages",),
    "instruction": ("instruction",),
    "question": ("question", "query", "input"),
}
_FIELDS = (_PAIR, _GROUP, _ORDER, _MARGIN, _WANTED, _PROMPT)
# Keys of an answer that is an object: its text, and how good it is.
_TEXTS = ("answer", "response", "completion", "text", "output", "content", "value")
_SCORES = ("score", "overall_score", "rating", "reward")
# The last word of a text, in scripts that have white space between words.
_LAST_WORD = re.compile(r"[^\s\u2e80-\u9fff\uf900-\ufaff]+$")
# Turns of Anthropic's dialogues, which are one text.
_TURN = re.compile(r"\n\n(Human|Assistant):")


def detect_preferences(
    columns: Iterable[str], mapping: Mapping[str, str], kind: PreferenceKind, wanted: str = "auto"
) -> RowFormat:
    """The format of rows of preferences with these columns; ``wanted`` is that of a row with a single answer.
    Raises DataError: a field is missing, or the mapping matches nothing; the message lists the columns."""
    present = tuple(columns)
    # A mapping may use any of the names.
    names = {other: field for fields in _FIELDS for field, others in fields.items() for other in others}
    if "instruction" in mapping or "instruction" in present:
        del names["input"]
    given, mapping = mapping, {names.get(name, name): column for name, column in mapping.items()}
    known = {name for fields in _FIELDS for name in fields}
    chosen = {name: mapping[name] for name in mapping if name in known and root_of(mapping[name], present) is not None}

    def of(fields: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
        """The columns of these fields: those that are mapped, or else have such a name."""
        free = [column for column in present if column not in chosen.values()]
        columns = {
            name: chosen.get(name) or next((column for column in names if column in free), None)
            for name, names in fields.items()
        }
        return {name: column for name, column in columns.items() if column is not None}

    if kind == "unpaired" and (label := of(_WANTED)):
        others = [name for name in present if name != label["label"]]
        base = detect(others, {name: given[name] for name in given if names.get(name, name) != "label"}, wanted)
        if base.kind == "text":
            raise _lacking("an answer", "prompt` and `completion", present)
        return replace(base, kind="unpaired", columns={**base.columns, **label}, present=present, base=base)
    pair, answers = of(_PAIR), of(_GROUP)
    if len(pair) < len(_PAIR):
        if kind == "unpaired" and not answers:
            raise _lacking("a label that says whether an answer is wanted", "label", present)
        if pair or not answers:
            lacking = [what for name, what in {"chosen": "better", "rejected": "worse"}.items() if name not in pair]
            raise _lacking(
                f"a {' and a '.join(lacking)} answer",
                "chosen` and `rejected",
                present,
                repair="for single answers with a label set train.objective to kto" if of(_WANTED) and not pair else "",
            )
        pair = answers | of(_ORDER)
    prompts = of(_PROMPT)
    first = next((name for name in (*mapping, *prompts) if name in prompts), None)
    prompt = {} if first is None else {first: prompts[first]}
    if "answers" in pair and not prompt:
        raise _lacking("a prompt", "prompt", present)
    margin = of(_MARGIN)
    if "chosen" in pair and ("margin" in margin or len(margin) == 2):
        pair |= {name: margin[name] for name in (("margin",) if "margin" in margin else margin)}
    fields = {**prompt, **pair}
    optional = {**OF_CHATS, **({"input": ("input",), "history": ("history",)} if "instruction" in prompt else {})}
    unknown = [name for name in mapping if name not in fields and name not in optional]
    if unknown:
        every = ", ".join((*_PROMPT, *_PAIR, *_GROUP, *_ORDER, *_MARGIN, *optional))
        raise DataError(
            f"`{unknown[0]}` is no field of rows of preferences, or its column `{mapping[unknown[0]]}` is not there "
            f"(columns: {cut(', '.join(present), 500)})",
            where="data.field_mapping",
            repair=f"map one of {every}",
        )
    extra = {name: (mapping[name],) if name in mapping else names for name, names in optional.items()}
    found = RowFormat("preference", fields, extra, present=present)
    return found if kind == "preference" else replace(found, kind="unpaired", base=found)


def _lacking(what: str, field: str, present: Collection[str], *, repair: str = "") -> DataError:
    return DataError(
        f"there is no column with {what} (columns: {cut(', '.join(present), 500)})",
        where="data.field_mapping",
        repair=repair
        or f"rows of preferences have `{field}`: give columns these names, or map theirs with data.field_mapping",
    )


# --- from a row to one row for each answer --------------------------------------------------------------------------


def answer_rows(row: Columns, row_format: RowFormat, *, is_chat: bool) -> list[tuple[Columns, RowFormat]]:
    """The rows of the better and of the worse answer, each with its format; none if several answers are equally good.

    Args:
        row: of preferences.
        row_format: of the kind `preference`.
        is_chat: whether texts become chat turns.

    Raises:
        DataError: a field is null, or not what it should be.
    """
    columns = dict(row_format.columns)
    if "answers" in columns:
        best = _best_and_worst(row, columns)
        if best is None:
            return []
        row = {**row, "chosen": best[0], "rejected": best[1]}
        columns |= {"chosen": "chosen", "rejected": "rejected"}
    prompt = next((name for name in columns if name in _PROMPT), None)
    asked = None if prompt is None else _parsed(value_of(row, columns[prompt]))
    rows: list[tuple[Columns, RowFormat]] = []
    for name in (columns["chosen"], columns["rejected"]):
        answer = _parsed(value_of(row, name))
        if prompt == "instruction" and isinstance(answer, list | Mapping):
            answer = _only_text(answer, name)
        is_text = not isinstance(answer, list | Mapping)
        turns = _turns(answer) if prompt is None and is_chat and isinstance(answer, str) else []
        kind: Kind = "messages"
        fields, given = {"messages": name}, {**row, name: answer}
        if is_text and prompt is None and not turns:
            kind, fields = "text", {"text": name}
        elif is_text and prompt == "instruction":
            kind, fields = "alpaca", {"instruction": columns[prompt], "output": name}
        elif is_text and prompt is not None and not isinstance(asked, list | Mapping):
            kind, fields = "prompt_completion", {"prompt": columns[prompt], "completion": name}
        else:
            given[name] = turns or _conversation(asked, answer)
        rows.append((given, replace(row_format, kind=kind, columns=fields)))
    return rows


def value_of(row: Columns, name: str) -> Any:
    """The value of a column, in which a dot accesses nested ones. Raises DataError: it is missing or null."""
    value: Any = row.get(name)
    if value is None:
        value = row
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
    if value is None:
        raise DataError(
            f"the column `{name}` is missing or null", repair="fill or remove the row, or set data.on_bad_row to drop"
        )
    return value


def _parsed(value: Any) -> Any:
    """A text that is JSON of messages as these; every other value as it is."""
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")) and ('"role"' in value or '"from"' in value):
        with suppress(DataError):
            content = decoded(value, "", strict=True)
            first = content[0] if isinstance(content, list) and content else content
            return content if isinstance(first, Mapping) and ("role" in first or "from" in first) else value
    return value


def _only_text(answer: Any, name: str) -> str:
    """The text of an answer that is a message. Raises DataError: it is more than that."""
    messages = answer if isinstance(answer, list) else [answer]
    text = messages[0].get("content", messages[0].get("value")) if isinstance(messages[0], Mapping) else None
    if len(messages) > 1 or not isinstance(text, str):
        raise DataError(
            f"the column `{name}` must be a text, or a message with a text, not {shown(answer)}",
            repair="fix or remove the row, or set data.on_bad_row to drop",
        )
    return text


def _turns(text: str) -> list[dict[str, str]]:
    """The messages of one of Anthropic's dialogues; none if a text is something else."""
    parts = _TURN.split(text if text.startswith("\n\n") else f"\n\n{text}")
    if parts[0].strip() or len(parts) < 3:
        return []
    roles = {"Human": "user", "Assistant": "assistant"}
    return [
        {"role": roles[role], "content": content.strip()}
        for role, content in zip(parts[1::2], parts[2::2], strict=True)
    ]


def _conversation(asked: Any, answer: Any) -> list[Any]:
    """An answer behind its prompt, as messages; an answer that begins with a question is all of them."""
    said = answer if isinstance(answer, list) else [answer]
    first = said[0] if said and isinstance(said[0], Mapping) else {}
    if asked is None or first.get("role", first.get("from")) in ("user", "human", "system", "developer"):
        return said
    before = asked if isinstance(asked, list) else [asked]
    return [
        *(item if isinstance(item, Mapping) else {"role": "user", "content": item} for item in before),
        *(item if isinstance(item, Mapping) else {"role": "assistant", "content": item} for item in said),
    ]


def _best_and_worst(row: Columns, columns: Mapping[str, str]) -> tuple[Any, Any] | None:
    """Of several answers the one with the highest score (or the first rank) and the one with the lowest, the first of
    equal ones; None if all are equally good. So each prompt has one pair."""
    name = columns["answers"]
    answers = decoded(value_of(row, name), name)
    if not isinstance(answers, list) or len(answers) < 2:
        raise DataError(
            f"the column `{name}` must be a list of two answers or more, not {shown(answers)}",
            repair="fix or remove the row, or set data.on_bad_row to drop",
        )
    order = next((field for field in ("scores", "ranks") if field in columns), None)
    if order is not None:
        values = decoded(value_of(row, columns[order]), columns[order])
    else:
        keys = [key for key in (*_SCORES, "rank") if all(isinstance(item, Mapping) and key in item for item in answers)]
        order, values = (
            "ranks" if keys[:1] == ["rank"] else "scores",
            [item[keys[0]] for item in answers] if keys else [],
        )
    if not isinstance(values, list) or len(values) != len(answers):
        raise DataError(
            f"the {len(answers)} answers in `{name}` have no scores",
            repair="give a column `scores` or `ranks` with a number for each, or map one with data.field_mapping",
        )
    goods = [-_number(value, order) if order == "ranks" else _number(value, order) for value in values]
    if min(goods) == max(goods):
        return None
    best, worst = (answers[goods.index(end(goods))] for end in (max, min))
    return _said(best), _said(worst)


def _said(answer: Any) -> Any:
    """The text of an answer that is an object with a score."""
    if not isinstance(answer, Mapping) or "role" in answer or "from" in answer:
        return answer
    return next((answer[key] for key in _TEXTS if answer.get(key) is not None), answer)


def _number(value: Any, what: str) -> float:
    try:
        number = float(value) if not isinstance(value, bool | list | Mapping) else math.nan
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise DataError(f"`{what}` holds {shown(value)}, which is no number", repair="fix or remove the row")
    return number


def margin_of(row: Columns, columns: Mapping[str, str]) -> float | None:
    """By how much the better answer is better; None if the rows do not say. Raises DataError: it is no number."""
    if "margin" in columns:
        return _number(value_of(row, columns["margin"]), columns["margin"])
    if "score_chosen" not in columns:
        return None
    names = columns["score_chosen"], columns["score_rejected"]
    better, worse = (_number(value_of(row, name), name) for name in names)
    return better - worse


def is_wanted(row: Columns, column: str) -> bool:
    """Whether a row says that its answer is wanted. Raises DataError: it says neither yes nor no."""
    value = value_of(row, column)
    words = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}
    if (wanted := words.get(str(value).strip().lower())) is None:
        raise DataError(
            f"the column `{column}` holds {shown(value)}; it must be true (the answer is wanted) or false",
            repair="write true or false, or map another column with data.field_mapping: {label: COLUMN}",
        )
    return wanted


# --- from two examples to a pair ------------------------------------------------------------------------------------


def pair_of(chosen: Example, rejected: Example, margin: float | None) -> Preference:
    """Two conversations or texts as a pair, whose prompt is what both begin with: the longest common prefix in messages
    (in words, of texts). Raises DataError: they answer different questions."""
    match chosen, rejected:
        case Chat(), Chat():
            both = tuple(zip(chosen.messages, rejected.messages, strict=False))
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))
            # At least the last turn is the answer.
            same = min(same, len(chosen.messages) - 1, len(rejected.messages) - 1)
            for chat, name in ((chosen, "chosen"), (rejected, "rejected")):
                if not same or chat.messages[same].role != "assistant" or chat.messages[-1].role != "assistant":
                    raise DataError(
                        f"`{name}` has no answer after the turns that both have in common (messages[{same}] has the "
                        f"role `{chat.messages[same].role}`, the last one `{chat.messages[-1].role}`)",
                        repair="a pair is two answers to one prompt: fix or remove the row, or set data.on_bad_row to "
                        "drop",
                    )
            return Preference(
                replace(chosen, prompt_messages=same), replace(rejected, prompt_messages=same), margin=margin
            )
        case Text(), Text():
            if not (prompt := _common_words(chosen.text, rejected.text)).strip():
                raise DataError(
                    "the two texts begin with different words, so that they have no prompt in common",
                    repair="give the prompt in a column `prompt`, or fix or remove the row",
                )
            sides = (Completion(prompt, each.text[len(prompt) :], each.notes) for each in (chosen, rejected))
            return Preference(next(sides), next(sides), margin)
        case Completion(), Completion() if chosen.prompt == rejected.prompt:
            return Preference(chosen, rejected, margin)
    raise DataError("`chosen` and `rejected` have different forms", repair="write both as text, or both as messages")


def unpaired_of(answer: Example, wanted: bool) -> Unpaired:
    """A conversation, whose last turn is the answer unless its row says more, or a text.
    Raises DataError: there is no answer."""
    match answer:
        case Chat() if answer.messages[-1].role == "assistant" and len(answer.messages) > 1:
            return Unpaired(replace(answer, prompt_messages=answer.prompt_messages or len(answer.messages) - 1), wanted)
        case Completion():
            return Unpaired(answer, wanted)
    raise DataError("the conversation does not end with an answer", repair="fix or remove the row")


def _common_words(first: str, second: str) -> str:
    """What two texts begin with, without a word that only one of them ends there, and without the last word of one that
    is nothing else. White space belongs to the answer."""
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
    text = first[:same]
    if not (first[same : same + 1].isspace() and second[same : same + 1].isspace()):
        text = _LAST_WORD.sub("", text)
    return text.rstrip()
