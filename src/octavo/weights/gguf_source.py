"""Weights in one GGUF file, dequantised on the way in.

Quantised tensors are decoded piece by piece into the tensor that is wanted, so the peak is that tensor plus one piece.
Llama files hold the rows of q and k in the order that ggml rotates them (adjacent pairs); they are put back into Hugging
Face's order (first half, second half) while still quantised, where a row is few bytes.

        tensor list after the metadata: name string | dimensions u32 | sizes u64 ... | type u32 | offset u64
        then padding to the alignment, then the data that the offsets count from

Decoding is the gguf package's. It works on groups of 16 rows, which for narrow matrices means many small numpy calls; given
a piece as a single wide row it is some five times faster. Threads do not help: the calls hold the interpreter lock too much.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Collection
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from octavo.errors import ModelFileError
from octavo.model_spec import ModelSpec
from octavo.weights.architectures import ARCHITECTURES
from octavo.weights.gguf_config import ROPE_DIVISORS, architecture_of, gguf_spec, hf_name
from octavo.weights.gguf_metadata import GgufMetadata
from octavo.weights.mapped_file import Extent, MappedFile, checked_name
from octavo.weights.source import ROW_TYPES

SUPPORTED_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_IGNORED = frozenset({ROPE_DIVISORS})
_MAX_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32
# Elements decoded at a time: 256 KiB of float32, which stays in cache between the passes of the decoder.
_PIECE = 2**16


class GgufSource:
    """The weights of a GGUF file; a WeightSource. `spec` is the model they make (without a digest).

    Raises ModelFileError if the file is not GGUF, is cut short, or holds what cannot be served.
    """

    def __init__(self, path: Path) -> None:
        metadata = _TensorList(path)
        self._file = metadata.file
        _refuse_split(metadata)
        architecture = architecture_of(metadata, path)
        self._rotated_rows = ARCHITECTURES[architecture].gguf_rotated_rows
        self._extents: dict[str, Extent] = {}
        for extent in metadata.extents.values():
            if extent.name in _IGNORED:
                continue
            name = hf_name(extent.name)
            if name is None:
                raise ModelFileError(
                    path, f"no {architecture} model that is supported has such a tensor", tensor=extent.name
                )
            self._extents[name] = extent
        self._list = metadata.extents
        embedding = self.shape("model.embed_tokens.weight")
        if len(embedding) != 2 or 0 in embedding:
            raise ModelFileError(
                path, f"has shape {list(embedding)}; it must be a matrix", tensor="token_embd.weight"
            )
        self.spec: ModelSpec = gguf_spec(
            metadata, path, self._extents.keys(), vocab_size=embedding[0], rope_divisors=self._rope_divisors()
        )

    def names(self) -> Collection[str]:
        """See WeightSource."""
        return self._extents.keys()

    def file_of(self, name: str) -> Path:
        """See WeightSource."""
        return self._file.path

    def shape(self, name: str) -> tuple[int, ...]:
        """See WeightSource."""
        return self._extent(name).shape

    def kind(self, name: str) -> torch.dtype | None:
        """The dtype that a tensor is stored in; None if it is quantised."""
        return _PLAIN.get(self._extent(name).kind)

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """See WeightSource."""
        target = torch.empty(self.shape(name), dtype=dtype)
        self.fill(name, target)
        return target

    def fill(self, name: str, target: torch.Tensor) -> None:
        """See WeightSource. Extra memory: a few MiB."""
        _decode(self._ordered(name), self._extent(name), target.view(-1))

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
        return extent.kind, self._ordered(name).reshape(extent.shape[0], -1)

    def extents(self) -> list[tuple[MappedFile, list[Extent]]]:
        """The file with all its tensors; what the digest is taken over."""
        return [(self._file, list(self._list.values()))]

    def _ordered(self, name: str) -> npt.NDArray[np.uint8]:
        """All bytes of a tensor, its rows in Hugging Face's order."""
        extent = self._extent(name)
        raw = self._raw(extent)
        heads = self._rotated_heads(name)
        if not heads:
            return raw
        if not extent.shape or extent.shape[0] % (2 * heads):
            raise ModelFileError(
                self._file.path,
                f"shape {list(extent.shape)} does not divide into {heads} heads",
                tensor=extent.name,
            )
        return _half_order(raw.reshape(extent.shape[0], -1), heads).reshape(-1)

    def _raw(self, extent: Extent) -> npt.NDArray[np.uint8]:
        if extent.kind not in SUPPORTED_TYPES:
            raise ModelFileError(
                self._file.path,
                f"type {extent.kind} is not supported; supported: {', '.join(SUPPORTED_TYPES)}",
                tensor=extent.name,
            )
        return np.frombuffer(self._file.bytes_at(extent.start, extent.num_bytes, extent.name), dtype=np.uint8)

    def _rotated_heads(self, name: str) -> int:
        """Number of heads whose rows have to be put back in order; 0 if none."""
        if not self._rotated_rows:
            return 0
        if ".self_attn.q_proj." in name:
            return self.spec.num_heads
        return self.spec.num_kv_heads if ".self_attn.k_proj." in name else 0

    def _rope_divisors(self) -> tuple[float, ...] | None:
        extent = self._list.get(ROPE_DIVISORS)
        if extent is None:
            return None
        divisors = torch.empty(extent.shape, dtype=torch.float32)
        _decode(self._raw(extent), extent, divisors.view(-1))
        return tuple(divisors.view(-1).tolist())

    def _extent(self, name: str) -> Extent:
        if name not in self._extents:
            raise ModelFileError(self._file.path, "there is no such tensor", tensor=name)
        return self._extents[name]


class _TensorList(GgufMetadata):
    """The metadata plus the list of tensors that follows it, each checked to lie inside the file."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.file = MappedFile(path)
        self.extents: dict[str, Extent] = {}
        self._at = max((end for _, _, end in self._places.values()), default=24)
        entries = [self._entry() for _ in range(self._tensor_count())]
        alignment = self.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelFileError(path, f"general.alignment is {alignment!r}; it must be a positive integer")
        data_start = -(-self._at // alignment) * alignment
        for name, shape, type_id, offset in entries:
            extent = _placed(path, name, shape, type_id, data_start + offset)
            self.file.check(extent)
            self.extents[name] = extent

    def _tensor_count(self) -> int:
        (count,) = struct.unpack("<Q", self.file.bytes_at(8, 8, "the number of tensors"))
        return int(count)

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, type and offset of the next tensor in the list."""
        name_length = self._numbers("<Q")[0]
        name = checked_name(self.path, bytes(self._take(name_length)).decode("utf-8", errors="replace"))
        dimensions = self._numbers("<I")[0]
        if dimensions > _MAX_DIMENSIONS:
            raise ModelFileError(
                self.path, f"claims {dimensions} dimensions; the file is corrupt", tensor=name
            )
        # GGUF lists the fastest dimension first.
        shape = tuple(reversed(self._numbers(f"<{dimensions}Q")))
        type_id, offset = self._numbers("<IQ")
        return name, shape, type_id, offset

    def _numbers(self, form: str) -> tuple[int, ...]:
        return struct.unpack(form, self._take(struct.calcsize(form)))

    def _take(self, length: int) -> memoryview:
        taken = self.file.bytes_at(self._at, length, "the list of tensors")
        self._at += length
        return taken


def _refuse_split(metadata: GgufMetadata) -> None:
    parts = metadata.get("split.count", 1)
    if parts not in (0, 1):
        raise ModelFileError(
            metadata.path, f"is one of {parts} parts; join them into one file (llama-gguf-split --merge)"
        )


def _placed(path: Path, name: str, shape: tuple[int, ...], type_id: int, start: int) -> Extent:
    """The extent of a tensor; its size follows from type and shape."""
    try:
        kind = GGMLQuantizationType(type_id)
    except ValueError:
        raise ModelFileError(
            path, f"type {type_id} is unknown; supported: {', '.join(SUPPORTED_TYPES)}", tensor=name
        ) from None
    block, block_bytes = GGML_QUANT_SIZES[kind]
    row = shape[-1] if shape else 1
    if row % block:
        raise ModelFileError(
            path,
            f"rows of {row} elements do not divide into blocks of {block} ({kind.name}); the file is corrupt",
            tensor=name,
        )
    return Extent(name, kind.name, shape, start, math.prod(shape) // block * block_bytes)


def _half_order(rows: npt.NDArray[np.uint8], heads: int) -> npt.NDArray[np.uint8]:
    """Rows of q or k, any bytes each: per head, from (first pair, second pair, ...) to (all firsts, all seconds)."""
    count = rows.shape[0]
    order = np.arange(count).reshape(heads, count // heads // 2, 2).swapaxes(1, 2).reshape(-1)
    return rows[order]


def _decode(raw: npt.NDArray[np.uint8], extent: Extent, target: torch.Tensor) -> None:
    """Decode all of `raw` into `target`, a flat tensor."""
    kind = GGMLQuantizationType[extent.kind]
    block, block_bytes = GGML_QUANT_SIZES[kind]
    step = _PIECE // block
    for first in range(0, len(raw) // block_bytes, step):
        piece = raw[first * block_bytes : (first + step) * block_bytes]
        part = target[first * block : (first + step) * block]
        if target.dtype == torch.float32:
            # A plain memory copy; torch would wake its threads for each piece, which costs more than the copy.
            part.numpy()[:] = dequantize(piece, kind)
        else:
            # torch wants arrays that are writable, and plain types are decoded by viewing the mapping, which is not.
            part.copy_(torch.from_numpy(dequantize(piece.copy() if extent.kind in _PLAIN else piece, kind)))
