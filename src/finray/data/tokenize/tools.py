"""Tools and tool calls as text, for chat templates without tool support."""

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
    """A text format of tools and their calls."""

    offer: Callable[[Sequence[Mapping[str, Any]]], str]  # introduces the tools, if the template does not
    leads: bool  # whether that comes before or after the system message's content
    call: Callable[[Mapping[str, Any]], str]  # formats a call, given its ``name`` and ``arguments``
    result_role: str | None  # role of results; None for the row's own
    result: Callable[[str], str]  # formats a result


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _lines(tools: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(map(_json, tools))


def _tagged_call(function: Mapping[str, Any]) -> str:
    return f"<tool_call>\n{_json(function)}\n</tool_call>"


TOOL_FORMATS: dict[str, ToolFormat] = {
    "plain": ToolFormat(_lines, False, _tagged_call, None, str),
    # As in the templates of Hermes 2 Pro and Qwen 2.5; results are user turns, which every template supports.
    "hermes": ToolFormat(
        lambda tools: _HERMES.format(tools=_lines(tools)),
        False,
        _tagged_call,
        "user",
        lambda content: f"<tool_response>\n{content}\n</tool_response>",
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
