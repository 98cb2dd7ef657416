"""The ASGI layer around every route: request ids, the API key, readiness, and the last catch for errors."""

from __future__ import annotations

import hmac
import re
from uuid import uuid4

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.api.errors import ApiError, as_api_error
from headrace.api.service import Service

GUARDED = ("/v1/", "/reset_prefix_cache")
"""Paths that need the key, where there is one, and a ready engine."""
MAX_BODY = 64 * 2**20
"""Bytes of a request's body; a million token ids take a tenth."""
_USABLE_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Gate:
    """Pure ASGI, because it wraps every chunk of every stream."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app = app
        self.service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP request; other scopes (lifespan) pass through."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id", "")
        if not _USABLE_ID.fullmatch(request_id):
            request_id = uuid4().hex
        id_header = (b"x-request-id", request_id.encode())
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message.get("headers", ()), id_header]
            await send(message)

        service = self.service
        service.num_active += 1
        try:
            refusal = self._refusal(scope["path"], headers)
            if refusal is not None:
                await refusal.response()(scope, receive, send_with_id)
            else:
                await self.app(scope, _limited(receive, headers), send_with_id)
        except Exception as error:
            answer = as_api_error(error)
            if started:
                raise
            await answer.response()(scope, receive, send_with_id)
        finally:
            service.num_active -= 1

    def _refusal(self, path: str, headers: Headers) -> ApiError | None:
        if not path.startswith(GUARDED):
            return None
        key = self.service.api_key
        if key is not None:
            scheme, _, token = headers.get("authorization", "").partition(" ")
            # Headers are decoded as latin-1, so this gives back the bytes that were sent.
            good = hmac.compare_digest(token.strip().encode("latin-1"), key.encode())
            if scheme.lower() != "bearer" or not good:
                return ApiError(
                    401, "Incorrect API key: send it as `Authorization: Bearer KEY`.", code="invalid_api_key"
                )
        reason = self.service.not_ready
        return ApiError(503, f"Not ready: {reason}", code="not_ready") if reason else None


def _limited(receive: Receive, headers: Headers) -> Receive:
    """`receive` that refuses a body past `MAX_BODY`, by what it says of its length or by what comes."""
    declared = headers.get("content-length", "0")
    num_bytes = int(declared) if declared.isdecimal() else 0

    async def counted() -> Message:
        nonlocal num_bytes
        if num_bytes <= MAX_BODY:
            message = await receive()
            if "content-length" not in headers:
                num_bytes += len(message.get("body", b""))
        if num_bytes > MAX_BODY:
            # Of this kind, because the framework turns any other into a 400.
            raise HTTPException(413, f"The body has more than {MAX_BODY} bytes.")
        return message

    return counted
