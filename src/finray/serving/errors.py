"""Errors of the API, in the form that OpenAI's clients read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from finray.errors import FinrayError, explained

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request that fails.

    Args:
        status: HTTP status.
        message: what is wrong, and what to do about it.
        param: the field of the request in question.
        code: OpenAI's error code.
        retry_after: seconds after which a retry may succeed.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_after = status, message, param, code, retry_after

    def body(self) -> dict[str, Any]:
        """The JSON document."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """HTTP headers of the response."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return {**headers, "WWW-Authenticate": "Bearer"} if self.status == 401 else headers


def no_model(name: str, known: Iterable[str], *, param: str | None = None) -> ApiError:
    """The error of a name that is not that of a served model."""
    message = f"the model `{name[:80]}` does not exist; there are: {', '.join(known)}"
    return ApiError(404, message, param=param, code="model_not_found")


def queue_full() -> ApiError:
    """The error of a request for which the queue has no room."""
    return ApiError(429, "too many requests are waiting; try again", code="queue_full", retry_after=1)


def of_request(error: FinrayError, param: str | None = None) -> ApiError:
    """The error for a request that cannot be fulfilled, without locations that mean nothing to a client."""
    return ApiError(400, error.message + (f"; {error.repair}" if error.repair else ""), param=param)


def of_server(error: BaseException) -> str:
    """The message to a client for an internal error: without our paths and values."""
    known = explained(error)
    memory = known is not None and "memory" in known.message
    return "out of memory" if memory else "the server failed; see its log"
