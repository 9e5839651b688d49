"""Who may ask a server: with an API key whoever has it; without one this machine's programs, but no other web site.

A browser on this machine runs the pages of any site. A page cannot read the answers of another origin, but its site can
point its own name at this machine (DNS rebinding): then the page and the server have the same origin, and only the name
in ``Host`` tells them apart. So without a key that must be a name of this server.
"""

from __future__ import annotations

import hmac
import re
import socket
from collections.abc import Iterable
from contextlib import suppress
from ipaddress import IPv6Address, ip_address
from typing import TYPE_CHECKING

from finray.errors import ConfigError
from finray.serving.errors import ApiError, readable

if TYPE_CHECKING:
    # Its package may be missing, which `finray serve` says.
    from starlette.datastructures import Headers

# Addresses that only this machine reaches, and those that mean all of its addresses.
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_ALL = ("0.0.0.0", "::")
# A name or an address of four numbers, or an IPv6 address in brackets; and a port.
_AUTHORITY = re.compile(r"(?:\[([0-9a-f:.]+(?:%[\w.-]+)?)\]|([a-z0-9_.-]+))(?::\d{0,5})?", re.IGNORECASE | re.ASCII)
_ORIGIN = re.compile(r"https?://(.*)", re.IGNORECASE)


class Access:
    """Decides whether a request is answered.

    Args:
        key: the API key; None for no key.
        host: address at which the server listens.
        names: further names by which clients address it, such as that of a proxy.

    Raises:
        ConfigError: one of the names is none.
    """

    def __init__(self, key: bytes | None, *, host: str, names: Iterable[str] = ()) -> None:
        self._key, self._names = key, {"localhost"}
        for name in names:
            if (host_name := name_of(name)) is None:
                raise ConfigError(
                    f"`{name}` is not the name of a host", where="--allow-host", repair="--allow-host models.example"
                )
            self._names.add(host_name)
        listens = (name_of(host) or name_of(f"[{host}]") or host).lower()
        self._is_open = listens in _ALL
        # A site that is addressed by a bare address has no name that could be pointed elsewhere.
        self._names |= {socket.gethostname().lower(), socket.getfqdn().lower()} if self._is_open else {listens}

    def refusal(self, headers: Headers, *, needs_key: bool) -> ApiError | None:
        """The reason to refuse a request, if there is one.

        Args:
            headers: of the request.
            needs_key: whether it needs the key, if there is one.
        """
        if self._key is None:
            # Probes of HTTP/1.0 name no host; a browser always does.
            is_probe = not needs_key and "host" not in headers and "origin" not in headers
            return None if is_probe else self._foreign(headers)
        kind, _, shown = headers.get("authorization", "").partition(" ")
        # Compared in constant time.
        if needs_key and not (hmac.compare_digest(shown.strip().encode(), self._key) and kind.lower() == "bearer"):
            message = "the API key is missing or wrong; send it as `Authorization: Bearer KEY`"
            return ApiError(401, message, code="invalid_api_key")
        return None

    def _foreign(self, headers: Headers) -> ApiError | None:
        """The reason to refuse a request that may be another site's, if any."""
        hosts, origins = headers.getlist("host"), headers.getlist("origin")
        host = name_of(hosts[0]) if len(hosts) == 1 else None
        if host is None or not (self._is_ours(host) or (self._is_open and _is_address(host))):
            shown = readable(", ".join(hosts)) or "none"
            return ApiError(
                403,
                f"the Host header ({shown}) has no name of this server; `finray serve --allow-host NAME` allows one, "
                "and with an API key any name will do",
                code="host_not_allowed",
            )
        for origin in origins:
            match = _ORIGIN.fullmatch(origin)
            name = None if match is None else name_of(match[1])
            if name is None or not (name == host or self._is_ours(name)):
                message = f"pages of {readable(origin)} cannot use this server; `finray serve --allow-host` allows them"
                return ApiError(403, message, code="origin_not_allowed")
        if headers.get("sec-fetch-site", "").lower() == "cross-site":
            return ApiError(403, "pages of other sites cannot use this server", code="origin_not_allowed")
        return None

    def _is_ours(self, name: str) -> bool:
        return name in self._names or (_is_address(name) and ip_address(name.partition("%")[0]).is_loopback)


def name_of(authority: str) -> str | None:
    """The host of an authority (``NAME:PORT``) in one spelling; None if it has another form."""
    match = _AUTHORITY.fullmatch(authority)
    if match is None:
        return None
    with suppress(ValueError):
        if match[1] is None:
            return str(ip_address(match[2]))
        address = IPv6Address(match[1])
        return str(address.ipv4_mapped or address)
    return None if match[1] is not None else match[2].lower().removesuffix(".") or None


def _is_address(name: str) -> bool:
    with suppress(ValueError):
        ip_address(name)
        return True
    return False
