"""What a server refuses, and how OpenAI's API puts it: a status, and an object that clients know how to read."""

from typing import Any

from hisparse.errors import HiSparseError

TOO_LONG = "context_length_exceeded"  # OpenAI's code


class QueueFullError(HiSparseError):
    """As many requests as are allowed wait already."""


class NotServingError(HiSparseError):
    """The engine has stopped, is about to, or has failed: this server answers no more."""


class ApiError(Exception):
    """An answer that is an error.

    Args:
        message: what was expected, what came, and the way out.
        status: of HTTP.
        kind: OpenAI's `type`.
        param: the field of the request that is to blame.
        code: for programs, where the status alone does not tell.
        headers: more headers of the answer.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.kind = message, status, kind
        self.param, self.code, self.headers = param, code, headers

    def body(self) -> dict[str, Any]:
        """The answer's JSON."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def shown(value: object, longest: int = 80) -> str:
    """A value that came, short enough for a message."""
    text = repr(value)
    return text if len(text) <= longest else f"{text[:longest]}..."


def as_api_error(error: Exception) -> ApiError:
    """How an error of the package is answered. What is not foreseen is a 500 whose details stay in the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(
            str(error), status=429, kind="rate_limit_error", code="queue_full", headers={"Retry-After": "1"}
        )
    if isinstance(error, NotServingError):
        return ApiError(str(error), status=503, kind="server_error", code="not_serving")
    if isinstance(error, HiSparseError):
        return ApiError(str(error), status=500, kind="server_error")
    return ApiError("an unexpected error; the server's log has the details", status=500, kind="server_error")
