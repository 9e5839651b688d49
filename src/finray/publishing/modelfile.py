"""A `Modelfile` for Ollama, whose template is derived from the chat template used in training, and checked against it.

Ollama's templates are Go's. Not every Jinja template can be converted; those of most chat models can: each message is
enclosed by two fixed texts of its role, with an optional default system message, and a fixed text before an answer.
This form is inferred from rendered conversations, and then verified on others. If verification fails, the file says so
and has no template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finray.config.adapter_files import Notes

Messages = Sequence[Mapping[str, str]]
_MARK = "finray-marks-this"


@dataclass(frozen=True, slots=True)
class Frame:
    """The text that a chat template puts around messages.

    Attributes:
        begin: before all messages.
        default: after that, if the first message is not a system message.
        around: by role, the texts before and after a message.
        answer: after the last message, before an answer.
    """

    begin: str
    default: str
    around: Mapping[str, tuple[str, str]]
    answer: str

    def render(self, messages: Messages) -> str:
        """Render a conversation with this frame."""
        parts = [self.begin]
        if not messages or messages[0]["role"] != "system":
            parts.append(self.default)
        for message in messages:
            before, after = self.around[message["role"]]
            parts += [before, message["content"], after]
        return "".join([*parts, self.answer])

    def go(self) -> str:
        """The same in Go's template language, for Ollama."""
        (s0, s1), (u0, u1), (a0, a1) = (self.around[role] for role in ("system", "user", "assistant"))
        head = _go(self.begin)
        if self.default:
            head += (
                '{{- if not (and .Messages (eq (index .Messages 0).Role "system")) }}'
                + _go(self.default)
                + "{{- end }}"
            )
        return (
            f"{head}{{{{- range .Messages }}}}"
            f'{{{{- if eq .Role "system" }}}}{_go(s0)}{{{{- .Content }}}}{_go(s1)}'
            f'{{{{- else if eq .Role "user" }}}}{_go(u0)}{{{{- .Content }}}}{_go(u1)}'
            f'{{{{- else if eq .Role "assistant" }}}}{_go(a0)}{{{{- .Content }}}}{_go(a1)}'
            f"{{{{- end }}}}{{{{- end }}}}{_go(self.answer)}"
        )


def _go(text: str) -> str:
    """Literal text as a Go string, so that white space is not trimmed and braces are not parsed."""
    quoted = (
        text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r")
    )
    return f'{{{{- "{quoted}" }}}}' if text else ""


def modelfile(tokenizer: Any, file: str, notes: Notes, *, bos: str = "") -> tuple[str, str | None]:
    """The text of a ``Modelfile``, and why it has no template; None if it has one, or the model has none.

    Args:
        tokenizer: with the chat template used in training.
        file: name of the GGUF file.
        notes: finray's metadata next to the weights.
        bos: token that the runner itself prepends.
    """
    lines = [f"FROM ./{file}"]
    refused = None
    if tokenizer.chat_template:
        arguments = notes.get("chat_template_arguments") or {}

        def render(messages: Messages) -> str:
            text: str = tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, **arguments
            )
            # Otherwise it would be there twice.
            return text.removeprefix(bos)

        frame = frame_of(render)
        if isinstance(frame, Frame):
            lines.append(f'TEMPLATE """{frame.go()}"""')
            if isinstance(end := tokenizer.eos_token, str) and '"' not in end:
                lines.append(f'PARAMETER stop "{end}"')
        else:
            refused = frame
            lines.append(f"# The chat template of the model cannot be written as one of Ollama's: {refused}.")
    if (system := notes.get("system")) and '"""' not in system:
        lines.append(f'SYSTEM """{system}"""')
    return "\n".join(lines) + "\n", refused


def frame_of(render: Any) -> Frame | str:
    """The frame of a chat template, or why there is none.

    Args:
        render: renders a conversation, including the generation prompt.
    """
    marks = {role: f"{_MARK}-{role}" for role in ("system", "user", "assistant")}

    def conversation(*roles: str) -> list[Mapping[str, str]]:
        return [{"role": role, "content": marks[role]} for role in roles]

    try:
        first = render(conversation("user"))
        with_system = render(conversation("system", "user"))
        three = render(conversation("user", "assistant", "user"))
        five = render(conversation("user", "assistant", "user", "assistant", "user"))
    except Exception as error:
        return f"it does not render a system message or several turns ({type(error).__name__})"
    user, assistant, system = marks["user"], marks["assistant"], marks["system"]
    parts = three.split(user)
    counts = (first.count(user), with_system.count(system), three.count(user), three.count(assistant), five.count(user))
    if counts != (1, 1, 2, 1, 3):
        return "a message is not there once"
    # Between two user messages: the end of the first, the answer in its frame, the start of the second.
    middle, tail = parts[1], parts[2]
    head = parts[0]
    front, back = middle.split(assistant)
    ending = five.split(user)[1]
    if ending != middle:
        return "a turn looks different when others follow it"
    before, rest = with_system.split(system)
    if not rest.endswith(tail) or user not in rest:
        return "what follows a system message differs"
    between = rest[: rest.index(user)]
    # The start of a user message is the common suffix of everything before user messages.
    begin = _common_begin([text[::-1] for text in (head, back, between)])[::-1]
    after = head[: len(head) - len(begin)]
    opening = _common_begin([before, after]) if after else ""
    # The end of a user message is the common prefix before an answer.
    end = _common_begin([front, tail])
    end = end[: end.rindex("\n") + 1] if "\n" in end else end
    frame = Frame(
        opening,
        after[len(opening) :],
        {
            "system": (before[len(opening) :], between[: len(between) - len(begin)]),
            "user": (begin, end),
            "assistant": (front[len(end) :], back[: len(back) - len(begin)]),
        },
        tail[len(end) :],
    )
    samples: list[Messages] = [
        conversation("user"),
        conversation("system", "user"),
        conversation("user", "assistant", "user"),
        conversation("system", "user", "assistant", "user", "assistant", "user"),
        [{"role": "user", "content": 'Two\n\nlines, {{ braces }} and "quotes".'}],
        [
            {"role": "system", "content": "Short."},
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "y"},
            {"role": "user", "content": "z"},
        ],
    ]
    for messages in samples:
        if frame.render(messages) != render(messages):
            return f"on {len(messages)} messages it does something else than put texts around them"
    return frame


def _common_begin(texts: Sequence[str]) -> str:
    short = min(texts, key=len)
    size = next((at for at in range(len(short)) if any(text[at] != short[at] for text in texts)), len(short))
    return short[:size]
