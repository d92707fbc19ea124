"""Where weights come from: the seam between checkpoint formats and models.

A source serves tensors under Hugging Face names and in Hugging Face layouts, whatever the file calls them, so a model is
written once. Tensors are read when asked for, one at a time, and handed over: the caller owns them, the file is not held in
memory. Nothing is allocated before the file has been found long enough for what it claims.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from octavo.errors import ModelFileError
from octavo.weights.mapped_file import Extent, MappedFile


class WeightSource(Protocol):
    """Named tensors of one checkpoint. A name that is not in names() raises ModelFileError everywhere."""

    def names(self) -> Collection[str]:
        """All tensor names, as Hugging Face spells them (`model.layers.0.self_attn.q_proj.weight`)."""
        ...

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor, or the one to blame if it is missing."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        ...

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Read a tensor as `dtype` into memory of its own. Raises ModelFileError if its type is not supported."""
        ...

    def fill(self, name: str, target: torch.Tensor) -> None:
        """Read a tensor into `target`, a contiguous CPU tensor of its shape, converting to the dtype of `target`.

        This is how fused weights are loaded: no tensor exists twice. Raises ModelFileError as `tensor` does.
        """
        ...

    def extents(self) -> list[tuple[MappedFile, list[Extent]]]:
        """Every file with the tensors it holds; what the digest is taken over."""
        ...

    def row_type(self, name: str) -> str:
        """The type in which `rows` gives a matrix."""
        ...

    def rows(self, name: str) -> tuple[str, npt.NDArray[np.uint8]]:
        """A matrix as it lies in the file: its type (one of ROW_TYPES) and its rows, uint8 [rows, bytes of a row].

        A tensor of another type is decoded to F32. The array may be the file's own memory. Raises ModelFileError as
        `tensor` does.
        """
        ...


# Types of rows that packing reads as they are; the last three are GGUF's blocks of 32.
ROW_TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0")


def check_tensor(source: WeightSource, name: str, expected: tuple[int, ...]) -> None:
    """Raise ModelFileError unless `source` has tensor `name` in the shape that the model's config asks for."""
    if name not in source.names():
        raise ModelFileError(
            source.file_of(name),
            f"missing; the config asks for it with shape {list(expected)}; get the model again or fix its config",
            tensor=name,
        )
    shape = source.shape(name)
    if shape != expected:
        raise ModelFileError(
            source.file_of(name),
            f"has shape {list(shape)} but the config asks for {list(expected)}; weights and config do not belong together",
            tensor=name,
        )
