"""The application: routes, errors, the layer around them and the OpenAPI description."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

import headrace
from headrace.api.chat import chat_routes
from headrace.api.completions import completion_routes
from headrace.api.errors import install_handlers
from headrace.api.gate import Gate
from headrace.api.health import health_routes, model_routes
from headrace.api.service import Service
from headrace.api.shapes import component_schemas
from headrace.api.text_tools import tokenizer_routes


def create_app(service: Service) -> FastAPI:
    """Everything that is served, over one service."""
    app = FastAPI(
        title="headrace",
        version=headrace.__version__,
        # Their pages come from elsewhere, which a machine on its own cannot reach.
        docs_url=None,
        redoc_url=None,
    )
    app.add_middleware(Gate, service=service)
    install_handlers(app)
    for routes in (health_routes, model_routes, completion_routes, chat_routes, tokenizer_routes):
        app.include_router(routes(service))
    _describe(app)
    return app


def _describe(app: FastAPI) -> None:
    """Make the description say what is answered: our errors instead of the framework's, the answers' schemas."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            description = generate()
            for path in description["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
            schemas = description.setdefault("components", {}).setdefault("schemas", {})
            for framework in ("HTTPValidationError", "ValidationError"):
                schemas.pop(framework, None)
            schemas |= component_schemas()
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # the documented way to change it
