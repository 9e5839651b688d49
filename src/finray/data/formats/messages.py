"""Messages of a conversation in OpenAI's (`role`, `content`) or ShareGPT's format (`from`, `value`), with tools, calls,
and flags of what is learned.

A bad row raises a :class:`DataError` without a location; the caller, who knows file and row, adds it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from itertools import pairwise
from typing import Any

from finray.data.formats.examples import Arguments, Message
from finray.data.sources.readers import RepeatedKey, parse_json
from finray.errors import DataError, did_you_mean
from finray.limits import shown

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
_ALIASES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}
_CALLS = ("function_call", "tool_call")
# The flag that says whether a turn, or a part of its content, is learned: finray's name, and those of other systems.
FLAGS = ("train", "training", "trainable", "loss", "loss_mask", "loss_scale", "loss_weight", "weight")
# Axolotl's list of ranges of a turn's content.
_RANGES = "train_detail"
# Parts of a content, and columns beside the messages, that are no text; in the plural too.
MEDIA = ("image", "video", "audio", "input_image", "input_audio")
# Keys of a message that templates usually read, and all that are read here; a template may read any other.
_KEPT = ("name", "tool_call_id", "reasoning_content", "thinking", "reasoning")
_READ = frozenset(("role", "from", "content", "value", "tool_calls", "function_call", _RANGES, *FLAGS, *_KEPT))


def messages_of(value: Any, column: str, notes: set[str] | None = None) -> tuple[Message, ...]:
    """The messages in a column.

    Args:
        value: of the column.
        column: its name.
        notes: gets notes for the row.

    Raises:
        DataError: the column does not hold a valid conversation; the message names the turn.
    """
    value = decoded(value, column)
    if isinstance(value, Mapping):
        # `datasets` stores a list of records as a record of lists.
        lengths = {len(items) if isinstance(items, list) else -1 for items in value.values()}
        if len(lengths) != 1 or -1 in lengths:
            raise DataError(f"the column `{column}` holds nested columns that are not a list of messages")
        value = [dict(zip(value, items, strict=True)) for items in zip(*value.values(), strict=True)]
    if not isinstance(value, list):
        raise DataError(f"the column `{column}` holds {type(value).__name__}, not a list of messages")
    if not value:
        raise DataError(f"the column `{column}` is an empty list of messages")
    messages: list[Message] = []
    notes = set() if notes is None else notes
    for position, item in enumerate(value):
        message = _message(item, f"{column}[{position}]", notes)
        if not (messages and messages[-1].role == message.role == "assistant"):
            messages.append(message)
            continue
        before = messages[-1]
        if message.content or "tool_calls" not in message.extra or before.train != message.train:
            is_flagged = not message.content and "tool_calls" in message.extra
            raise DataError(
                f"{column}[{position}]: two assistant turns in a row"
                + (", of which only one is to be learned" if before.train != message.train else ""),
                repair="calls that belong to one turn are learned together: give both the same flag"
                if is_flagged
                else "join them (as parts of one content if they have flags of their own: "
                '{"type": "text", "text": "...", "train": false}), or put the user\'s turn between them',
            )
        # Some datasets write text and calls, or several calls, as separate turns.
        calls = [*before.extra.get("tool_calls", ()), *message.extra["tool_calls"]]
        is_null = before.is_null and message.is_null
        messages[-1] = replace(before, extra={**before.extra, **message.extra, "tool_calls": calls}, is_null=is_null)
    return tuple(messages)


def tools_of(value: Any, column: str = "tools") -> tuple[Mapping[str, Any], ...]:
    """The tools of a row, as JSON schemas; text is parsed as JSON, bare functions are wrapped.
    Raises DataError: the value is something else."""
    if value is None or value == "":
        return ()
    value = decoded(value, column, strict=True)
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise DataError(
            f"the column `{column}` must be a list of functions, or such a list as JSON text",
            repair="write their `name`, `description` and `parameters`, or give the column another name",
        )
    return tuple(tool if "function" in tool else {"type": "function", "function": dict(tool)} for tool in value)


def template_arguments(value: Any) -> Mapping[str, Any]:
    """A row's own variables for the chat template, from the column of TRL's name.
    Raises DataError: it is no object, or sets what finray sets."""
    arguments = decoded(value, "chat_template_kwargs", strict=True) if value else {}
    if not isinstance(arguments, Mapping):
        raise DataError(
            f"the column `chat_template_kwargs` holds {type(arguments).__name__}, not an object",
            repair='write the variables of the chat template, such as {"enable_thinking": false}',
        )
    if ours := sorted(set(arguments) & {"messages", "tools", "documents", "add_generation_prompt"}):
        raise DataError(
            f"the column `chat_template_kwargs` sets {', '.join(ours)}, which finray sets",
            repair="leave it out of the column",
        )
    return arguments


def decoded(value: Any, column: str, *, strict: bool = False) -> Any:
    """Lists may be stored as JSON text, in CSV for instance."""
    if not isinstance(value, str):
        return value
    if strict or value.lstrip().startswith(("[", "{")):
        try:
            return parse_json(value)
        except RepeatedKey as error:
            raise DataError(f"the column `{column}` is JSON in which {error}", repair="remove one of them") from None
        except json.JSONDecodeError as error:
            raise DataError(
                f"the column `{column}` is not JSON: {error.msg} (character {error.pos})",
                repair="write it as JSON, in Python with json.dumps",
            ) from None
        except (ValueError, RecursionError):
            raise DataError(
                f"the column `{column}` is not JSON that can be parsed: it is nested too deeply, or has too long a "
                f"number"
            ) from None
    return value


def _message(item: Any, place: str, notes: set[str]) -> Message:
    if not isinstance(item, Mapping):
        raise DataError(f"{place} must be an object with `role` and `content`")
    raw_role = item.get("role", item.get("from"))
    if not isinstance(raw_role, str):
        raise DataError(f"{place} must be an object with `role` and `content` (or `from` and `value`)")
    role = _ALIASES.get(raw_role, raw_role)
    if role not in ROLES:
        hint = did_you_mean(raw_role, [*ROLES, *_ALIASES])
        raise DataError(f"{place}: unknown role `{raw_role}`{hint}", repair=f"use one of {', '.join(ROLES)}")
    content = item.get("content", item.get("value"))
    if len(item) == 2 and isinstance(content, str) and raw_role not in _CALLS:
        # Nothing but these two, as in most rows.
        return Message(role, content)
    extra = {key: item[key] for key in _KEPT if item.get(key) is not None}
    others = {key: value for key, value in item.items() if key not in _READ and not is_empty(value)}
    calls = item.get("tool_calls") or item.get("function_call")
    if raw_role in _CALLS:
        calls, content = decoded(content, place, strict=True), None
    if calls:
        # `function_call` is OpenAI's name of a single call before there were several.
        extra["tool_calls"] = _calls(calls, place)
    train = _flag(item, place)
    if train and role != "assistant":
        # Only answers are learned; as a key that nothing reads it is counted.
        others |= {name: item[name] for name in FLAGS if item.get(name) is not None}
    hidden: list[tuple[int, int]] = []
    is_null = content is None and "tool_calls" in extra
    if isinstance(content, list) and content and all(isinstance(part, Mapping) for part in content):
        content, hidden = _joined(content, place, notes)
    elif not (isinstance(content, str) or content is None or isinstance(content, list)):
        content = as_text(content, f"{place} has no text: `content`")
    if not isinstance(content, str) and not is_null:
        what = "is null" if content is None else f"holds {type(content).__name__}"
        raise DataError(
            f"{place} has no text: `content` {what} (role `{raw_role}`)",
            repair='write text, or parts such as {"type": "text", "text": "..."}; or set data.on_bad_row to drop',
        )
    content = content or ""
    if ranges := item.get(_RANGES):
        if hidden:
            raise DataError(f"{place} has flags of its parts and `{_RANGES}`", repair="leave out one of the two")
        hidden = _not_learned(ranges, len(content), f"{place}.{_RANGES}")
    if hidden and not "".join(content[low:high] for low, high in _between(hidden, len(content))).strip():
        if train:
            raise DataError(f"{place} is to be learned, but none of its parts is", repair="fix one of the flags")
        train, hidden = False, []
    return Message(role, content, train is not False, extra, others, is_null, () if train is False else tuple(hidden))


def no_text(what: str) -> DataError:
    """The error of a row with an image, a video or a sound."""
    return DataError(
        f"{what}: finray trains on text only; training on images comes in a later version",
        repair="leave such rows out (data.on_bad_row=drop), or their images where the text makes sense alone",
    )


def is_empty(value: Any) -> bool:
    """Whether a field says nothing: null, or an empty text, list or object."""
    return value is None or (isinstance(value, str | list | Mapping) and not value)


def _flag(item: Mapping[str, Any], place: str) -> bool | None:
    """Whether a turn or a part is to be learned; None if it does not say.
    Raises DataError: it is neither yes nor no, or two flags differ."""
    flags: dict[str, bool] = {}
    for name in FLAGS:
        if (value := item.get(name)) is None:
            continue
        word = value.strip().lower() if isinstance(value, str) else value
        is_number = isinstance(word, bool | int | float) and word in (0, 1)
        if not is_number and word not in ("true", "false", "0", "1", "0.0", "1.0"):
            is_weight = isinstance(word, int | float)
            raise DataError(
                f"{place}.{name} is {shown(value)}; it must be 1 (trained on) or 0 (not trained on)"
                if is_weight
                else f"{place}.{name} must be true or false (or 1 or 0), not {shown(value)}",
                repair="turns have no weights: write 1 or 0, or repeat the row" if is_weight else "write one of them",
            )
        flags[name] = bool(word) if is_number else word in ("true", "1", "1.0")
    if item.get("mask") is not None or item.get("masked") is not None:
        name = "mask" if item.get("mask") is not None else "masked"
        raise DataError(
            f"{place}.{name} is {shown(item[name])}: some systems learn what is masked, others leave it out",
            repair="write `train: true` (learned) or `train: false` (not learned) instead",
        )
    if "train" not in flags and len(set(flags.values())) > 1:
        raise DataError(
            f"{place} has flags that differ: {', '.join(f'{name} {shown(item[name])}' for name in flags)}",
            repair="keep one of them",
        )
    # `train` is the first.
    return next(iter(flags.values()), None)


def _joined(parts: Sequence[Mapping[str, Any]], place: str, notes: set[str]) -> tuple[str, list[tuple[int, int]]]:
    """The text of parts, and the ranges of it that are not to be learned."""
    content, hidden = "", list[tuple[int, int]]()
    for number, part in enumerate(parts):
        if str(part.get("type")).startswith(MEDIA):
            raise no_text(f"{place} has a part of type `{part['type']}`")
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise DataError(
                f"{place} has no text: a part of `content` is {shown(dict(part))}",
                repair='only text is trained on; a part is {"type": "text", "text": "..."}',
            )
        start, content = len(content), content + part["text"]
        if len(part) > 2:
            if _flag(part, f"{place}.content[{number}]") is False:
                # Of one that follows another, the same range.
                joined = bool(hidden) and hidden[-1][1] == start
                hidden = [*hidden[:-1], (hidden[-1][0], len(content))] if joined else [*hidden, (start, len(content))]
            others = (key for key in part if key not in (*FLAGS, "type", "text") and not is_empty(part[key]))
            notes |= {f"unread:messages[].content[].{key}" for key in others}
    return content, [(low, high) for low, high in hidden if low < high]


def _not_learned(ranges: Any, length: int, place: str) -> list[tuple[int, int]]:
    """The ranges of a content that Axolotl's ``train_detail`` leaves out: what no range covers is not learned.
    Raises DataError: it is no list of ranges inside the content that do not overlap."""
    learned: list[tuple[int, int]] = []
    every: list[tuple[int, int]] = []
    for number, entry in enumerate(ranges if isinstance(ranges, list) else [None]):
        low, high = (entry.get("begin_offset"), entry.get("end_offset")) if isinstance(entry, Mapping) else (None, None)
        if type(low) is not int or type(high) is not int or not 0 <= low <= high < length:
            raise DataError(
                f"{place} is {shown(entry)}; it must be a range of the content's {length} characters",
                repair='write {"begin_offset": FIRST, "end_offset": LAST, "train": true}, counted from 0',
            )
        every.append((low, high + 1))
        if _flag(entry, f"{place}[{number}]") is not False:
            learned.append(every[-1])
    every.sort()
    if any(before[1] > after[0] for before, after in pairwise(every)):
        raise DataError(f"{place} has ranges that overlap", repair="give each character one range")
    return _between(sorted(learned), length)


def _between(ranges: Sequence[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    """What ranges leave of so many characters."""
    starts, stops = [0, *(high for _, high in ranges)], [*(low for low, _ in ranges), length]
    return [(low, high) for low, high in zip(starts, stops, strict=True) if low < high]


def _calls(value: Any, place: str) -> list[dict[str, Any]]:
    """Tool calls in OpenAI's format."""
    calls = []
    for call in value if isinstance(value, list) else [value]:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError(f"{place}: a tool call must have a `name` and `arguments`")
        # OpenAI stores arguments as JSON text; templates serialize them, so text would be quoted twice.
        arguments = function.get("arguments", function.get("parameters", {}))
        # Calls without arguments are logged with empty ones.
        written = arguments if isinstance(arguments, str) and arguments else None
        arguments = {} if arguments in (None, "") else decoded(arguments, f"{place}.arguments", strict=True)
        if not isinstance(arguments, Mapping):
            raise DataError(
                f"{place}: the `arguments` of a tool call must be an object, not {shown(arguments)}",
                repair='write {"name": "...", "arguments": {"parameter": "value"}}',
            )
        if written is not None:
            arguments = Arguments(arguments, written)
        extra = {"id": call["id"]} if call.get("id") else {}
        calls.append({**extra, "type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return calls


def as_text(value: Any, what: str, notes: set[str] | None = None, *, flags: bool = True) -> str:
    """Text; with ``notes``, also a number, true or false as JSON writes it, with a note.
    Raises DataError: it is something else."""
    if isinstance(value, str):
        return value
    is_flag = isinstance(value, bool)
    if notes is not None and (flags if is_flag else isinstance(value, int | float | Decimal) and math.isfinite(value)):
        notes.add("numbers_as_text")
        return str(value).lower() if is_flag else str(value)
    repair = "write it as text (in quotes), or use data.converter"
    if isinstance(value, list | Mapping):
        nested = "a dot reaches into nested columns (such as `data.text`) in data.field_mapping"
        repair = f"write it as text, such as JSON (json.dumps in Python), or use data.converter; {nested}"
    raise DataError(f"{what} holds {type(value).__name__}, not text", repair=repair)
