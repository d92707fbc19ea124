"""A read-only view of a weight file in which no read can leave the file, and the digest of what such files hold.

Offsets and lengths in a model file are claims. Every read goes through `bytes_at`, which checks the claim against the size
of the file before anything is mapped, copied or allocated.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from octavo.errors import ModelFileError

_SAMPLE_BYTES = 64
_MAX_NAME = 200


@dataclass(frozen=True)
class Extent:
    """Where one tensor lies in a file: bytes [start, start + num_bytes). `kind` is the file format's own type name."""

    name: str
    kind: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


class MappedFile:
    """A file mapped into memory. Pages are loaded on use and stay the system's to reclaim.

    Raises ModelFileError if the file cannot be opened or is empty.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.size = path.stat().st_size
                if self.size == 0:
                    raise ModelFileError(path, "the file is empty; get the model again")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as e:
            raise ModelFileError(
                path, f"cannot be read ({e.strerror}); check that it exists and is yours to read"
            ) from e
        self._view = memoryview(self._map)

    def bytes_at(self, start: int, length: int, what: str) -> memoryview:
        """The bytes [start, start + length), not copied. `what` names them in the error if the file is too short.

        Raises ModelFileError.
        """
        if start < 0 or length < 0 or start + length > self.size:
            raise ModelFileError(
                self.path,
                f"truncated or corrupt: {what} would end at byte {start + length:,} of {self.size:,}",
            )
        return self._view[start : start + length]

    def check(self, extent: Extent) -> None:
        """Raise ModelFileError if a tensor reaches beyond the file."""
        if extent.start + extent.num_bytes > self.size:
            raise ModelFileError(
                self.path,
                f"its data would end at byte {extent.start + extent.num_bytes:,} but the file has {self.size:,}; "
                "the file is truncated, get it again",
                tensor=extent.name,
            )


def checked_name(file: Path, name: str) -> str:
    """Return the name of a tensor; raises ModelFileError for one that no tensor has and no message should repeat."""
    if not name.isprintable() or len(name) > _MAX_NAME:
        raise ModelFileError(
            file, f"holds a tensor named {name[:_MAX_NAME]!r}; the file is corrupt, get it again"
        )
    return name


def weights_digest(facts: str, files: Iterable[tuple[MappedFile, Iterable[Extent]]]) -> str:
    """A stable name for what a model computes, cheap enough to take at every start; 32 hex digits.

    It covers `facts` (the config), the size of each file, and of each tensor its name, type, shape and three samples of 64
    bytes (start, middle, end). Paths and times do not matter. Two checkpoints of one shape that differ only in bytes that
    are not sampled (a few rows edited by hand) get the same digest; a training step or another quantisation does not
    leave the samples alone.
    """
    digest = hashlib.sha256(facts.encode())
    for file, extents in files:
        digest.update(f"|{file.size}".encode())
        for extent in sorted(extents, key=lambda e: e.name):
            digest.update(f"|{extent.name}|{extent.kind}|{extent.shape}|".encode())
            length = min(_SAMPLE_BYTES, extent.num_bytes)
            last = extent.num_bytes - length
            for offset in (0, last // 2, last):
                digest.update(file.bytes_at(extent.start + offset, length, extent.name))
    return digest.hexdigest()[:32]
