"""Steps through the page table on the device give what the reference attention gives, whatever the rows are."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.config import LayoutConfig
from headrace.kernels.flashinfer import Planner, Shape
from headrace.kernels.paged import PagedAttention
from headrace.layers.build import Build
from headrace.layers.decoder import Decoder
from headrace.mesh import build_mesh
from headrace.models.registry import build_model, rules_of
from headrace.plan.reserve import LADDER, ladder
from headrace.spec import GqaSpec, ModelSpec
from headrace.step import Register, SamplerSpec, StepPlan, pack, unpack
from headrace.weights.fill import fill_random
from headrace.weights.source import read_spec, resolve
from headrace.worker import steps as steps_module
from headrace.worker.batch import Rows
from headrace.worker.cache import KVCache
from headrace.worker.mirror import Mirror
from headrace.worker.steps import DeviceState, EagerSteps
from tests.fakes import flashinfer
from tests.kernels.paged_rows import error
from tests.tiny import write_tiny

CPU = torch.device("cpu")
PAGE, SLOTS, MAX_LEN = 4, 3, 64
PROMPTS = ([5, 9, 11, 3, 7, 8, 2], [4], [6, 6, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11])
ROUNDS: list[list[tuple[int, int, int, int]]] = [
    [(0, 0, 7, 1), (2, 0, 5, 0)],
    [(0, 7, 1, 1), (1, 0, 1, 1), (2, 5, 8, 1)],
    [(0, 8, 1, 1), (1, 1, 1, 1), (2, 13, 1, 1)],
]
"""A chunk and a part of one; decodes beside a chunk; decodes alone."""


@pytest.fixture(scope="module", params=["llama", "qwen3_moe", "deepseek_v3", "kimi_k2_int4"])
def spec(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    folder: Path = tmp_path_factory.mktemp("m")
    return read_spec(resolve(str(write_tiny(folder / "m", request.param, tokenizer=False)), say=lambda _: None))


def make_model(spec: ModelSpec, counter: torch.Tensor | None = None, dtype: torch.dtype = torch.float32) -> Decoder:
    mesh = build_mesh(LayoutConfig(), spec)
    build = Build(spec=spec, layers=mesh.layers_of(0), max_len=MAX_LEN, dtype=dtype, routing_counter=counter)
    model = build_model(build)
    fill_random(model, rules_of(spec), spec, 1)
    model.finalise()
    return model


def run(
    spec: ModelSpec,
    model: Decoder,
    *,
    paged: bool,
    counter: torch.Tensor | None = None,
    planner: Planner | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[torch.Tensor]:
    """Logits of every round; the pages of the requests are dealt in turn."""
    cache = KVCache(spec, range(spec.num_layers), SLOTS * 8, PAGE, 1, dtype, CPU)
    mirror = Mirror(SLOTS, MAX_LEN // PAGE)
    state = DeviceState.make(SLOTS, MAX_LEN // PAGE, CPU, paged=paged, counter=counter)
    steps = EagerSteps(model, mirror, cache, state, PAGE, MAX_LEN, CPU, planner)
    assert steps.backend == ("flashinfer" if planner is not None else "triton" if paged else "torch")
    register = [Register(slot, pack(tokens), len(tokens), SamplerSpec()) for slot, tokens in enumerate(PROMPTS)]
    pages = [value for index in range(8) for slot in range(SLOTS) for value in (slot, index * SLOTS + slot)]
    found = []
    with torch.inference_mode():
        for plan_id, rows in enumerate(ROUNDS):
            first = plan_id == 0
            plan = StepPlan(plan_id, b"", [], register if first else [], pack(pages) if first else b"")
            mirror.apply(plan)
            state.take_pages(mirror)
            outcome = steps.run(plan_id, Rows.of(unpack(pack([v for row in rows for v in row]), 4)), None)
            assert outcome.logits is not None
            slots = [slot for slot, _, _, samples in rows if samples]
            state.last_token[slots] = outcome.logits.argmax(-1)
            found.append(outcome.logits)
    return found


def test_pages_found_on_the_device(spec: ModelSpec) -> None:
    model = make_model(spec)
    for got, expected in zip(run(spec, model, paged=True), run(spec, model, paged=False), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_chunks_whose_keys_and_values_are_made(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(spec)
    expected = run(spec, model, paged=False)
    monkeypatch.setattr(steps_module, "EXPAND_PAIRS", 0)
    made: list[bool] = []
    plain = EagerSteps._expansion

    def seen(self: EagerSteps, rows: Rows, num_decodes: int) -> object:
        found = plain(self, rows, num_decodes)
        made.append(found is not None)
        return found

    monkeypatch.setattr(EagerSteps, "_expansion", seen)
    for got, one in zip(run(spec, model, paged=True), expected, strict=True):
        torch.testing.assert_close(got, one, rtol=1e-4, atol=1e-4)
    assert made == ([True, True, False] if model.has_latent_cache else [])


WIDE_LLAMA: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
WIDE_MLA: dict[str, Any] = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}


@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize(("family", "changes"), [("llama", WIDE_LLAMA), ("deepseek_v3", WIDE_MLA)])
def test_steps_planned_for_flashinfer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, changes: dict[str, Any], expand: bool
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
    if expand:
        monkeypatch.setattr(steps_module, "EXPAND_PAIRS", 0)
    folder = write_tiny(tmp_path / "m", family, tokenizer=False, dtype="bfloat16", **changes)
    spec = read_spec(resolve(str(folder), say=lambda _: None))
    attention = spec.layers[0].attention
    heads = attention.num_heads
    if isinstance(attention, GqaSpec):
        shape = Shape(heads, attention.num_kv_heads, 64, 64, attention.scale, PAGE, torch.bfloat16)
    else:
        shape = Shape(heads, 1, 576, 512, attention.scale, PAGE, torch.bfloat16)
    model = make_model(spec, dtype=torch.bfloat16)
    got = run(spec, model, paged=False, planner=Planner(shape, CPU, 2), dtype=torch.bfloat16)
    for one, expected in zip(got, run(spec, model, paged=False, dtype=torch.bfloat16), strict=True):
        assert error(one, expected.double()) < 0.03


def test_forced_routing_is_fresh_every_step(spec: ModelSpec) -> None:
    counter = torch.zeros(1, dtype=torch.int64)
    model = make_model(spec, counter)
    once = run(spec, model, paged=True, counter=counter)
    assert int(counter) == len(ROUNDS)
    again = run(spec, model, paged=True, counter=counter)
    has_experts = "moe" in str([type(layer.mlp).__name__ for layer in spec.layers]).lower()
    assert torch.equal(once[0], again[0]) is not has_experts


def test_a_context_that_is_too_long_is_not_expanded(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps_module, "EXPAND_PAIRS", 0)
    monkeypatch.setattr(steps_module, "EXPAND_MOST", 11)
    seen: list[object] = []
    plain = PagedAttention.__init__

    def init(self: PagedAttention, *args: object, **kwargs: object) -> None:
        plain(self, *args, **kwargs)  # type: ignore[arg-type]
        seen.append(self.expansion)

    monkeypatch.setattr(PagedAttention, "__init__", init)
    run(spec, make_model(spec), paged=True)
    assert seen == [None] * len(ROUNDS)


def test_the_ladder_holds_every_plan() -> None:
    for most in range(1, LADDER[-1] + 1):
        sizes = ladder(most)
        assert sizes[-1] >= most and sizes == tuple(sorted(sizes))
        assert len(sizes) == 1 or sizes[-2] < most
    assert ladder(10_000) == LADDER
