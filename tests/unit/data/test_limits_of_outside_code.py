"""Chat templates and converters may do anything: each way to fail is one error, and none goes on for ever."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finray import limits
from finray.data.formats import convert
from finray.data.tokenize import chat
from finray.errors import ConfigError, DataError, FinrayError
from tests.support import runs
from tests.support.talk import Templated

_LOOP, _END = "{% for a in range(99999) %}", "{% endfor %}"
NEVER = _LOOP * 3 + _END * 3
# A megabyte at a time: what doubles may fill a machine between two looks of whoever watches.
GROWING = (
    "{% set ns = namespace(x=[]) %}{% for a in range(99999) %}{% set ns.x = ns.x + ['x' * 1000000 ~ a] %}{% endfor %}"
)


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    # As in a process that has called nothing yet.
    signal.signal(signal.SIGURG, signal.SIG_DFL)
    monkeypatch.setattr(chat, "TEMPLATE_S", 0.5)
    monkeypatch.setattr(convert, "CONVERTER_S", 0.5)


@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize(
    ("template", "said"),
    [
        (NEVER, "used more than 0.5 seconds"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recurses without end"),
        ("{{ messages[0]", "has a syntax error"),
        ("{% for m in messages %}{{ m.content }}", "has a syntax error"),
        ("{{ 'x' * 100000000000 }}", "a text of more than 10,000,000 characters"),
        ("{{ 'x' * (messages | length * 100000000000) }}", "a text of more than 10,000,000 characters"),
        ("{{ 10 ** 10 ** 10 }}", "the power of such large numbers"),
        ("{{ messages + 1 }}", "refuses the conversation: can only concatenate list"),
        ("{{ 1 // 0 }}", "refuses the conversation"),
        ("{{ raise_exception('no such role') }}", "refuses the conversation: no such role"),
        ("{{ messages.x.y }}", "refuses the conversation"),
        ("{{ range(10 ** 9) }}", "refuses the conversation: Range too big"),
        ("{{ ''.__class__.__mro__ }}", "refuses the conversation"),
        (f"{{{{ raise_exception('{'x' * 5000}') }}}}", "refuses the conversation"),
    ],
)
def test_a_template_that_fails_is_one_error(template: str, said: str) -> None:
    renderer = chat.ChatRenderer(Templated(template), special_tokens=())
    with pytest.raises(DataError) as caught:
        renderer.render((chat.Message("user", "hello"),))
    assert said in caught.value.message
    assert caught.value.where == "model.chat_template"
    assert caught.value.repair
    assert len(str(caught.value)) < 1000


def test_a_template_that_fills_the_memory_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits.within.__init__, "__kwdefaults__", {"memory": 2**28})
    renderer = chat.ChatRenderer(Templated(GROWING), special_tokens=())
    with pytest.raises(DataError, match=r"more than 0\.25 GiB of memory"):
        renderer.render((chat.Message("user", "hello"),))


def test_what_templates_multiply_is_worked_out_as_ever() -> None:
    renderer = chat.ChatRenderer(
        Templated("{{ '=' * 3 }}{{ 2 * 21 }}{{ 2 ** 3 }}{{ [0] * 2 }}{{ 1.5 * 2 }}"), special_tokens=()
    )
    assert renderer.render((chat.Message("user", "hello"),)) == "===428[0, 0]3.0"


CONVERTERS = """
import time
def loops(row):
    while True:
        pass
def yields_for_ever(row):
    while True:
        yield from ()
def sleeps(row):
    time.sleep(3600)
def good(row):
    return {"text": "hello"}
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], str]:
    """Writes a module that can be imported; its name."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, content: str) -> str:
        (tmp_path / f"{name}.py").write_text(content)
        monkeypatch.delitem(__import__("sys").modules, name, raising=False)
        monkeypatch.syspath_prepend(str(tmp_path))
        return name

    return write


@pytest.mark.long
@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize("function", ["loops", "yields_for_ever", "sleeps"])
def test_a_converter_that_never_returns_is_an_error_of_its_row(
    function: str, module: Callable[[str, str], str], tiny_run: Any, write_rows: Any
) -> None:
    rows = write_rows([{"a": number} for number in range(1000)])
    converter = f"{module('outside_converter', CONVERTERS)}:{function}"
    # No row is waited for after the first.
    plain = tiny_run({"data.source": str(rows), "data.converter": converter, "data.on_bad_row": "drop"})
    started = time.monotonic()
    with pytest.raises(DataError, match=r"the converter used more than 0\.5 seconds on this row"):
        runs.prepare_here(runs.config_of(plain))
    assert time.monotonic() - started < 60


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("def f(row):\n  return", ""),
        ("def f(row:\n", "SyntaxError"),
        ("raise ValueError('at import')", "ValueError: at import"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("import nothing_of_that_name", "No module named"),
        ("def f(): return f()\nf()", "RecursionError"),
    ],
)
def test_a_converter_that_cannot_be_imported_is_one_error(
    content: str, said: str, module: Callable[[str, str], str]
) -> None:
    name = module("outside_import", content)
    if not said:
        assert callable(convert.load_function(f"{name}:f"))
        return
    with pytest.raises(ConfigError) as caught:
        convert.load_function(f"{name}:f")
    assert said in caught.value.message
    assert "data.converter" in str(caught.value.where)


@pytest.mark.parametrize("path", [":f", "module:", "module", ":", "..:f", "a b:c"])
def test_a_name_of_a_converter_that_names_nothing_is_one_error(path: str) -> None:
    with pytest.raises(ConfigError):
        convert.load_function(path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 10**9}, "`num_hidden_layers` is 1000000000; it must be a whole number"),
        ({"hidden_size": 10**12}, "`hidden_size` is 1000000000000"),
        ({"hidden_size": 0}, "`hidden_size` is 0"),
        ({"hidden_size": -1}, "`hidden_size` is -1"),
        ({"hidden_size": "many"}, "`hidden_size` is 'many'"),
        ({"vocab_size": True}, "`vocab_size` is True"),
        ({"text_config": {"num_hidden_layers": 10**9}}, "`num_hidden_layers` is 1000000000"),
        ({"intermediate_size": [64, 10**10]}, "`intermediate_size` is 10000000000"),
        ({"num_labels": 10**9}, "`num_labels` is 1000000000; it must be a whole number from 0"),
        ({"num_local_experts": 10**9}, "`num_local_experts` is 1000000000"),
        ({"hidden_size": 63}, "cannot be loaded"),
        ({"model_type": 5}, "cannot be loaded"),
        ({"hidden_act": "x" * 10**5}, "cannot be loaded"),
    ],
)
def test_a_model_of_impossible_size_is_one_error_before_it_is_built(
    changes: dict[str, Any], said: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    import torch

    from finray.config.schema import ModelConfig
    from finray.models.loading import load_model

    content = json.loads((tiny_model_dir / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**content, **changes}))
    with pytest.raises(FinrayError) as caught:
        load_model(ModelConfig(name=str(tmp_path)), dtype=torch.float32, on_meta=True)
    assert said in caught.value.message
    assert str(tmp_path) in str(caught.value.where)
    assert len(str(caught.value)) < 1000


def test_a_chat_template_may_be_in_the_config_itself(tiny_model_dir: Path, tmp_path: Path) -> None:
    from finray.config.schema import ModelConfig
    from finray.pretrained.tokenizers import load_tokenizer

    text = "{% for m in messages %}<{{ m.role }}>\n{% endfor %}" + "{# a long comment #}" * 20
    (tmp_path / "t.jinja").write_text(text)
    for given in (text, str(tmp_path / "t.jinja")):
        assert load_tokenizer(ModelConfig(name=str(tiny_model_dir), chat_template=given)).chat_template == text


def test_a_chat_template_that_is_no_text_is_one_error(tiny_model_dir: Path, tmp_path: Path) -> None:
    from finray.config.schema import ModelConfig
    from finray.pretrained.tokenizers import load_tokenizer

    (tmp_path / "t.jinja").write_bytes(b"\xff\x00\xff")
    with pytest.raises(FinrayError, match="is not UTF-8 text"):
        load_tokenizer(ModelConfig(name=str(tiny_model_dir), chat_template=str(tmp_path / "t.jinja")))
