"""Faults that people reported of other engines, as far as a plan has to do with them: what it says instead."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from headrace.cli.main import run
from headrace.mesh import Mesh
from headrace.plan.hardware import Machine, catalogue
from headrace.plan.inventory import embedding, head
from headrace.plan.memory import Limits, stage_memory
from tests.plan.specs import K2, K2_CONFIG

EIGHT = ["plan", str(K2_CONFIG), "--gpu", "rtx-pro-6000", "--gpus", "8", "--pp", "8"]
PRO = catalogue().gpu("rtx-pro-6000")
PP8 = Mesh(pp=8, tp=1, ep=1, split=(8, 8, 8, 8, 8, 8, 8, 5))


def test_case_4_kv_tokens_follow_the_layers_of_each_stage(capsys: pytest.CaptureFixture[str]) -> None:
    """61 layers over 8 stages (sglang#13282, vllm#34076): counted and printed a stage, the least is what counts."""
    assert run([*EIGHT, "--json"]) == 0
    (layout,) = json.loads(capsys.readouterr().out)["layouts"]
    for stage, layers in zip(layout["stages"], layout["split"], strict=True):
        assert stage["kv_token_bytes"] == layers * 576 * 2
        assert stage["kv_tokens"] == stage["free_bytes"] // stage["kv_token_bytes"]
    assert layout["kv_tokens"] == min(stage["kv_tokens"] for stage in layout["stages"])
    assert run([*EIGHT, "--explain", "pp8"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("KV tokens"))
    assert [int(cell.replace(",", "")) for cell in line.split()[2:]] == [one["kv_tokens"] for one in layout["stages"]]


def test_case_6_logits_of_sampled_rows_are_priced() -> None:
    """A vocabulary of 163,840 (vllm#12895): by rows that may sample, on the last stage, however long a chunk is."""
    machine = Machine(gpus=(PRO,) * 8, link=None)
    few, many = (Limits(chunk=chunk, max_running=64) for chunk in (512, 8192))
    last = [stage_memory(K2, PP8, machine, 7, limits).logits for limits in (few, many, replace(few, max_running=128))]
    assert last[0] == last[1] == last[2] / 2 >= 64 * 163_840 * 4
    assert stage_memory(K2, PP8, machine, 6, many).logits == 0


def test_case_5_the_ends_are_where_they_are_computed() -> None:
    machine, limits = Machine(gpus=(PRO,) * 8, link=None), Limits(chunk=512, max_running=64)
    ends = [stage_memory(K2, PP8, machine, stage, limits).weights for stage in range(8)]
    assert [one.get("embedding", 0) for one in ends] == [embedding(K2).bytes, *[0] * 7]
    assert [one.get("head", 0) for one in ends] == [*[0] * 7, head(K2).bytes]


def test_case_9_a_small_kv_cache_says_why_with_both_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    """Much is free beside the weights and the cache is small (field notes of K2.5: 4,578 tokens)."""
    assert run([*EIGHT, "--chunk", "16384", "--max-running", "256"]) == 0
    said = capsys.readouterr().out
    assert "weights leave" in said and "the KV cache gets" in said and "a smaller --chunk or --max-running" in said


def test_case_30_a_hardware_file_without_p2p_prices_the_way_round(capsys: pytest.CaptureFixture[str]) -> None:
    """P2P broken by IOMMU or ACS (nccl#1999): the probe says that it hangs, and a plan without it is a slower one."""
    rates = []
    for links in ("pcie5-x16", "pcie5-x16-host"):
        assert run([*EIGHT[:-2], "--tp", "8", "--pp", "1", "--links", links, "--json"]) == 0
        rates.append(json.loads(capsys.readouterr().out)["layouts"][0]["decode"]["1"]["tok_s"])
    assert rates[1] < 0.75 * rates[0]
