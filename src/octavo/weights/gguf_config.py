"""The metadata of a GGUF file as a ModelSpec, and its tensor names in Hugging Face's words.

GGUF stores the same facts as a config.json under other names. Three of them are in the tensors instead: whether embeddings
are tied (no `output.weight`), whether projections have biases, and, for llama 3 style rope, the finished divisors of the
rotary frequencies (`rope_freqs.weight`).

Source: the GGUF specification of the ggml project.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from octavo.errors import ModelFileError
from octavo.model_spec import ModelSpec, RopeScaling
from octavo.weights.architectures import ARCHITECTURES
from octavo.weights.fields import Fields, Values, checked

ROPE_DIVISORS = "rope_freqs.weight"
_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_name(gguf_name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor; None if no supported model has such a tensor.

    >>> hf_name("blk.3.attn_q.weight")
    'model.layers.3.self_attn.q_proj.weight'
    """
    if gguf_name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[gguf_name]
    parts = gguf_name.split(".")
    if len(parts) != 4 or parts[0] != "blk" or not parts[1].isdecimal() or parts[3] not in ("weight", "bias"):
        return None
    inner = _LAYER_NAMES.get(parts[2])
    return f"model.layers.{parts[1]}.{inner}.{parts[3]}" if inner else None


def architecture_of(metadata: Values, file: Path) -> str:
    """The architecture of a GGUF file, as a name in ARCHITECTURES. Raises ModelFileError if it is not supported."""
    fields = Fields(file, metadata)
    given = fields.raw("general.architecture")
    by_gguf_name = {family.gguf_name: name for name, family in ARCHITECTURES.items() if family.gguf_name}
    if given not in by_gguf_name:
        raise fields.unsupported(f"general.architecture {given!r}", ", ".join(sorted(by_gguf_name)))
    return by_gguf_name[given]


def gguf_spec(
    metadata: Values,
    file: Path,
    tensor_names: Collection[str],
    vocab_size: int,
    rope_divisors: tuple[float, ...] | None,
) -> ModelSpec:
    """The spec of the model in a GGUF file.

    tensor_names: Hugging Face names of its tensors. vocab_size: rows of the embedding. rope_divisors: the content of
    ROPE_DIVISORS if the file has it. Raises ModelFileError for missing, malformed or unsupported metadata.
    """
    architecture = architecture_of(metadata, file)
    general = Fields(file, metadata)
    fields = Fields(file, metadata, f"{ARCHITECTURES[architecture].gguf_name}.")
    hidden_size, num_heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    head_size = fields.integer("attention.key_length", hidden_size // num_heads)
    _refuse_unsupported(fields, head_size)
    if rope_divisors is not None and len(rope_divisors) != head_size // 2:
        raise ModelFileError(
            file,
            f"{ROPE_DIVISORS} has {len(rope_divisors)} divisors; a head size of {head_size} needs {head_size // 2}",
        )
    eos = [i for word in ("eos", "eot", "eom") for i in general.token_ids(f"tokenizer.ggml.{word}_token_id")]
    bos = general.token_ids("tokenizer.ggml.bos_token_id")
    spec = ModelSpec(
        architecture=architecture,
        num_layers=fields.integer("block_count"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
        head_size=head_size,
        vocab_size=vocab_size,
        max_position=fields.integer("context_length"),
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope_theta=fields.number("rope.freq_base", 10000.0),
        rope_scaling=_rope_scaling(fields, rope_divisors),
        sliding_window=fields.integer("attention.sliding_window", 0, at_least=0) or None,
        tie_embeddings="lm_head.weight" not in tensor_names,
        attention_bias="model.layers.0.self_attn.q_proj.bias" in tensor_names,
        attention_output_bias="model.layers.0.self_attn.o_proj.bias" in tensor_names,
        mlp_bias="model.layers.0.mlp.up_proj.bias" in tensor_names,
        qk_norm=ARCHITECTURES[architecture].qk_norm,
        eos_token_ids=tuple(dict.fromkeys(eos)),
        bos_token_id=bos[0] if bos else None,
        name=str(general.raw("general.name") or file.stem),
    )
    return checked(spec, file)


def _refuse_unsupported(fields: Fields, head_size: int) -> None:
    if fields.integer("expert_count", 0, at_least=0):
        raise fields.unsupported("a mixture of experts (expert_count)", "dense models")
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(key, head_size) != head_size:
            raise fields.unsupported(f"{key} {fields.raw(key)} with head size {head_size}", "equal sizes")


def _rope_scaling(fields: Fields, divisors: tuple[float, ...] | None) -> RopeScaling | None:
    """Finished divisors win over a recipe: a converter that writes them has already applied it."""
    if divisors is not None:
        return RopeScaling("llama3", frequency_divisors=divisors)
    kind = fields.raw("rope.scaling.type")
    if kind == "linear" or (kind is None and fields.has("rope.scale_linear")):
        old_name = fields.number("rope.scale_linear", 1.0)
        return RopeScaling("linear", factor=fields.number("rope.scaling.factor", old_name))
    if kind not in (None, "none"):
        raise fields.unsupported(
            f"rope.scaling.type {kind!r}", "none, linear, and llama3 as rope_freqs.weight"
        )
    return None
