"""Small GGUF files of the Llama family, written as llama.cpp's converter writes them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file

from headrace.weights.random import write_checkpoint
from tests.tiny import tiny_config
from tests.tiny_tokenizer import CHATML, TINY_SPECIALS, byte_alphabet

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_tiny_gguf(
    path: Path, *, kind: str = "F32", seed: int = 0, tied: bool = True, tokenizer: bool = True, **changes: Any
) -> dict[str, torch.Tensor]:
    """Write a tiny Llama as GGUF, matrices in `kind` (F32, F16, Q8_0, Q4_1, Q4_0), and return its float32 tensors.

    `changes` replace fields of the tiny `llama` config. The tensors are as Hugging Face has them, before rounding.
    """
    config = {**tiny_config("llama"), "tie_word_embeddings": tied, **changes}
    folder = path.parent / f"{path.stem}-safetensors"
    write_checkpoint(folder, config, seed=seed)
    tensors = load_file(folder / "model.safetensors")
    write_gguf(path, config, tensors, kind=kind, tokenizer=tokenizer)
    return tensors


@contextmanager
def parsed_once() -> Iterator[None]:
    """What transformers asks of `gguf` again and again for one file, it gets from memory: half the time goes."""
    reader, names = functools.cache(gguf.GGUFReader), functools.cache(gguf.get_tensor_name_map)
    with mock.patch.object(gguf, "GGUFReader", reader), mock.patch.object(gguf, "get_tensor_name_map", names):
        yield


def load_gguf_reference(path: Path) -> Any:
    """The file as transformers reads and runs it, in float32 and evaluation mode."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    # from_pretrained does the same, but asks for another package first.
    with parsed_once():
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
        tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    problems = model.load_state_dict(tensors, strict=False)
    assert not problems.unexpected_keys, problems
    assert set(problems.missing_keys) <= ({"lm_head.weight"} if config.tie_word_embeddings else set()), problems
    model.tie_weights()
    return model.eval()


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    *,
    kind: str = "F32",
    tokenizer: bool = True,
    extra: Mapping[str, np.ndarray[Any, Any] | tuple[np.ndarray[Any, Any], GGMLQuantizationType]] | None = None,
    fields: Mapping[str, Any] | None = None,
) -> None:
    """Write a Llama config and its tensors (Hugging Face names) as one GGUF file.

    `extra` are tensors under their GGUF names, as they are, or bytes and their type; `fields` are further text and
    whole-number metadata.
    """
    writer = gguf.GGUFWriter(path, "llama")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_name("tiny")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if tokenizer:
        _add_tokenizer(writer, config)
    for key, value in (fields or {}).items():
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)
    for name, tensor in tensors.items():
        values = tensor.float().numpy()
        if ".q_proj." in name or ".k_proj." in name:
            values = _permute(values, heads if ".q_proj." in name else kv_heads)
        # llama.cpp keeps vectors in float32 whatever the matrices are.
        _add(writer, _gguf_name(name), values, kind if values.ndim > 1 else "F32")
    for name, array in (extra or {}).items():
        data, quant = array if isinstance(array, tuple) else (array, None)
        writer.add_tensor(name, data, raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module.startswith("model.layers."):
        _, _, i, rest = module.split(".", 3)
        return f"blk.{i}.{_NAMES[rest]}.{kind}"
    return f"{_NAMES[module]}.{kind}"


def _add(writer: gguf.GGUFWriter, name: str, values: np.ndarray[Any, Any], kind: str) -> None:
    quant = GGMLQuantizationType[kind]
    if quant in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
        writer.add_tensor(name, values.astype(np.float32 if kind == "F32" else np.float16))
    else:
        writer.add_tensor(name, gguf.quants.quantize(values, quant), raw_dtype=quant)


def _permute(values: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """As llama.cpp's convert_hf_to_gguf.py does: rotary pairs, half a head apart, become neighbours."""
    shape = (heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(values.reshape(shape).swapaxes(1, 2).reshape(values.shape))


def _add_tokenizer(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    size = config["vocab_size"]
    alphabet = byte_alphabet()
    tokens = [*(alphabet[byte] for byte in range(256)), *TINY_SPECIALS]
    tokens += [f"{alphabet[0x20]}w{i}" for i in range(len(tokens), size)]
    special = set(TINY_SPECIALS.values())
    types = [gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for i in range(size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([f"{alphabet[ord('t')]} {alphabet[ord('h')]}"] if "th" in tokens else [])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHATML)
