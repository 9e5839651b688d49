"""Conversations as data sets write them, as messages: OpenAI's `role` and `content`, ShareGPT's `from` and `value`."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from finray.data.formats.examples import Message
from finray.errors import DataError

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
# What else of a message chat templates read.
_KEPT = ("name", "tool_call_id", "reasoning_content", "thinking", "reasoning")


def messages_of(value: Any, column: str) -> tuple[Message, ...]:
    """The messages in a column.

    Raises:
        DataError: the column holds no conversation that can be learned from; the message names the turn.
    """
    value = _decoded(value, column)
    if isinstance(value, Mapping):
        # `datasets` keeps a list of records as a record of lists.
        value = _records(value, column)
    if not isinstance(value, list):
        raise DataError(f"the column `{column}` holds {type(value).__name__}, not a list of messages")
    if not value:
        raise DataError(f"the column `{column}` is an empty list of messages")
    messages: list[Message] = []
    for position, item in enumerate(value):
        message = _message(item, f"{column}[{position}]")
        if messages and messages[-1].role == message.role == "assistant":
            joined = _joined(messages[-1], message)
            if joined is None:
                raise DataError(
                    f"{column}[{position}]: two assistant turns in a row",
                    repair="join them, or put the user's turn between them",
                )
            messages[-1] = joined
        else:
            messages.append(message)
    return tuple(messages)


def tools_of(value: Any) -> tuple[Mapping[str, Any], ...]:
    """The functions that a row offers, as JSON schemas; text is read as JSON, bare functions are wrapped.

    Raises:
        DataError: it is something else.
    """
    if value is None or value == "":
        return ()
    value = _decoded(value, "tools", strict=True)
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise DataError("the column `tools` must be a list of functions, or that as JSON text")
    return tuple(tool if "function" in tool else {"type": "function", "function": dict(tool)} for tool in value)


def _decoded(value: Any, column: str, *, strict: bool = False) -> Any:
    """Lists may be stored as JSON text, in CSV for instance."""
    if not isinstance(value, str):
        return value
    if strict or value.lstrip().startswith(("[", "{")):
        try:
            return json.loads(value)
        except json.JSONDecodeError as error:
            raise DataError(f"the column `{column}` is not JSON: {error.msg} (character {error.pos})") from None
        except (ValueError, RecursionError):
            raise DataError(
                f"the column `{column}` is not JSON that can be read: too deep, or too long a number"
            ) from None
    return value


def _records(value: Mapping[str, Any], column: str) -> list[dict[str, Any]]:
    lengths = {len(items) if isinstance(items, list) else -1 for items in value.values()}
    if len(lengths) != 1 or -1 in lengths:
        raise DataError(f"the column `{column}` holds nested columns that are not a list of messages")
    return [dict(zip(value, items, strict=True)) for items in zip(*value.values(), strict=True)]


def _message(item: Any, place: str) -> Message:
    if not isinstance(item, Mapping):
        raise DataError(f"{place} must be an object with `role` and `content`")
    said = item.get("role", item.get("from"))
    if not isinstance(said, str):
        raise DataError(f"{place} must be an object with `role` and `content` (or `from` and `value`)")
    role = _ALIASES.get(said, said)
    if role not in ROLES:
        close = difflib.get_close_matches(said, [*ROLES, *_ALIASES], n=1)
        hint = f" (did you mean `{close[0]}`?)" if close else ""
        raise DataError(f"{place}: the role `{said}` is unknown{hint}", repair=f"use one of {', '.join(ROLES)}")
    extra = {key: item[key] for key in _KEPT if item.get(key) is not None}
    content = item.get("content", item.get("value"))
    if said in _CALLS:
        extra["tool_calls"] = _calls(_decoded(content, place, strict=True), place)
        content = ""
    elif item.get("tool_calls"):
        extra["tool_calls"] = _calls(item["tool_calls"], place)
    train = item.get("train")
    if train is not None and not isinstance(train, bool):
        raise DataError(f"{place}.train must be true or false")
    return Message(role, _content(content, place, said, empty="tool_calls" in extra), train is not False, extra)


def _content(value: Any, place: str, role: str, *, empty: bool) -> str:
    if value is None and empty:
        return ""
    if isinstance(value, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in value):
        value = "".join(str(part.get("text", "")) for part in value)
    if not isinstance(value, str):
        what = "is null" if value is None else f"holds {type(value).__name__}"
        raise DataError(f"{place} has no text: `content` {what} (role `{role}`)")
    return value


def _calls(value: Any, place: str) -> list[dict[str, Any]]:
    calls = value if isinstance(value, list) else [value]
    return [_call(call, place) for call in calls]


def _call(call: Any, place: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"{place}: a tool call must have a `name` and `arguments`")
    arguments = function.get("arguments", function.get("parameters", {}))
    # OpenAI keeps arguments as JSON text; templates write them as JSON, so text would be quoted twice.
    arguments = _decoded(arguments, f"{place}.arguments", strict=True) if isinstance(arguments, str) else arguments
    extra = {"id": call["id"]} if call.get("id") else {}
    return {**extra, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _joined(first: Message, second: Message) -> Message | None:
    """Text and calls, or calls and calls, that data sets write as turns of their own; None for two texts."""
    if second.content or "tool_calls" not in second.extra or first.train != second.train:
        return None
    calls = [*first.extra.get("tool_calls", ()), *second.extra["tool_calls"]]
    return replace(first, extra={**first.extra, **second.extra, "tool_calls": calls})
