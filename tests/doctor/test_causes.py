"""Every entry of the table against a log in which it happened, and how findings are ordered."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headrace.doctor.causes import Cause, diagnose, load_causes

LOGS = Path(__file__).parents[1] / "data" / "doctor"
CAUSES = {cause.name: cause for cause in load_causes()}


def names(text: str) -> list[str]:
    return [finding.cause.name for finding in diagnose(text.splitlines(), load_causes())]


def test_names_are_unique_and_each_has_its_log() -> None:
    assert len(CAUSES) == len(load_causes())
    assert {path.stem for path in LOGS.glob("*.log")} == CAUSES.keys()


@pytest.mark.parametrize("cause", CAUSES.values(), ids=lambda cause: cause.name)
def test_an_entry_is_found_in_its_log_and_nothing_else_is(cause: Cause) -> None:
    lines = (LOGS / f"{cause.name}.log").read_text().splitlines()
    (finding,) = diagnose(lines, load_causes())
    assert finding.cause == cause
    assert finding.line == lines[finding.number - 1].strip()
    assert re.search("|".join(cause.match), finding.line)


@pytest.mark.parametrize("cause", CAUSES.values(), ids=lambda cause: cause.name)
def test_an_entry_says_what_to_do_and_who_reported_it(cause: Cause) -> None:
    assert cause.title
    assert len(cause.advice) > 40
    assert cause.sources
    assert all(re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+", url) for url in cause.sources)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("headrace serve: --port 8000: already in use on 127.0.0.1; --port 0 picks a free one", "port-in-use"),
        ("headrace serve: architecture 'MambaForCausalLM' is not supported; supported: ...", "unknown-architecture"),
        ("headrace serve: /m/model.safetensors: truncated: tensor a ends at byte 9, the file has 7", "truncated-shard"),
        ("headrace serve: /m: 2 of 4 shards missing: model-1.safetensors, model-2.safetensors", "missing-shard"),
        ("headrace serve: MODEL a/b: gated on the hub; ask for access on its page", "gated-on-the-hub"),
        ("headrace serve: stage 1 has 5 bytes left for the KV cache, a page takes 9", "no-memory-for-kv-cache"),
        ("headrace serve: engine: no result from the last stage within 90 s (--timeout)", "gpus-wait-for-each-other"),
        ("headrace serve: GPU 3: out of memory, 5 of 9 bytes are free: a smaller --chunk", "out-of-gpu-memory"),
        ("headrace serve: /m/config.json: cannot be read: Permission denied", "permission-denied"),
        ("llama_model_load: error loading model: unknown model architecture: 'gemma4'", "unknown-architecture"),
        ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", "no-memory-for-kv-cache"),
    ],
)
def test_what_engines_say_in_one_line(line: str, name: str) -> None:
    assert names(line) == [name]


@pytest.mark.parametrize(
    ("log", "name"),
    [
        (
            "worker rank 0 (stage 0): up\nworker rank 3 (stage 3): GPU 3: out of memory",
            "out-of-memory-on-the-last-stage",
        ),
        ("worker rank 3 (stage 3): up\nworker rank 0 (stage 0): GPU 0: out of memory", "out-of-gpu-memory"),
        ("(Worker_PP0_TP0 pid=1) up\n(Worker_PP1_TP0 pid=2) CUDA out of memory.", "out-of-memory-on-the-last-stage"),
        ("[a PP1 TP0] up\n[a PP0 TP0] Scheduler hit an exception:\nCUDA out of memory.", "out-of-gpu-memory"),
        ("worker rank 0 (stage 0): CUDA out of memory.", "out-of-gpu-memory"),
    ],
)
def test_only_the_last_of_several_stages_is_the_last_stage(log: str, name: str) -> None:
    assert names(log) == [name]


def test_an_index_error_alone_is_no_known_cause() -> None:
    assert names("IndexError: list index out of range") == []
    far = "shape = pool.get_value_buffer(0).shape\n" + "x\n" * 20 + "IndexError: list index out of range"
    assert names(far) == []


def test_an_echo_is_named_behind_the_cause_though_it_is_louder() -> None:
    log = "Watchdog caught collective operation timeout: a\n" * 3 + "OSError: [Errno 28] No space left on device\n"
    found = diagnose(log.splitlines(), load_causes())
    assert [(finding.cause.name, finding.number) for finding in found] == [
        ("disk-full", 4),
        ("gpus-wait-for-each-other", 1),
    ]


def test_the_first_line_of_each_is_shown() -> None:
    (finding,) = diagnose(["", "  Too many open files: a", "Too many open files: b"], load_causes())
    assert (finding.number, finding.line) == (2, "Too many open files: a")
