"""A model on disk, opened: what it is, and where its weights are read from.

    folder/config.json + *.safetensors  --+
                                          +-->  Checkpoint(spec, source, dtype)
    model.gguf                          --+

Opening reads headers and a few sampled bytes, never whole tensors. Keep a Checkpoint only while loading: it holds the files
mapped, and pages that were read count as this process's memory until it is dropped.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from octavo.errors import ModelFileError
from octavo.model_spec import ModelSpec
from octavo.weights.gguf_source import GgufSource
from octavo.weights.hf_config import read_hf_config
from octavo.weights.mapped_file import weights_digest
from octavo.weights.safetensors_source import SafetensorsSource
from octavo.weights.source import WeightSource

_EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True)
class Checkpoint:
    """One opened model. `dtype` is what its weights are stored in (float32 for quantised ones, which decode to it)."""

    path: Path
    spec: ModelSpec
    source: WeightSource
    dtype: torch.dtype

    @property
    def identity(self) -> str:
        """A name for the exact files: the digest, and when and how long they were written. For what is kept between runs."""
        files = [file for file, _ in self.source.extents()]
        stats = [(file.path.name, file.size, file.path.stat().st_mtime_ns) for file in files]
        return hashlib.sha256(f"{self.spec.digest}{stats}".encode()).hexdigest()[:32]


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a model folder (config.json with safetensors) or a .gguf file.

    Raises ModelFileError if something is missing, damaged or not supported; the message is one line.
    """
    path = Path(path)
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        raise ModelFileError(path, "no such file or folder; give a model folder or a .gguf file")
    return _open_gguf(path)


def _open_folder(folder: Path) -> Checkpoint:
    spec, named = read_hf_config(folder)
    source = SafetensorsSource(folder)
    stored = source.kind(_EMBEDDING) if _EMBEDDING in source.names() else None
    spec = replace(spec, digest=weights_digest(_facts(spec), source.extents()))
    return Checkpoint(folder, spec, source, named or stored or torch.float32)


def _open_gguf(file: Path) -> Checkpoint:
    source = GgufSource(file)
    matrices = [source.kind(name) for name in source.names() if len(source.shape(name)) > 1]
    stored = matrices[0] if matrices and len(set(matrices)) == 1 else None
    spec = replace(source.spec, digest=weights_digest(_facts(source.spec), source.extents()))
    return Checkpoint(file, spec, source, stored or torch.float32)


def _facts(spec: ModelSpec) -> str:
    """What the config contributes to the digest. The name does not change what is computed, nor do the end tokens."""
    return repr(replace(spec, name="", eos_token_ids=(), bos_token_id=None, digest=""))
