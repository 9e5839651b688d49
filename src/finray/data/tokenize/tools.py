"""Tools and their calls as text, for chat templates that know none."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_HERMES = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
_LLAMA3 = """\
You have access to the following functions. To call a function, please respond with JSON for a function call. \
Respond in the format {{"name": function name, "parameters": dictionary of argument name and its value}}. \
Do not use variables.

{tools}"""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How tools are written.

    Attributes:
        offer: what is said of the tools, where there is no template for it.
        leads: whether that comes before the words of the system message, or after them.
        call: a call, by its ``name`` and ``arguments``.
        result_role: the role that gives results; None for the row's own.
        result: a result as text.
    """

    offer: Callable[[Sequence[Mapping[str, Any]]], str]
    leads: bool
    call: Callable[[Mapping[str, Any]], str]
    result_role: str | None
    result: Callable[[str], str]


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _lines(tools: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(map(_json, tools))


def _tagged_call(function: Mapping[str, Any]) -> str:
    return f"<tool_call>\n{_json(function)}\n</tool_call>"


TOOL_FORMATS: dict[str, ToolFormat] = {
    "plain": ToolFormat(_lines, False, _tagged_call, None, str),
    # As the templates of Hermes 2 Pro and Qwen 2.5 write them; results are a user's turn, which every template knows.
    "hermes": ToolFormat(
        lambda tools: _HERMES.format(tools=_lines(tools)),
        False,
        _tagged_call,
        "user",
        lambda said: f"<tool_response>\n{said}\n</tool_response>",
    ),
    # Meta's JSON calls of Llama 3.1 and later.
    "llama3": ToolFormat(
        lambda tools: _LLAMA3.format(tools="\n\n".join(_json(tool, indent=4) for tool in tools)),
        True,
        lambda function: _json({"name": function["name"], "parameters": function["arguments"]}),
        "ipython",
        str,
    ),
}
