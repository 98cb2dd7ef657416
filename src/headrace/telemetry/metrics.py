"""Prometheus metrics of a server: per-request counters and histograms, and the engine's status at every scrape.

Names follow the dashboards that exist for other engines, under the prefix `headrace:`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from headrace.step import EngineStatus, StageStats

PREFIX = "headrace:"
CONTENT_TYPE = CONTENT_TYPE_LATEST

_TTFT_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_TOKEN_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
_REQUEST_BUCKETS_S = (
    0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip


class Metrics:
    """All metrics of one HTTP process, in a registry of its own."""

    def __init__(self, model_name: str, status: Callable[[], EngineStatus], ready: Callable[[], bool]) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # the library's own
        self._model = model_name
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_StatusCollector(model_name, status, ready))
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens, cached ones included.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._ttft = self._histogram("time_to_first_token_seconds", "Arrival to the first token.", _TTFT_BUCKETS_S)
        self._itl = self._histogram("inter_token_latency_seconds", "Between a request's outputs.", _TOKEN_BUCKETS_S)
        self._tpot = self._histogram(
            "time_per_output_token_seconds", "Mean time per token of a request, the first excluded.", _TOKEN_BUCKETS_S
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "Arrival to the last token.", _REQUEST_BUCKETS_S)
        self._queue = self._histogram("request_queue_time_seconds", "Submission to the first step.", _REQUEST_BUCKETS_S)
        self._finished = Counter(
            f"{PREFIX}request_success", "Requests that ended, by how.", ("model_name", "finished_reason"),
            registry=self._registry,
        )  # fmt: skip
        for reason in ("stop", "length", "abort", "error"):
            self._finished.labels(model_name, reason)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(PREFIX + name, text, ("model_name",), registry=self._registry).labels(self._model)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(PREFIX + name, text, ("model_name",), buckets=buckets, registry=self._registry)
        return family.labels(self._model)

    def track(self, num_prompt_tokens: int) -> RequestTimer:
        """Begin to follow one engine request, which arrives now."""
        return RequestTimer(self, num_prompt_tokens)

    def render(self) -> bytes:
        """The text that a scrape gets, of type `CONTENT_TYPE`."""
        return generate_latest(self._registry)


class RequestTimer:
    """Follows one request from its arrival to its end."""

    __slots__ = ("_arrived_s", "_ended", "_first_s", "_last_s", "_metrics", "_num_prompt", "num_tokens")

    def __init__(self, metrics: Metrics, num_prompt_tokens: int) -> None:
        self._metrics = metrics
        self._num_prompt = num_prompt_tokens
        self._arrived_s = time.monotonic()
        self._first_s = 0.0
        self._last_s = 0.0
        self._ended = False
        self.num_tokens = 0

    def output(self, num_tokens: int, queued_s: float) -> None:
        """Tokens have come; `queued_s` counts with the first."""
        if not num_tokens:
            return
        now, metrics = time.monotonic(), self._metrics
        if self.num_tokens:
            metrics._itl.observe(now - self._last_s)
        else:
            self._first_s = now
            metrics._ttft.observe(now - self._arrived_s)
            metrics._queue.observe(queued_s)
            metrics._prompt_tokens.inc(self._num_prompt)
        self._last_s = now
        self.num_tokens += num_tokens
        metrics._generation_tokens.inc(num_tokens)

    def end(self, reason: str) -> None:
        """The request ended as `reason` says (`stop`, `length`, `abort`, `error`); later calls do nothing."""
        if self._ended:
            return
        self._ended = True
        metrics = self._metrics
        metrics._finished.labels(metrics._model, reason).inc()
        if reason not in ("stop", "length"):
            return
        metrics._e2e.observe(time.monotonic() - self._arrived_s)
        if self.num_tokens > 1:
            metrics._tpot.observe((self._last_s - self._first_s) / (self.num_tokens - 1))


class _StatusCollector(Collector):
    """Turns the latest `EngineStatus` into metrics when a scrape asks."""

    def __init__(self, model_name: str, status: Callable[[], EngineStatus], ready: Callable[[], bool]) -> None:
        self._model = model_name
        self._status = status
        self._ready = ready

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        gauges = (
            ("num_requests_running", "Requests that hold KV pages.", status.num_running),
            ("num_requests_waiting", "Requests that wait for their first step.", status.num_waiting),
            ("kv_cache_usage_perc", "Share of KV pages in use, 0 to 1.", status.kv_usage),
            ("kv_cache_cached_perc", "Share of KV pages kept for what they hold, 0 to 1.", status.kv_cached),
            ("kv_cache_tokens", "Capacity of the KV cache in tokens.", status.kv_tokens),
            ("ready", "1 while requests are served.", int(self._ready())),
        )
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=("model_name",))
            gauge.add_metric((self._model,), value)
            yield gauge
        counters = (
            ("num_preemptions", "Requests put back in the queue for want of KV pages.", float(status.num_preemptions)),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", float(status.prefix_queries)),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", float(status.prefix_hits)),
            ("engine_host_seconds", "Time the engine spent on scheduling and messages.", status.host_s),
        )
        for name, text, value in counters:
            counter = CounterMetricFamily(PREFIX + name, text, labels=("model_name",))
            counter.add_metric((self._model,), value)
            yield counter
        yield from self._stages(status.stages)

    def _stages(self, stages: list[StageStats]) -> Iterator[Metric]:
        labels = ("model_name", "stage")

        def seconds(name: str, text: str, *more: str) -> CounterMetricFamily:
            return CounterMetricFamily(f"{PREFIX}stage_{name}_seconds", text, labels=(*labels, *more))

        def gauge(name: str, text: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"{PREFIX}stage_{name}", text, labels=labels)

        step = SummaryMetricFamily(f"{PREFIX}stage_step_seconds", "Steps of a stage, waits left out.", labels=labels)
        tokens = CounterMetricFamily(f"{PREFIX}stage_tokens", "Positions a stage computed.", labels=labels)
        active = seconds("active", "Time with plans in flight: what the other times are a share of.")
        waits = seconds("wait", "Time a stage waited, by what for.", "kind")
        communication = seconds("communication", "Time that sends and messages alone kept a stage from its next step.")
        edge = seconds("edge", "From the end of a step's computing to the end of its send, beside other work or not.")
        busy = gauge("busy_ratio", "Busy share of a stage's active time.")
        bubble = gauge("bubble_ratio", "Share of a stage's active time that it is not busy.")
        layers = gauge("layers", "Layers of a stage.")
        weights = gauge("weight_bytes", "Weight bytes of each rank.")
        kv = gauge("kv_bytes", "KV cache bytes of each rank.")
        for stage in stages:
            key = (self._model, str(stage.stage))
            step.add_metric(key, count_value=stage.num_steps, sum_value=stage.busy_s)
            tokens.add_metric(key, stage.num_tokens)
            active.add_metric(key, stage.active_s)
            for kind, wait_s in (
                ("activations", stage.activations_wait_s),
                ("sampled_tokens", stage.tokens_wait_s),
                ("plan", stage.plan_wait_s),
            ):
                waits.add_metric((*key, kind), wait_s)
            communication.add_metric(key, stage.communication_s)
            edge.add_metric(key, stage.edge_s)
            share = stage.busy_s / stage.active_s if stage.active_s else 0.0
            busy.add_metric(key, share)
            bubble.add_metric(key, 1.0 - share if stage.active_s else 0.0)
            layers.add_metric(key, stage.num_layers)
            weights.add_metric(key, stage.weight_bytes)
            kv.add_metric(key, stage.kv_bytes)
        yield from (step, tokens, active, waits, communication, edge, busy, bubble, layers, weights, kv)
