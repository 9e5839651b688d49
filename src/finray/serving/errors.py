"""Errors of the API, in the form that OpenAI's clients read."""

from __future__ import annotations

from typing import Any

from finray.errors import FinrayError, explained

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request that gets no answer.

    Args:
        status: of HTTP.
        message: what is wrong, and what to do about it.
        param: the field of the request that it is about.
        code: OpenAI's word for it.
        retry_after: seconds after which another try may do better.
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
        """The document."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """That go with it."""
        told = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return {**told, "WWW-Authenticate": "Bearer"} if self.status == 401 else told


def said(error: FinrayError) -> str:
    """An error of finray's in one line, without places that mean nothing to a client."""
    return error.message + (f"; {error.repair}" if error.repair else "")


def of_request(error: FinrayError, param: str | None = None) -> ApiError:
    """What a request asks for cannot be done."""
    return ApiError(400, said(error), param=param)


def of_server(error: BaseException) -> str:
    """What a client is told of an error that is not its own: no path and no value of ours."""
    known = explained(error)
    memory = known is not None and "memory" in known.message
    return "there is not enough memory for this" if memory else "the server failed; its log says why"
