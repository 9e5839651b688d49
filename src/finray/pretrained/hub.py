"""Checks once, within seconds, whether the Hugging Face Hub answers.

Its client would try for minutes and log many lines; if the Hub does not answer, the client is told to use its cache.
"""

from __future__ import annotations

import os
import sys
import threading

TIMEOUT_S = 6.0
_VARIABLES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
_lock = threading.Lock()
_refusals: list[str | None] = []


def refusal() -> str | None:
    """Why the Hub cannot be reached, in words for a message; None if it can, or if it is not needed.

    Where it cannot, this process works offline from then on, and so do those that it starts.
    """
    with _lock:
        if not _refusals:
            endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
            is_offline = os.environ.get(_VARIABLES[0], "").upper() in ("1", "ON", "YES", "TRUE")
            reason = None if is_offline else unreachable(endpoint)
            _refusals.append(None if reason is None else f"the Hub was tried at {endpoint}: {reason}")
            if reason is not None:
                os.environ.update(dict.fromkeys(_VARIABLES, "1"))
                # The libraries read the variables once.
                for module in ("huggingface_hub.constants", "datasets.config"):
                    if (loaded := sys.modules.get(module)) is not None:
                        loaded.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
        return _refusals[0]


def unreachable(url: str) -> str | None:
    """Why a web server cannot be reached, or :func:`no_answer`; None where it answers, whatever that is."""
    # Not at the start of every command.
    import urllib.error
    import urllib.request

    outcome: list[str | None] = [no_answer()]

    def probe() -> None:
        try:
            request = urllib.request.Request(url, method="HEAD", headers={"User-Agent": "finray"})
            urllib.request.urlopen(request, timeout=TIMEOUT_S).close()
        except urllib.error.HTTPError:
            pass  # An answer.
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            if not isinstance(reason, TimeoutError):
                outcome[0] = str(getattr(reason, "strerror", None) or reason).lower()
            return
        outcome[0] = None

    # Looking a name up knows no limit of time.
    thread = threading.Thread(target=probe, name="finray-hub", daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    return outcome[0]


def no_answer() -> str:
    """The message about a server that does not answer in time."""
    return f"no answer within {TIMEOUT_S:g} s"
