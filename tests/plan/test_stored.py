"""Sizes from a checkpoint's headers: of a folder, of the hub, and where they and the config disagree."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.cli.main import run
from headrace.model_config import spec_from_config
from headrace.models.registry import rules_of
from headrace.plan.inventory import rank_bytes
from headrace.plan.stored import derived_bytes, headers_of, measure, sized, used_bytes
from headrace.spec import ModelSpec
from headrace.weights.places import places
from headrace.weights.published import tensor_shapes
from headrace.weights.rules import expand
from tests.tiny import TINY, tiny_config, write_tiny
from tests.weights.hub_server import Hub, serve_hub
from tests.weights.test_hub import environment_for


def read(folder: Path) -> ModelSpec:
    return spec_from_config(json.loads((folder / "config.json").read_text()))


def planned(model: str, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    assert run(["plan", model, "--gpu", "h200", "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("name", TINY)
def test_tensors_belong_where_the_loaders_rules_put_them(name: str) -> None:
    """Every tensor that a rule asks for has a part, its rule's layer, and a part that its target's path names."""
    spec = spec_from_config(tiny_config(name))
    place, found = places(spec), set()
    words = {"attention": "attention", "experts": "experts", "shared": "shared", "router": "router", "dense": "mlp"}
    for item in expand(rules_of(spec), spec):
        layer, part = place(item.tensor)
        assert part in words or part in ("norm", "embedding", "head"), item.tensor
        index = item.target.split(".")[1] if item.target.startswith("layers.") else None
        assert layer == (None if index is None else int(index))
        if part in words and part != "dense":
            assert words[part] in f"{item.target}.{item.rule.part}", item
        found.add((layer, part))
    assert found >= {key for key in derived_bytes(spec) if key != (None, "head")}


@pytest.mark.parametrize("name", TINY)
def test_what_no_rule_asks_for_is_named_as_unused(name: str) -> None:
    config = tiny_config(name)
    spec = spec_from_config(config)
    wanted = {item.tensor for item in expand(rules_of(spec), spec)}
    place = places(spec)
    for tensor in tensor_shapes(config):
        if tensor.name not in wanted and not tensor.name.endswith("weight_shape"):
            assert place(tensor.name)[1] in ("next-token (MTP)", "vision", "unused"), tensor.name


@pytest.mark.parametrize("name", TINY)
def test_headers_and_config_agree_on_what_was_published(name: str, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, name, tokenizer=False, max_shard_bytes=100_000)
    spec, headers = read(folder), headers_of(str(folder), lambda line: None)
    assert headers is not None
    sizes = measure(headers, spec)
    derived = derived_bytes(spec)
    for key, num_bytes in derived.items():
        if not (spec.tied and key[1] == "head"):
            # A selection bias is float32 whatever the rest is.
            assert sizes.held[key] == pytest.approx(num_bytes, rel=0.01)
    found = sized(spec, sizes)
    whole = [rank_bytes(one, 1, range(one.num_layers), first=True, last=True) for one in (spec, found)]
    assert whole[1] == pytest.approx(whole[0], rel=0.001)
    assert (
        sorted(extra.name for extra in found.extras) == sorted(extra.name for extra in spec.extras) or spec.multimodal
    )


def test_a_checkpoint_of_another_type_than_its_config_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """float32 files under a bfloat16 config: files are twice as large, ranks hold what is served."""
    folder = write_tiny(tmp_path, "llama", tokenizer=False)
    before = planned(str(folder), capsys)
    weights = {name: value.float() for name, value in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16", "dtype": "bfloat16"}))
    after = planned(str(folder), capsys)
    assert any("headers differ from what config.json makes" in line for line in after["notes"])  # type: ignore[attr-defined]
    stored = sum(value.nbytes for value in weights.values())
    spec = read(folder)
    sizes = measure(headers_of(str(folder), lambda line: None) or (), spec)
    assert used_bytes(sizes) == stored
    held = rank_bytes(sized(spec, sizes), 1, range(spec.num_layers), first=True, last=True)
    assert held == pytest.approx(stored / 2)
    assert before["model"] != {}


def test_a_part_that_is_missing_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_tiny(tmp_path, "llama", tokenizer=False)
    weights = load_file(folder / "model.safetensors")
    save_file({k: v for k, v in weights.items() if "layers.1.mlp" not in k}, folder / "model.safetensors")
    assert run(["plan", str(folder), "--gpu", "h200"]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and "hold nothing of layer 1's dense" in said.err


def test_a_truncated_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_tiny(tmp_path, "llama", tokenizer=False)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    assert run(["plan", str(folder), "--gpu", "h200"]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and "truncated" in said.err


def test_a_hub_id_costs_the_first_bytes_of_each_shard(tmp_path: Path) -> None:
    """Config, index and a range of each shard, no file of weights; without torch; the same figures as the folder."""
    folder = write_tiny(tmp_path / "tiny", "llama", tokenizer=False, max_shard_bytes=100_000)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    shards = [name for name in files if name.endswith(".safetensors")]
    assert len(shards) > 2
    program = """
import sys
import headrace.weights.hub_headers as hub_headers
from headrace.cli.main import run
hub_headers.FIRST_BYTES = 100  # less than a header: the rest is asked for
code = run(["plan", sys.argv[1], "--gpu", "h200", "--json"])
assert "torch" not in sys.modules
sys.exit(code)
"""
    with serve_hub(Hub({"org/tiny": files, "org/bare": {"config.json": files["config.json"]}})) as hub:
        found = {}
        for model in ("org/tiny", "org/bare", str(folder)):
            done = subprocess.run(
                [sys.executable, "-c", program, model],
                env=environment_for(tmp_path / "cache", hub.url), capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            found[model] = json.loads(done.stdout)
        assert len(hub.ranges) == 2 * len(shards)
        assert sum(int(r.split("-")[1]) - int(r.split("=")[1].split("-")[0]) + 1 for r in hub.ranges) < 0.2 * sum(
            map(len, files.values())
        )
    ours, whole = found["org/tiny"], found[str(folder)]
    assert ours["model"]["bytes"] == whole["model"]["bytes"] and ours["layouts"] == whole["layouts"]
    assert found["org/bare"]["model"]["bytes"] == pytest.approx(whole["model"]["bytes"], rel=0.01)


def test_what_is_not_loaded_is_priced_and_counted_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """A next-token layer on the last stage, the vision tower of K2.5 (27 layers of 1152) on the first."""
    from tests.plan.specs import K2_CONFIG

    args = ["plan", str(K2_CONFIG), "--gpu", "rtx-pro-6000", "--gpus", "8", "--pp", "8"]
    assert run([*args, "--explain", "pp8"]) == 0
    assert "(vision, not loaded)" in capsys.readouterr().out
    free = []
    for flags in ((), ("--count-unused",)):
        assert run([*args, "--split", "8,8,8,8,8,8,8,5", "--json", *flags]) == 0
        (layout,) = json.loads(capsys.readouterr().out)["layouts"]
        free.append([stage["free_bytes"] for stage in layout["stages"]])
    tower = 27 * (1152 * (4 * 1152 + 2 * 4304)) * 2
    assert free[0][0] - free[1][0] == pytest.approx(tower, rel=0.15) and free[0][1:] == free[1][1:]


def test_a_next_token_layer_is_as_large_as_its_tensors() -> None:
    config = {**tiny_config("deepseek_v3"), "num_nextn_predict_layers": 1}
    spec = spec_from_config(config)
    (extra,) = spec.extras
    last = f".layers.{spec.num_layers}."
    stored = sum(torch.Size(tensor.shape).numel() for tensor in tensor_shapes(config) if last in tensor.name)
    assert extra.last and extra.bytes == pytest.approx(stored * (4 if spec.dtype == "float32" else 2), rel=0.01)
