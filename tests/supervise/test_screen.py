"""What a person sees of a start."""

from __future__ import annotations

import io
import json

import pytest

from headrace.mesh import Mesh
from headrace.supervise.child import Progress
from headrace.supervise.screen import Screen, amount, ready_json, ready_text, stop_text

MESH = Mesh(pp=2, tp=1, ep=1, split=(15, 15))
FIELDS = {
    "kv_tokens": 65536,
    "load_s": 1.25,
    "max_len": 8192,
    "stages": [
        {"stage": 0, "first_layer": 0, "num_layers": 15, "weight_bytes": 320_000_000, "kv_bytes": 1_500_000_000},
        {"stage": 1, "first_layer": 15, "num_layers": 15, "weight_bytes": 320_000_000, "kv_bytes": 1_500_000_000},
    ],
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def loading(rank: int, done: int) -> Progress:
    return Progress(who=f"worker rank {rank}", text="loading weights", done=done, total=100_000_000)


def test_on_a_terminal_one_line_updates_and_the_next_stands_below() -> None:
    stream = Terminal()
    screen = Screen(stream)
    screen.progress(loading(0, 50_000_000))
    screen.progress(loading(1, 100_000_000))
    screen.line("ready")
    assert stream.getvalue() == (
        "\r\x1b[Kloading weights: 50% (50 MB of 100 MB)\r\x1b[Kloading weights: 75% (150 MB of 200 MB)\r\x1b[Kready\n"
    )


def test_elsewhere_a_line_now_and_then() -> None:
    stream, now = io.StringIO(), 0.0
    screen = Screen(stream, clock=lambda: now)
    for done in range(0, 100_000_001, 10_000_000):
        screen.progress(loading(0, done))
        now += 1.0
    screen.progress(loading(0, 100_000_000))  # once more, when the rank has compiled and measured too
    assert stream.getvalue().splitlines() == [
        "loading weights: 0% (0 bytes of 100 MB)",
        "loading weights: 50% (50 MB of 100 MB, 10 MB/s)",
        "loading weights: 100% (100 MB of 100 MB, 10 MB/s)",
    ]


def ready_lines(has_key: bool) -> list[str]:
    return ready_text(
        name="smollm2",
        device="cpu",
        dtype="float32",
        url="http://127.0.0.1:8000",
        mesh=MESH,
        fields=FIELDS,
        ready_s=4.2,
        has_key=has_key,
    )


def test_the_ready_lines_say_where_what_each_stage_holds_and_how_to_ask() -> None:
    assert ready_lines(has_key=False) == [
        "ready at http://127.0.0.1:8000 after 4.2 s (weights 1.2 s)",
        "  smollm2, pp2, float32 on cpu, KV cache 65,536 tokens, requests up to 8,192",
        "  stage 0: layers 0 to 14, weights 320 MB, KV cache 1.5 GB",
        "  stage 1: layers 15 to 29, weights 320 MB, KV cache 1.5 GB",
        "  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' "
        """-d '{"model": "smollm2", "messages": [{"role": "user", "content": "Hello"}]}'""",
    ]


def test_a_key_is_asked_for_and_not_shown() -> None:
    assert '-H "Authorization: Bearer $HEADRACE_API_KEY"' in ready_lines(has_key=True)[-1]


def test_the_ready_json_is_one_line_with_its_keys() -> None:
    text = ready_json(url="http://127.0.0.1:8000", pid=7, mesh=MESH, fields=FIELDS, ready_s=4.2)
    assert "\n" not in text
    assert json.loads(text) == {
        "event": "ready",
        "url": "http://127.0.0.1:8000",
        "pid": 7,
        "layout": {"pp": 2, "tp": 1, "ep": 1, "split": [15, 15]},
        "kv_tokens": 65536,
        "load_s": 1.25,
        "ready_s": 4.2,
    }


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 bytes"), (999, "999 bytes"), (98_362_432, "98 MB"), (594e9, "594.0 GB")]
)
def test_bytes_for_a_reader(count: float, text: str) -> None:
    assert amount(int(count)) == text


def test_a_stop_says_where_each_stages_time_went() -> None:
    whole = {"num_steps": 1234, "active_s": 2000.0, "busy_s": 1500.0, "tokens_wait_s": 0.0, "plan_wait_s": 100.0}
    waited = whole | {"busy_s": 500.0, "activations_wait_s": 1250.0, "communication_s": 150.0}
    none = {"activations_wait_s": 0.0, "communication_s": 400.0}
    lines = stop_text({"stages": [{"stage": 0} | whole | none, {"stage": 1} | waited]})
    assert lines[1:] == [
        "  stage 0: busy 75.0%, waiting for a plan 5.0%, communicating 20.0% of 2,000.0 s; 1,234 steps",
        "  stage 1: busy 25.0%, waiting for activations 62.5%, waiting for a plan 5.0%, communicating 7.5% "
        "of 2,000.0 s; 1,234 steps",
    ]


def test_a_stop_before_any_plan_says_nothing() -> None:
    assert stop_text({}) == [] and stop_text({"stages": [{"stage": 0, "active_s": 0.0}]}) == []
