"""Masks secrets in everything that is printed or written, by the name of the key and by the form of the value."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

MASK = "***"
_NAME = re.compile(
    r"(^|[_\-.])(token|secret|passw(or)?d|passphrase|api_?key|access_?key|credentials?|private_?key)($|[_\-.])", re.I
)
# Arguments of chat templates, whose values are read again.
_TEMPLATE_TOKEN = re.compile(r"(bos|eos|eot|eom|pad|unk|sep|cls|mask|image|audio|video)_token", re.I)
# Maps of names from the data: of fields, labels and a template's arguments (config/schema.py refuses secrets in those).
NAMED_BY_DATA = ("field_mapping", "class_weights", "chat_template_arguments")
# Maps of names of models, and of scores with the names of classes, in the document of `finray evaluate`.
_NAMED_BY_MODELS = ("models", "without_training_rows", "confusion", "baselines", "answers", "scores")
# A value that can be nothing else than a secret, where a variable that holds one has it.
_RANDOM = re.compile(r"(?=[^0-9]*[0-9])(?=[^A-Za-z]*[A-Za-z])[A-Za-z0-9+=_]{20,}")
_VALUE = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_\-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[0-9A-Z]{16}"
    r"|xox[abpr]-[A-Za-z0-9-]{10,})\b"
)
# Query parameters of signed URLs, or URLs that contain a key.
_URL_QUERY = re.compile(
    r"(?<=\?)[^\s'\"<>#]*\b(?:[\w-]*(?:signature|security-token|credential)|sig|(?:access_?)?token|api_?key|key|secret)=[^\s'\"<>#]*",
    re.I,
)
_URL_PASSWORD = re.compile(r"(?<=://)([^/\s:@]+):([^/\s@]+)@")


def is_secret_name(name: str) -> bool:
    """Whether a key of this name holds a secret: ``HF_TOKEN`` does, ``max_new_tokens`` and ``eos_token`` do not."""
    return bool(_NAME.search(name)) and not _TEMPLATE_TOKEN.fullmatch(name)


def holds_token(text: str) -> bool:
    """Whether a text contains what has the form of a token: ``hf_...``, ``sk-...``."""
    return bool(_VALUE.search(text))


def tokens_in(text: str) -> list[str]:
    """All that has the form of a token."""
    return _VALUE.findall(text)


def redact_text(text: str, *, environ: Mapping[str, str] = os.environ) -> str:
    """Mask secrets in free text: token formats, passwords and signatures in URLs, values of secret environment
    variables."""
    text = _URL_PASSWORD.sub(rf"\1:{MASK}@", _VALUE.sub(MASK, text))
    if "://" in text:
        text = _URL_QUERY.sub(MASK, text)
    for name, value in environ.items():
        # A mounted secret often ends in a newline, which others leave out, or quote.
        if len(secret := value.strip()) >= 8 and is_secret_name(name):
            text = text.replace(secret, MASK).replace(repr(secret)[1:-1], MASK)
    return text


def redact(value: Any, *, environ: Mapping[str, str] = os.environ, named: bool = True) -> Any:
    """Mask secrets in nested dictionaries and lists, by key and by value.

    A local path is kept as it is, because what is read again must be found; it is no secret where a password happens
    to be a word of it. So is what the maps of :data:`NAMED_BY_DATA` and :data:`_NAMED_BY_MODELS` hold, whose keys name
    fields, labels, models and scores (``named``): there, no value is masked because of its key.
    """
    if isinstance(value, Mapping):
        return {
            key: MASK
            if named and is_secret_name(str(key)) and item
            else redact(item, environ=environ, named=named and key not in (*NAMED_BY_DATA, *_NAMED_BY_MODELS))
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [redact(item, environ=environ, named=named) for item in value]
    if not isinstance(value, str):
        return value
    is_path = "/" in value and "://" not in value and not any(one.isspace() for one in value)
    return redact_text(value, environ={} if is_path else environ)


def redact_saved(value: Any, *, environ: Mapping[str, str] = os.environ) -> Any:
    """As :func:`redact`, for what is read again: a variable's value is only masked if it can be no ordinary word.

    A run called ``postgres-sql`` must be found again where a password is ``postgres``.
    """
    return redact(value, environ={name: text for name, text in environ.items() if _RANDOM.fullmatch(text.strip())})
