"""The served OpenAPI description: what it says holds, and nothing that it allows ends in a 5xx."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from headrace.api.app import create_app
from headrace.step import EngineStatus
from tests.api.harness import Caller, make_service
from tests.fakes.engine import FakeEngine

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_nothing_ends_in_a_server_error(tmp_path: Path, mode: GenerationMode) -> None:
    # Room for any number of tokens, so that most values get past the length check.
    engine = FakeEngine(reply=b"ok", status=EngineStatus("ready", max_len=2**32))
    app = create_app(make_service(tmp_path, engine))
    statuses = set()
    for found in schemathesis.openapi.from_asgi("/openapi.json", app).get_all_operations():
        assert isinstance(found, Ok)
        operation = found.ok()
        if mode is GenerationMode.NEGATIVE and "requestBody" not in operation.definition.raw:
            continue  # nothing in it can be wrong

        @settings(
            max_examples=12,
            deadline=None,
            derandomize=True,
            database=None,
            phases=(Phase.explicit, Phase.generate),
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case: Any) -> None:
            response = case.call()
            statuses.add(response.status_code)
            case.validate_response(response, checks=CHECKS)

        check()
    # The values did get past the schema, or did not, as meant.
    assert (200 if mode is GenerationMode.POSITIVE else 400) in statuses


def test_requests_and_answers_are_described(caller: Caller) -> None:
    found = caller("GET", "/openapi.json").json()
    schemas = found["components"]["schemas"]
    assert {"CompletionRequest", "ChatRequest", "Completion", "ChatCompletion", "ChatChunk", "ErrorBody"} <= set(
        schemas
    )
    assert "HTTPValidationError" not in schemas
    assert schemas["ChatRequest"]["required"] == ["messages"]
    assert schemas["CompletionRequest"]["required"] == ["prompt"]
    for path, operations in found["paths"].items():
        for operation in operations.values():
            assert "422" not in operation["responses"]
            assert "503" in operation["responses"] or not path.startswith("/v1/")
