"""The model families that can be read, and what is particular about each, as data.

A checkpoint names its family; most of the rest is numbers. What the numbers leave open (values that a family's config may
omit, biases that are always there, how a GGUF file orders rows) is written here once, for both formats. Adding a family of
this kind is one entry here, one file in `models/` and one line in its registry.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One family.

    class_name: the entry of `architectures` in a config.json. gguf_name: `general.architecture`, None if GGUF files of this
    family go by another one's. gguf_rotated_rows: whether GGUF stores the rows of q and k in the order of adjacent
    rotary pairs instead of halves.

    The defaults are those of the Hugging Face config class, for fields that a config.json may leave out; None means
    "derived" (kv heads: as many as heads; head size: hidden size / heads).
    qkv_bias: None if the config's attention_bias decides, for q, k, v and the output projection alike.
    window: "none", "all" (every layer) or "optional" (use_sliding_window, max_window_layers, layer_types).
    """

    class_name: str
    gguf_name: str | None = None
    gguf_rotated_rows: bool = False
    num_kv_heads: int | None = None
    head_size: int | None = None
    max_position: int
    sliding_window: int = 4096
    qkv_bias: bool | None = None
    mlp_bias_option: bool = False
    qk_norm: bool = False
    window: str = "none"


ARCHITECTURES = {
    "llama": Architecture(
        class_name="LlamaForCausalLM",
        gguf_name="llama",
        gguf_rotated_rows=True,
        max_position=2048,
        mlp_bias_option=True,
    ),
    "mistral": Architecture(
        class_name="MistralForCausalLM", num_kv_heads=8, max_position=4096 * 32, qkv_bias=False, window="all"
    ),
    "qwen2": Architecture(
        class_name="Qwen2ForCausalLM",
        gguf_name="qwen2",
        num_kv_heads=32,
        max_position=32768,
        qkv_bias=True,
        window="optional",
    ),
    "qwen3": Architecture(
        class_name="Qwen3ForCausalLM",
        gguf_name="qwen3",
        num_kv_heads=32,
        head_size=128,
        max_position=32768,
        qk_norm=True,
        window="optional",
    ),
}
