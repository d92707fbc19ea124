"""A decoder of the llama family over block-paged KV: the model that the others are variations of.

    token ids [T] -> embedding -> layers x ( norm, attention, +, norm, mlp, + ) -> norm -> hidden [T, hidden]
    hidden of the tokens that are sampled from -> head -> logits

T is every token of a step, of all its sequences, flattened: each matrix is multiplied once per step. Only attention knows
where a sequence begins, through `AttentionStep`. There is no module state, no mask and no cache object: weights come in when
the model is made, everything that changes comes in as an argument. The caller holds `torch.inference_mode()`.

The family differs in data only (biases, head norms, windows, stretched rotary frequencies), all of it in `ModelSpec`.

Source: Touvron et al., "LLaMA", 2023.

Axes: T tokens, H query heads, K kv heads, D head size, N blocks, S block size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from octavo.attention.backend import AttentionBackend, AttentionStep
from octavo.model_spec import ModelSpec
from octavo.models.layers import rms_norm, rope_angles, rope_frequencies, rotate, silu_and_multiply
from octavo.models.loading import DecoderWeights, LayerWeights, load_decoder
from octavo.weights.source import WeightSource


class Llama:
    """Llama 2 and 3, SmolLM2 and all models that share their config class.

    Raises ModelFileError if `source` does not hold what `spec` asks for. weight_bytes: memory that the weights take.
    """

    def __init__(self, spec: ModelSpec, source: WeightSource, dtype: torch.dtype) -> None:
        self.spec = spec
        self._weights: DecoderWeights = load_decoder(spec, source, dtype)
        self._frequencies = rope_frequencies(spec)
        self.weight_bytes = self._weights.nbytes

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        caches: Sequence[torch.Tensor],
        step: AttentionStep,
        backend: AttentionBackend,
    ) -> torch.Tensor:
        """Compute the step's tokens, write their keys and values into `caches`, return their hidden states [T, hidden].

        token_ids, positions: int64 [T]. caches: one [2, N, S, K, D] per layer, changed in the slots of the step only. The
        result is normed and in the dtype of the weights.
        """
        hidden = F.embedding(token_ids, self._weights.embedding)
        cosines, sines = rope_angles(positions, self._frequencies, hidden.dtype)
        for index, (layer, cache) in enumerate(zip(self._weights.layers, caches, strict=True)):
            x = rms_norm(hidden, layer.input_norm, self.spec.rms_norm_eps)
            query, key, value = self._query_key_value(x, layer, cosines, sines)
            backend.write_kv(key, value, cache, step.slot_mapping)
            attended = backend.attend(
                query,
                cache,
                step,
                scale=self.spec.head_size**-0.5,
                window=self.spec.window_of(index),
                soft_cap=self.spec.attention_soft_cap,
            )
            hidden += layer.output(attended.flatten(1))
            x = rms_norm(hidden, layer.mlp_norm, self.spec.rms_norm_eps)
            x = silu_and_multiply(layer.gate_up(x))
            hidden += layer.down(x)
        return rms_norm(hidden, self._weights.norm, self.spec.rms_norm_eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of every token of the vocabulary, float32 [n, vocab], for rows [n, hidden] of what forward returned."""
        return self._weights.head(hidden).float()

    def _query_key_value(
        self, x: torch.Tensor, layer: LayerWeights, cosines: torch.Tensor, sines: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[T, H, D], [T, K, D], [T, K, D]; q and k are normed (if the model does) and rotated, both in one go."""
        spec = self.spec
        num_rotated = spec.num_heads + spec.num_kv_heads
        heads = layer.qkv(x).view(x.shape[0], -1, spec.head_size)
        rotated, value = heads[:, :num_rotated], heads[:, num_rotated:]
        if layer.qk_norm is not None:
            rotated = rms_norm(rotated, layer.qk_norm, spec.rms_norm_eps)
        rotated = rotate(rotated, cosines, sines)
        return rotated[:, : spec.num_heads], rotated[:, spec.num_heads :], value
