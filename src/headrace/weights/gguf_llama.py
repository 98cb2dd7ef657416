"""What a GGUF file of the Llama family means in Hugging Face's words: config, tensor names, order of rows."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Sequence
from typing import Any

from headrace.errors import CheckpointError, UnsupportedModel
from headrace.spec import GqaSpec, ModelSpec
from headrace.weights.gguf_file import GgufFile

ROPE_FREQS = "rope_freqs.weight"

_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_PERMUTED = re.compile(r"model\.layers\.\d+\.self_attn\.([qk])_proj\.(?:weight|bias)")

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What every published Llama 3.1 to 3.3 uses; only the factor differs between them."""

_END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def hf_name(name: str) -> str:
    """A tensor's Hugging Face name; a name that the Llama family does not have stays as it is."""
    stem, _, kind = name.rpartition(".")
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{kind}"
    match = _BLOCK.fullmatch(name)
    if match and match[2] in _BLOCK_NAMES:
        return f"model.layers.{match[1]}.{_BLOCK_NAMES[match[2]]}.{match[3]}"
    return name


def permuted_heads(name: str, spec: ModelSpec) -> int | None:
    """How many heads the rows of a q or k projection are permuted in; None for every other tensor.

    Within a head GGUF keeps rotary pairs as neighbours (2i, 2i + 1); Hugging Face has them half a head apart.
    """
    match = _PERMUTED.fullmatch(name)
    attention = spec.layers[0].attention
    if match is None or not isinstance(attention, GqaSpec):
        return None
    return attention.num_heads if match[1] == "q" else attention.num_kv_heads


def config_from_gguf(file: GgufFile) -> dict[str, Any]:
    """The config.json that the file's metadata stands for, for `spec_from_config`.

    Raises UnsupportedModel for another architecture or something it does not carry over exactly.
    """
    meta = _Metadata(file)
    architecture = file.metadata.get("general.architecture")
    if architecture != "llama":
        raise UnsupportedModel(f"{file.path}: GGUF architecture {architecture!r} is not supported; only 'llama' is")
    if file.metadata.get("split.count", 1) != 1:
        raise UnsupportedModel(f"{file.path}: GGUF split over several files is not supported; merge it into one")
    if meta.get("expert_count"):
        raise UnsupportedModel(f"{file.path}: GGUF with experts (llama.expert_count) is not supported")
    hidden, heads = meta.integer("embedding_length"), meta.integer("attention.head_count")
    head_dim = meta.integer("attention.key_length", hidden // heads)
    num_layers = meta.integer("block_count")
    if num_layers > len(file.tensors):
        raise CheckpointError(
            f"{file.path}: llama.block_count is {num_layers}, the file holds {len(file.tensors)} tensors"
        )
    if (
        meta.get("rope.dimension_count", head_dim) != head_dim
        or meta.get("attention.value_length", head_dim) != head_dim
    ):
        raise UnsupportedModel(
            f"{file.path}: rotary or value dims that differ from the head's {head_dim} are not supported"
        )
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path}: tensor token_embd.weight is missing")
    theta = meta.number("rope.freq_base", 10000.0)
    ends = [file.metadata[key] for key in _END_KEYS if isinstance(file.metadata.get(key), int)]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": meta.integer("feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": meta.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": meta.integer("context_length"),
        "rms_norm_eps": meta.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(file, meta, theta, head_dim),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in file.tensors,
        # What is quantised was never float32: half precision holds it.
        "dtype": {"F32": "float32", "BF16": "bfloat16"}.get(_main_type(file), "float16"),
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(ends)) or None,
    }


class _Metadata:
    """The `llama.` fields of a file."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file

    def get(self, key: str, default: Any = None) -> Any:
        value = self._file.metadata.get(f"llama.{key}", default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise UnsupportedModel(f"{self._file.path}: llama.{key} differs between layers, which is not supported")
            return value[0]
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        value = self.get(key, default)
        if value is None:
            raise UnsupportedModel(f"{self._file.path}: GGUF field llama.{key} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise UnsupportedModel(f"{self._file.path}: GGUF field llama.{key} is {value!r}, not a positive number")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive whole number."""
        value = self.number(key, default)
        if not isinstance(value, int):
            raise UnsupportedModel(f"{self._file.path}: GGUF field llama.{key} is {value!r}, not a whole number")
        return value


def _main_type(file: GgufFile) -> str:
    """The type that holds most of the file's bytes."""
    sizes: dict[str, int] = {}
    for tensor in file.tensors.values():
        sizes[tensor.type] = sizes.get(tensor.type, 0) + tensor.num_bytes
    return max(sizes, key=lambda kind: sizes[kind])


def _rope_scaling(file: GgufFile, meta: _Metadata, theta: float, dim: int) -> dict[str, Any] | None:
    kind = meta.get("rope.scaling.type", "none")
    if ROPE_FREQS in file.tensors:
        if kind not in ("none", "llama3"):
            raise UnsupportedModel(f"{file.path}: {ROPE_FREQS} together with rope scaling {kind!r} is not supported")
        return _llama3_scaling(file, theta, dim)
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": meta.number("rope.scaling.factor")}
    raise UnsupportedModel(f"{file.path}: GGUF rope scaling {kind!r} is not supported; only 'linear' is")


def _llama3_scaling(file: GgufFile, theta: float, dim: int) -> dict[str, Any]:
    """Find the llama3 fields behind `rope_freqs`: GGUF keeps only the divisors that they make of the frequencies."""
    tensor = file.tensors[ROPE_FREQS]
    problem = UnsupportedModel(f"{file.path}: {ROPE_FREQS} is not the rope scaling of Llama 3, the only one supported")
    if tensor.type != "F32" or tensor.shape != (dim // 2,):
        raise problem
    with file.path.open("rb") as handle:
        handle.seek(tensor.offset)
        raw = handle.read(tensor.num_bytes)
    if len(raw) != tensor.num_bytes:
        end = tensor.offset + tensor.num_bytes
        raise CheckpointError(f"{file.path}: truncated: {ROPE_FREQS} ends at byte {end}, the file has {file.size}")
    divisors = struct.unpack(f"<{dim // 2}f", raw)
    factor = max(divisors)
    wanted = _llama3_divisors(theta, dim, factor, **_LLAMA3)
    if any(abs(got - want) > 1e-4 * want for got, want in zip(divisors, wanted, strict=True)):
        raise problem
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def _llama3_divisors(
    theta: float,
    dim: int,
    factor: float,
    *,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: float,
) -> Sequence[float]:
    """What each rotary frequency is divided by under Llama 3's scaling."""
    divisors = []
    for i in range(0, dim, 2):
        turns = original_max_position_embeddings / (2 * math.pi * theta ** (i / dim))
        smooth = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
        smooth = min(1.0, max(0.0, smooth))
        divisors.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return divisors
