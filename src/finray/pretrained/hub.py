"""Checks once, within seconds, whether the Hugging Face Hub answers.

Its client would try for minutes and log many lines; if the Hub does not answer, the client is told to use its cache.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time

TIMEOUT_S = 6.0
# Together with a storage that was silent just before: a command must end within 15 s.
_WITH_OTHERS_S = 8.0
# For so long, an address that said nothing is not asked again.
_KNOWN_S = 10.0
_VARIABLES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
_lock = threading.Lock()
_refusals: list[str | None] = []
# By address: when it was given up, and after how many seconds.
_silent: dict[str, tuple[float, float]] = {}


class Silence(str):
    """Why a server cannot be reached: it gives no answer."""

    __slots__ = ()


def refusal() -> str | None:
    """Why the Hub cannot be reached, in words for a message; None if it can, or if it is not needed.

    Where it cannot, this process works offline from then on, and so do those that it starts.
    """
    with _lock:
        if not _refusals:
            endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
            is_offline = os.environ.get(_VARIABLES[0], "").upper() in ("1", "ON", "YES", "TRUE")
            recent = (waited for since, waited in list(_silent.values()) if time.monotonic() - since < _KNOWN_S)
            left_s = _WITH_OTHERS_S - sum(recent)
            reason = None if is_offline else unreachable(endpoint, min(TIMEOUT_S, max(left_s, 1.0)))
            _refusals.append(None if reason is None else f"the Hub was tried at {endpoint}: {reason}")
            if reason is not None:
                os.environ.update(dict.fromkeys(_VARIABLES, "1"))
                # The libraries read the variables once.
                for module in ("huggingface_hub.constants", "datasets.config"):
                    if (loaded := sys.modules.get(module)) is not None:
                        loaded.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
        return _refusals[0]


def unreachable(url: str, within_s: float) -> str | None:
    """Why a web server cannot be reached, a :class:`Silence` after ``within_s`` seconds among it; None where it
    answers, whatever that is. A server that took longer is not asked again for ten seconds."""
    # Not at the start of every command.
    import http.client
    import urllib.error
    import urllib.request

    since, waited = _silent.get(url, (-math.inf, 0.0))
    if time.monotonic() - since < _KNOWN_S:
        return Silence(f"no answer within {waited:g} s")
    silence = Silence(f"no answer within {within_s:g} s")
    outcome: list[str | None] = [silence]

    def probe() -> None:
        try:
            request = urllib.request.Request(url, method="HEAD", headers={"User-Agent": "finray"})
            urllib.request.urlopen(request, timeout=within_s).close()
        except (urllib.error.HTTPError, http.client.HTTPException):
            pass  # An answer, though maybe not one in HTTP.
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            if not isinstance(reason, TimeoutError):
                outcome[0] = str(getattr(reason, "strerror", None) or reason).lower()
            return
        outcome[0] = None

    # Looking a name up knows no limit of time.
    thread = threading.Thread(target=probe, name="finray-hub", daemon=True)
    thread.start()
    thread.join(within_s)
    if (reason := outcome[0]) is silence:
        _silent[url] = time.monotonic(), within_s
    return reason
