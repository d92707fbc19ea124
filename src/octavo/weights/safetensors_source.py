"""Weights in safetensors files: one file, or shards that an index file lists.

The format is a length (u64, little-endian), that many bytes of JSON naming each tensor's dtype, shape and place, then the
data. Read by our own code because each claim in it has to be checked before it is believed: a header length of 2^60, a place
outside the file or a size that does not fit the shape is an error in one line here, not an allocation or a traceback.

Source: the format section of the safetensors README.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt
import torch

from octavo.errors import ModelFileError
from octavo.weights.hf_config import read_json
from octavo.weights.mapped_file import Extent, MappedFile, checked_name
from octavo.weights.source import ROW_TYPES

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100 * 10**6
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_MAX_DIMENSIONS = 8
# Elements converted at a time when the stored type is not the one wanted.
_PIECE = 2**20


class SafetensorsSource:
    """The safetensors weights of a model folder; a WeightSource.

    Raises ModelFileError if there are none, a shard is missing, or a header is not what its file can hold.
    """

    def __init__(self, folder: Path) -> None:
        self._index = folder / _INDEX
        single = folder / _SINGLE
        if self._index.exists():
            wanted = _weight_map(self._index)
        elif single.exists():
            self._index, wanted = single, {}
        else:
            raise ModelFileError(folder, _why_no_weights(folder))
        files = [folder / name for name in sorted(set(wanted.values()))] or [single]
        for path in files:
            if not path.exists():
                lost = sum(shard == path.name for shard in wanted.values())
                raise ModelFileError(
                    path, f"missing, with {lost} tensors that {_INDEX} places in it; get the model again"
                )
        self._files = {path.name: MappedFile(path) for path in files}
        headers = {name: _read_header(file) for name, file in self._files.items()}
        wanted = wanted or dict.fromkeys(headers[single.name], single.name)
        for tensor, shard in wanted.items():
            if tensor not in headers[shard]:
                raise ModelFileError(
                    folder / shard,
                    f"missing, though {_INDEX} places it here; get the model again",
                    tensor=tensor,
                )
        self._shards = wanted
        self._extents = {tensor: headers[shard][tensor] for tensor, shard in wanted.items()}

    def names(self) -> Collection[str]:
        """See WeightSource."""
        return self._extents.keys()

    def file_of(self, name: str) -> Path:
        """See WeightSource; for an unknown tensor the index, or the only file."""
        shard = self._shards.get(name)
        return self._files[shard].path if shard else self._index

    def shape(self, name: str) -> tuple[int, ...]:
        """See WeightSource."""
        return self._extent(name).shape

    def kind(self, name: str) -> torch.dtype | None:
        """The dtype that a tensor is stored in; None if it is not one of floating point that is supported."""
        return _DTYPES.get(self._extent(name).kind)

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """See WeightSource."""
        target = torch.empty(self.shape(name), dtype=dtype)
        self.fill(name, target)
        return target

    def fill(self, name: str, target: torch.Tensor) -> None:
        """See WeightSource. Always a copy: a tensor that aliased the file would change, or crash, with it."""
        extent = self._extent(name)
        file = self._files[self._shards[name]]
        stored = _DTYPES.get(extent.kind)
        if stored is None:
            raise ModelFileError(
                file.path,
                f"type {extent.kind} is not supported; supported: {', '.join(_DTYPES)}",
                tensor=name,
            )
        raw = np.frombuffer(file.bytes_at(extent.start, extent.num_bytes, name), dtype=np.uint8)
        flat = target.view(-1)
        if stored == target.dtype:
            flat.view(torch.uint8).numpy()[:] = raw
            return
        for first in range(0, flat.shape[0], _PIECE):
            piece = raw[first * stored.itemsize : (first + _PIECE) * stored.itemsize].copy()
            flat[first : first + _PIECE].copy_(torch.from_numpy(piece).view(stored))

    def row_type(self, name: str) -> str:
        """See WeightSource."""
        kind = self._extent(name).kind
        return kind if kind in ROW_TYPES else "F32"

    def rows(self, name: str) -> tuple[str, npt.NDArray[np.uint8]]:
        """See WeightSource."""
        extent = self._extent(name)
        if extent.kind not in ROW_TYPES:
            decoded = self.tensor(name, torch.float32)
            return "F32", decoded.view(decoded.shape[0], -1).view(torch.uint8).numpy()
        raw = self._files[self._shards[name]].bytes_at(extent.start, extent.num_bytes, name)
        return extent.kind, np.frombuffer(raw, dtype=np.uint8).reshape(extent.shape[0], -1)

    def extents(self) -> list[tuple[MappedFile, list[Extent]]]:
        """Every file with the tensors it holds, in file name order; what the digest is taken over."""
        by_file: dict[str, list[Extent]] = {name: [] for name in self._files}
        for tensor, shard in self._shards.items():
            by_file[shard].append(self._extents[tensor])
        return [(self._files[name], by_file[name]) for name in sorted(by_file)]

    def _extent(self, name: str) -> Extent:
        if name not in self._extents:
            raise ModelFileError(self._index, "there is no such tensor", tensor=name)
        return self._extents[name]


def _why_no_weights(folder: Path) -> str:
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        return "its weights are pickled (.bin, .pt), which can run code and is not loaded; get them as safetensors"
    return f"has neither {_SINGLE} nor {_INDEX}; a model folder needs one of them beside config.json"


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> shard file name."""
    weights = read_json(index).get("weight_map")
    if not isinstance(weights, dict) or not weights:
        raise ModelFileError(index, "has no weight_map, so the tensors cannot be found; get the model again")
    for tensor, shard in weights.items():
        checked_name(index, tensor)
        # A shard is a neighbour of the index. Anything else would let a model read files elsewhere.
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ModelFileError(
                index, f"weight_map names {shard!r}; it must be a .safetensors file beside it", tensor=tensor
            )
    return weights


def _read_header(file: MappedFile) -> dict[str, Extent]:
    """The tensors of one file by name, each checked to lie inside it and to fill its shape exactly."""
    length = int.from_bytes(file.bytes_at(0, _LENGTH_BYTES, "the header length"), "little")
    if length > min(file.size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
        raise ModelFileError(
            file.path,
            f"its header claims {length:,} bytes in a file of {file.size:,}; it is truncated or not a safetensors file",
        )
    try:
        header = json.loads(bytes(file.bytes_at(_LENGTH_BYTES, length, "the header")))
    except (ValueError, RecursionError) as e:
        raise ModelFileError(file.path, f"its header is not valid JSON ({e}); get the file again") from e
    if not isinstance(header, dict):
        raise ModelFileError(file.path, "its header is not a JSON object; get the file again")
    header.pop("__metadata__", None)
    start = _LENGTH_BYTES + length
    return {
        name: _extent(file, checked_name(file.path, name), entry, start) for name, entry in header.items()
    }


def _extent(file: MappedFile, name: str, entry: Any, data_start: int) -> Extent:
    corrupt = ModelFileError(file.path, f"its header entry is malformed: {str(entry)[:200]}", tensor=name)
    if not isinstance(entry, dict):
        raise corrupt
    kind, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(kind, str) or not _sizes(shape, _MAX_DIMENSIONS) or not _sizes(offsets, 2):
        raise corrupt
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise corrupt
    extent = Extent(name, kind, tuple(shape), data_start + offsets[0], offsets[1] - offsets[0])
    file.check(extent)
    if kind in _DTYPES and math.prod(shape) * _DTYPES[kind].itemsize != extent.num_bytes:
        raise ModelFileError(
            file.path,
            f"{kind} {shape} needs {math.prod(shape) * _DTYPES[kind].itemsize:,} bytes, its entry has "
            f"{extent.num_bytes:,}; get the file again",
            tensor=name,
        )
    return extent


def _sizes(value: Any, most: int) -> TypeGuard[list[int]]:
    """Whether a value is a list of at most `most` integers that are not negative."""
    return (
        isinstance(value, list)
        and len(value) <= most
        and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in value)
    )
