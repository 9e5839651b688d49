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
        lengths = {len(items) if isinstance(items, list) else -1 for items in value.values()}
        if len(lengths) != 1 or -1 in lengths:
            raise DataError(f"the column `{column}` holds nested columns that are not a list of messages")
        value = [dict(zip(value, items, strict=True)) for items in zip(*value.values(), strict=True)]
    if not isinstance(value, list):
        raise DataError(f"the column `{column}` holds {type(value).__name__}, not a list of messages")
    if not value:
        raise DataError(f"the column `{column}` is an empty list of messages")
    messages: list[Message] = []
    for position, item in enumerate(value):
        message = _message(item, f"{column}[{position}]")
        if not (messages and messages[-1].role == message.role == "assistant"):
            messages.append(message)
            continue
        before = messages[-1]
        if message.content or "tool_calls" not in message.extra or before.train != message.train:
            raise DataError(
                f"{column}[{position}]: two assistant turns in a row",
                repair="join them, or put the user's turn between them",
            )
        # Text and calls, or calls and calls, that data sets write as turns of their own.
        calls = [*before.extra.get("tool_calls", ()), *message.extra["tool_calls"]]
        messages[-1] = replace(before, extra={**before.extra, **message.extra, "tool_calls": calls})
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
    if content is None and "tool_calls" in extra:
        content = ""
    if isinstance(content, list) and all(isinstance(one, Mapping) and one.get("type") == "text" for one in content):
        content = "".join(str(one.get("text", "")) for one in content)
    if not isinstance(content, str):
        what = "is null" if content is None else f"holds {type(content).__name__}"
        raise DataError(f"{place} has no text: `content` {what} (role `{said}`)")
    return Message(role, content, train is not False, extra)


def _calls(value: Any, place: str) -> list[dict[str, Any]]:
    """Tool calls as OpenAI writes them."""
    calls = []
    for call in value if isinstance(value, list) else [value]:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError(f"{place}: a tool call must have a `name` and `arguments`")
        # OpenAI keeps arguments as JSON text; templates write them as JSON, so text would be quoted twice.
        arguments = function.get("arguments", function.get("parameters", {}))
        arguments = _decoded(arguments, f"{place}.arguments", strict=True)
        extra = {"id": call["id"]} if call.get("id") else {}
        calls.append({**extra, "type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return calls
