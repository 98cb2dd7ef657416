"""Random checkpoints hold what each family's published checkpoints hold, whatever the shards, and run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headrace.errors import UnsupportedModel, UserError
from headrace.model_config import spec_from_config
from headrace.weights import random as random_module
from headrace.weights.formats import dequantise
from headrace.weights.headers import open_headers
from headrace.weights.published import tensor_shapes
from headrace.weights.random import main, parse_bytes, write_checkpoint
from headrace.weights.source import ModelSource
from tests.tiny import TINY, Spelling, load_reference, tiny_config, write_tiny


def stored(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


@pytest.mark.parametrize("spelling", ["v4", "v5"])
@pytest.mark.parametrize("name", TINY)
def test_transformers_loads_every_family_whole(tmp_path: Path, name: str, spelling: Spelling) -> None:
    model = load_reference(write_tiny(tmp_path / "m", name, spelling=spelling), tmp_path / "plain")
    with torch.inference_mode():
        logits = model(torch.arange(24).view(2, 12)).logits
    # Neither flat nor a spike: a wrong layer shows, and the next token is no coin toss.
    assert 1 < logits.std() < 4
    assert logits.isfinite().all()


@pytest.mark.parametrize("name", TINY)
def test_both_spellings_are_one_spec(name: str) -> None:
    v4, v5 = (spec_from_config(tiny_config(name, spelling)) for spelling in ("v4", "v5"))
    assert v4 == v5


@pytest.mark.parametrize("name", TINY)
def test_bytes_are_those_that_the_spec_prices(name: str, tmp_path: Path) -> None:
    config = tiny_config(name)
    spec = spec_from_config(config)
    headers = open_headers(ModelSource("folder", write_tiny(tmp_path / "m", name), "m")).tensors
    for i in range(spec.num_layers):
        at = f"{spec.weight_prefix}model.layers.{i}."
        held = sum(h.num_bytes for n, h in headers.items() if n.startswith(at) and not n.endswith("weight_shape"))
        assert held == spec.layer_bytes(i), i


def test_tensors_depend_on_name_and_seed_alone(tmp_path: Path) -> None:
    whole = stored(write_tiny(tmp_path / "whole", "kimi_k2_int4"))
    sharded = stored(write_tiny(tmp_path / "sharded", "kimi_k2_int4", max_shard_bytes=50_000))
    fewer = stored(write_tiny(tmp_path / "fewer", "kimi_k2_int4", num_hidden_layers=2))
    other = stored(write_tiny(tmp_path / "other", "kimi_k2_int4", seed=1))
    assert whole.keys() == sharded.keys() == other.keys()
    assert all(torch.equal(tensor, sharded[name]) for name, tensor in whole.items())
    assert fewer.keys() < whole.keys()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in fewer.items())
    same = {name for name, tensor in whole.items() if torch.equal(tensor, other[name])}
    assert same == {name for name in whole if name.endswith("weight_shape")}


def test_no_two_layers_or_experts_are_alike(tmp_path: Path) -> None:
    tensors = stored(write_tiny(tmp_path / "m", "deepseek_v3"))
    contents = [tensor.numpy().tobytes() for tensor in tensors.values()]
    assert len(set(contents)) == len(contents)


def test_shards_stay_under_the_limit(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "m", "llama", max_shard_bytes=100_000, tokenizer=False)
    largest = max(tensor.nbytes for tensor in stored(folder).values())
    assert largest < 100_000
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(folder.glob("*.safetensors"))
    assert {file.name for file in files} == set(index["weight_map"].values())
    assert len(files) >= 9
    for file in files:
        header_bytes = 8 + int.from_bytes(file.read_bytes()[:8], "little")
        assert file.stat().st_size - header_bytes <= 100_000
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in stored(folder).values())


def test_tensor_larger_than_a_chunk_is_one_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_module, "_CHUNK_VALUES", 1000)
    chunks = []
    write_checkpoint(tmp_path / "m", tiny_config("llama"), progress=lambda done, total: chunks.append((done, total)))
    weight = stored(tmp_path / "m")["model.layers.0.mlp.up_proj.weight"]
    assert weight.std().item() == pytest.approx(1 / 8, rel=0.05)
    sizes = [b - a for (a, _), (b, _) in zip([(0, 0), *chunks], chunks, strict=False)]
    assert max(sizes) == 4000
    assert chunks[-1][0] == chunks[-1][1]


def test_only_what_the_ignore_list_leaves_is_int4(tmp_path: Path) -> None:
    tensors = stored(write_tiny(tmp_path / "m", "kimi_k25_int4", dtype="bfloat16"))
    packed = {name.removesuffix(".weight_packed") for name in tensors if name.endswith(".weight_packed")}
    assert packed == {
        f"language_model.model.layers.{i}.mlp.experts.{e}.{part}_proj"
        for i in range(1, 5)
        for e in range(8)
        for part in ("gate", "up", "down")
    }
    for module in packed:
        words, scale = tensors[f"{module}.weight_packed"], tensors[f"{module}.weight_scale"]
        assert (words.dtype, scale.dtype) == (torch.int32, torch.bfloat16)
        weight = dequantise(words, scale, torch.float32)
        assert tensors[f"{module}.weight_shape"].tolist() == list(weight.shape) == [64, 64]
        assert weight.std().item() == pytest.approx(1 / 8, rel=0.1)
    assert tensors["language_model.lm_head.weight"].dtype == torch.bfloat16
    assert {name.split(".")[0] for name in tensors} == {"language_model", "vision_tower", "mm_projector"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("spelling", ["v4", "v5"])
def test_config_says_what_was_written(tmp_path: Path, dtype: Any, spelling: Spelling) -> None:
    folder = write_tiny(tmp_path / "m", "kimi_k25_int4", dtype=dtype, spelling=spelling)
    config = json.loads((folder / "config.json").read_text())
    assert spec_from_config(config).dtype == dtype
    assert stored(folder)["language_model.model.norm.weight"].dtype == getattr(torch, dtype)
    assert stored(folder)["language_model.model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32


def test_next_token_layers_are_written_for_readers_to_ignore() -> None:
    config = {**tiny_config("deepseek_v3"), "num_nextn_predict_layers": 1}
    extra = {t.name for t in tensor_shapes(config)} - {t.name for t in tensor_shapes(tiny_config("deepseek_v3"))}
    assert "model.layers.6.eh_proj.weight" in extra
    assert "model.layers.6.mlp.experts.7.up_proj.weight" in extra
    assert all(name.startswith("model.layers.6.") for name in extra)


@pytest.mark.parametrize(
    "changes",
    [{"architectures": ["GPT2LMHeadModel"]}, {"architectures": []}, {"quantization_config": {"quant_method": "fp8"}}],
)
def test_what_it_cannot_make_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match="no random checkpoint is made for"):
        write_checkpoint(tmp_path / "m", {**tiny_config("llama"), **changes})


def test_the_command_writes_a_checkpoint_that_can_be_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("kimi_k25_int4")))
    out = tmp_path / "out"
    arguments = ["--seed", "3", "--dtype", "bfloat16", "--max-shard", "200KB", "--layers", "3"]
    assert main([str(tmp_path / "config.json"), str(out), *arguments]) == 0
    config = json.loads((out / "config.json").read_text())
    assert (config["text_config"]["num_hidden_layers"], spec_from_config(config).dtype) == (3, "bfloat16")
    assert (out / "model.safetensors.index.json").is_file()
    assert any(".layers.2." in name for name in stored(out))
    assert not any(".layers.3." in name for name in stored(out))
    assert "GB" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "arguments", "words"),
    [
        ("{", [], "Expecting"),
        ('{"architectures": ["LlamaForCausalLM"]}', [], "'hidden_size' is missing"),
        ('{"architectures": ["X"]}', [], "architecture 'X'"),
        ("{}", ["--max-shard", "many"], "--max-shard 'many'"),
    ],
)
def test_the_command_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, arguments: list[str], words: str
) -> None:
    (tmp_path / "config.json").write_text(text)
    assert main([str(tmp_path / "config.json"), str(tmp_path / "out"), *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("text", "size"), [("10GB", 10**10), ("1.5 MiB", 3 << 19), ("700", 700), ("2kb", 2000)])
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1TBB", "0"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="--max-shard"):
        parse_bytes(text)
