"""What the gateway refuses, and the shape in which each API's clients understand it.

Nothing here is ever 429: clients count that against budgets that are meant for their provider's limits. A lack of
capacity is 503 with Retry-After.
"""

from __future__ import annotations

from typing import Any

from ...schemas.errors import HeadraceError

OPENAI_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    409: "invalid_request_error",
    413: "invalid_request_error",
    503: "server_error",
}
ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "invalid_request_error",
    413: "request_too_large",
    503: "overloaded_error",
}
CONTEXT_LENGTH = "context_length_exceeded"


class RequestError(HeadraceError):
    """A request that is refused, with its HTTP status; the message says what, where and how to mend it."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        """`param`: the field at fault; `code`: OpenAI's word for it; `retry_after`: seconds."""
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code
        self.retry_after = retry_after

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers that belong to it."""
        return {} if self.retry_after is None else {"retry-after": str(self.retry_after)}


class ContextOverflow(RequestError):
    """The prompt leaves no room. Codex and LiteLLM look at the code, Claude Code and others at the words."""

    def __init__(self, amount: int, limit: int, unit: str) -> None:
        super().__init__(
            f"This model's maximum context length is {limit} {unit}, but the prompt holds {amount} {unit}. "
            "Shorten the conversation.",
            param="messages",
            code=CONTEXT_LENGTH,
        )
        self.anthropic = f"prompt is too long: {amount} {unit} > {limit} maximum"


def context_overflow(amount: int, limit: int, unit: str = "tokens") -> RequestError:
    """`amount` of `unit` where `limit` are possible."""
    return ContextOverflow(amount, limit, unit)


def busy(why: str, *, retry_after: int = 1) -> RequestError:
    """No capacity at the moment."""
    return RequestError(why, status=503, code="overloaded", retry_after=retry_after)


def openai_error(e: RequestError) -> dict[str, Any]:
    """The body of an error in the chat, Responses and completions APIs."""
    kind = OPENAI_TYPES.get(e.status, "server_error" if e.status >= 500 else "invalid_request_error")
    return {"error": {"message": e.message, "type": kind, "param": e.param, "code": e.code}}


def anthropic_error(e: RequestError) -> dict[str, Any]:
    """The body of an error in the Messages API."""
    kind = ANTHROPIC_TYPES.get(e.status, "api_error" if e.status >= 500 else "invalid_request_error")
    message = e.anthropic if isinstance(e, ContextOverflow) else e.message
    return {"type": "error", "error": {"type": kind, "message": message}}
