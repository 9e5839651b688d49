"""Errors of the API, in the form that OpenAI's clients read."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from finray.config.redact import redact_error
from finray.errors import FinrayError, explained
from finray.limits import cut

logger = logging.getLogger(__name__)

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


def no_model(name: str, names: Iterable[str], *, param: str | None = None) -> ApiError:
    """The error of a name that is not that of a served model."""
    message = f"the model `{readable(name)}` does not exist; there are: {', '.join(names)}"
    return ApiError(404, message, param=param, code="model_not_found")


def queue_full() -> ApiError:
    """The error of a request for which the queue has no room."""
    return ApiError(429, "too many requests are waiting; try again", code="queue_full", retry_after=1)


def of_request(error: FinrayError, param: str | None = None) -> ApiError:
    """The error for a request that cannot be fulfilled, without locations that mean nothing to a client."""
    return ApiError(400, error.message + (f"; {error.repair}" if error.repair else ""), param=param)


@contextmanager
def caused_by_request(param: str | None = None) -> Iterator[None]:
    """Whatever goes wrong in the block is an error of the request, which is about the field ``param``.
    Raises ApiError: something did."""
    try:
        yield
    except ApiError:
        raise
    except FinrayError as error:
        raise of_request(error, param) from None
    except Exception as error:
        # A library met a value that nobody thought of; its text may hold paths of this machine.
        logger.warning("a request was refused\n%s", redact_error(error))
        message = f"this cannot be processed ({type(error).__name__}); the server's log says where it failed"
        raise ApiError(400, message, param=param) from None


def readable(text: str, width: int = 80) -> str:
    """A client's text as it stands in a message: not long, and without control characters."""
    return cut("".join(character if character.isprintable() else "\ufffd" for character in text[: width + 1]), width)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is one of memory, of the machine or its GPU."""
    explanation = explained(error)
    return explanation is not None and "memory" in explanation.message


def of_server(error: BaseException) -> str:
    """The message to a client for an internal error: without our paths and values."""
    return "out of memory" if is_out_of_memory(error) else "the server failed; see its log"
