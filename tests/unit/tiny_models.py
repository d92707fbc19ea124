"""Tiny random models of every supported kind, written by transformers as Hugging Face folders.

They hold weights and config only, no tokenizer. Everything is float32 and seeded, so two calls write the same bytes. Norm
weights and biases are random too: left at the ones and zeros that transformers starts with, a model that forgot them would
pass every comparison.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

VOCAB_SIZE = 512
MAX_POSITION = 2048

_SHARED: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITION,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
_KINDS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "llama": (LlamaConfig, {"num_hidden_layers": 3}),
    "llama31": (LlamaConfig, {"rope_parameters": _LLAMA3_ROPE}),
    "llama_linear_rope": (
        LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama_untied": (LlamaConfig, {"tie_word_embeddings": False}),
    "llama_biased": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "mistral": (MistralConfig, {"sliding_window": 8}),
    "qwen2": (Qwen2Config, {}),
    "qwen2_windows": (
        Qwen2Config,
        {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3Config, {"head_dim": 32, "tie_word_embeddings": False}),
}
KINDS = tuple(_KINDS)


def tiny_model(kind: str, folder: Path | str, *, max_shard_size: str = "5GB", **overrides: Any) -> Path:
    """Write a model of `kind` (one of KINDS) into `folder` and return the folder.

    overrides: fields of the transformers config class, e.g. `num_hidden_layers=1`. max_shard_size: as in transformers;
    a small one, e.g. "100KB", gives a sharded checkpoint.
    """
    folder = Path(folder)
    config_class, special = _KINDS[kind]
    config = config_class(**{**_SHARED, **special, **overrides})
    generator = torch.Generator().manual_seed(KINDS.index(kind) + 1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # Large enough for peaked attention and distinct logits, small enough to stay well conditioned.
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.15 * noise)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def reference_logits(folder: Path | str, token_ids: list[int]) -> torch.Tensor:
    """Logits [T, vocab] in float32 that transformers computes for one prompt of a model folder."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tiny_gguf(folder: Path | str, file: Path | str, quantisation: str = "F32") -> Path:
    """Convert a folder of `tiny_model` to one GGUF file, as the converters of llama.cpp would; no tokenizer inside.

    quantisation: a type that the gguf package can write; norms and biases stay F32. Returns the file.
    """
    config = json.loads((Path(folder) / "config.json").read_text())
    architecture = {"mistral": "llama"}.get(config["model_type"], config["model_type"])
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_name("tiny")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if config["model_type"] == "mistral":
        writer.add_sliding_window(config["sliding_window"])
    _add_rope(writer, config["rope_parameters"], head_size)
    for name, tensor in load_file(Path(folder) / "model.safetensors").items():
        array = tensor.numpy()
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = array.shape[0] // head_size
            array = array.reshape(heads, 2, head_size // 2, -1).swapaxes(1, 2).reshape(array.shape)
        kind = gguf.GGMLQuantizationType[quantisation if array.ndim > 1 else "F32"]
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(file)


def gguf_name(name: str) -> str:
    """What GGUF calls the tensor that Hugging Face calls `name`."""
    stem, _, kind = name.rpartition(".")
    if stem in _GGUF_NAMES:
        return f"{_GGUF_NAMES[stem]}.{kind}"
    _, _, layer, inner = stem.split(".", 3)
    return f"blk.{layer}.{_GGUF_NAMES[inner]}.{kind}"


def _add_rope(writer: gguf.GGUFWriter, rope: dict[str, Any], head_size: int) -> None:
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(head_size)
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "llama3":
        # The llama 3 stretching, written independently of ours: thresholds on wavelengths instead of turns.
        pairs = np.arange(0, head_size, 2, dtype=np.float64)
        wavelengths = 2 * np.pi * rope["rope_theta"] ** (pairs / head_size)
        context, factor = rope["original_max_position_embeddings"], rope["factor"]
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        smooth = (context / wavelengths - low) / (high - low)
        divisors = np.where(
            wavelengths < context / high,
            1.0,
            np.where(wavelengths > context / low, factor, 1 / ((1 - smooth) / factor + smooth)),
        )
        writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))
