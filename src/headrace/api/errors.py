"""Errors as OpenAI clients expect them: {"error": {"message", "type", "param", "code"}} and a status."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from headrace.errors import Fault, UserError

log = logging.getLogger(__name__)

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class ErrorDetail(msgspec.Struct, frozen=True):
    """What went wrong, for people and for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every answer that is not a success."""

    error: ErrorDetail


class ApiError(Exception):
    """An answer other than success. `param` names the field of the request that is to blame."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    @property
    def type(self) -> str:
        """OpenAI's kind of error for this status."""
        return _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    @property
    def detail(self) -> ErrorDetail:
        """What the body says."""
        # A lone surrogate in what the client sent must not break the answer that quotes it.
        message = self.message.encode("utf-8", "replace").decode()
        param = self.param and self.param.encode("utf-8", "replace").decode()
        return ErrorDetail(message, self.type, param, self.code)

    @property
    def headers(self) -> dict[str, str]:
        """What goes with the status."""
        headers = {"www-authenticate": "Bearer"} if self.status == 401 else {}
        if self.status in (429, 503):
            headers["retry-after"] = "1"
        return headers

    def encode(self) -> bytes:
        """The JSON body."""
        return msgspec.json.encode(ErrorBody(self.detail))

    def response(self) -> Response:
        """The whole HTTP answer."""
        return Response(self.encode(), self.status, self.headers, "application/json")


def bad_value(param: str, problem: str) -> ApiError:
    """A 400 that names the field and says what is wrong with its value."""
    return ApiError(400, f"{param}: {problem}", param=param, code="invalid_value")


def unsupported(param: str, problem: str) -> ApiError:
    """A 400 for a field whose meaning exists but is not served here."""
    return ApiError(400, f"{param}: {problem}", param=param, code="unsupported_value")


def context_overflow(param: str, num_prompt: int, num_asked: int, max_len: int) -> ApiError:
    """A 400 for a request that cannot fit, with the limit and what was asked for."""
    asked = f" and {param} asks for {num_asked} more, {num_prompt + num_asked} in all" if num_asked else ""
    message = f"This model's maximum context length is {max_len} tokens; the prompt has {num_prompt}{asked}."
    return ApiError(400, message, param=param, code="context_length_exceeded")


def as_api_error(error: BaseException) -> ApiError:
    """How any exception is told to the client; an unexpected one is logged and told without its words."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Fault):
        return ApiError(503, f"The engine is lost: {error}", code="engine_lost")
    if isinstance(error, UserError):
        return ApiError(400, str(error), code="invalid_value")
    log.error("request failed", exc_info=error)
    return ApiError(500, "Internal error; the server's log has the details.", code="internal_error")


def field_path(loc: Sequence[str | int]) -> str:
    """`("body", "messages", 0, "role")` as `messages[0].role`."""
    path = ""
    for part in loc[1:] if loc and loc[0] in ("body", "query", "path", "header") else loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path


def _validation_error(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    first = errors[0]
    if first.get("type") == "json_invalid":
        reason = first.get("ctx", {}).get("error", "malformed")
        return ApiError(400, f"The body is not valid JSON: {reason}", code="invalid_json")
    param = field_path(first.get("loc", ()))
    if not param and first.get("type") != "value":
        return ApiError(400, "The body must be a JSON object, sent as application/json.", code="invalid_json")
    message = str(first.get("msg", "is not valid")).removeprefix("Value error, ")
    return bad_value(param, message) if param else ApiError(400, message, code="invalid_value")


def _http_error(error: HTTPException, request: Request) -> ApiError:
    if error.status_code == 404:
        return ApiError(404, f"There is no {request.method} {request.url.path} here.", code="unknown_route")
    if error.status_code == 405:
        return ApiError(405, f"{request.url.path} does not take {request.method}.", code="method_not_allowed")
    return ApiError(error.status_code, str(error.detail))


def install_handlers(app: FastAPI) -> None:
    """Make every error of the framework and of the routes OpenAI-shaped."""

    @app.exception_handler(RequestValidationError)
    async def on_validation(_request: Request, error: RequestValidationError) -> Response:
        return _validation_error(error.errors()).response()

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> Response:
        response = _http_error(error, request).response()
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(ApiError)
    async def on_api(_request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(Fault)
    async def on_fault(_request: Request, error: Fault) -> Response:
        return as_api_error(error).response()
