"""Conversations rendered from an outline: the template's own text, or none."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import _compile_jinja_template

from finray.data.formats.examples import Message
from finray.data.tokenize import template_cache as outlines
from finray.data.tokenize.chat import ChatRenderer
from finray.data.tokenize.template_cache import Outlines
from tests.support import families
from tests.support.written_out import WRITTEN

TALK = (Message("system", "be kind"), Message("user", "one two"), Message("assistant", "three"))


def compiled(source: str, **variables: Any) -> tuple[Any, Outlines]:
    template = _compile_jinja_template(source)
    return template, Outlines(template, source, variables)


def in_turns(said: str) -> str:
    return "{% for m in messages %}" + said + "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"


HARMLESS = {
    "written": "<{{ m.role }}>{{ m['content'] }}</s>",
    "joined": "{{ '<' + m.role + '>' + m['content'] + '</s>' }}",
    "stripped": "{% set text = '[' + m.content | trim + ']' %}{{ text }}{{ m.content.strip() }}",
    "by role": "{% if m['role'] in ['user', 'tool'] %}{{ 'U' + m.content }}{% else %}{{ m.content ~ '!' }}{% endif %}",
    "by place": "{{ ('first ' if loop.index0 % 2 == 0 else '') + m.content }}",
    "of a kind": "{% if m.content is string and m.content is defined %}{{ m.content }}{% endif %}",
}
LOOKING = {
    "compared": "{% if m.content == 'x' %}a{% else %}{{ m.content }}{% endif %}",
    "searched": "{% if 'x' in m.content %}a{% else %}{{ m.content }}{% endif %}",
    "searched for": "{% if m.content in 'x y z' %}a{% else %}{{ m.content }}{% endif %}",
    "joined, then searched": "{% set t = 'a' + m.content %}{% if t.endswith('x') %}{{ 1 }}{% endif %}{{ t }}",
    "made one, then searched": "{% set t = 'a' ~ m.content %}{% if 'x' in t %}{{ 1 }}{% endif %}{{ t }}",
    "formatted, then searched": "{% set t = '%s!' % m.content %}{% if 'x' in t %}{{ 1 }}{% endif %}{{ t }}",
    "assigned, then searched": "{% set t %}{{ m.content }}{% endset %}{% if 'x' in t %}{{ 1 }}{% endif %}{{ t }}",
    "in a macro": "{% macro s(t) %}{{ t }}{% endmacro %}{% if 'x' in s(m.content) %}{{ 1 }}{% endif %}{{ m.content }}",
    "measured": "{{ m.content | length }}{{ m.content }}",
    "empty or not": "{% if m.content %}{{ m.content }}{% endif %}",
    "upper case": "{{ m.content | upper }}",
    "replaced": "{{ m.content | replace('x', 'y') }}",
    "as JSON": "{{ m | tojson }}",
    "its text as JSON": "{{ m.content | tojson }}",
    "split": "{{ m.content.split('x')[-1] }}",
    "cut": "{{ m.content[:3] }}",
    "stripped of letters": "{{ m.content.strip('x') }}",
    "a key": "{% set d = {'x': 1} %}{{ d.get(m.content, 2) }}{{ m.content }}",
    "looked for": "{{ 'x y'.find(m.content) }}{{ m.content }}",
    "letter by letter": "{% for c in m.content %}{{ c }}{% endfor %}",
}


@pytest.mark.parametrize("said", HARMLESS.values(), ids=HARMLESS.keys())
@pytest.mark.parametrize("prompt", [False, True])
def test_what_only_writes_contents_has_an_outline(said: str, prompt: bool) -> None:
    template, found = compiled(in_turns(said))
    expected = template.render(messages=[one.plain() for one in TALK], add_generation_prompt=prompt)
    assert found.fill(TALK, add_generation_prompt=prompt) == expected


@pytest.mark.parametrize("said", LOOKING.values(), ids=LOOKING.keys())
def test_what_looks_into_contents_has_none(said: str) -> None:
    assert compiled(in_turns(said))[1].fill(TALK, add_generation_prompt=False) is None


@pytest.mark.parametrize("content", ["", " a", "a\n", "\u2003a"])
def test_contents_that_stripping_would_change_have_none(content: str) -> None:
    found = compiled(in_turns(HARMLESS["stripped"]))[1]
    assert found.fill((Message("user", content),), add_generation_prompt=True) is None


def test_messages_with_more_than_a_content_have_none() -> None:
    found = compiled(in_turns(HARMLESS["written"]))[1]
    assert found.fill((Message("user", "a", extra={"name": "b"}),), add_generation_prompt=True) is None


def test_a_template_that_refuses_the_roles_is_run() -> None:
    source = "{% if messages[0].role != 'user' %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}"
    assert compiled(source)[1].fill(TALK, add_generation_prompt=True) is None


def test_without_the_search_for_what_hides_a_look_texts_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlines, "_hides_nothing", lambda tree: True)
    for name in ("searched for", "made one, then searched", "assigned, then searched", "in a macro"):
        template, found = compiled(in_turns(LOOKING[name]))
        talk = (Message("user", "x"),)
        text = template.render(messages=[one.plain() for one in talk], add_generation_prompt=True)
        assert found.fill(talk, add_generation_prompt=True) not in (None, text)


_PARTS = ("a", "B", " ", "\n", '"', "\\", "<", "&", "{{", "x", "</s>", "<|im_end|>", "\ue000", "ß")
_SAID = st.lists(st.sampled_from(_PARTS), max_size=8).map("".join)
_ROLES = st.lists(st.sampled_from(["system", "user", "assistant"]), min_size=1, max_size=5)


@pytest.mark.parametrize("name", sorted(WRITTEN))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), roles=_ROLES, prompt=st.booleans())
def test_an_outline_gives_what_the_template_of_a_family_gives(
    name: str, data: st.DataObject, roles: list[str], prompt: bool
) -> None:
    renderer = ChatRenderer(families.tokenizer(name), special_tokens=[])
    talk = tuple(Message(role, data.draw(_SAID)) for role in roles)
    template = renderer._template(False)
    found = renderer._outlines(template).fill(talk, add_generation_prompt=prompt)
    if found is not None:
        plain = [one.plain() for one in talk]
        assert found == template.render(
            messages=plain, tools=None, documents=None, add_generation_prompt=prompt, **renderer._variables
        )


def test_families_that_have_outlines() -> None:
    """Were they fewer, preparation would only be slower; more would have to be looked into."""
    talk = (Message("user", "a"), Message("assistant", "b"))
    having = set()
    for name in WRITTEN:
        renderer = ChatRenderer(families.tokenizer(name), special_tokens=[])
        if renderer._outlines(renderer._template(False)).fill(talk, add_generation_prompt=False) is not None:
            having.add(name)
    assert {"smollm2", "zephyr", "chatml", "llama-3", "mistral-small", "gemma-3", "phi-4", "qwen-2.5"} <= having
    # It strips reasoning from answers, so it looks into them.
    assert "qwen-3" not in having
