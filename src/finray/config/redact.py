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
_VALUE = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_\-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[0-9A-Z]{16}"
    r"|xox[abpr]-[A-Za-z0-9-]{10,})\b"
)
# Query parameters of signed URLs, or URLs that contain a key.
_URL_QUERY = re.compile(
    r"(?<=\?)[^\s'\"<>#]*\b(?:[\w-]*(?:signature|security-token|credential)|sig|(?:access_?)?token|api_?key|key|secret)=[^\s'\"<>#]*",
    re.I,
)
# Names of a template's special tokens, which are no secrets.
_SPECIAL_TOKENS = frozenset(f"{name}_token" for name in ("bos", "eos", "pad", "unk", "sep", "cls", "mask"))
# Fields whose keys are not names of settings, but words of the data: columns and labels.
KEYED_BY_DATA = ("field_mapping", "class_weights")
# Values of secret variables shorter than this are not masked in a config that is read back: they may be words.
_NO_WORD = 16
_URL_PASSWORD = re.compile(r"(?<=://)([^/\s:@]+):([^/\s@]+)@")


def is_secret_name(name: str) -> bool:
    """Whether a key of this name holds a secret: ``HF_TOKEN`` and ``api_key`` do, ``max_new_tokens`` does not."""
    return bool(_NAME.search(name)) and name.lower() not in _SPECIAL_TOKENS


def redact_text(text: str, *, environ: Mapping[str, str] = os.environ) -> str:
    """Mask secrets in free text: token formats, passwords and signatures in URLs, values of secret environment
    variables."""
    text = _URL_PASSWORD.sub(rf"\1:{MASK}@", _VALUE.sub(MASK, text))
    if "://" in text:
        text = _URL_QUERY.sub(MASK, text)
    for name, value in environ.items():
        if len(value) >= 8 and is_secret_name(name):
            text = text.replace(value, MASK)
    return text


def redact(value: Any, *, named: bool = True, environ: Mapping[str, str] = os.environ) -> Any:
    """Mask secrets in nested dictionaries and lists, by key and by value.

    A local path is kept as it is, because what is read again must be found; it is no secret where a password happens
    to be a word of it. So are the keys of :data:`KEYED_BY_DATA`, which do not say what a value is (``named``).
    """
    if isinstance(value, Mapping):
        return {
            key: MASK
            if named and is_secret_name(str(key)) and item
            else redact(item, named=key not in KEYED_BY_DATA, environ=environ)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [redact(item, environ=environ) for item in value]
    if not isinstance(value, str):
        return value
    is_path = "/" in value and "://" not in value
    return redact_text(value, environ={} if is_path else environ)


def redact_config(plain: Any, *, environ: Mapping[str, str] = os.environ) -> Any:
    """The same for a config that is written to be read back: a name that contains a short password stays what it is."""
    return redact(plain, environ={name: value for name, value in environ.items() if len(value) >= _NO_WORD})
