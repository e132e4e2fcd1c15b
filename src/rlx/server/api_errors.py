"""Errors of the API: one JSON form for all of them, and the status code of each error of rlx."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rlx.errors import CapabilityError, ContextError, NotFoundError, OverloadedError, RequestError, RlxError

TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error", 408: "timeout_error", 413: "invalid_request_error", 415: "invalid_request_error",
    429: "rate_limit_error", 500: "server_error", 503: "overloaded_error",
}  # fmt: skip


class ApiError(Exception):
    """An answer that is an error: a status code, and the members of OpenAI's error object."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        headers: Mapping[str, str] | None = None, more: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers, self.more = dict(headers or {}), dict(more or {})

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code, **self.more}}


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


@contextmanager
def naming(field: str | None, kinds: Sequence[str]) -> Iterator[None]:
    """Errors of the engine that begin with one of its own words name the field of the request that they are about."""
    try:
        yield
    except RequestError as error:
        if field is None or not str(error).startswith(tuple(kinds)):
            raise
        raise invalid(f"{field}: {error}" + (f" (hint: {error.hint})" if error.hint else ""), field) from error


def stopping() -> ApiError:
    return ApiError(503, "the server is stopping", code="stopping", headers={"retry-after": "5"})


def of_rlx(error: RlxError) -> ApiError:
    """The answer for an error of rlx. Only messages about the request are shown; others may name files."""
    message = str(error) + (f" (hint: {error.hint})" if error.hint else "")
    match error:
        case OverloadedError():
            seconds = str(max(1, round(error.retry_after)))
            return ApiError(429, message, code="overloaded", headers={"retry-after": seconds})
        case ContextError():
            sizes = {"n_prompt_tokens": error.tokens, "n_ctx": error.context}
            name = _field(str(error))
            param = {"chat": "messages", "submit": None}.get(name, name) if name else None
            return ApiError(400, message, param=param, code="context_length_exceeded", more=sizes)
        case NotFoundError():
            return ApiError(404, message, code="not_found")
        case RequestError() | CapabilityError():
            return ApiError(400, message, param=_field(str(error)))
    return ApiError(500, "the model failed")


def _field(message: str) -> str | None:
    """The field that a message begins with: `messages[0].role: expected ...`."""
    name, colon, _ = message.partition(":")
    return (
        name if colon and name.replace("[", "").replace("]", "").replace(".", "").replace("_", "").isalnum() else None
    )
