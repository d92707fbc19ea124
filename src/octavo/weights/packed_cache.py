"""Packed weights on disk, so that a model that was packed once is mapped the next time.

    header, one page: magic, digest of the layout         then each array on a page of its own, in the order of the layout

The name of a file holds the digest of the weights and what they were packed for; the layout digest guards against a file of
another version. A file is written beside its place and then renamed, so one that is there is whole. It is mapped read-only
and shared: several engines of one model hold its weights in memory once. Where nothing can be written (no space, no
permission), the weights are packed into memory instead, and only the next start is slower.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

logger = logging.getLogger(__name__)

Arrays = dict[str, npt.NDArray[np.uint8]]
_PAGE = 4096
# Changes when the meaning of packed bytes does.
_VERSION = b"octavo packed weights 1\n"
# Left free on the disk: a cache must not be what fills it.
_SPARE_BYTES = 2**30


def packed_arrays(path: Path | None, sizes: Mapping[str, int], fill: Callable[[Arrays], None]) -> Arrays:
    """Arrays of `sizes` bytes, from the file at `path`, or filled by `fill` (and then written there, if that is possible).

    path: None keeps them in memory only. Arrays of a file are read-only.
    """
    if path is None:
        return _in_memory(sizes, fill)
    found = _mapped(path, sizes)
    if found is not None:
        return found
    try:
        _write(path, sizes, fill)
        found = _mapped(path, sizes)
    except OSError as e:
        logger.info("packed weights are not kept in %s (%s)", path.parent, e.strerror or e)
    return _in_memory(sizes, fill) if found is None else found


def packed_folder() -> Path:
    """Where packed weights are kept: $OCTAVO_CACHE/packed, by default ~/.cache/octavo/packed."""
    root = os.environ.get("OCTAVO_CACHE")
    return (Path(root).expanduser() if root else Path.home() / ".cache" / "octavo") / "packed"


def _layout(sizes: Mapping[str, int]) -> tuple[bytes, dict[str, tuple[int, int]], int]:
    """Header, place of each array as (start, length), length of the file."""
    places: dict[str, tuple[int, int]] = {}
    at = _PAGE
    for name, size in sizes.items():
        places[name] = (at, size)
        at += -(-size // _PAGE) * _PAGE
    digest = hashlib.sha256(repr(list(places.items())).encode()).digest()
    return _VERSION + digest, places, at


def _mapped(path: Path, sizes: Mapping[str, int]) -> Arrays | None:
    header, places, length = _layout(sizes)
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != length or file.read(len(header)) != header:
                return None
            mapping = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ)
    except OSError:
        return None
    mapping.madvise(mmap.MADV_WILLNEED)
    return _views(mapping, places)


def _write(path: Path, sizes: Mapping[str, int], fill: Callable[[Arrays], None]) -> None:
    header, places, length = _layout(sizes)
    path.parent.mkdir(parents=True, exist_ok=True)
    room = os.statvfs(path.parent)
    if room.f_bavail * room.f_frsize < length + _SPARE_BYTES:
        raise OSError(28, "too little space is left on the disk")
    handle, beside = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "r+b") as file:
            # Blocks are taken now: a mapping of a file with holes ends the process when the disk is full.
            os.posix_fallocate(file.fileno(), 0, length)
            mapping = mmap.mmap(file.fileno(), length)
            fill(_views(mapping, places))
            mapping[: len(header)] = header
        Path(beside).replace(path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise


def _in_memory(sizes: Mapping[str, int], fill: Callable[[Arrays], None]) -> Arrays:
    _, places, length = _layout(sizes)
    mapping = mmap.mmap(-1, length)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    arrays = _views(mapping, places)
    fill(arrays)
    return arrays


def _views(mapping: mmap.mmap, places: Mapping[str, tuple[int, int]]) -> Arrays:
    whole = np.frombuffer(mapping, np.uint8)
    return {name: whole[start : start + size] for name, (start, size) in places.items()}
