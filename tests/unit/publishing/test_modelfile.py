"""Ollama's template, read off a chat template: what it says, and where there is none."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from finray.publishing.gguf import added_bos
from finray.publishing.modelfile import Frame, frame_of, modelfile

CHATML = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n"
    "{% endif %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# As Mistral's, with a system message.
INST = (
    "<s>{% for m in messages %}{% if m['role'] == 'system' %}[SYSTEM_PROMPT] {{ m['content'] }}[/SYSTEM_PROMPT]"
    "{% elif m['role'] == 'user' %}[INST] {{ m['content'] }}[/INST]{% else %} {{ m['content'] }}</s>{% endif %}"
    "{% endfor %}"
)
# The system message goes into the first message of the user.
GEMMA = (
    "{% if messages[0]['role'] == 'system' %}{% set s = messages[0]['content'] + '\n\n' %}{% set rest = messages[1:] %}"
    "{% else %}{% set s = '' %}{% set rest = messages %}{% endif %}{% for m in rest %}<start>{{ m['role'] }}\n"
    "{{ s if loop.first else '' }}{{ m['content'] | trim }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<start>model\n{% endif %}"
)
UPPER = CHATML.replace("{{ m['content'] }}", "{{ m['content'] | upper }}")
# Only the last answer keeps what it thought.
THINKING = CHATML.replace(
    "{{ m['content'] }}", "{{ m['content'] if loop.last or m['role'] != 'assistant' else m['content'] + '!' }}"
).replace("loop.last or", "messages | length < 5 or")
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": 'Say "{{ hi }}".\nTwice.'},
    {"role": "assistant", "content": "hi hi"},
    {"role": "user", "content": "Thanks"},
]


def renderer(template: str) -> Any:
    def render(messages: Any) -> str:
        texts, _ = render_jinja_template(
            conversations=[list(messages)], chat_template=template, add_generation_prompt=True
        )
        text: str = texts[0]
        return text

    return render


def go(template: str, messages: list[dict[str, str]]) -> str:
    """What Go makes of the templates that are written here: literals, one condition, and one loop over messages."""

    def literals(part: str) -> list[str]:
        # Where each piece was: a quoted text, or the content.
        return re.findall(r'\{\{- "(?:\\.|[^"\\])*" \}\}|\{\{- \.Content \}\}', part)

    def text(piece: str, content: str = "") -> str:
        if piece == "{{- .Content }}":
            return content
        return piece[5:-4].encode().decode("unicode_escape")

    head, _, rest = template.partition("{{- range .Messages }}")
    body, _, tail = rest.partition("{{- end }}{{- end }}")
    found = re.match(r"(.*?)\{\{- if not (?:.*?) \}\}(.*)\{\{- end \}\}$", head, re.DOTALL)
    out = "".join(map(text, literals(found[1] if found else head)))
    if found and messages[0]["role"] != "system":
        out += "".join(map(text, literals(found[2])))
    branches = re.split(r'\{\{- (?:else )?if eq \.Role "(\w+)" \}\}', body)[1:]
    by_role = dict(zip(branches[::2], branches[1::2], strict=True))
    for one in messages:
        out += "".join(text(piece, one["content"]) for piece in literals(by_role[one["role"]]))
    return out + "".join(map(text, literals(tail)))


@pytest.mark.parametrize("template", [CHATML, LLAMA3, GEMMA])
def test_the_template_says_what_the_chat_template_says(template: str) -> None:
    render = renderer(template)
    found = frame_of(render)
    assert isinstance(found, Frame), found
    for messages in (CONVERSATION, CONVERSATION[1:], CONVERSATION[1:2]):
        assert go(found.go(), messages) == render(messages)


@pytest.mark.parametrize(("template", "begin"), [(LLAMA3, "<|begin_of_text|>"), (INST, "<s>")])
def test_a_token_that_the_runner_writes_itself_is_not_in_the_template(template: str, begin: str) -> None:
    render = renderer(template)
    tokenizer = SimpleNamespace(
        chat_template=template, eos_token=None, apply_chat_template=lambda messages, **options: render(messages)
    )
    for own in (begin, ""):
        text, refused = modelfile(tokenizer, "m.gguf", {}, bos=own)
        assert refused is None
        written = re.findall(r'TEMPLATE """(.*)"""', text)[0]
        for messages in (CONVERSATION, CONVERSATION[1:]):
            # As Ollama: its own token, and then the rendered text.
            assert own + go(written, messages) == render(messages)
            assert render(messages).count(begin) == 1


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"model": "gpt2", "add_bos_token": True}, "<s>"),
        ({"model": "gpt2", "add_bos_token": False}, ""),
        ({"model": "llama", "add_bos_token": False}, ""),
        # Where the file says nothing, llama.cpp goes by the kind of the tokenizer.
        ({"model": "gpt2", "pre": "smollm"}, ""),
        ({"model": "gpt2", "pre": "llama-bpe"}, "<s>"),
        ({"model": "llama", "pre": "default"}, "<s>"),
    ],
)
def test_whether_the_runner_writes_it_is_in_the_gguf_file(tmp_path: Path, said: dict[str, Any], expected: str) -> None:
    file = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    for name, value in said.items():
        add = writer.add_bool if isinstance(value, bool) else writer.add_string
        add(f"tokenizer.ggml.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert added_bos(file, SimpleNamespace(bos_token="<s>")) == expected
    assert added_bos(file, SimpleNamespace(bos_token=None)) == ""


@pytest.mark.parametrize("template", [UPPER, THINKING])
def test_what_cannot_be_written_so_is_said(template: str) -> None:
    assert isinstance(frame_of(renderer(template)), str)


def test_the_file_for_ollama() -> None:
    render = renderer(CHATML)
    tokenizer = SimpleNamespace(
        chat_template=CHATML, eos_token="<|im_end|>", apply_chat_template=lambda messages, **options: render(messages)
    )
    text, refused = modelfile(tokenizer, "model-f16.gguf", {"system": "Be brief."})
    assert refused is None
    assert text.startswith('FROM ./model-f16.gguf\nTEMPLATE """{{- ')
    assert 'PARAMETER stop "<|im_end|>"' in text
    assert text.endswith('SYSTEM """Be brief."""\n')
    tokenizer.apply_chat_template = lambda messages, **options: renderer(UPPER)(messages)
    text, refused = modelfile(tokenizer, "model-f16.gguf", {})
    assert refused
    assert "TEMPLATE" not in text
    assert modelfile(SimpleNamespace(chat_template=None), "m.gguf", {}) == ("FROM ./m.gguf\n", None)
