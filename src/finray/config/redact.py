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
_URL_PASSWORD = re.compile(r"(?<=://)([^/\s:@]+):([^/\s@]+)@")


def is_secret_name(name: str) -> bool:
    """Whether a key of this name holds a secret: ``HF_TOKEN`` and ``api_key`` do, ``max_new_tokens`` does not."""
    return bool(_NAME.search(name))


def redact_text(text: str, *, environ: Mapping[str, str] = os.environ) -> str:
    """Mask secrets in free text: token formats, passwords in URLs, values of secret environment variables."""
    text = _URL_PASSWORD.sub(rf"\1:{MASK}@", _VALUE.sub(MASK, text))
    for name, value in environ.items():
        if len(value) >= 8 and is_secret_name(name):
            text = text.replace(value, MASK)
    return text


def redact(value: Any) -> Any:
    """Mask secrets in nested dictionaries and lists, by key and by value."""
    if isinstance(value, Mapping):
        return {key: MASK if is_secret_name(str(key)) and item else redact(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact(item) for item in value]
    return redact_text(value) if isinstance(value, str) else value
