"""Files that a config names, and their contents in their place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from finray.config.identity import differences
from finray.config.load import load_config
from finray.config.paths import sent_by_name, with_absolute_paths, with_contents
from finray.config.schema import Config
from finray.errors import ConfigError

TEMPLATE = "{% for m in messages %}\n  <|{{ m.role }}|> costs $1/$x: https://x {{ m.content }}\n{% endfor %}\n"
ZERO = {"zero_optimization": {"stage": 3}, "gradient_clipping": "auto"}


def config(**changes: str) -> Config:
    deepspeed = {"parallel.strategy": "deepspeed"} if "deepspeed_config" in changes else {}
    named = {"chat_template": "model.chat_template", "deepspeed_config": "parallel.deepspeed_config"}
    return load_config("smollm2-lora", {**deepspeed, **{named[name]: value for name, value in changes.items()}})


def test_a_chat_template_and_deepspeeds_json_replace_their_files_and_are_read_back(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    (tmp_path / "zero.json").write_text(json.dumps(ZERO))
    named = config(chat_template=str(tmp_path / "chat.jinja"), deepspeed_config=str(tmp_path / "zero.json"))
    found = with_contents(named)
    assert (found.model.chat_template, found.parallel.deepspeed_config) == (TEMPLATE, ZERO)
    assert (len(sent_by_name(named)), sent_by_name(found)) == (2, [])
    # They are no paths for what makes paths absolute, and what is written is what was read.
    again = with_contents(with_absolute_paths(found))
    assert (again.model, again.parallel) == (found.model, found.parallel)
    assert load_config(found.model_dump(mode="json", exclude_unset=True)).plain() == found.plain()
    # A run that was started with the files is continued by a job that carries them, and with another template by none.
    assert differences(named, found) == []
    (tmp_path / "chat.jinja").write_text(TEMPLATE + "{# changed #}")
    assert [path for path, _, _ in differences(named, found)] == ["model.chat_template"]


def test_an_encoder_of_this_machine_is_found_from_another_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "encoder").mkdir()
    monkeypatch.chdir(tmp_path)
    for given, found in (("./encoder", str(tmp_path / "encoder")), ("roberta-large", "roberta-large"), (None, None)):
        scoring = with_absolute_paths(
            load_config("smollm2-lora", {"evaluation.scoring.encoder": given})
        ).evaluation.scoring
        assert scoring is not None
        assert scoring.encoder == found
    assert with_absolute_paths(config()).evaluation.scoring is None


def test_what_cannot_be_taken_keeps_its_name(tmp_path: Path) -> None:
    (tmp_path / "large.jinja").write_text(TEMPLATE * 1000)
    (tmp_path / "no-template.jinja").write_text("chatml")
    for name in ("large.jinja", "no-template.jinja", "not-here.jinja"):
        named = config(chat_template=str(tmp_path / name), deepspeed_config=str(tmp_path / "not-here.json"))
        assert with_contents(named) == named
        there = [f"model.chat_template {tmp_path / name}"] if name != "not-here.jinja" else []
        assert sent_by_name(named) == there
    assert with_contents(config()) == config()


def test_a_file_that_is_not_what_it_should_be_is_named(tmp_path: Path) -> None:
    path = tmp_path / "zero.json"
    for content in ("{", "[]"):
        path.write_text(content)
        with pytest.raises(ConfigError) as caught:
            with_contents(config(deepspeed_config=str(path)))
        assert caught.value.where == str(path)
