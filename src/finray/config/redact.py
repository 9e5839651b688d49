"""Masks secrets in everything that is printed or written: by the name of what holds them, and by their form.

The forms are those of gitleaks (``vendor/secret_forms.json``, made by ``tools/secret_forms.py``) and the few below.
Every screen, page, document and file goes through :func:`redact_text` or :func:`redact`; ``tests/security`` checks it.
Rows, prompts and answers are what a user asked for, and stay as they are.
"""

from __future__ import annotations

import base64
import html
import json
import os
import re
import traceback
from collections.abc import Mapping
from functools import cache, lru_cache
from importlib import resources
from typing import Any
from urllib.parse import quote, quote_plus

from finray.errors import MASKS

MASK = "***"
_NAME = re.compile(
    r"(^|[_\-.])(token|secret|passw(or)?d|passphrase|credentials?|authorization|bearer"
    r"|(api|access|account|auth|private|secret|shared|signing|encryption|master|ssh)[_-]?key)($|[_\-.])",
    re.I,
)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
# Where a secret is, which is none itself.
_PLACE = re.compile(r"_(file|path|dir|folder)$", re.I)
# Arguments of chat templates, whose values are read again.
_TEMPLATE_TOKEN = re.compile(r"(bos|eos|eot|eom|pad|unk|sep|cls|mask|image|audio|video)_token", re.I)
# Maps of names from the data: of fields, labels and a template's arguments (config/schema.py refuses secrets in those).
NAMED_BY_DATA = ("field_mapping", "class_weights", "chat_template_arguments")
# Maps of names of models, and of scores with the names of classes, in the document of `finray evaluate`.
_NAMED_BY_MODELS = ("models", "without_training_rows", "confusion", "baselines", "answers", "scores")
# A token begins behind no letter or digit, or behind an escape (`\n`, `%3D`); `\b` in a form stands for this.
_BEGINS = r"(?:(?<![A-Za-z0-9])|(?<=\\[nrt])|(?<=%[0-9A-Fa-f]{2}))"
# What gitleaks does not have, or has with the length of one year's tokens. By words of which one must be there.
_FORMS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("hf_",), r"\bhf_[A-Za-z0-9]{16,}"),
    (("api_org_",), r"\bapi_org_[A-Za-z0-9]{16,}"),
    (("hvs.", "hvb."), r"\bhv[sb]\.[\w-]{16,}"),
    (("atatt3",), r"\bATATT3[\w=+/-]{16,}"),
    (("sbp_", "ntn_"), r"\b(?:sbp|ntn)_[A-Za-z0-9]{16,}"),
    (("tskey-",), r"\btskey-[a-z]{1,16}-[\w-]{12,}"),
    (("age-secret-key-1",), r"AGE-SECRET-KEY-1[A-Z0-9]{16,}"),
    (
        ("sk-",),
        r"\bsk-(?:[A-Za-z0-9]{16,}[\w-]*|(?:proj|ant|or|svcacct|admin|lf)-[\w-]{12,}"
        r"|(?=[\w-]{0,80}?[0-9])(?=[\w-]{0,80}?[A-Z])[\w-]{16,})",
    ),
    (("ghp_", "gho_", "ghu_", "ghs_", "ghr_"), r"gh[pousr]_[A-Za-z0-9]{16,}"),
    (("akia", "asia", "abia", "acca", "a3t"), r"\b(?:A3T[A-Z0-9]|AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}(?![A-Za-z0-9])"),
    (("iqoj", "fwog"), r"\b(?:IQoJb3JpZ2lu|FwoGZXIvYXdz)[A-Za-z0-9+/=]{16,}"),
    (("xox",), r"xox[a-z](?:\.xox[a-z])?-[A-Za-z0-9-]{10,}"),
    (("hooks.slack.com",), r"hooks\.slack\.com/(?:services|workflows|triggers)/[A-Za-z0-9+/]{16,}"),
    (("/api/webhooks/",), r"discord(?:app)?\.com/api/webhooks/[0-9]+/[\w-]{16,}"),
    (("aiza",), r"\bAIza[\w-]{30,}"),
    (("ya29.",), r"\bya29\.[\w.-]{16,}"),
    (("gocspx-",), r"GOCSPX-[\w-]{16,}"),
    (("_live_", "_test_", "_prod_"), r"\b[sr]k_(?:live|test|prod)_[A-Za-z0-9]{10,}"),
    (("whsec_",), r"whsec_[A-Za-z0-9+/=]{16,}"),
    (("r8_", "gsk_", "fw_", "jina_", "e2b_"), r"\b(?:r8|gsk|fw|jina|e2b)_[A-Za-z0-9]{16,}"),
    (("xai-", "csk-"), r"\b(?:xai|csk)-[A-Za-z0-9]{16,}"),
    (("nvapi-",), r"nvapi-[\w-]{16,}"),
    (("rpa_", "kgat_"), r"\b(?:rpa|KGAT)_[A-Za-z0-9]{16,}"),
    (
        ("tgp_v1_", "wandb_v1_", "lsv2_", "pcsk_", "figd_", "dckr_"),
        r"\b(?:tgp_v1|wandb_v1|lsv2_(?:pt|sk)|pcsk|figd|dckr_(?:pat|oat))_[\w-]{16,}",
    ),
    (("sntrys_",), r"sntrys_[\w+/=-]{16,}"),
    (("sgp_",), r"\bsgp_[A-Za-z0-9_]{16,}"),
    (("squ_", "sqp_", "sqa_"), r"\bsq[upa]_[0-9a-f]{16,}"),
    (("pypi-age",), r"pypi-AgE[\w-]{16,}"),
    ((":aa",), r"\b[0-9]{8,12}:AA[\w-]{30,}"),
    (("q~",), r"\b[\w~.-]{3}[0-9]Q~[\w~.-]{31,34}"),
    (("eyj",), r"(?:(?<![\w-])|(?<=\\[nrt]))eyJ[\w-]{8,}(?:\.[\w-]{6,}){1,4}"),
    (
        ("private key",),
        r"-----BEGIN[ A-Z0-9]{0,40}PRIVATE KEY(?: BLOCK)?-----(?:(?!-----)[\s\S]){0,20000}"
        r"(?:-----END[ A-Z0-9]{0,60}-----)?",
    ),
)
# The length of the shortest form, and the only word with a space; tests/unit/config/test_redact.py checks both.
LEAST, _SPACED = 12, "private key"
# Texts up to this length are masked once, and remembered.
_SHORT = 256
# A value that its name makes a secret: `NAME=VALUE`, `"name": "value"`, `Authorization: Bearer VALUE`, `--name VALUE`.
_VALUE = r"([^\s\"'\\,;&<>(){}\[\]|]{8,256})"
_DIGIT, _LETTER = re.compile("[0-9]"), re.compile("[A-Za-z]")
_REST = re.compile(r"[^\s\"'\\,;&<>(){}\[\]|]*")
_NAMED = re.compile(
    r"(?<![\w.-])([A-Za-z][\w.-]{0,80}+)\\?[\"']?\s{0,3}(?:=>|[:=])\s{0,3}\\?[\"']?"
    r"(?:(?:bearer|basic|digest|token|apikey)\s{1,3})?" + _VALUE,
    re.I,
)
_OPTION = re.compile(rf"(?<![\w.-])(-{{1,2}}[A-Za-z][\w-]{{0,80}})\s{{1,3}}[\"']?{_VALUE}")
_BEARER = re.compile(rf"(?<![\w-])(bearer)\s{{1,3}}{_VALUE}", re.I)
_BASIC = re.compile(
    r"(?<![\w-])([Bb]asic)\s{1,3}((?=\S{0,256}[0-9])(?=\S{0,256}[A-Z])[A-Za-z0-9+/]{8,256}={0,2})(?![\w-])"
)
_HEADERS = re.compile(r"(set-)?cookie|(x-amz-)?signature|bearer|basic", re.I)
_NAME_WORDS = ("token", "secret", "passw", "passphrase", "key", "credential", "auth", "bearer", "basic", "cookie")
_URL = re.compile(r"://[^\s'\"<>]+")
_URL_USER = re.compile(
    r"://([^\s/@:?#]{0,512}):([^\s/?#]{0,512})@|://([^\s/@:?#]{1,512}):(?![0-9]{1,5}(?:[/?#]|$))([^\s@]{0,512})@"
)
_URL_TOKEN = re.compile(r"://([^\s/@:?#]{1,512})(?=(?::[^/@]{0,512})?@)")
# Parameters of signed URLs, or URLs that contain a key.
_URL_QUERY = re.compile(
    r"[?&;#](?:[\w-]*(?:signature|token|credential|secret|passw(?:or)?d|api_?key|access_?key)|sig|key|auth|pwd|jwt)=",
    re.I,
)


@lru_cache(maxsize=1024)
def is_secret_name(name: str) -> bool:
    """Whether a key of this name holds a secret: ``HF_TOKEN`` does, ``max_new_tokens`` and ``eos_token`` do not."""
    plain = _CAMEL.sub("_", name)
    return bool(_NAME.search(plain)) and not _TEMPLATE_TOKEN.fullmatch(plain) and not _PLACE.search(plain)


def holds_token(text: str, *, environ: Mapping[str, str] | None = None) -> bool:
    """Whether a text contains what has the form of a token (``hf_...``, ``sk-...``), or the value of a secret variable
    of ``environ``."""
    return bool(tokens_in(text)) or (environ is not None and variable_in(text, environ) is not None)


def tokens_in(text: str) -> list[str]:
    """All that has the form of a token."""
    tokens: list[str] = []
    _without_tokens(text, tokens)
    return tokens


def redact_text(text: str, *, environ: Mapping[str, str] = os.environ, sure: bool = False) -> str:
    """Mask secrets in free text.

    These are known forms of tokens, passwords and signatures in URLs, what stands behind a name such as ``password=``,
    and the values of secret environment variables.

    Args:
        text: what is shown or written.
        environ: environment variables.
        sure: mask only what can be nothing else than a secret, as :func:`redact_saved` does.
    """
    return _masked(text, _secrets(environ), sure)


MASKS[:] = [redact_text]


def redact_error(error: BaseException) -> str:
    """The traceback of an error, and of those that caused it, without secrets."""
    return redact_text("".join(traceback.format_exception(error)))


def redact(value: Any, *, environ: Mapping[str, str] = os.environ, named: bool = True, sure: bool = False) -> Any:
    """Mask secrets in nested dictionaries and lists, by key and by value.

    A local path is kept as it is, because what is read again must be found; it is no secret where a password happens
    to be a word of it. So is what the maps of :data:`NAMED_BY_DATA` and :data:`_NAMED_BY_MODELS` hold, whose keys name
    fields, labels, models and scores (``named``): there, no value is masked because of its key.
    """
    return _redacted(value, _secrets(environ), named, sure)


def redact_saved(value: Any, *, environ: Mapping[str, str] = os.environ) -> Any:
    """As :func:`redact`, for what is read again: only what can be no ordinary word is masked.

    A run called ``postgres-sql`` must be found again where a password is ``postgres``.
    """
    return redact(value, environ=environ, sure=True)


def holds_secret(text: str, *, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a text that is sent away holds a secret: what can be nothing else, or the value of a secret variable."""
    return redact_text(text, environ={}, sure=True) != text or variable_in(text, environ) is not None


def variable_in(text: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """The secret variable whose value a text contains, if it is no ordinary word."""
    for name, value in environ.items():
        secret = value.strip()
        if is_secret_name(name) and _is_no_word(secret, 8) and any(form in text for form in _written(secret)):
            return name
    return None


def _secrets(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The values of secret variables."""
    # A mounted secret often ends in a newline, which others leave out, or quote.
    values = (environ.get(name, "").strip() for name in _secret_names(tuple(environ)))
    return tuple(value for value in values if len(value) >= 8)


@lru_cache(maxsize=16)
def _secret_names(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if is_secret_name(name))


def _redacted(value: Any, secrets: tuple[str, ...], named: bool, sure: bool) -> Any:
    """See :func:`redact`."""
    if isinstance(value, Mapping):
        return {
            _masked(key, secrets, True) if isinstance(key, str) else key: MASK
            if named and is_secret_name(str(key)) and item
            else _redacted(item, secrets, named and key not in (*NAMED_BY_DATA, *_NAMED_BY_MODELS), sure)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_redacted(item, secrets, named, sure) for item in value]
    if not isinstance(value, str):
        return value
    is_path = "/" in value and "://" not in value and not any(character.isspace() for character in value)
    return _masked(value, secrets, sure or is_path)


def _masked(text: str, secrets: tuple[str, ...], sure: bool) -> str:
    """A text without tokens, named values and these secrets."""
    # Keys, cells and messages come again and again; long texts do not, and would fill the memory.
    return (_masked_short if len(text) <= _SHORT else _masked_long)(text, secrets, sure)


def _masked_long(text: str, secrets: tuple[str, ...], sure: bool) -> str:
    text, least = _without_tokens(text), 16 if sure else 8
    if "://" in text:
        text = _URL.sub(lambda match: _redact_url(match[0]), text)
    lower = text.lower()
    # In most texts no value is random, and no name has to be looked for.
    is_named = any(word in lower for word in _NAME_WORDS)
    if is_named and any(_is_random(part.lstrip("$"), least) for part in lower.split()):
        for pattern in (_NAMED, _OPTION, _BEARER, _BASIC):
            text = _without_named(text, pattern, least=least)
    for secret in secrets:
        if not sure or _is_no_word(secret, 16):
            for written in _written(secret):
                text = text.replace(written, MASK)
    return text


_masked_short = lru_cache(maxsize=2048)(_masked_long)


def _is_no_word(secret: str, least: int) -> bool:
    """Whether the value of a secret variable can be no ordinary word, name or path."""
    is_place = secret.startswith(("/", "~", "./", "../"))
    return not is_place and (len(secret) >= 24 or _is_random(secret, least))


def _is_random(text: str, least: int) -> bool:
    return (
        len(text) >= least
        and not text.startswith("$")
        and _DIGIT.search(text) is not None
        and _LETTER.search(text) is not None
    )


def _without_named(text: str, pattern: re.Pattern[str], *, least: int) -> str:
    """A text without the values that stand behind the name of a secret."""
    made, kept, place = [], 0, 0
    while (match := pattern.search(text, place)) is not None:
        name, value = match[1].lstrip("-"), match[2]
        if (is_secret_name(name) or _HEADERS.fullmatch(name)) and _is_random(value, least):
            made += [text[kept : match.start(2)], MASK]
            kept = place = _REST.match(text, match.end(2)).end()  # type: ignore[union-attr]
        else:
            # The value may be a name itself: `use password=...`.
            place = match.start(2)
    return "".join([*made, text[kept:]])


@lru_cache(maxsize=64)
def _written(secret: str) -> tuple[str, ...]:
    """A secret as it stands in a text: plain, and as quoting and encoding leave it."""
    encoded = base64.b64encode(secret.encode(errors="surrogateescape")).decode()
    forms = {secret, repr(secret)[1:-1], json.dumps(secret)[1:-1], html.escape(secret)}
    forms |= {quote(secret, safe=safe, errors="replace") for safe in ("", "/")} | {quote_plus(secret, errors="replace")}
    forms |= {encoded, encoded.translate(str.maketrans("+/", "-_"))}
    return tuple(sorted(forms, key=len, reverse=True))


@cache
def _forms() -> tuple[tuple[str, str], ...]:
    """A word, and the form of which it is a part; some forms have several."""
    made = json.loads((resources.files("finray.config") / "vendor" / "secret_forms.json").read_text(encoding="utf-8"))
    rules = [*_FORMS, *((rule["words"], rule["form"]) for rule in made["forms"])]
    return tuple((word, form) for words, form in rules for word in words)


@cache
def _compiled(form: str) -> re.Pattern[str]:
    return re.compile(form.replace(r"\b", _BEGINS))


def _without_tokens(text: str, tokens: list[str] | None = None) -> str:
    """A text with its tokens masked; they are added to ``tokens``."""
    lower = text.lower()
    # No token is shorter or has a space in it, but a private key: most of a text need not be searched.
    lower = " ".join([word for word in lower.split() if len(word) >= LEAST] + [_SPACED] * (_SPACED in lower))
    # Most texts have none of the words, so that most forms are never compiled.
    for form in dict.fromkeys(form for word, form in _forms() if word in lower):
        pattern = _compiled(form)
        if tokens is not None:
            tokens += [match[0] for match in pattern.finditer(text)]
        text = pattern.sub(MASK, text)
    return text


def _redact_url(url: str) -> str:
    head, mark, rest = re.match(r"([^?#]*)([?#]?)(.*)", url, re.S).groups()  # type: ignore[union-attr]
    if mark and _URL_QUERY.search(mark + rest):
        rest = MASK
    head = _URL_USER.sub(lambda match: f"://{match[1] if match[1] is not None else match[3]}:{MASK}@", head)
    head = _URL_TOKEN.sub(lambda match: f"://{MASK}" if _is_random(match[1], 20) else match[0], head)
    return f"{head}{mark}{rest}"
