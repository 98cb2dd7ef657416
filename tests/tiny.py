"""Tiny models of every family: configs in both spellings, random checkpoints, and transformers' reading of them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from headrace.weights.random import DtypeName, write_checkpoint
from tests.tiny_tokenizer import write_tiny_tiktoken, write_tiny_tokenizer

Spelling = Literal["v4", "v5"]

VOCAB = 288
"""Of every tiny model: 256 bytes, special tokens, fillers."""

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 256,
    "eos_token_id": 258,
}
_QWEN3: dict[str, Any] = {
    **_LLAMA,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 5,
    # Wider than hidden / heads, as in the published small ones.
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
}
_DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 4,
    "topk_group": 2,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        # Unlike mscale, so that the scale of cos and sin is not 1.
        "mscale_all_dim": 0.7,
    },
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 256,
    "eos_token_id": 258,
    "num_nextn_predict_layers": 0,
}
_INT4: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": 32,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "group",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "format": "pack-quantized",
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    ],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
# The tiny tiktoken vocabulary keeps its special tokens in its last 16 ids: [BOS], [EOS], ...
_KIMI: dict[str, Any] = {
    **_DEEPSEEK,
    "model_type": "kimi_k2",
    "num_hidden_layers": 5,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "rope_scaling": {**_DEEPSEEK["rope_scaling"], "beta_fast": 1.0, "mscale_all_dim": 1.0},
    "bos_token_id": VOCAB - 16,
    "eos_token_id": VOCAB - 15,
    "quantization_config": _INT4,
}

_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "llama_tied": {
        **_LLAMA,
        "tie_word_embeddings": True,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "llama_yarn": {
        **_LLAMA,
        "num_hidden_layers": 5,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    },
    "llama_bias": {**_LLAMA, "num_hidden_layers": 5, "attention_bias": True, "mlp_bias": True},
    "qwen3": {**_QWEN3, "tie_word_embeddings": True},
    "qwen3_moe": {
        **_QWEN3,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": 6,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1, 4],
    },
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v3_plain_q": {
        **_DEEPSEEK,
        "num_hidden_layers": 5,
        "q_lora_rank": None,
        "v_head_dim": 16,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 2,
        "rope_scaling": None,
    },
    "kimi_k2_int4": _KIMI,
    "kimi_k25_int4": {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "torch_dtype": "float32",
        "bos_token_id": _KIMI["bos_token_id"],
        "eos_token_id": _KIMI["eos_token_id"],
        "media_placeholder_token_id": VOCAB - 1,
        "text_config": {**_KIMI, "architectures": ["DeepseekV3ForCausalLM"]},
        "vision_config": {"vt_hidden_size": 32, "vt_num_hidden_layers": 1, "patch_size": 14},
    },
}

TINY = tuple(_CONFIGS)
"""Names of the tiny models: family, then what is special about it."""


def tiny_config(name: str, spelling: Spelling = "v4") -> dict[str, Any]:
    """A config as transformers 4 (and the published checkpoints) or transformers 5 writes it."""
    config = copy.deepcopy(_CONFIGS[name])
    return config if spelling == "v4" else _respell(config)


def write_tiny(
    folder: Path,
    name: str,
    *,
    seed: int = 0,
    spelling: Spelling = "v4",
    dtype: DtypeName | None = None,
    max_shard_bytes: int | None = None,
    tokenizer: bool = True,
    **changes: Any,
) -> Path:
    """Write a tiny random checkpoint, with a tokenizer of its family's kind; `changes` replace fields of its config.

    Returns the folder.
    """
    config = tiny_config(name, spelling)
    config.get("text_config", config).update(changes)
    write_checkpoint(folder, config, seed=seed, dtype=dtype, max_shard_bytes=max_shard_bytes)
    if tokenizer:
        (write_tiny_tiktoken if name.startswith("kimi") else write_tiny_tokenizer)(folder, VOCAB)
    return folder


def load_reference(folder: Path, scratch: Path) -> Any:
    """The checkpoint as transformers runs it: float32, evaluation mode, INT4 dequantised, the text part alone.

    `scratch` is an empty folder for the plain checkpoint that transformers reads where it cannot read this one.
    """
    from transformers import AutoModelForCausalLM

    config = json.loads((folder / "config.json").read_text("utf-8"))
    if "text_config" in config or "quantization_config" in config or config["model_type"] == "kimi_k2":
        _write_plain(folder, config, scratch)
        folder = scratch
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    model, loading = loaded
    problems = {key: value for key, value in loading.items() if value}
    assert not problems, problems
    return model.eval()


def _write_plain(folder: Path, config: Mapping[str, Any], scratch: Path) -> None:
    prefix = "language_model." if "text_config" in config else ""
    text = {**config.get("text_config", config), "model_type": "deepseek_v3"}
    for key in ("quantization_config", "auto_map"):
        text.pop(key, None)
    stored: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        stored |= load_file(file)
    plain = {}
    for name, tensor in stored.items():
        if not name.startswith(prefix) or name.endswith((".weight_scale", ".weight_shape")):
            continue
        name = name.removeprefix(prefix)
        if name.endswith(".weight_packed"):
            module = name.removesuffix(".weight_packed")
            scale = stored[f"{prefix}{module}.weight_scale"]
            name, tensor = f"{module}.weight", torch.from_numpy(_dequantised(tensor, scale))
        plain[name] = tensor.float().contiguous()
    scratch.mkdir(parents=True, exist_ok=True)
    save_file(plain, scratch / "model.safetensors", metadata={"format": "pt"})
    (scratch / "config.json").write_text(json.dumps({**text, "torch_dtype": "float32"}), "utf-8")


def _dequantised(packed: torch.Tensor, scale: torch.Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    """INT4 by the format's words alone: the lowest nibble is the lowest column, stored value = weight + 8."""
    words = packed.numpy().view(np.uint32)
    columns = [((words >> (4 * i)) & 15).astype(np.int32) - 8 for i in range(8)]
    q = np.stack(columns, axis=-1).reshape(words.shape[0], -1)
    scales = scale.float().numpy()
    return (q * np.repeat(scales, q.shape[1] // scales.shape[1], axis=1)).astype(np.float32)


def _respell(config: Mapping[str, Any]) -> dict[str, Any]:
    """From transformers 4's spelling to 5's."""
    rename: dict[str, Callable[[Any], Any]] = {"torch_dtype": lambda value: value, "text_config": _respell}
    out = {
        {"torch_dtype": "dtype"}.get(key, key): rename.get(key, lambda value: value)(value)
        for key, value in config.items()
        if key not in ("rope_theta", "rope_scaling")
    }
    if "rope_theta" in config:
        rope = dict(config.get("rope_scaling") or {})
        rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type") or "default"
        out["rope_parameters"] = {**rope, "rope_theta": config["rope_theta"]}
    return out
