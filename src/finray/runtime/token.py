"""The token with which Ray's servers know their users: its file, and what Ray's core has read of it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from finray.config.environment import unset_default
from finray.errors import ClusterError


def token_file(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The file with the token of this user's clusters; None if a variable holds the token itself."""
    if environ.get("RAY_AUTH_TOKEN"):
        return None
    return Path(environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")


def require_token(*, where: str, create: bool) -> bool:
    """Make sure that there is a token that only this user can read; returns whether it was created.
    Raises ClusterError: there is none and ``create`` is false, or others can read it."""
    file = token_file()
    if file is None:
        return False
    try:
        mode = file.stat().st_mode
        if not file.read_text(encoding="utf-8").strip():
            raise ClusterError(f"the token file {file} is empty", where=where, repair="delete it, or copy the head's")
    except FileNotFoundError:
        if not create:
            raise ClusterError(
                f"the cluster requires a token, and there is none in {file}",
                where=where,
                repair="copy ~/.ray/auth_token from the head's machine to this one (mode 600), or set RAY_AUTH_TOKEN "
                "to its content",
            ) from None
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
            stream.write(secrets.token_hex(32))
        return True
    if mode & 0o077:
        raise ClusterError(
            f"others on this machine can read the token in {file} (mode {mode & 0o777:o})",
            where=where,
            repair=f"chmod 600 {file}; if anyone else may have read it, delete it on all machines and start the "
            f"cluster again",
        )
    return False


def read_again() -> None:
    """Have Ray's core read the variables again that it read when it was loaded (private names of Ray 2.60)."""
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def use_token() -> bool:
    """Send this user's token to a cluster that requires one, unless the user has set the authentication mode.

    Ray's head requires a token as soon as there is one in ~/.ray, which starting Ray once creates; a process that joins
    by address does not look there by itself.
    """
    # A Ray of our own, earlier in this process, had a token that nobody else knows.
    unset_default("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")
    if "RAY_AUTH_MODE" in os.environ or not _token():
        return False
    os.environ["RAY_AUTH_MODE"] = "token"
    read_again()
    return True


def http_headers() -> dict[str, str]:
    """Headers of a request to a server of Ray: with this user's token, if ``RAY_AUTH_MODE`` says so."""
    is_on = os.environ.get("RAY_AUTH_MODE", "").lower() == "token"
    return {"Authorization": f"Bearer {_token()}"} if is_on and _token() else {}


def refused(who: str, *, where: str) -> ClusterError:
    """The error when a server of Ray, in words, does not accept this user's token."""
    is_on = os.environ.get("RAY_AUTH_MODE", "").lower() == "token"
    shown = "the one that was sent is wrong" if is_on and _token() else "none was sent"
    return ClusterError(
        f"{who} requires a token, and {shown}",
        where=where,
        repair="export RAY_AUTH_MODE=token and RAY_AUTH_TOKEN=..., with the content of ~/.ray/auth_token on the "
        "machine where `finray cluster up` was run",
    )


def _token() -> str:
    file = token_file()
    try:
        return os.environ["RAY_AUTH_TOKEN"] if file is None else file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
