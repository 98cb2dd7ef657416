"""POST /tokenize and /detokenize."""

from __future__ import annotations

from fastapi import APIRouter, Response

from headrace.api.chat import render
from headrace.api.request import check_model, encode
from headrace.api.schema import DetokenizeRequest, TokenizeRequest
from headrace.api.service import Service
from headrace.api.shapes import Detokenized, Tokenized, describe
from headrace.api.stream import json_response


def tokenizer_routes(service: Service) -> APIRouter:
    """The routes, for the application to include; they need no engine."""
    router = APIRouter()

    @router.post("/tokenize", responses=describe(Tokenized, errors=(400, 404, 413)))
    async def tokenize(body: TokenizeRequest) -> Response:
        """Token ids of a prompt or of a rendered conversation."""
        check_model(service, body.model)
        text, add_special = body.prompt or "", body.add_special_tokens
        if body.messages is not None:
            text, add_special = (
                render(
                    service,
                    body.messages,
                    body.tools,
                    body.chat_template_kwargs,
                    add_generation_prompt=body.add_generation_prompt,
                ),
                False,
            )
        tokens = await encode(service, text, add_special=add_special)
        texts = [service.tokenizer.token_text(token) for token in tokens] if body.return_token_strs else None
        return json_response(Tokenized(len(tokens), service.engine.status.max_len or None, tokens, texts))

    @router.post("/detokenize", responses=describe(Detokenized, errors=(400, 404, 413)))
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of token ids."""
        check_model(service, body.model)
        return json_response(Detokenized(service.tokenizer.decode(body.tokens, skip_special=False)))

    return router
