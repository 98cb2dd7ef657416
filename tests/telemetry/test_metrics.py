"""What a request adds to the metrics, by how it ends."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from headrace.step import EngineStatus
from headrace.telemetry.metrics import Metrics


def _values(metrics: Metrics) -> dict[tuple[str, str], float]:
    """Samples by name and finished_reason, buckets left out."""
    return {
        (sample.name.removeprefix("headrace:"), sample.labels.get("finished_reason", "")): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
        if "le" not in sample.labels
    }


def _metrics() -> Metrics:
    return Metrics("m", lambda: EngineStatus("starting"), lambda: False)


def test_tokens_count_as_they_come_and_the_prompt_with_the_first() -> None:
    metrics = _metrics()
    request = metrics.track(7)
    request.output(0, 0.25)
    assert _values(metrics)["prompt_tokens_total", ""] == 0
    request.output(2, 0.25)
    request.output(3, 9.0)
    found = _values(metrics)
    assert found["prompt_tokens_total", ""] == 7
    assert found["generation_tokens_total", ""] == 5
    assert found["time_to_first_token_seconds_count", ""] == 1
    assert found["request_queue_time_seconds_sum", ""] == 0.25
    assert found["inter_token_latency_seconds_count", ""] == 1


def test_a_request_ends_once() -> None:
    metrics = _metrics()
    request = metrics.track(1)
    request.output(1, 0.0)
    request.output(1, 0.0)
    request.end("length")
    request.end("abort")
    found = _values(metrics)
    assert found["request_success_total", "length"] == 1
    assert found["request_success_total", "abort"] == 0
    assert found["e2e_request_latency_seconds_count", ""] == 1
    assert found["time_per_output_token_seconds_count", ""] == 1


def test_an_aborted_request_has_no_latency() -> None:
    metrics = _metrics()
    request = metrics.track(1)
    request.output(1, 0.0)
    request.end("abort")
    found = _values(metrics)
    assert found["request_success_total", "abort"] == 1
    assert found["e2e_request_latency_seconds_count", ""] == 0


def test_two_registries_do_not_meet() -> None:
    first, second = _metrics(), _metrics()
    first.track(1).end("stop")
    assert _values(second)["request_success_total", "stop"] == 0


def test_an_engine_without_stages_has_metrics_too() -> None:
    found = _values(_metrics())
    assert found["ready", ""] == 0
    assert found["num_requests_running", ""] == 0
