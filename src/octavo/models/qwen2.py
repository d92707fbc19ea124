"""Qwen 2 and 2.5: llama with biases on q, k and v, and optionally a sliding window in the upper layers.

Both are in the spec (`attention_bias`, `sliding_layers`).

Source: Yang et al., "Qwen2 Technical Report", 2024.
"""

from __future__ import annotations

from octavo.models.llama import Llama


class Qwen2(Llama):
    """Qwen2 and Qwen2.5, dense."""
