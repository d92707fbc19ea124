"""Weights from a source into the fused tensors of a decoder.

Matrices that read the same input (q, k, v; gate, up) are laid one under the other, so that a layer multiplies once where a
checkpoint has three matrices. Every name and shape is checked against the config before the first weight is read: a wrong
file is refused at once and not after minutes of loading.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch

from octavo.model_spec import ModelSpec
from octavo.models.linear import Linear
from octavo.weights.source import WeightSource, check_tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class LayerWeights:
    """One layer. `qkv` holds the rows of q, k, v in this order, `gate_up` those of gate and up.

    qk_norm: [H + K, D], the weight of each query head, then of each kv head; None if the model does not normalise them.
    """

    input_norm: torch.Tensor
    qkv: Linear
    qk_norm: torch.Tensor | None
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class DecoderWeights:
    """All weights of a decoder. Also where `head` is tied to `embedding` there may be both: one is packed, one is read."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: Linear

    @property
    def nbytes(self) -> int:
        """Memory that the weights take."""
        parts = [getattr(layer, field.name) for layer in self.layers for field in fields(layer)]
        tied = self.head.shares(self.embedding)
        whole = [self.embedding, self.norm, *parts] + ([] if tied else [self.head])
        return sum(part.nbytes for part in whole if part is not None)


def load_decoder(spec: ModelSpec, source: WeightSource, dtype: torch.dtype) -> DecoderWeights:
    """Read all weights that `spec` asks for, as `dtype`.

    Raises ModelFileError for a tensor that is missing, misshapen or of an unsupported type. Peak memory: the weights
    plus a few MiB.
    """
    check_decoder(spec, source)
    embedding = source.tensor("model.embed_tokens.weight", dtype)
    head = embedding if spec.tie_embeddings else source.tensor("lm_head.weight", dtype)
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(_layer(spec, source, dtype, i) for i in range(spec.num_layers)),
        norm=source.tensor("model.norm.weight", dtype),
        head=Linear(head),
    )


def check_decoder(spec: ModelSpec, source: WeightSource) -> None:
    """Raise ModelFileError for the first tensor that is missing or has another shape than `spec` asks for."""
    table = (spec.vocab_size, spec.hidden_size)
    check_tensor(source, "model.embed_tokens.weight", table)
    check_tensor(source, "model.norm.weight", (spec.hidden_size,))
    if not spec.tie_embeddings:
        check_tensor(source, "lm_head.weight", table)
    # Generated lazily: a config that claims a billion layers fails at the first that is not there.
    for i in range(spec.num_layers):
        for name, shape in _layer_shapes(spec):
            check_tensor(source, f"model.layers.{i}.{name}", shape)


def _layer_shapes(spec: ModelSpec) -> Iterator[tuple[str, Shape]]:
    """Name (within the layer) and shape of each tensor of a layer."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_size, kv_size = spec.num_heads * spec.head_size, spec.num_kv_heads * spec.head_size
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    if spec.qk_norm:
        yield "self_attn.q_norm.weight", (spec.head_size,)
        yield "self_attn.k_norm.weight", (spec.head_size,)
    for name, out_size, in_size, bias in (
        ("self_attn.q_proj", q_size, hidden, spec.attention_bias),
        ("self_attn.k_proj", kv_size, hidden, spec.attention_bias),
        ("self_attn.v_proj", kv_size, hidden, spec.attention_bias),
        ("self_attn.o_proj", hidden, q_size, spec.attention_output_bias),
        ("mlp.gate_proj", inner, hidden, spec.mlp_bias),
        ("mlp.up_proj", inner, hidden, spec.mlp_bias),
        ("mlp.down_proj", hidden, inner, spec.mlp_bias),
    ):
        yield f"{name}.weight", (out_size, in_size)
        if bias:
            yield f"{name}.bias", (out_size,)


def _layer(spec: ModelSpec, source: WeightSource, dtype: torch.dtype, index: int) -> LayerWeights:
    def weight(*names: str) -> torch.Tensor:
        return _stacked(source, dtype, [f"model.layers.{index}.{name}.weight" for name in names])

    def linear(has_bias: bool, *names: str) -> Linear:
        biases = [f"model.layers.{index}.{name}.bias" for name in names]
        return Linear(weight(*names), _stacked(source, dtype, biases) if has_bias else None)

    qk_norm = None
    if spec.qk_norm:
        q_norm, k_norm = weight("self_attn.q_norm"), weight("self_attn.k_norm")
        qk_norm = torch.stack([q_norm] * spec.num_heads + [k_norm] * spec.num_kv_heads)
    return LayerWeights(
        input_norm=weight("input_layernorm"),
        qkv=linear(spec.attention_bias, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        qk_norm=qk_norm,
        output=linear(spec.attention_output_bias, "self_attn.o_proj"),
        mlp_norm=weight("post_attention_layernorm"),
        gate_up=linear(spec.mlp_bias, "mlp.gate_proj", "mlp.up_proj"),
        down=linear(spec.mlp_bias, "mlp.down_proj"),
    )


def _stacked(source: WeightSource, dtype: torch.dtype, names: list[str]) -> torch.Tensor:
    """The tensors one under the other, each read into its place."""
    shapes = [source.shape(name) for name in names]
    stacked = torch.empty(sum(shape[0] for shape in shapes), *shapes[0][1:], dtype=dtype)
    row = 0
    for name, shape in zip(names, shapes, strict=True):
        source.fill(name, stacked[row : row + shape[0]])
        row += shape[0]
    return stacked
