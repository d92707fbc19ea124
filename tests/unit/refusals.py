"""What a broken model must do: be refused with one line that names the file, or load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from octavo.errors import ModelFileError
from octavo.weights.checkpoint import open_checkpoint


def fault(path: Path) -> ModelFileError:
    """The error of opening `path` and reading all of it; it must be one line."""
    with pytest.raises(ModelFileError) as caught:
        checkpoint = open_checkpoint(path)
        for name in checkpoint.source.names():
            checkpoint.source.tensor(name, torch.float32)
    assert "\n" not in str(caught.value)
    return caught.value


def opens_or_refuses(path: Path) -> None:
    """Open `path` and read all of it; the only exception that may come of it is ModelFileError."""
    try:
        checkpoint = open_checkpoint(path)
        for name in checkpoint.source.names():
            checkpoint.source.tensor(name, torch.float32)
    except ModelFileError as e:
        assert "\n" not in str(e)
