"""The models that can be served, by architecture name, and the one way to load one.

A new model is one file here, one line in MODELS, and one entry in `weights/architectures.py` if its checkpoints name a
family that is not read yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import torch

from octavo.attention.backend import AttentionBackend, AttentionStep
from octavo.model_spec import ModelSpec
from octavo.registry import Registry
from octavo.weights.source import WeightSource

MODELS = Registry(
    "model",
    {
        "llama": "octavo.models.llama:Llama",
        "mistral": "octavo.models.mistral:Mistral",
        "qwen2": "octavo.models.qwen2:Qwen2",
        "qwen3": "octavo.models.qwen3:Qwen3",
    },
)


class Model(Protocol):
    """What a runner needs of a model. Made by calling the class with (spec, source, dtype)."""

    spec: ModelSpec
    weight_bytes: int

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        caches: Sequence[torch.Tensor],
        step: AttentionStep,
        backend: AttentionBackend,
    ) -> torch.Tensor:
        """Hidden states [T, hidden] of the step's tokens; see Llama.forward."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [n, vocab] for hidden states [n, hidden]."""
        ...


def load_model(spec: ModelSpec, source: WeightSource, dtype: torch.dtype) -> Model:
    """Load the model that `spec.architecture` names, with weights as `dtype`.

    Raises ModelFileError if the weights do not fit the spec, ConfigError if the architecture is not in MODELS.
    """
    return cast(Model, MODELS.load(spec.architecture)(spec, source, dtype))
