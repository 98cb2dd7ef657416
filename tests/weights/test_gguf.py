"""GGUF files of the Llama family mean what transformers and the `gguf` package say they mean."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from headrace.errors import CheckpointError, UnsupportedModel, UserError
from headrace.weights import checkpoint as checkpoint_module
from headrace.weights import codecs
from headrace.weights.checkpoint import Checkpoint, load
from headrace.weights.gguf_file import read_gguf
from headrace.weights.gguf_llama import config_from_gguf
from headrace.weights.headers import open_headers
from headrace.weights.reads import plan_reads
from headrace.weights.slots import Slot
from headrace.weights.source import ModelSource, read_spec
from tests.gguf_files import load_gguf_reference, write_gguf, write_tiny_gguf
from tests.tiny import tiny_config


def opened(path: Path) -> Checkpoint:
    source = ModelSource("gguf", path, "m")
    return Checkpoint(source, read_spec(source))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
@pytest.mark.parametrize("tied", [True, False])
def test_tensors_are_those_that_transformers_reads(tmp_path: Path, kind: str, tied: bool) -> None:
    originals = write_tiny_gguf(tmp_path / "m.gguf", kind=kind, tied=tied, num_hidden_layers=2)
    checkpoint = opened(tmp_path / "m.gguf")
    reference = load_gguf_reference(tmp_path / "m.gguf").state_dict()
    assert set(checkpoint.tensors) == set(originals) == set(reference) - ({"lm_head.weight"} if tied else set())
    for name, original in originals.items():
        got = checkpoint.read(name)
        assert torch.equal(got.float(), reference[name]), name
        # A fifth of a value's own size at 4 bits; rows in another order would be off by far more.
        assert (got - original).norm() < 0.15 * original.norm(), name


def test_spec_is_that_of_the_config(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "m.gguf", kind="Q8_0", tied=False)
    spec = read_spec(ModelSource("gguf", tmp_path / "m.gguf", "m"))
    config = tiny_config("llama")
    assert (spec.family, spec.num_layers, spec.hidden, spec.vocab_size) == ("llama", 6, 64, config["vocab_size"])
    assert (spec.tied, spec.dtype, spec.max_positions) == (False, "float16", 512)
    assert spec.norm_eps == pytest.approx(1e-5)
    assert (spec.rope.kind, spec.rope.theta, spec.rope.dim) == ("default", 10000.0, 16)
    assert (spec.bos_id, spec.eos_ids) == (256, (258,))


def test_every_id_that_ends_a_turn_ends_a_text(tmp_path: Path) -> None:
    fields = {"tokenizer.ggml.eot_token_id": 257, "tokenizer.ggml.eom_token_id": 258}
    write_plain(tmp_path / "m.gguf", fields=fields)
    assert read_spec(ModelSource("gguf", tmp_path / "m.gguf", "m")).eos_ids == (258, 257)


def write_plain(path: Path, **options: Any) -> dict[str, torch.Tensor]:
    tensors = write_tiny_gguf(path, num_hidden_layers=1)
    config = {**tiny_config("llama"), "num_hidden_layers": 1}
    write_gguf(path, config, tensors, **options)
    return tensors


@pytest.mark.parametrize("kind", ["Q4_1", "F16"])
@pytest.mark.parametrize("block_bytes", [100, 5000])
def test_parts_are_dequantised_in_blocks_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, block_bytes: int
) -> None:
    write_tiny_gguf(tmp_path / "m.gguf", kind=kind, num_hidden_layers=1)
    parts = {
        "model.layers.0.self_attn.q_proj.weight": (slice(16, 48), slice(0, 64)),
        # Not at a head's edge, and some columns only.
        "model.layers.0.self_attn.k_proj.weight": (slice(3, 21), slice(8, 40)),
        "model.layers.0.mlp.down_proj.weight": (slice(0, 64), slice(64, 128)),
        "model.embed_tokens.weight": (slice(100, 233), slice(0, 64)),
        "model.norm.weight": (slice(5, 60),),
    }
    whole = {name: opened(tmp_path / "m.gguf").read(name).float() for name in parts}
    slots = {}
    for name, part in parts.items():
        want = whole[name][part]
        slots[name] = [Slot(torch.full(want.shape, torch.nan), part, tuple(whole[name].shape))]
    monkeypatch.setattr(codecs, "_DEQUANTISED_VALUES", 600)
    monkeypatch.setattr(checkpoint_module, "plan_reads", lambda wants: plan_reads(wants, block_bytes))
    load(opened(tmp_path / "m.gguf"), slots)
    for name, part in parts.items():
        assert torch.equal(slots[name][0].dest, whole[name][part]), name


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"])
def test_block_formats_of_256_values(tmp_path: Path, kind: str) -> None:
    config = {**tiny_config("llama"), "hidden_size": 256, "num_hidden_layers": 1}
    quant = gguf.GGMLQuantizationType[kind]
    block_bytes = gguf.GGML_QUANT_SIZES[quant][1]
    tensors = {
        "model.embed_tokens.weight": torch.zeros(config["vocab_size"], 256),
        "model.norm.weight": torch.ones(256),
    }
    # No writer exists for these in Python; any bytes are valid, if the scales in them are finite.
    raw = np.random.default_rng(0).integers(0, 60, (64, 2 * block_bytes), dtype=np.uint8)
    write_gguf(tmp_path / "m.gguf", config, tensors, extra={"blk.0.ffn_up.weight": (raw, quant)})
    want = torch.from_numpy(gguf.quants.dequantize(raw, quant))
    assert want.isfinite().all()
    assert torch.equal(opened(tmp_path / "m.gguf").read("model.layers.0.mlp.up_proj.weight"), want)


def test_type_that_nothing_dequantises_is_named(tmp_path: Path) -> None:
    raw = np.zeros((4, 40), dtype=np.uint8)
    write_plain(tmp_path / "m.gguf", extra={"blk.0.extra.weight": (raw, gguf.GGMLQuantizationType.Q8_1)})
    with pytest.raises(
        CheckpointError, match=r"tensor blk\.0\.extra\.weight is stored as Q8_1, which is not supported"
    ):
        opened(tmp_path / "m.gguf").read("blk.0.extra.weight")


def llama3_divisors(theta: float, dim: int, factor: float) -> np.ndarray[Any, Any]:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    rope = {"rope_type": "llama3", "factor": factor, "rope_theta": theta, **scaling}
    config = LlamaConfig(head_dim=dim, rope_parameters=rope, max_position_embeddings=131072)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = theta ** -(np.arange(0, dim, 2) / dim)
    return (plain / scaled.numpy()).astype(np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_found_behind_its_divisors(tmp_path: Path, factor: float) -> None:
    tensors = write_tiny_gguf(tmp_path / "m.gguf", num_hidden_layers=1)
    config = {**tiny_config("llama"), "num_hidden_layers": 1, "rope_theta": 500000.0}
    divisors = llama3_divisors(500000.0, 16, factor)
    assert (divisors > 1).any()
    assert ((divisors > 1) & (divisors < factor)).any()
    write_gguf(tmp_path / "m.gguf", config, tensors, extra={"rope_freqs.weight": divisors})
    source = ModelSource("gguf", tmp_path / "m.gguf", "m")
    rope = read_spec(source).rope
    assert (rope.kind, rope.factor, rope.original_max) == ("llama3", factor, 8192)
    assert (rope.low_freq_factor, rope.high_freq_factor) == (1.0, 4.0)
    assert "rope_freqs.weight" not in open_headers(source).tensors


def test_other_rope_divisors_are_refused(tmp_path: Path) -> None:
    divisors = llama3_divisors(10000.0, 16, 8.0)
    write_plain(tmp_path / "m.gguf", extra={"rope_freqs.weight": divisors * np.linspace(1, 1.1, 8, dtype=np.float32)})
    source = ModelSource("gguf", tmp_path / "m.gguf", "m")
    for read in (read_spec, open_headers):
        with pytest.raises(UnsupportedModel, match=r"rope_freqs\.weight"):
            read(source)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"llama.expert_count": 8}, "experts"),
        ({"split.count": 3}, "split over several files"),
        ({"llama.rope.scaling.type": "yarn"}, "rope scaling 'yarn'"),
    ],
)
def test_what_would_be_read_wrong_is_refused(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    write_plain(tmp_path / "m.gguf", fields=fields)
    with pytest.raises(UnsupportedModel, match=words):
        read_spec(ModelSource("gguf", tmp_path / "m.gguf", "m"))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("block_count", None, "llama.block_count is missing"),
        ("block_count", "six", "llama.block_count is 'six', not a positive number"),
        ("block_count", 2.5, "llama.block_count is 2.5, not a whole number"),
        ("block_count", 1 << 40, "holds 11 tensors"),
        ("attention.head_count", 0, "llama.attention.head_count is 0, not a positive number"),
        ("attention.head_count_kv", [2, 4], "llama.attention.head_count_kv differs between layers"),
        ("attention.layer_norm_rms_epsilon", None, "rms_epsilon is missing"),
        ("rope.dimension_count", 8, "rotary or value dims"),
        ("rope.freq_base", math.nan, "llama.rope.freq_base is nan"),
    ],
)
def test_field_that_makes_no_sense_is_named(tmp_path: Path, key: str, value: Any, words: str) -> None:
    write_plain(tmp_path / "m.gguf")
    file = read_gguf(tmp_path / "m.gguf")
    assert config_from_gguf(file)["num_hidden_layers"] == 1
    with pytest.raises(UserError, match=words):
        config_from_gguf(replace(file, metadata={**file.metadata, f"llama.{key}": value}))


def test_fields_that_agree_in_every_layer_are_one(tmp_path: Path) -> None:
    write_plain(tmp_path / "m.gguf")
    file = read_gguf(tmp_path / "m.gguf")
    listed = {**file.metadata, "llama.attention.head_count_kv": [2, 2], "llama.feed_forward_length": [128, 128]}
    assert config_from_gguf(replace(file, metadata=listed)) == config_from_gguf(file)


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen3moe")
    writer.add_tensor("token_embd.weight", np.zeros((2, 2), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match="GGUF architecture 'qwen3moe' is not supported"):
        open_headers(ModelSource("gguf", tmp_path / "m.gguf", "m"))


def test_metadata_is_what_the_package_reads(tmp_path: Path) -> None:
    write_plain(tmp_path / "m.gguf")
    long = ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type")
    ours = read_gguf(tmp_path / "m.gguf", long)
    theirs = gguf.GGUFReader(tmp_path / "m.gguf")
    fields = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == fields
    for tensor in theirs.tensors:
        got = ours.tensors[tensor.name]
        assert (got.type, list(got.shape)) == (tensor.tensor_type.name, list(reversed(tensor.shape.tolist())))
        assert (got.offset, got.num_bytes) == (tensor.data_offset, tensor.n_bytes)


def test_long_arrays_are_read_only_if_asked_for(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    words, numbers, few = [f"w{i}" for i in range(2000)], list(range(2000)), ["en", "fr"]
    writer.add_array("a.words", words)
    writer.add_array("b.numbers", numbers)
    writer.add_array("c.few", few)
    writer.add_uint32("d.after", 7)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert read_gguf(tmp_path / "m.gguf").metadata == {"general.architecture": "llama", "c.few": few, "d.after": 7}
    everything = read_gguf(tmp_path / "m.gguf", ("a.words", "b.numbers")).metadata
    assert (everything["a.words"], everything["b.numbers"], everything["d.after"]) == (words, numbers, 7)


def test_truncated_file_is_named_with_both_sizes(tmp_path: Path) -> None:
    write_plain(tmp_path / "m.gguf")
    path = tmp_path / "m.gguf"
    size = max(tensor.offset + tensor.num_bytes for tensor in read_gguf(path).tensors.values())
    with path.open("r+b") as file:
        file.truncate(size - 1)
    with pytest.raises(CheckpointError, match=rf"truncated: tensor \S+ ends at byte {size}, the file has {size - 1}$"):
        open_headers(ModelSource("gguf", path, "m"))


def refusal(path: Path) -> str:
    """The line that refuses a file; empty if it is accepted. Anything but a line fails the test."""
    try:
        open_headers(ModelSource("gguf", path, "m"))
    except UserError as error:
        return str(error)
    return ""


def test_any_cut_or_damage_of_the_header_is_one_line(tmp_path: Path) -> None:
    write_plain(tmp_path / "m.gguf", tokenizer=False)
    good = (tmp_path / "m.gguf").read_bytes()
    end = min(tensor.offset for tensor in read_gguf(tmp_path / "m.gguf").tensors.values())
    bad = tmp_path / "bad.gguf"
    cuts = [good[:size] for size in range(0, end - 32, 7)]
    huge = struct.pack("<Q", 1 << 62)
    damaged = [good[:at] + huge + good[at + 8 :] for at in range(8, end - 40, 5)]
    lines = []
    for data in cuts + damaged:
        bad.write_bytes(data)
        lines.append(refusal(bad))
    assert all(lines[: len(cuts)])
    assert not any("\n" in line for line in lines)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not a GGUF file"),
        (b"x" * 100, "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF version 1 is not supported"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "GGUF version 50331648 is not supported"),
    ],
)
def test_what_is_not_gguf_is_refused(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=words):
        read_gguf(tmp_path / "m.gguf")
