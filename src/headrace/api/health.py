"""What operators and clients ask about the server: health, readiness, models, version, metrics; and its cache."""

from __future__ import annotations

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse

import headrace
from headrace.api.errors import ApiError
from headrace.api.request import check_model
from headrace.api.service import Service
from headrace.api.shapes import Health, ModelCard, ModelList, Readiness, Version, describe
from headrace.api.stream import json_response
from headrace.telemetry.metrics import CONTENT_TYPE


def health_routes(service: Service) -> APIRouter:
    """The routes, for the application to include."""
    router = APIRouter()

    @router.get("/health", responses=describe(Health))
    async def health() -> Response:
        """Live: this process answers."""
        return json_response(Health("ok"))

    @router.get("/ready", responses=describe(Readiness) | {503: describe(Readiness)[200]})
    async def ready() -> Response:
        """Ready: an inference went through every stage, and requests are served."""
        state, detail = service.state
        if state == "ready":
            return json_response(Readiness(state, detail))
        error = ApiError(503, f"Not ready: {service.not_ready}", code="not_ready")
        done, total = service.engine.status.load_bytes if state == "loading" else (0, 0)
        answer = json_response(Readiness(state, detail, done, total, error.detail), error.status)
        answer.headers.update(error.headers)
        return answer

    @router.get("/version", responses=describe(Version))
    async def version() -> Response:
        """The version of headrace."""
        return json_response(Version(headrace.__version__))

    @router.get("/metrics", response_class=PlainTextResponse, response_description="Prometheus text.")
    async def metrics() -> Response:
        """Metrics in Prometheus' text format."""
        return Response(service.metrics.render(), headers={"content-type": CONTENT_TYPE})

    @router.post("/reset_prefix_cache", responses=describe(Health, errors=(401, 503)))
    async def reset_prefix_cache() -> Response:
        """Forget what is cached of earlier requests: those that come after this answer find nothing of it."""
        service.engine.reset_prefix_cache()
        return json_response(Health("ok"))

    return router


def model_routes(service: Service) -> APIRouter:
    """The routes, for the application to include."""
    router = APIRouter()

    def card() -> ModelCard:
        model = service.model
        return ModelCard(model.name, service.created, model.root, service.engine.status.max_len)

    @router.get("/v1/models", responses=describe(ModelList, errors=(401, 503)))
    async def list_models() -> Response:
        """The served model."""
        return json_response(ModelList([card()]))

    @router.get("/v1/models/{model_id:path}", responses=describe(ModelCard, errors=(401, 404, 503)))
    async def get_model(model_id: str) -> Response:
        """One model."""
        check_model(service, model_id)
        return json_response(card())

    return router
