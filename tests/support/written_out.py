"""Conversations of real families written out by hand: plain strings, no Jinja, no finray.

Every family is a function from messages to segments. A segment is a piece of the rendered text with the index of the
message whose answer it is (the answer and the token that ends its turn), or None. Where a family renders an earlier
answer otherwise than it did when that answer was the last, ``apart`` names the answers that need a row of their own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from finray.data.formats.examples import Message

Segment = tuple[str, int | None]
Tools = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Written:
    """A family's format.

    Attributes:
        segments: the whole conversation.
        opening: what serving adds after the history, so that the model answers.
        apart: answers that only a conversation ending there renders as it was generated.
        system: a system message is rendered.
        tools: tool definitions, calls and results are rendered.
        swallows: special tokens swallow the white space beside them.
    """

    segments: Callable[[Sequence[Message], Tools], list[Segment]]
    opening: str
    apart: Callable[[Sequence[Message], Tools], set[int]] = lambda messages, tools: set()
    system: bool = True
    tools: bool = False
    swallows: bool = False


def answer(index: int, message: Message) -> int | None:
    """The segment's owner: the message's index when it is an answer."""
    return index if message.role == "assistant" else None


def joined(segments: Sequence[Segment]) -> str:
    """The rendered text."""
    return "".join(text for text, _ in segments)


def as_json(value: Any, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, **options)


def calls(message: Message) -> list[dict[str, Any]]:
    return list(message.extra.get("tool_calls", ()))


# Llama


def llama_3(messages: Sequence[Message], tools: Tools) -> list[Segment]:
    out: list[Segment] = [("<|begin_of_text|>", None)]
    for index, message in enumerate(messages):
        out.append((f"<|start_header_id|>{message.role}<|end_header_id|>\n\n", None))
        out.append((f"{message.content.strip()}<|eot_id|>", answer(index, message)))
    return out


def llama_3_1(messages: Sequence[Message], tools: Tools) -> list[Segment]:
    rest = list(enumerate(messages))
    system = ""
    if messages[0].role == "system":
        system = messages[0].content.strip()
        rest = rest[1:]
    head = "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
    head += "Environment: ipython\n" if tools else ""
    head += f"Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n{system}<|eot_id|>"
    out: list[Segment] = [(head, None)]
    if tools:
        listed = "".join(as_json(tool, indent=4) + "\n\n" for tool in tools)
        first = rest.pop(0)[1]
        intro = 'Functions you may call, as {"name": ..., "parameters": ...}:\n\n'
        user = "<|start_header_id|>user<|end_header_id|>\n\n"
        out.append((f"{user}{intro}{listed}{first.content.strip()}<|eot_id|>", None))
    for index, message in rest:
        name = "ipython" if message.role == "tool" else message.role
        out.append((f"<|start_header_id|>{name}<|end_header_id|>\n\n", None))
        if message.role == "tool":
            out.append((f"{as_json(message.content)}<|eot_id|>", None))
        elif calls(message):
            function = calls(message)[0]["function"]
            call = '{"name": "' + function["name"] + '", "parameters": ' + as_json(function["arguments"]) + "}"
            out.append((f"{call}<|eot_id|>", index))
        else:
            out.append((f"{message.content.strip()}<|eot_id|>", answer(index, message)))
    return out


# ChatML and its children


def chatml(messages: Sequence[Message], tools: Tools) -> list[Segment]:
    out: list[Segment] = []
    for index, message in enumerate(messages):
        out.append((f"<|im_start|>{message.role}\n", None))
        out.append((f"{message.content}<|im_end|>", answer(index, message)))
        out.append(("\n", None))
    return out


def smollm2(messages: Sequence[Message], tools: Tools) -> list[Segment]:
    default = "<|im_start|>system\nYou are SmolLM, a helpful assistant<|im_end|>\n"
    return [(default if messages[0].role != "system" else "", None), *chatml(messages, tools)]


def smollm3(messages: Sequence[Message], tools: Tools, *, think: bool = True) -> list[Segment]:
    """With the date that finray gives to templates which ask for today's."""
    rest = list(enumerate(messages))
    wanted = ""
    if messages[0].role == "system":
        wanted = messages[0].content
        if "/no_think" in wanted:
            think = False
        elif "/think" in wanted:
            think = True
        rest = rest[1:]
    wanted = wanted.replace("/no_think", "").replace("/think", "").rstrip()
    mode = "/think" if think else "/no_think"
    default = "You are SmolLM, and you think before you answer." if think else "You are SmolLM."
    head = "<|im_start|>system\n## Metadata\n\nKnowledge Cutoff Date: June 2025\nToday Date: 26 July 2024\n"
    head += f"Reasoning Mode: {mode}\n\n## Custom Instructions\n\n{wanted or default}\n\n<|im_end|>\n"
    out: list[Segment] = [(head, None)]
    for index, message in rest:
        if message.role == "user":
            out.append((f"<|im_start|>user\n{message.content}<|im_end|>\n", None))
        else:
            out.append(("<|im_start|>assistant\n" + ("" if think else "<think>\n\n</think>\n"), None))
            out.append((message.content.lstrip("\n") + "<|im_end|>", index))
            out.append(("\n", None))
    return out


def phi_4(messages: Sequence[Message], tools: Tools) -> list[Segment]:
    out: list[Segment] = []
    for index, message in enumerate(messages):
        out.append((f"<|im_start|>{message.role}<|im_sep|>", None))
        out.append((f"{message.content}<|im_end|>", answer(index, message)))
    return out


# Qwen


def qwen_call(function: dict[str, Any]) -> str:
    call = '{"name": "' + function["name"] + '", "arguments": ' + as_json(function["arguments"]) + "}"
    return f"<tool_call>\n{call}\n</tool_call>"


def qwen_tools(tools: Tools) -> str:
    listed = "".join("\n" + as_json(tool) for tool in tools)
    shape = '<tool_call>\n{"name": ..., "arguments": ...}\n</tool_call>'
    return f"# Tools\n\nFunctions you may call:\n<tools>{listed}\n</tools>\n\nWrite each call as:\n{shape}"


def qwen_result(messages: Sequence[Message], index: int) -> Segment:
    """Results that follow each other share one user turn."""
    opens = messages[index - 1].role != "tool"
    closes = index + 1 == len(messages) or messages[index + 1].role != "tool"
    body = f"\n<tool_response>\n{messages[index].content}\n</tool_response>"
    return ("<|im_start|>user" if opens else "") + body + ("<|im_end|>\n" if closes else ""), None


def qwen_2_5(messages: Sequence[Message], tools: Tools) -> list[Segment]:
    has_system = messages[0].role == "system"
    system = messages[0].content if has_system else "You are Qwen, a helpful assistant."
    system += "\n\n" + qwen_tools(tools) if tools else ""
    out: list[Segment] = [(f"<|im_start|>system\n{system}<|im_end|>\n", None)]
    for index, message in enumerate(messages):
        if message.role == "tool":
            out.append(qwen_result(messages, index))
        elif message.role == "assistant":
            written = [qwen_call(call["function"]) for call in calls(message)]
            said = [message.content] if message.content or not written else []
            out += [
                ("<|im_start|>assistant\n", None),
                ("\n".join([*said, *written]) + "<|im_end|>", index),
                ("\n", None),
            ]
        elif index or not has_system:
            out.append((f"<|im_start|>{message.role}\n{message.content}<|im_end|>\n", None))
    return out


def last_query(messages: Sequence[Message]) -> int:
    return max((index for index, message in enumerate(messages) if message.role == "user"), default=len(messages) - 1)


def reasoning_and_answer(message: Message) -> tuple[str, str]:
    if isinstance(message.extra.get("reasoning_content"), str):
        return message.extra["reasoning_content"], message.content
    before, mark, after = message.content.rpartition("</think>")
    if not mark:
        return "", message.content
    return before.split("</think>")[0].rstrip("\n").split("<think>")[-1].lstrip("\n"), after.lstrip("\n")


def qwen_3(messages: Sequence[Message], tools: Tools) -> list[Segment]:
    has_system = messages[0].role == "system"
    system = [messages[0].content] if has_system else []
    system += [qwen_tools(tools)] if tools else []
    out: list[Segment] = []
    if system:
        out.append(("<|im_start|>system\n" + "\n\n".join(system) + "<|im_end|>\n", None))
    for index, message in enumerate(messages):
        if message.role == "tool":
            out.append(qwen_result(messages, index))
        elif message.role == "assistant":
            reasoning, text = reasoning_and_answer(message)
            is_last = index == len(messages) - 1
            before = ""
            said = text
            if index > last_query(messages) and (is_last or reasoning):
                clean = reasoning.strip("\n")
                before = f"<think>\n{clean}\n</think>\n\n"
                said = text.lstrip("\n")
            written = "\n".join([*([said] if text else []), *(qwen_call(call["function"]) for call in calls(message))])
            out += [("<|im_start|>assistant\n", None), (f"{before}{written}<|im_end|>", index), ("\n", None)]
        elif index or not has_system:
            out.append((f"<|im_start|>{message.role}\n{message.content}<|im_end|>\n", None))
    return out


def qwen_3_apart(messages: Sequence[Message], tools: Tools) -> set[int]:
    """Earlier turns lose their think block; so does a tool step that had no reasoning, once a step follows it."""
    query = last_query(messages)
    return {
        index
        for index, message in enumerate(messages[:-1])
        if message.role == "assistant" and (index < query or not reasoning_and_answer(message)[0])
    }


# Gemma


def gemma_3(messages: Sequence[Message], tools: Tools) -> list[Segment]:
    out: list[Segment] = [("<bos>", None)]
    folded = ""
    for index, message in enumerate(messages):
        if message.role == "system":
            folded = message.content + "\n\n"
        elif message.role == "assistant":
            out.append(("<start_of_turn>model\n", None))
            out += [(message.content.strip() + "<end_of_turn>", index), ("\n", None)]
        else:
            out.append((f"<start_of_turn>user\n{folded}{message.content.strip()}<end_of_turn>\n", None))
            folded = ""
    return out


# Mistral


def mistral_v0_3(messages: Sequence[Message], tools: Tools) -> list[Segment]:
    out: list[Segment] = [("<s>", None)]
    for index, message in enumerate(messages):
        if message.role == "user":
            offered = tools and index == last_query(messages)
            out.append((f"[AVAILABLE_TOOLS] {as_json(list(tools))}[/AVAILABLE_TOOLS]" if offered else "", None))
            out.append((f"[INST] {message.content}[/INST]", None))
        elif message.role == "tool":
            made = message.extra["tool_call_id"]
            out.append(
                ('[TOOL_RESULTS] {"content": ' + f'{message.content}, "call_id": "{made}"' + "}[/TOOL_RESULTS]", None)
            )
        elif calls(message):
            written = ", ".join(as_json({**call["function"], "id": call["id"]}) for call in calls(message))
            out.append((f"[TOOL_CALLS] [{written}]</s>", index))
        else:
            out.append((f" {message.content.strip()}</s>", index))
    return out


def mistral_v0_3_apart(messages: Sequence[Message], tools: Tools) -> set[int]:
    """The tools stand before the last question only."""
    query = last_query(messages)
    return {index for index, message in enumerate(messages) if tools and message.role == "assistant" and index < query}


def mistral_small(messages: Sequence[Message], tools: Tools) -> list[Segment]:
    system = messages[0].content if messages[0].role == "system" else "Answer well and briefly."
    out: list[Segment] = [(f"<s>[SYSTEM_PROMPT]{system}[/SYSTEM_PROMPT]", None)]
    for index, message in enumerate(messages):
        if message.role == "user":
            out.append((f"[INST]{message.content}[/INST]", None))
        elif message.role == "assistant":
            out.append((f"{message.content}</s>", index))
    return out


# Phi-3 and Zephyr


def phi_3(messages: Sequence[Message], tools: Tools) -> list[Segment]:
    out: list[Segment] = []
    for index, message in enumerate(messages):
        out.append((f"<|{message.role}|>\n", None))
        out += [(f"{message.content}<|end|>", answer(index, message)), ("\n", None)]
    return [*out, ("<|endoftext|>", None)]


def zephyr(messages: Sequence[Message], tools: Tools) -> list[Segment]:
    out: list[Segment] = []
    for index, message in enumerate(messages):
        out.append((f"<|{message.role}|>\n", None))
        out += [(f"{message.content}</s>", answer(index, message)), ("\n", None)]
    return out


_HEADER = "<|start_header_id|>assistant<|end_header_id|>\n\n"
_IM = "<|im_start|>assistant\n"

WRITTEN: dict[str, Written] = {
    "llama-3": Written(llama_3, _HEADER),
    "llama-3.1": Written(llama_3_1, _HEADER, tools=True),
    "qwen-2.5": Written(qwen_2_5, _IM, tools=True),
    "qwen-3": Written(qwen_3, _IM, apart=qwen_3_apart, tools=True),
    "gemma-3": Written(gemma_3, "<start_of_turn>model\n"),
    "mistral-v0.3": Written(mistral_v0_3, "", apart=mistral_v0_3_apart, system=False, tools=True),
    "mistral-small": Written(mistral_small, ""),
    "phi-3": Written(phi_3, "<|assistant|>\n", swallows=True),
    "phi-4": Written(phi_4, "<|im_start|>assistant<|im_sep|>", swallows=True),
    "smollm2": Written(smollm2, _IM),
    "smollm3": Written(smollm3, _IM),
    "chatml": Written(chatml, _IM),
    "chatml-markers": Written(chatml, _IM),
    "zephyr": Written(zephyr, "<|assistant|>\n"),
}
