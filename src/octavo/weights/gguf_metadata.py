"""The key-value metadata of a GGUF file, in plain Python.

What this is: a walk over the metadata that notes where each value lies, and decodes a value when it is asked
for. It is not a reader of tensors, and it needs neither numpy nor the gguf package: a general reader turns
each of some 98,000 strings into several arrays, which takes seconds; this walk takes some 25 ms for SmolLM2
and is done in every process that starts.

    magic "GGUF" | version u32 | tensors u64 | pairs u64 | pair, pair, ...     a pair is: key string | type
    u32 | value a string is u64 length + UTF-8 bytes; an array is element type u32 + count u64 + elements; all
    little-endian

Source: the GGUF specification of the ggml project.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from octavo.errors import ModelFileError

# GGUF value types. 8 is a string, 9 an array; the others are numbers with these struct letters.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING = 8
_ARRAY = 9
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class GgufMetadata:
    """The key-value pairs of one GGUF file: walked when made (O(bytes of metadata)), decoded when asked for.

    Raises ModelFileError if the file is missing, is not GGUF, or ends inside its metadata.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as e:
            raise ModelFileError(path, f"cannot be read ({e}); give a readable .gguf file") from e
        # key -> (type, first byte of the value, byte after the value)
        self._places: dict[str, tuple[int, int, int]] = {}
        try:
            self._walk()
        except (struct.error, UnicodeDecodeError, OverflowError, RecursionError) as e:
            raise ModelFileError(
                path, f"ends or is damaged inside its metadata ({e}); download it again"
            ) from e

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def keys(self) -> list[str]:
        """All keys, in file order."""
        return list(self._places)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `key` as a Python number, bool, str or list, or `default`. O(elements)."""
        place = self._places.get(key)
        if place is None:
            return default
        try:
            return self._decode(place[0], place[1])
        except UnicodeDecodeError as e:
            raise ModelFileError(self.path, f"the text of {key} is not UTF-8 ({e})") from e

    def need(self, key: str) -> Any:
        """The value of `key`. Raises ModelFileError naming the key if it is not there."""
        if key not in self._places:
            raise ModelFileError(
                self.path, f"has no {key}, so its tokenizer cannot be built; convert the model again"
            )
        return self.get(key)

    def digest(self, prefix: str) -> str:
        """SHA-256 over all pairs whose key starts with `prefix`: equal in every quantization of one model."""
        digest = hashlib.sha256()
        for key, (_, start, end) in self._places.items():
            if key.startswith(prefix):
                digest.update(f"{key}\0{end - start}\0".encode())
                digest.update(self._bytes[start:end])
        return digest.hexdigest()

    def _walk(self) -> None:
        if self._bytes[:4] != b"GGUF":
            raise ModelFileError(self.path, "is not a GGUF file (it does not begin with GGUF)")
        version = _U32.unpack_from(self._bytes, 4)[0]
        if version not in (2, 3):
            raise ModelFileError(
                self.path, f"is GGUF version {version}; versions 2 and 3, little-endian, are read"
            )
        (num_pairs,) = _U64.unpack_from(self._bytes, 16)
        at = 24
        for _ in range(num_pairs):
            (length,) = _U64.unpack_from(self._bytes, at)
            key = self._bytes[at + 8 : at + 8 + length].decode("utf-8")
            at += 8 + length
            (kind,) = _U32.unpack_from(self._bytes, at)
            end = self._skip(kind, at + 4)
            self._places[key] = (kind, at + 4, end)
            at = end

    def _skip(self, kind: int, at: int) -> int:
        """The byte after the value of type `kind` that starts at byte `at`."""
        if kind == _STRING:
            at += 8 + _U64.unpack_from(self._bytes, at)[0]
        elif kind == _ARRAY:
            (element,) = _U32.unpack_from(self._bytes, at)
            (count,) = _U64.unpack_from(self._bytes, at + 4)
            at += 12
            if element in _NUMBERS:
                at += count * struct.calcsize(_NUMBERS[element])
            elif element == _STRING:
                read, source = _U64.unpack_from, self._bytes
                for _ in range(count):
                    at += 8 + read(source, at)[0]
            else:
                for _ in range(count):
                    at = self._skip(element, at)
        elif kind in _NUMBERS:
            at += struct.calcsize(_NUMBERS[kind])
        else:
            raise ModelFileError(self.path, f"has a metadata value of unknown type {kind} at byte {at}")
        if at > len(self._bytes):
            raise struct.error(f"a value reaches to byte {at}, the file has {len(self._bytes)}")
        return at

    def _decode(self, kind: int, at: int) -> Any:
        if kind == _STRING:
            return next(self._strings(at, 1))
        if kind != _ARRAY:
            return struct.unpack_from("<" + _NUMBERS[kind], self._bytes, at)[0]
        (element,) = _U32.unpack_from(self._bytes, at)
        (count,) = _U64.unpack_from(self._bytes, at + 4)
        at += 12
        if element == _STRING:
            return list(self._strings(at, count))
        if element in _NUMBERS:
            return list(struct.unpack_from(f"<{count}{_NUMBERS[element]}", self._bytes, at))
        values = []
        for _ in range(count):
            values.append(self._decode(element, at))
            at = self._skip(element, at)
        return values

    def _strings(self, at: int, count: int) -> Iterator[str]:
        read, source = _U64.unpack_from, self._bytes
        for _ in range(count):
            end = at + 8 + read(source, at)[0]
            yield source[at + 8 : end].decode("utf-8")
            at = end
