"""Qwen 3: llama whose query and key heads are normed before they are rotated, with a head size of its own.

Both are in the spec (`qk_norm`, `head_size`).

Source: Yang et al., "Qwen3 Technical Report", 2025.
"""

from __future__ import annotations

from octavo.models.llama import Llama


class Qwen3(Llama):
    """Qwen3, dense."""
