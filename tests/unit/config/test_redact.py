"""Secrets are masked by their form, by the name of what holds them, by the variable that has them, and nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finray.config import redact as module
from finray.config.redact import (
    MASK,
    holds_secret,
    holds_token,
    is_secret_name,
    redact,
    redact_saved,
    redact_text,
    tokens_in,
    variable_in,
)
from tests.support.examples import examples

_PEM = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7VJTUt9Us8cKj"
# Of providers' own documentation, put together so that no scanner takes this file for a leak.
SAMPLES = {
    "Hugging Face": "hf_" + "aB3dE" * 7,
    "GitHub": "ghp_" + "a1B2c3" * 6,
    "GitHub, fine-grained": "github_pat_" + "11ABCDEFG0" + "a1B2c3D4e5F6" + "_" + "Zy9" * 19,
    "GitHub Actions": "ghs_" + "a1B2c3" * 6,
    "GitLab": "glpat-" + "x1Y2z3-_W4v5U6t7S8",
    "OpenAI": "sk-" + "a1B2c3D4e5F6" * 4,
    "OpenAI project": "sk-proj-" + "a1B2-c3D4_e5F6" * 6,
    "Anthropic": "sk-ant-" + "api03-" + "a1B2-c3D4_e5F6" * 3,
    "OpenRouter": "sk-or-" + "v1-" + "0123456789abcdef" * 4,
    "AWS": "AKIA" + "IOSFODNN7EXAMPLE",
    "AWS, temporary": "ASIA" + "IOSFODNN7EXAMPLE",
    "Google": "AIza" + "SyA-1234567890_abcdefghijklmnopqrstu",
    "Google OAuth": "ya29." + "a0AfH6SMBx-1234567890",
    "Google client": "GOCSPX-" + "a1B2c3D4e5F6g7H8i9J0k1L2m3N4",
    "Slack": "xoxb-" + "123456789012-1234567890123-a1B2c3D4e5F6g7H8i9J0k1L2",
    "Slack webhook": "hooks.slack.com/services/" + "T00000000/B00000000/" + "X" * 24,
    "Discord webhook": "discord.com/api/webhooks/" + "123456789012345678/" + "aB3-_" * 13,
    "Stripe": "sk_live_" + "4eC39HqLyjWDarjtT1zdp7dc",
    "Twilio": "SK" + "0123456789abcdef" * 2,
    "SendGrid": "SG." + "a1B2c3D4e5F6g7H8i9J0k1" + "." + "a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R8s9T0u1V",
    "Telegram": "123456789:AA" + "HdqTcvCH1vGWJxfSeofSAs0K5PALDsaw-1",
    "npm": "npm_" + "a1B2c3" * 6,
    "PyPI": "pypi-AgE" + "IcHlwaS5vcmcCJ" + "a1B2c3-_" * 10,
    "Replicate": "r8_" + "a1B2c3D4" * 5,
    "NVIDIA": "nvapi-" + "a1B2c3D4-_" * 6,
    "Groq": "gsk_" + "a1B2c3D4" * 6,
    "Hugging Face organisation": "api_org_" + "a1B2c3D4" * 4,
    "a short one of Vault": "hvs." + "a1B2c3D4" * 4,
    "Atlassian": "ATATT3xFfGF0" + "a1B2c3D4" * 5,
    "Supabase": "sbp_" + "a1b2c3d4" * 5,
    "Tailscale": "tskey-auth-" + "a1B2c3D4" * 4,
    "age": "AGE-SECRET-KEY-1" + "A1B2C3D4" * 7,
    "xAI": "xai-" + "a1B2c3D4" * 10,
    "Perplexity": "pplx-" + "a1B2c3D4" * 6,
    "Together": "tgp_v1_" + "a1B2c3D4-_" * 4,
    "W&B": "wandb_v1_" + "a1B2c3D4_" * 8,
    "LangSmith": "lsv2_pt_" + "0123456789abcdef" * 2 + "_0123456789",
    "Docker": "dckr_pat_" + "a1B2c3D4-_E5f6G7h8I9j0K1l2",
    "DigitalOcean": "dop_v1_" + "0123456789abcdef" * 4,
    "Databricks": "dapi" + "0123456789abcdef" * 2,
    "Azure AD": "abc8Q~" + "a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7",
    "Vault": "hvs." + "a1B2c3D4-_" * 10,
    "Grafana": "glsa_" + "a1B2c3D4" * 4 + "_0123abcd",
    "Notion": "ntn_" + "12345678901" + "a1B2c3D4" * 4 + "aB3",
    "Shopify": "shpat_" + "0123456789abcdef" * 2,
    "Heroku": "HRKU-AA" + "a1B2c3D4_-" * 5 + "a1B2c3D4",
    "Postman": "PMAK-" + "0123456789abcdef01234567-0123456789abcdef0123456789abcdef01",
    "JWT": "eyJ"
    + "hbGciOiJIUzI1NiJ9."
    + "eyJzdWIiOiIxMjM0NTY3ODkwIn0."
    + "dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U",
    "private key": "-----BEGIN " + f"PRIVATE KEY-----\n{_PEM}\n-----END PRIVATE KEY-----",
    "private key, encrypted": "-----BEGIN RSA "
    + f"PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,1F\n\n{_PEM}"
    "\n-----END RSA PRIVATE KEY-----",
    "private key, cut off": "-----BEGIN OPENSSH " + f"PRIVATE KEY-----\n{_PEM}",
}
# How a token may stand in a text.
SETTINGS = (
    "{}",
    "token {}, and more",
    '{{"a": "{}"}}',
    "Error: {}.",
    "https://host/x?next=%3D{}&y",
    "<b>{}</b>",
    "a\\n{}\\n",
)


@pytest.mark.parametrize("provider", SAMPLES)
def test_the_tokens_of_providers_are_masked_wherever_they_stand(provider: str) -> None:
    token = SAMPLES[provider]
    for setting in SETTINGS:
        text = setting.format(token)
        for shown in (redact_text(text, environ={}), redact_saved(text, environ={})):
            assert MASK in shown
            assert token[-12:] not in shown
        assert holds_token(text)
        assert holds_secret(text, environ={})
        assert tokens_in(text)


def test_without_the_list_tokens_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_forms", lambda: ())
    token = SAMPLES["GitLab"]
    assert redact_text(f"the token {token}", environ={}) == f"the token {token}"


def forms() -> dict[str, Any]:
    source = module.resources.files("finray.config") / "vendor" / "secret_forms.json"
    return {one["id"]: one for one in json.loads(source.read_text())["forms"]}


@pytest.mark.long
@pytest.mark.parametrize("name", forms())
@settings(max_examples=examples(5), deadline=None)
@given(drawn=st.data())
def test_a_text_of_each_form_is_masked_whole(name: str, drawn: st.DataObject) -> None:
    """That is: the words by which a form is chosen are in each of its texts, and it is one of Python's."""
    pattern = re.compile(forms()[name]["form"].replace(r"\b", ""), re.ASCII)
    # A `.` of a form stands for any character but "\n"; no token has white space in it.
    token = drawn.draw(st.from_regex(pattern, fullmatch=True).filter(lambda text: not any(map(str.isspace, text))))
    assert token not in redact_text(f"x {token} y", environ={})


def repeats(tree: Any) -> list[tuple[int, Any]]:
    """Every repetition in a form: the most often, and what is repeated."""
    found = []
    for code, argument in tree:
        if code in (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT):
            found.append((argument[1], argument[2]))
            found += repeats(argument[2])
        elif code is codes.SUBPATTERN:
            found += repeats(argument[3])
        elif code is codes.BRANCH:
            found += [one for branch in argument[1] for one in repeats(branch)]
        elif code in (codes.ASSERT, codes.ASSERT_NOT):
            found += repeats(argument[1])
    return found


def test_a_text_can_be_searched_for_words_by_its_long_parts() -> None:
    """Those without a space, to which the words of a form belong."""
    for word, form in module._forms():
        assert (" " in word) == (word == module._SPACED)
        assert parser.parse(form).getwidth()[0] >= module.LEAST
    long = "it was a long answer, and the key of it " * 500
    for provider in ("GitHub", "private key"):
        assert SAMPLES[provider] not in redact_text(f"{long}{SAMPLES[provider]} {long}", environ={})
    assert redact_text(f"{long}password: hunter22 {long}", environ={}) == f"{long}password: *** {long}"


def test_what_was_masked_is_not_kept_for_other_secrets() -> None:
    for secret in ("first-secret", "second-secret"):
        text = "the first-secret and the second-secret"
        assert redact_text(text, environ={"A_TOKEN": secret}) == text.replace(secret, MASK)
        assert redact({"a": [text]}, environ={"A_TOKEN": secret}) == {"a": [text.replace(secret, MASK)]}


def nested(form: str) -> bool:
    """Whether a form repeats without a limit what itself repeats: then a text can take it exponential time."""
    return any(
        most > 100 and any(inner > 10 for inner, _ in repeats(what)) for most, what in repeats(parser.parse(form))
    )


def test_no_form_takes_exponential_time() -> None:
    every = [one["form"] for one in forms().values()] + [form for _, form in module._FORMS]
    every += [one.pattern for one in vars(module).values() if isinstance(one, re.Pattern)]
    assert len(every) > 100
    assert [form for form in every if nested(form)] == []
    assert nested("(a+)+b")


ORDINARY = (
    *("run-2026-11-29", "postgres-sql", "meta-llama/Llama-3.2-1B-Instruct", "Qwen/Qwen3-30B-A3B"),
    *("./models/sk-tuned-v2", "sk-learn-compatible-estimators", "/data/2026/rows-00001-of-00064.jsonl"),
    *("s3://bucket/runs/key-value/rows.jsonl", "http://127.0.0.1:8265", "http://host:8000/a@b"),
    *("max_new_tokens=1234567a", "eos_token: <|im_end|>", "the key `prompt` of row 12 is missing"),
    *("token 12345678 of 32000", "train.py:31", "1h 05 min", "task-specific-head-1", "4b1d2f", "monkey-deadbeef"),
    *("the job server requires a token: none was sent", "pad_token=token12345678"),
    *("git@github.com:org/repository-1.git", "feature/npm_config_registry_2", "live_streaming_data_v2_2026"),
    *("the basic authentication1 of the host", "Basic understanding-of-2-things"),
    "data.field_mapping.token: is missing from row 12",
)


@pytest.mark.parametrize("text", ORDINARY)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact_saved(text, environ={"DB_PASSWORD": "postgres"}) == text
    assert not holds_secret(text, environ={"DB_PASSWORD": "postgres"})
    assert redact_text(text, environ={}) == text


@given(st.binary())
def test_digests_stay(content: bytes) -> None:
    for algorithm in ("sha256", "sha1", "md5"):
        digest = hashlib.new(algorithm, content).hexdigest()
        for text in (digest, f"prepared/{digest[:24]}", f"{algorithm}:{digest}"):
            assert redact_text(text, environ={}) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgres://me:pass@host/db", "postgres://me:***@host/db"),
        ("redis://:pass@host:1", "redis://:***@host:1"),
        ("https://me:p@ss@host/a", "https://me:***@host/a"),
        ("https://me:p/ss@host/a", "https://me:***@host/a"),
        ("git+https://a1B2c3D4e5F6g7H8i9J0@host/x", "git+https://***@host/x"),
        ("https://h/x?a=1&X-Amz-Signature=abc&b=2 more", "https://h/x?*** more"),
        ("https://h/x?sv=2022&sig=abcdef%3D", "https://h/x?***"),
        ("https://h/x?GoogleAccessId=a&Expires=1&Signature=abcdef", "https://h/x?***"),
        ("https://h/x?api_key=abcdef", "https://h/x?***"),
        ("https://h/x#access_token=abc", "https://h/x#***"),
        ("https://h/x?page=2&sort=key", "https://h/x?page=2&sort=key"),
        ("cluster.env.DB_PASSWORD=hunter22", "cluster.env.DB_PASSWORD=***"),
        ("use password=hunter22, and go", "use password=***, and go"),
        ("{'apiKey': 'a1b2c3d4'}", "{'apiKey': '***'}"),
        ("AccountKey=a1B2c3D4/+==;End", "AccountKey=***;End"),
        ("AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG", "AWS_SECRET_ACCESS_KEY=***"),
        ("Authorization: Bearer a1b2c3d4e5", "Authorization: Bearer ***"),
        ("-H 'X-Api-Key: a1b2c3d4e5'", "-H 'X-Api-Key: ***'"),
        ("Basic dXNlcjpwYXNzd29yZA==", "Basic ***"),
        ("Cookie: session=a1b2c3d4", "Cookie: ***"),
        ("tool --api-key a1b2c3d4 run", "tool --api-key *** run"),
        ("token_file=/run/secrets/token1", "token_file=/run/secrets/token1"),
        (f"password={'a1' * 500} b", "password=*** b"),
    ],
)
def test_passwords_are_known_by_where_they_stand(text: str, shown: str) -> None:
    assert redact_text(text, environ={}) == shown


@pytest.mark.parametrize("secret", ['p@ss w0rd\'s "1"&/+', "s3cr3t-value-of-this-shell"])
def test_a_variables_value_is_masked_however_it_is_written(secret: str) -> None:
    environ = {"MY_JOB_TOKEN": f"{secret}\n"}
    for written in (
        *(secret, repr(secret), json.dumps(secret), quote(secret), quote(secret, safe="")),
        base64.b64encode(secret.encode()).decode(),
    ):
        shown = redact_text(f"a {written} b", environ=environ)
        assert MASK in shown
        assert written.strip("'\"") not in shown
        assert variable_in(written, environ) == "MY_JOB_TOKEN"
    assert redact_text(secret, environ={"MY_COLOUR": secret}) == secret
    assert redact_saved({"note": secret}, environ={"MY_TOKEN": "aB3" * 8 + "\n"}) == {"note": secret}
    # A key of several lines, such as a private one.
    several = {"MY_TOKEN": "first-half\nsecond-half\n"}
    assert redact_text(f"invalid: {several['MY_TOKEN']!r}", environ=several) == "invalid: '***\\n'"


def test_only_values_that_are_no_words_are_refused_or_masked_in_what_is_read_again() -> None:
    environ = {
        "A_PASSWORD": "postgres",
        "A_TOKEN": "a1b2c3d4",
        "B_TOKEN": "/etc/keys/a1",
        "C_SECRET": "a1B2c3D4e5F6g7H8",
    }
    assert not holds_secret("postgres in /etc/keys/a1", environ=environ)
    assert holds_secret("use a1b2c3d4", environ=environ)
    assert redact_saved("runs/postgres", environ=environ) == "runs/postgres"
    assert redact_saved("runs/a1B2c3D4e5F6g7H8", environ=environ) == "runs/***"


def test_names_of_secrets_in_any_spelling() -> None:
    secret = ("HF_TOKEN", "apiKey", "client-secret", "db.password", "AZURE_ACCOUNT_KEY", "accessToken", "x-api-key")
    others = ("max_new_tokens", "eos_token", "eosToken", "tokenizer", "key", "keyboard", "TOKEN_FILE", "NCCL_P2P")
    assert [is_secret_name(name) for name in (*secret, "token")] == [True] * 8
    assert [name for name in (*others, "passing") if is_secret_name(name)] == []


def test_keys_hold_secrets_too() -> None:
    token = SAMPLES["GitHub"]
    assert redact({token: 1, "a": [{"password": "x"}], "tokens": 3}, environ={}) == {
        MASK: 1,
        "a": [{"password": MASK}],
        "tokens": 3,
    }
