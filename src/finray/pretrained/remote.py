"""Time limits for storage behind a URL: fsspec's libraries wait for minutes, and try again after each wait.

A limit is for one read without a byte. So slow storage is never cut off, however long a file takes.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any, Literal

from finray.errors import FinrayError
from finray.files import first_line
from finray.pretrained import hub

# Of the first question: a server on a machine at full load has taken more than six seconds.
FIRST_S = 7.0
CONNECT_S = 5.0
# A store may be silent while it joins the parts of an upload, or copies an object; a web server only reads.
READ_S = 15.0
WEB_READ_S = 10.0
_WEB = ("http", "https")
_GOOGLE = ("gs", "gcs")
_answered: set[str] = set()
_EXTRAS = {"s3": "s3", "gs": "gcs", "gcs": "gcs", "abfs": "azure", "az": "azure"}
CREDENTIALS = "check the name, the credentials and the endpoint in the environment (such as AWS_ACCESS_KEY_ID)"


def filesystem(
    url: str, arguments: dict[str, Any], *, error: type[FinrayError], use: Literal["read", "write"], repair: str
) -> tuple[Any, str]:
    """fsspec's file system of a URL, with :func:`options` and more of the caller's, and the path within it.
    Raises FinrayError: of this class; no library for the scheme is installed, or the URL is malformed."""
    import fsspec

    scheme = url.split("://", 1)[0]
    try:
        fs, path = fsspec.core.url_to_fs(url, **arguments)
    except ImportError:
        extra = _EXTRAS.get(scheme)
        line = f"`pip install 'finray[{extra}]'`" if extra else f"install the fsspec package for `{scheme}://`"
        raise error(f"no installed package can {use} `{scheme}://`", where=url, repair=line) from None
    except (ValueError, TypeError, OSError) as failure:
        # HDFS needs Java; of a URL that lacks something, fsspec may miss an argument.
        raise error(f"the URL cannot be used: {first_line(failure)}", where=url, repair=repair) from None
    return fs, path


def described(failure: Exception) -> str:
    """An error of storage in words: file systems raise exceptions of their own libraries (botocore, aiohttp, ...)."""
    return type(failure).__name__ + (f": {first_line(failure)}" if str(failure).strip() else "")


def options(scheme: str) -> dict[str, Any]:
    """Arguments for fsspec's file system of a scheme: its time limits, and where it is."""
    if scheme == "s3":
        return {
            "config_kwargs": {"connect_timeout": CONNECT_S, "read_timeout": READ_S},
            # Otherwise fsspec would reuse a file system that it created when the variable named another server.
            "endpoint_url": os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"),
        }
    if scheme in _WEB + _GOOGLE:
        with suppress(ImportError):
            import aiohttp

            # Its own limit of five minutes is for a whole file.
            read, name = (WEB_READ_S, "client_kwargs") if scheme in _WEB else (READ_S, "session_kwargs")
            return {name: {"timeout": aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=read)}}
    return {}


def silence(fs: Any, scheme: str) -> tuple[str, str] | None:
    """The address of a storage that gives no answer, and how long that took, in words; None if it answers.

    The S3 file system is told to give up at the second silence in a row.
    """
    address = None
    # An error here is met again, and reported, when the storage is used.
    with suppress(Exception):
        if scheme == "s3":
            address = fs.s3.meta.endpoint_url
            fs.s3.meta.events.register_first("needs-retry.s3", _give_up, unique_id="finray")
        elif scheme in _GOOGLE:
            address = fs.base
    if address is None or (waited := unanswered(address)) is None:
        return None
    return address, waited


def unanswered(url: str) -> str | None:
    """That and how long the server of a URL gave no answer, in words; None if it answers, whatever that is, or refuses.

    An answer is remembered.
    """
    # The URL may be malformed.
    scheme, _, rest = url.partition("://")
    server = f"{scheme}://{rest.split('/')[0]}/"
    if server in _answered:
        return None
    if isinstance(reason := hub.unreachable(server, FIRST_S), hub.Silence):
        return reason
    _answered.add(server)
    return None


class FellSilent(OSError):
    """Storage that answered before says nothing any more."""


def _give_up(attempts: int, caught_exception: Exception | None = None, **_: Any) -> None:
    """Called by botocore before it tries a request again, which it does five times, and s3fs five times that."""
    timed_out = type(caught_exception).__name__ in ("ReadTimeoutError", "ConnectTimeoutError")
    if attempts > 1 and timed_out:
        raise FellSilent(f"no answer within {READ_S:g} s, twice") from None
