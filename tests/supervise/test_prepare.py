"""What is resolved and what is refused before any process starts."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from headrace.config import EngineConfig, HttpConfig, LayoutConfig, ModelConfig, RunConfig, ScheduleConfig, ServeConfig
from headrace.errors import UserError
from headrace.spec import GqaSpec, Int4Spec, MlaSpec
from headrace.supervise import devices
from headrace.supervise.prepare import (
    CPU_CHUNK,
    GPU_CHUNK,
    GPU_RUN_AHEAD,
    Prepared,
    _check_flashinfer,
    _check_groups,
    prepare,
)
from headrace.weights.source import read_spec, resolve

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 5,
    "vocab_size": 100,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}

Make = Callable[..., Path]


@pytest.fixture
def model(tmp_path: Path) -> Make:
    """Writes a folder with a config and one shard; its names do not matter here."""

    def make(**changes: Any) -> Path:
        folder = tmp_path / "tiny-llama"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(CONFIG | changes))
        save_file({"model.embed_tokens.weight": np.zeros((100, 32), np.float32)}, folder / "model.safetensors")
        return folder

    return make


def prepared(path: Path, layout: LayoutConfig | None = None, **fields: Any) -> Prepared:
    config = ServeConfig(
        engine=EngineConfig(
            model=ModelConfig(model=str(path), device="cpu", **fields), layout=layout or LayoutConfig()
        ),
        http=HttpConfig(port=0),
    )
    return prepare(config, say=lambda _: None)


def test_every_auto_is_resolved(model: Make) -> None:
    path = model()
    ready = prepared(path, LayoutConfig(pp=2))
    engine = ready.config.engine
    assert engine.model.model == str(path)
    assert (engine.model.device, engine.model.dtype) == ("cpu", "float32")
    assert engine.layout.split == ready.mesh.split
    assert sum(ready.mesh.split) == 5
    assert engine.schedule.chunk == 512
    assert ready.name == "tiny-llama"


def test_what_is_said_stays(model: Make) -> None:
    config = ServeConfig(
        engine=EngineConfig(
            model=ModelConfig(model=str(model()), device="cpu", dtype="bfloat16"),
            layout=LayoutConfig(pp=2, split=(4, 1)),
            schedule=ScheduleConfig(chunk=7),
        ),
        http=HttpConfig(served_name="mine"),
    )
    ready = prepare(config, say=lambda _: None)
    assert ready.config.engine.schedule.chunk == 7
    assert ready.config.engine.model.dtype == "bfloat16"
    assert ready.mesh.split == (4, 1)
    assert ready.name == "mine"


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (LayoutConfig(pp=6), "--pp 6: the model has only 5 layers"),
        (LayoutConfig(tp=3), "--tp 3: does not divide"),
        (LayoutConfig(ep=2), "--ep 2: the model has no experts"),
        (LayoutConfig(pp=2, split=(3, 3)), "--split adds up to 6 layers, the model has 5"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(model: Make, layout: LayoutConfig, message: str) -> None:
    with pytest.raises(UserError, match=message):
        prepared(model(), layout)


def test_an_unknown_architecture_is_refused(model: Make) -> None:
    with pytest.raises(UserError, match="MambaForCausalLM"):
        prepared(model(architectures=["MambaForCausalLM"]))


def test_a_length_past_the_models_is_refused(model: Make) -> None:
    with pytest.raises(UserError, match="--max-len 129: the model has 128 positions"):
        prepared(model(), max_len=129)


def test_a_truncated_shard_is_refused(model: Make) -> None:
    path = model()
    shard = path / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"model\.safetensors"):
        prepared(path)


def test_a_missing_shard_is_refused(model: Make) -> None:
    path = model()
    (path / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": "model-00001-of-00001.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"model-00001-of-00001\.safetensors"):
        prepared(path)


def test_a_trace_that_could_not_be_written_is_refused(model: Make, tmp_path: Path) -> None:
    asked = EngineConfig(model=ModelConfig(model=str(model())), run=RunConfig(trace=str(tmp_path / "no" / "t.json")))
    with pytest.raises(UserError, match=r"^--trace .*t\.json: No such file or directory$"):
        prepare(ServeConfig(engine=asked), say=lambda _: None)


def test_nothing_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="MODEL"):
        prepared(tmp_path / "nothing")


def with_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(devices, "num_gpus", lambda: count)
    monkeypatch.setattr(devices, "torch_has_cuda", lambda: True)


def test_gpus_are_taken_where_they_are(model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 1)
    folder = str(model())
    asked = EngineConfig(model=ModelConfig(model=folder))
    engine = prepare(ServeConfig(engine=asked), say=lambda _: None).config.engine
    assert (engine.model.device, engine.model.attention) == ("cuda", "triton")
    assert (engine.schedule.chunk, engine.schedule.run_ahead) == (GPU_CHUNK, GPU_RUN_AHEAD)
    own = ModelConfig(model=folder, device="cpu")
    engine = prepare(ServeConfig(engine=EngineConfig(model=own)), say=lambda _: None).config.engine
    assert (engine.model.device, engine.model.attention, engine.schedule.run_ahead) == ("cpu", "torch", 0)


def test_two_ranks_share_a_gpu_only_where_that_is_asked_for(model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 1)
    asked = ServeConfig(engine=EngineConfig(model=ModelConfig(model=str(model())), layout=LayoutConfig(pp=2)))
    with pytest.raises(UserError, match="needs 2 GPUs, 1 visible"):
        prepare(asked, say=lambda _: None)
    monkeypatch.setenv("HEADRACE_SHARE_GPUS", "1")
    assert prepare(asked, say=lambda _: None).config.engine.model.device == "cuda"


def test_the_reference_on_a_gpu_has_a_processors_chunk(model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 1)
    asked = EngineConfig(model=ModelConfig(model=str(model()), attention="torch"))
    assert prepare(ServeConfig(engine=asked), say=lambda _: None).config.engine.schedule.chunk == CPU_CHUNK


def test_groups_that_gpus_have_no_kernel_for_are_refused(model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 1)
    spec = read_spec(resolve(str(model()), say=lambda _: None))
    _check_groups(replace(spec, quant=Int4Spec(group_size=32)))
    with pytest.raises(UserError, match="group_size 128: on GPUs INT4 has groups of 32"):
        _check_groups(replace(spec, quant=Int4Spec(group_size=128)))


def test_kernels_for_gpus_are_refused_on_a_processor(model: Make) -> None:
    with pytest.raises(UserError, match="--attention triton: needs --device cuda"):
        prepare(
            ServeConfig(engine=EngineConfig(model=ModelConfig(model=str(model()), device="cpu", attention="triton"))),
            say=lambda _: None,
        )


FAR_LLAMA: dict[str, Any] = {"head_dim": 64, "torch_dtype": "bfloat16"}


def asked_for_flashinfer(folder: Path, layout: LayoutConfig | None = None, **fields: Any) -> ServeConfig:
    model = ModelConfig(model=str(folder), attention="flashinfer", **fields)
    return ServeConfig(engine=EngineConfig(model=model, layout=layout or LayoutConfig()))


def installed(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    found = importlib.util.find_spec
    spec = importlib.util.spec_from_loader("flashinfer", None) if there else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "flashinfer" else found(name))


def test_flashinfer_is_taken_where_it_is_asked_for(model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 1)
    installed(monkeypatch, True)
    engine = prepare(asked_for_flashinfer(model(**FAR_LLAMA)), say=lambda _: None).config.engine
    assert (engine.model.attention, engine.schedule.chunk) == ("flashinfer", GPU_CHUNK)


def test_flashinfer_is_refused_where_it_cannot_be_had(model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model(**FAR_LLAMA)
    installed(monkeypatch, False)
    with pytest.raises(UserError, match="^--attention flashinfer: needs --device cuda$"):
        prepare(asked_for_flashinfer(folder, device="cpu"), say=lambda _: None)
    with_gpus(monkeypatch, 1)
    with pytest.raises(UserError, match=r"^--attention flashinfer: is not installed: pip install .*\[flashinfer\]'$"):
        prepare(asked_for_flashinfer(folder), say=lambda _: None)
    installed(monkeypatch, True)
    with pytest.raises(UserError, match="^--attention flashinfer: has no kernels for float32; --dtype bfloat16"):
        prepare(asked_for_flashinfer(folder, dtype="float32"), say=lambda _: None)


def test_flashinfer_is_refused_for_heads_it_has_no_kernels_for(model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 1)
    installed(monkeypatch, True)
    with pytest.raises(UserError, match="^--attention flashinfer: has no kernels for heads of 8 dims; --attention tri"):
        prepare(asked_for_flashinfer(model(torch_dtype="bfloat16")), say=lambda _: None)


def test_flashinfer_is_refused_for_latents_it_has_no_kernels_for(model: Make) -> None:
    spec = read_spec(resolve(str(model()), say=lambda _: None))
    mla = MlaSpec(
        num_heads=64, q_lora_rank=None, kv_lora_rank=512, nope_dim=128, rope_dim=64, v_dim=128, scale=192**-0.5
    )

    def check(*attentions: GqaSpec | MlaSpec, tp: int = 1) -> None:
        layers = [replace(spec.layers[0], attention=attention) for attention in attentions]
        _check_flashinfer(replace(spec, layers=tuple(layers)), tp, "bfloat16")

    check(mla)
    check(mla, mla, tp=8)
    check(replace(mla, num_heads=96), tp=6)
    for attention, tp, words in (
        (replace(mla, kv_lora_rank=256), 1, "latent rows of 256 and 64 dims"),
        (replace(mla, rope_dim=32), 1, "latent rows of 512 and 32 dims"),
        (replace(mla, num_heads=96), 2, "48 heads a rank over a latent cache"),
        (replace(mla, num_heads=256), 1, "256 heads a rank over a latent cache"),
    ):
        with pytest.raises(UserError, match=f"^--attention flashinfer: has no kernels for {words}"):
            check(attention, tp=tp)
    with pytest.raises(UserError, match="^--attention flashinfer: has no kernels for layers whose attention differs"):
        check(mla, replace(mla, scale=1.0))


def test_random_weights_need_a_config_alone(model: Make) -> None:
    folder = model()
    for file in folder.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(UserError):
        prepared(folder)
    asked = EngineConfig(model=ModelConfig(model=str(folder), weights="random"))
    assert prepare(ServeConfig(engine=asked), say=lambda _: None).spec.num_layers
