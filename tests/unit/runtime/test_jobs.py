"""What is refused before a job is sent, and where it would be sent to."""

from __future__ import annotations

from typing import Any

import pytest

from finray.config.load import load_config
from finray.errors import ConfigError
from finray.runtime.jobs import DEFAULT_ADDRESS, address_of, require_no_secret, secrets_named


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"data.source": "https://me:hf_abcdefghijklmnopqrstuv@host/x"}, "HF_TOKEN"),
        ({"model.chat_template_arguments": {"api_key": "anything"}}, "API_KEY"),
        ({"data.system": "use AKIAABCDEFGHIJKLMNOP"}, "AWS_ACCESS_KEY_ID"),
    ],
)
def test_a_secret_in_a_config_is_refused_with_the_name_to_use(changes: dict[str, Any], name: str) -> None:
    config = load_config("smollm2-lora", changes)
    with pytest.raises(ConfigError) as caught:
        require_no_secret(config)
    said = str(caught.value)
    assert f"--env {name}" in said
    assert next(iter(changes)) in said
    for value in ("hf_abc", "anything", "AKIAABC"):
        assert value not in said


def test_a_config_without_secrets_is_sent() -> None:
    require_no_secret(load_config("smollm2-lora", {"data.field_mapping": {"prompt": "token"}}))


def test_secrets_are_named_and_come_from_the_environment() -> None:
    assert secrets_named(("A",), {"A": "x", "B": "y"}) == {"A": "x"}
    with pytest.raises(ConfigError, match="B is not set here"):
        secrets_named(("B",), {"A": "x"})
    with pytest.raises(ConfigError, match="on no command line") as caught:
        secrets_named(("A=very-secret",), {})
    assert "very-secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "environ", "expected"),
    [
        (None, {}, DEFAULT_ADDRESS),
        ("head:8265", {}, "http://head:8265"),
        ("https://head/", {"RAY_API_SERVER_ADDRESS": "http://other"}, "https://head"),
        (None, {"RAY_API_SERVER_ADDRESS": "http://a:1", "RAY_ADDRESS": "http://b:2"}, "http://a:1"),
        (None, {"RAY_ADDRESS": "http://b:2"}, "http://b:2"),
        # That of a cluster, and of no job server.
        (None, {"RAY_ADDRESS": "10.0.0.1:6379"}, DEFAULT_ADDRESS),
    ],
)
def test_the_address_of_the_server(given: str | None, environ: dict[str, str], expected: str) -> None:
    assert address_of(given, environ) == expected
