"""Mistral: llama in which every layer sees only the last `sliding_window` tokens (first releases; later ones see all).

The window is in the spec (`ModelSpec.window_of`), so there is nothing else to say in code. Keys older than the window stay
in the cache and are not read.

Source: Jiang et al., "Mistral 7B", 2023.
"""

from __future__ import annotations

from octavo.models.llama import Llama


class Mistral(Llama):
    """Mistral 7B and models that share its config class."""
