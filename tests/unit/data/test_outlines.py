"""Conversations that are rendered from an outline, against the template that would have been run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

from finray.data.formats.examples import Message
from finray.data.tokenize import outline
from finray.data.tokenize.chat import ChatRenderer
from finray.errors import DataError
from tests.support import families
from tests.support.written_out import WRITTEN

WORDS = (
    "a",
    "b",
    "",
    " ",
    " a\n",
    "ab",
    "A\"<&'",
    "7",
    "\n\n<think>\nb\n</think>\n\na",
    "<tool_response>a",
    "{a}",
    "é",
)

# What templates may do with a message's words, `m.content`; an outline says some of it, and the template all.
LOOKS = (
    # An outline says these.
    "{{ m.content }}",
    "{{ m['content'] | trim }}!",
    "{{ '<' + m.content.strip() + '>' }}",
    "{{ m.content.rstrip('\\n').lstrip('a') }}",
    "{{ m.content.replace('a', 'bb') }}",
    "{% if m.content %}yes{% else %}no{% endif %}{{ m.content }}",
    "{% if m.content | trim %}yes{% endif %}",
    "{% if '</think>' in m.content %}thinks{% endif %}{{ m.content }}",
    "{% if m.content.startswith('<tool') or m.content.endswith('>') %}x{% else %}{{ m.content }}{% endif %}",
    "{% if m.content == 'a' %}same{% elif 'b' != m.content %}{{ m.content }}{% endif %}",
    "{% if m.content in ['a', 'b'] %}one{% endif %}",
    "{% if m.content is string and m.content is not none and m.content is defined %}{{ m.content }}{% endif %}",
    "{{ m.content | default('x', true) }}{{ m.other | default(m.content) }}",
    "{% set x = m.content + ';' %}{% if x %}{{ x }}{% endif %}",
    "{% set x %}({{ m.content }}){% endset %}{{ x }}",
    "{% macro said(x) %}[{{ x }}]{% endmacro %}{{ said(m.content) }}",
    "{% set n = namespace(x=m.content) %}{% set n.y = n.x %}{{ n.y }}",
    "{% generation %}{{ m.content }}{% endgeneration %}",
    # The template alone says these.
    "{{ m.content | upper }}",
    "{{ m.content | length }}",
    "{{ m.content | tojson }}{{ m | tojson }}{{ messages | tojson }}",
    "{{ m }}{{ m | string }}",
    "{{ m.content[0] }}{{ m.content[1:] }}",
    "{{ m.content ~ '!' }}",
    "{{ '%s!' % m.content }}{{ '{}!'.format(m.content) }}{{ '%s' | format(m.content) }}",
    "{{ m.content.format(a=1) }}{{ m.content % () }}",
    "{% if m.content in 'abc' %}in{% endif %}",
    "{% if m.content > 'aa' %}more{% endif %}",
    "{{ m.content | int }}{{ m.content | float(2) }}{{ m.content.isdigit() }}",
    "{{ m.content.split('</think>')[-1] }}{{ m.content.find('b') }}",
    "{% for c in m.content %}{{ c }},{% endfor %}{{ m.content | list }}{{ m.content | first }}",
    "{{ messages | map(attribute='content') | join('+') }}{{ '+'.join([m.content]) }}",
    "{{ messages | map(attribute='content') | map('upper') | list }}",
    "{{ messages | selectattr('content', 'equalto', 'a') | list | length }}",
    "{{ messages | map(attribute='content') | select('in', 'abc') | list | length }}",
    "{{ messages | sort(attribute='content') | map(attribute='content') | list }}",
    "{{ messages | map(attribute='content') | unique | list | length }}{{ messages | groupby('content') | length }}",
    "{{ {'a': 1}[m.content] }}{{ {'a': 1}.get(m.content, 0) }}{{ [1, 2][m.content] }}",
    "{{ messages[0] == messages[1] }}{{ messages[1].content == m.content }}{{ messages.index(m) }}",
    "{{ 'x'.replace('x', m.content) }}{{ m.content.replace('a', m.content) }}{{ 'x' | replace('x', m.content) }}",
    "{{ 'ab'.startswith(m.content) }}{{ 'ab' is in m.content }}{{ 'ab'.count(m.content) }}",
    "{% if m.content is eq 'a' %}same{% endif %}{% if m.content is lower %}low{% endif %}",
    "{% if m.content is iterable %}i{% endif %}{% if m.content is in 'abc' %}in{% endif %}",
    "{{ m.content | e }}{{ m.content | wordcount }}{{ m.content | replace('a', 'b') }}{{ m.content | title }}",
    "{% set x %}({{ m.content }}){% endset %}{{ x | length }}{{ x[1:] }}{{ x | trim }}{{ x.strip('(') }}",
    "{% macro said(x) %} {{ x }} {% endmacro %}{{ said(m.content) | trim }}{{ said(m.content) | length }}",
    "{% filter upper %}{{ m.content }}{% endfilter %}",
    "{% for m in messages %}{% if loop.changed(m.content) %}{{ loop.index }}{% endif %}{% endfor %}",
    "{{ dict(x=m.content) }}{{ namespace(x=m.content).x | length }}{{ range(m.content | length) | list }}",
    "{{ m.content * 2 }}{{ m.content.title() }}{{ m.content.unknown }}{{ m.content.__class__ }}",
    "{% if (m.content + 'b') == 'ab' %}same{% endif %}{% if (m.content + '') in ['a'] %}one{% endif %}",
    "{{ m.content | string | length }}{{ not m.content }}{{ m.content or 'none' }}{{ m.content and 'some' }}",
    "{% if m.content | trim == 'a' %}{{ raise_exception('no ' + m.content) }}{% endif %}",
)


@pytest.fixture
def outlines_are_used(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was rendered from an outline."""
    filled: list[str] = []

    def fill(self: Any, contents: Sequence[str], own: Any = outline.Outline.fill) -> str | None:
        text: str | None = own(self, contents)
        filled.extend([] if text is None else [text])
        return text

    monkeypatch.setattr(outline.Outline, "fill", fill)
    return filled


def said(renderer: ChatRenderer, messages: Sequence[Message], *, prompt: bool = False) -> str:
    """A rendering, or why the template refuses."""
    try:
        return renderer.render(tuple(messages), add_generation_prompt=prompt)
    except DataError as error:
        return str(error)


def expected(tokenizer: Any, messages: Sequence[Message], *, prompt: bool = False) -> str:
    """The same by a renderer that has seen no other conversation, and so runs the template."""
    return said(ChatRenderer(tokenizer, special_tokens=()), messages, prompt=prompt)


@pytest.mark.parametrize("look", LOOKS)
def test_whatever_a_template_does_with_words_is_what_it_does_to_those_of_the_next_row(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, look: str
) -> None:
    template = f"{{% for m in messages %}}{{{{ m.role }}}}:{look}\n{{% endfor %}}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    for order in (WORDS, WORDS[::-1]):
        renderer = ChatRenderer(tokenizer, special_tokens=())
        for words in (*order, *order):
            messages = (Message("user", words), Message("assistant", "a"))
            assert said(renderer, messages) == expected(tokenizer, messages), words


def test_a_template_is_told_of_no_tools_as_transformers_tells_it(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = "{% if tools is none %}none{% elif tools %}some{% else %}empty{% endif %}{{ messages[0].content }}"
    monkeypatch.setattr(tokenizer, "chat_template", looks)
    renderer = ChatRenderer(tokenizer, special_tokens=())
    # With another field, no outline of an earlier row is filled in.
    for message in (Message("user", "a"), Message("user", "a", extra={"name": "b"})):
        theirs = tokenizer.apply_chat_template([message.plain()], tokenize=False)
        assert said(renderer, (message,)) == theirs == "nonea"


@pytest.mark.parametrize("look", LOOKS[: next(at for at, look in enumerate(LOOKS) if "upper" in look)])
def test_what_an_outline_can_say_is_not_rendered_again(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, outlines_are_used: list[str], look: str
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", f"{{% for m in messages %}}{look}{{% endfor %}}")
    renderer = ChatRenderer(tokenizer, special_tokens=())
    texts = [renderer.render((Message("user", words),)) for words in ("a", "ab", "aab", "aaab")]
    assert outlines_are_used[-2:] == texts[-2:]


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_the_templates_of_families_say_the_same_from_outlines(name: str, outlines_are_used: list[str]) -> None:
    tokenizer = families.tokenizer(name)
    renderer = ChatRenderer(tokenizer, special_tokens=())
    for has_system, (asked, answered) in product((False, True), product(WORDS, WORDS)):
        turns = (Message("user", asked), Message("assistant", answered), Message("user", answered))
        messages = (*([Message("system", asked)] if has_system else []), *turns)
        for prompt in (True, False):
            shown = messages if prompt else messages[:-1]
            assert said(renderer, shown, prompt=prompt) == expected(tokenizer, shown, prompt=prompt)
    assert len(outlines_are_used) > len(WORDS) ** 2


def test_conversations_of_many_kinds_are_not_remembered_for_ever(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outline, "_MOST_KEYS", 3)
    renderer = ChatRenderer(tokenizer, special_tokens=())
    for turns in (1, 2, 3, 4, 5, 4, 3, 4, 5, 4):
        messages = tuple(Message("user" if at % 2 == 0 else "assistant", f"{at} {turns}") for at in range(turns))
        assert renderer.render(messages) == expected(tokenizer, messages)
        assert renderer._outlines is not None
        assert len(renderer._outlines._known) <= 3
