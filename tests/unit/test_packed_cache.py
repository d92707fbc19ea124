"""Packed weights on disk: written once, mapped afterwards, made again whenever they are not what is asked for."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE

import numpy as np
import pytest

from octavo.weights import packed_cache
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.packed_cache import Arrays, packed_arrays, packed_folder
from tiny_models import tiny_gguf, tiny_model

SIZES = {"first": 10_000, "empty": 0, "second": 4096, "third": 1}


class Filler:
    """Fills arrays with numbers that depend on their names, and counts how often it is asked to."""

    def __init__(self, shift: int = 0) -> None:
        self.calls, self.shift = 0, shift

    def __call__(self, arrays: Arrays) -> None:
        self.calls += 1
        for i, array in enumerate(arrays.values()):
            array[:] = (np.arange(len(array)) + i + self.shift) % 251


def assert_filled(arrays: Arrays, sizes: dict[str, int] = SIZES, shift: int = 0) -> None:
    assert {name: len(array) for name, array in arrays.items()} == sizes
    for i, array in enumerate(arrays.values()):
        assert np.array_equal(array, (np.arange(len(array)) + i + shift) % 251)
        assert array.ctypes.data % 64 == 0 or not len(array)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_a_file_is_written_once_and_mapped_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "made" / "for this" / "weights.bin"
    fill = Filler()
    assert_filled(packed_arrays(path, SIZES, fill))
    again = packed_arrays(path, SIZES, fill)
    assert_filled(again)
    assert fill.calls == 1 and files(tmp_path) == ["weights.bin"]
    assert not any(array.flags.writeable for array in again.values() if len(array))


def test_without_a_path_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fill = Filler()
    assert_filled(packed_arrays(None, SIZES, fill))
    assert fill.calls == 1 and files(tmp_path) == []


def _shorter(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4096)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _longer(path: Path) -> None:
    os.truncate(path, path.stat().st_size + 1)


def _other_version(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"packed weights 1", b"packed weights 0", 1))


def _unfinished(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize("damage", [_shorter, _empty, _longer, _other_version, _unfinished])
def test_a_file_that_is_not_whole_is_made_again(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    path = tmp_path / "weights.bin"
    packed_arrays(path, SIZES, Filler(shift=3))
    damage(path)
    fill = Filler()
    assert_filled(packed_arrays(path, SIZES, fill))
    assert_filled(packed_arrays(path, SIZES, fill))
    assert fill.calls == 1 and files(tmp_path) == ["weights.bin"]


@pytest.mark.parametrize(
    "other",
    [
        {**SIZES, "third": 2},  # the file is as long
        {"1st": 10_000, "empty": 0, "second": 4096, "third": 1},
        {"second": 4096, "first": 10_000, "empty": 0, "third": 1},
        {**SIZES, "fourth": 0},
        {"first": 10_000},
    ],
)
def test_a_file_of_another_layout_is_made_again(tmp_path: Path, other: dict[str, int]) -> None:
    path = tmp_path / "weights.bin"
    before = packed_arrays(path, other, Filler(shift=3))
    fill = Filler()
    assert_filled(packed_arrays(path, SIZES, fill))
    assert fill.calls == 1 and files(tmp_path) == ["weights.bin"]
    # Who has the old file mapped keeps it.
    assert_filled(before, other, shift=3)


def test_a_new_version_of_the_code_makes_files_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "weights.bin"
    packed_arrays(path, SIZES, Filler(shift=3))
    monkeypatch.setattr(packed_cache, "_VERSION", b"octavo packed weights 9\n")
    fill = Filler()
    assert_filled(packed_arrays(path, SIZES, fill))
    assert fill.calls == 1


def _a_file_in_the_way(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.parent.rmdir()
    path.parent.write_text("a file")


def _a_folder_in_the_way(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.mkdir()


def _no_permission(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    # Tests may run as root, whom no mode of a folder keeps out.
    monkeypatch.setattr(packed_cache.tempfile, "mkstemp", refuse)


def _full_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_cache, "_SPARE_BYTES", 2**62)


def _disk_that_fills_up(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packed_cache.os, "posix_fallocate", refuse)


@pytest.mark.parametrize(
    "hinder", [_a_file_in_the_way, _no_permission, _full_disk, _disk_that_fills_up, _a_folder_in_the_way]
)
def test_where_nothing_can_be_written_weights_are_packed_into_memory(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    hinder: Callable[[Path, pytest.MonkeyPatch], None],
) -> None:
    path = tmp_path / "packed" / "weights.bin"
    path.parent.mkdir()
    hinder(path, monkeypatch)
    with caplog.at_level(logging.INFO, logger="octavo.weights.packed_cache"):
        assert_filled(packed_arrays(path, SIZES, Filler()))
    assert len(caplog.messages) == 1 and str(path.parent) in caplog.messages[0]
    assert all(name == "packed" for name in files(tmp_path))


def test_a_fault_while_packing_is_passed_on_and_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail(arrays: Arrays) -> None:
        raise MemoryError("while packing")

    with pytest.raises(MemoryError, match="while packing"):
        packed_arrays(tmp_path / "weights.bin", SIZES, fail)
    assert files(tmp_path) == []


# Packs like Filler, but says when it begins and waits for a line before it goes on.
_PROCESS = """
import sys
from pathlib import Path
import numpy as np
from octavo.weights.packed_cache import packed_arrays

def fill(arrays):
    print("packing", flush=True)
    sys.stdin.readline()
    for i, array in enumerate(arrays.values()):
        array[:] = (np.arange(len(array)) + i) % 251

arrays = packed_arrays(Path(sys.argv[1]), eval(sys.argv[2]), fill)
print([int(array.astype(np.int64).sum()) for array in arrays.values()], flush=True)
sys.stdin.readline()
"""


def test_two_processes_may_pack_the_same_model_at_once(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    command = [sys.executable, "-c", _PROCESS, str(path), repr(SIZES)]
    both = [subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) for _ in range(2)]
    assert [p.stdout.readline() for p in both] == ["packing\n"] * 2  # neither is done before both have begun
    results = []
    for process in both:
        process.stdin.write("go on\n")
        process.stdin.flush()
        results.append(process.stdout.readline())
    for process in both:
        process.communicate("done\n", timeout=30)
    arrays = packed_arrays(path, SIZES, fill := Filler())
    assert_filled(arrays)
    assert fill.calls == 0 and files(tmp_path) == ["weights.bin"]
    assert results == [f"{[int(a.astype(np.int64).sum()) for a in arrays.values()]}\n"] * 2
    assert [process.returncode for process in both] == [0, 0]


def test_the_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", "/somewhere")
    assert packed_folder() == Path("/somewhere/packed")
    monkeypatch.delenv("OCTAVO_CACHE")
    monkeypatch.setenv("HOME", "/home/me")
    assert packed_folder() == Path("/home/me/.cache/octavo/packed")


# ---- the name of a model's files


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of three safetensors files, and a GGUF file; not to be changed."""
    root = tmp_path_factory.mktemp("written")
    tiny_model("llama", root / "folder", max_shard_size="200KB")
    tiny_gguf(tiny_model("llama", root / "whole"), root / "tiny.gguf")
    return root


@pytest.fixture(params=["folder", "tiny.gguf"])
def model(request: pytest.FixtureRequest, written: Path, tmp_path: Path) -> Path:
    """A model to change, with the times of the original."""
    shutil.copytree(written, tmp_path / "copy")
    return tmp_path / "copy" / request.param


def weight_files(model: Path) -> list[Path]:
    return sorted(model.glob("*.safetensors")) if model.is_dir() else [model]


def test_identity_stays_while_nothing_changes(model: Path) -> None:
    first = open_checkpoint(model).identity
    assert first == open_checkpoint(model).identity
    moved = model.parent.rename(model.parent.parent / "moved") / model.name
    assert open_checkpoint(moved).identity == first
    assert len(first) == 32 and first.isalnum()


def test_identity_changes_with_the_time_of_any_file(model: Path) -> None:
    seen = {open_checkpoint(model).identity}
    for file in weight_files(model):
        stat = file.stat()
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
        seen.add(open_checkpoint(model).identity)
    assert len(seen) == 1 + len(weight_files(model))


def test_identity_changes_with_a_byte_that_the_digest_does_not_sample(model: Path) -> None:
    checkpoint = open_checkpoint(model)
    before, digest = checkpoint.identity, checkpoint.spec.digest
    file, extents = next(iter(checkpoint.source.extents()))
    extent = max(extents, key=lambda e: e.num_bytes)
    with file.path.open("r+b") as raw:
        raw.seek(extent.start + extent.num_bytes // 4)
        raw.write(b"\x01\x02\x03")
    checkpoint = open_checkpoint(model)
    assert checkpoint.spec.digest == digest and checkpoint.identity != before


def test_identity_tells_models_apart(written: Path) -> None:
    models = [written / "folder", written / "whole", written / "tiny.gguf"]
    assert len({open_checkpoint(model).identity for model in models}) == 3
