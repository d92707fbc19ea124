"""Facts about a model and the shape of its KV memory, found at start and never changed.

`ModelSpec` is what a checkpoint says about itself (a Hugging Face config.json or the metadata of a GGUF file, in the same
words). `KVLayout` says which layers keep KV together and what one block of that costs. Both are plain data, so the
scheduler, the simulator and the memory report can use them without torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for long contexts.

    kind: "linear" or "llama3"; loaders refuse other kinds. The numbers are those of the checkpoint's own `rope_scaling`;
    fields that a kind does not use stay at their defaults.
    """

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    # Some GGUF files carry the finished per-frequency divisors instead of the recipe.
    frequency_divisors: tuple[float, ...] | None = None


@dataclass(frozen=True)
class ModelSpec:
    """One decoder-only transformer. Sizes are counts, not bytes."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    max_position: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None
    # Layers that use the sliding window; None means all of them (if there is a window at all).
    sliding_layers: tuple[int, ...] | None = None
    tie_embeddings: bool = False
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    attention_soft_cap: float | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    name: str = ""
    # Digest of the weights' identity; part of the key of every cached block.
    digest: str = ""

    def window_of(self, layer: int) -> int | None:
        """The sliding window of a layer in tokens, or None for full attention."""
        if self.sliding_window is None:
            return None
        if self.sliding_layers is None or layer in self.sliding_layers:
            return self.sliding_window
        return None


@dataclass(frozen=True)
class CacheGroup:
    """Layers whose KV lives and dies together, so that one block table serves them all."""

    name: str
    layers: tuple[int, ...]
    bytes_per_token: int


@dataclass(frozen=True)
class KVLayout:
    """What one block holds and costs. `block_size` is in tokens, sizes in bytes."""

    block_size: int
    groups: tuple[CacheGroup, ...] = field(default_factory=tuple)

    @property
    def block_bytes(self) -> int:
        return self.block_size * sum(group.bytes_per_token for group in self.groups)


def kv_layout(spec: ModelSpec, block_size: int, element_bytes: int, scale_bytes: int = 0) -> KVLayout:
    """The layout of an attention-only model: one group with every layer.

    Sliding-window layers share the group: their KV is kept and masked. `element_bytes` is the size of one number of K or V,
    `scale_bytes` what a quantised vector of one token and head has besides.
    """
    per_layer = 2 * spec.num_kv_heads * (spec.head_size * element_bytes + scale_bytes)
    group = CacheGroup("attention", tuple(range(spec.num_layers)), per_layer * spec.num_layers)
    return KVLayout(block_size, (group,))
