"""A Hugging Face config.json (and generation_config.json) as a ModelSpec.

Read by our own code, not by transformers: importing that costs seconds at every start, and it accepts more than the models
here can compute. What would change the answers and is not understood is refused; the rest is ignored. Both spellings of the
rotary settings are read: `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling` (before).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from octavo.errors import ModelFileError
from octavo.model_spec import ModelSpec, RopeScaling
from octavo.weights.architectures import ARCHITECTURES, Architecture
from octavo.weights.fields import Fields, checked

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_MAX_CONFIG_BYTES = 16 * 2**20
_ROPE_KINDS = "default, linear, llama3"


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ModelFileError if it is missing, too large, or not a JSON object."""
    try:
        if file.stat().st_size > _MAX_CONFIG_BYTES:
            raise ModelFileError(
                file, f"has {file.stat().st_size:,} bytes; a config of this kind is far smaller"
            )
        value = json.loads(file.read_bytes())
    except OSError as e:
        raise ModelFileError(
            file, f"cannot be read ({e.strerror}); check that it exists and is yours to read"
        ) from e
    except (ValueError, RecursionError) as e:
        raise ModelFileError(file, f"is not valid JSON ({e}); get the model again") from e
    if not isinstance(value, dict):
        raise ModelFileError(file, f"holds a JSON {type(value).__name__}, not an object; get the model again")
    return value


def read_hf_config(folder: Path) -> tuple[ModelSpec, torch.dtype | None]:
    """The spec of the model in `folder`, and the dtype that its config names (None if it names none).

    Raises ModelFileError for a missing, malformed or unsupported config.
    """
    file = folder / "config.json"
    if not file.exists():
        raise ModelFileError(
            file,
            "missing; a model folder needs config.json, tokenizer.json and *.safetensors (or give one .gguf file)",
        )
    config = read_json(file)
    fields = Fields(file, config)
    architecture = _architecture(fields)
    family = ARCHITECTURES[architecture]
    _refuse_unsupported(fields)
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    num_layers = fields.integer("num_hidden_layers")
    window, window_layers = _sliding(fields, family, num_layers)
    theta, scaling = _rope(fields)
    bias = family.qkv_bias if family.qkv_bias is not None else fields.flag("attention_bias", False)
    generation = _generation_fields(folder)
    bos = fields.token_ids("bos_token_id") or generation.token_ids("bos_token_id")
    spec = ModelSpec(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", _default_kv_heads(fields, family) or num_heads),
        head_size=fields.integer("head_dim", family.head_size or hidden_size // num_heads),
        vocab_size=fields.integer("vocab_size"),
        max_position=fields.integer("max_position_embeddings", family.max_position),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        sliding_window=window,
        sliding_layers=window_layers,
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        attention_bias=bias,
        attention_output_bias=family.qkv_bias is None and bias,
        mlp_bias=family.mlp_bias_option and fields.flag("mlp_bias", False),
        qk_norm=family.qk_norm,
        eos_token_ids=tuple(
            dict.fromkeys(fields.token_ids("eos_token_id") + generation.token_ids("eos_token_id"))
        ),
        bos_token_id=bos[0] if bos else None,
        name=folder.resolve().name,
    )
    return checked(spec, file), _dtype(fields)


def _architecture(fields: Fields) -> str:
    model_type = fields.raw("model_type")
    if model_type not in ARCHITECTURES:
        raise fields.unsupported(f"model_type {model_type!r}", ", ".join(sorted(ARCHITECTURES)))
    classes = fields.raw("architectures") or []
    expected = ARCHITECTURES[model_type].class_name
    if classes and expected not in classes:
        known = ", ".join(family.class_name for family in ARCHITECTURES.values())
        raise fields.unsupported(f"architecture {classes!r} of model_type {model_type}", known)
    return str(model_type)


def _default_kv_heads(fields: Fields, family: Architecture) -> int | None:
    """An explicit null means as many as heads (None); only an absent field means the family's default."""
    return None if fields.has("num_key_value_heads") else family.num_kv_heads


def _refuse_unsupported(fields: Fields) -> None:
    if fields.raw("hidden_act") not in (None, "silu", "swish"):
        raise fields.unsupported(f"hidden_act {fields.raw('hidden_act')!r}", "silu")
    if fields.raw("quantization_config"):
        raise fields.unsupported(
            "quantization_config in a safetensors model",
            "unquantised safetensors, or GGUF for quantised weights",
        )


def _sliding(
    fields: Fields, family: Architecture, num_layers: int
) -> tuple[int | None, tuple[int, ...] | None]:
    """The window in tokens and the layers that use it (None: all of them)."""
    # An explicit null means no window; an absent field means the family's default.
    if family.window == "none" or (fields.has("sliding_window") and fields.raw("sliding_window") is None):
        return None, None
    if family.window == "all":
        return fields.integer("sliding_window", family.sliding_window), None
    if not fields.flag("use_sliding_window", False):
        return None, None
    window = fields.integer("sliding_window", family.sliding_window)
    kinds = fields.raw("layer_types")
    if kinds is None:
        first = fields.integer("max_window_layers", 28, at_least=0)
        return window, tuple(range(first, num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise fields.error("layer_types", f"a list with one entry for each of {num_layers} layers")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise fields.unsupported(f"layer type {kind!r}", "full_attention, sliding_attention")
    return window, tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")


def _rope(fields: Fields) -> tuple[float, RopeScaling | None]:
    """Base of the rotary frequencies and how they are stretched."""
    rope = _rope_fields(fields)
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    for settings in (fields, rope):
        if settings.number("partial_rotary_factor", 1.0) != 1.0:
            raise fields.unsupported(
                f"partial_rotary_factor {settings.raw('partial_rotary_factor')}", "rotation of whole heads"
            )
    kind = rope.raw("rope_type") or rope.raw("type") or ("default" if rope.raw("factor") is None else None)
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", factor=rope.number("factor"))
    if kind == "llama3":
        return theta, _llama3_scaling(rope)
    if kind is None:
        raise fields.unsupported("a rotary factor without a rope_type", _ROPE_KINDS)
    raise fields.unsupported(f"rope type {kind!r}", _ROPE_KINDS)


def _rope_fields(fields: Fields) -> Fields:
    """The rotary settings of both spellings, the new one first."""
    settings: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        value = fields.raw(key)
        if value is not None and not isinstance(value, dict):
            raise fields.error(key, "an object")
        settings |= value or {}
    layers = next((name for name, value in settings.items() if isinstance(value, dict)), None)
    if layers is not None:
        raise fields.unsupported(
            f"rope_parameters of its own for {layers!r}", "one kind of rotation for all layers"
        )
    return Fields(fields.file, settings)


def _llama3_scaling(rope: Fields) -> RopeScaling:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        raise rope.error("high_freq_factor", f"above low_freq_factor, which is {low:g}")
    return RopeScaling(
        "llama3",
        factor=rope.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=rope.integer("original_max_position_embeddings"),
    )


def _generation_fields(folder: Path) -> Fields:
    file = folder / "generation_config.json"
    return Fields(file, read_json(file) if file.exists() else {})


def _dtype(fields: Fields) -> torch.dtype | None:
    name = fields.raw("dtype") or fields.raw("torch_dtype")
    if name is None:
        return None
    dtype = DTYPES.get(str(name).removeprefix("torch."))
    if dtype is None:
        raise fields.unsupported(f"dtype {name!r}", ", ".join(DTYPES))
    return dtype
