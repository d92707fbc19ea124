"""Starting the engine process: what it imports is ours, wherever the user stands."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from octavo.config import EngineConfig, ModelConfig
from octavo.engine.link import start_engine
from octavo.errors import OctavoError


def test_modules_in_the_working_directory_are_not_taken_for_those_of_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "random.py").write_text("raise RuntimeError('not the random that was meant')")
    monkeypatch.chdir(tmp_path)
    config = EngineConfig(model=ModelConfig(path=str(tmp_path / "no-model")), num_threads=1)
    with pytest.raises(OctavoError, match="no such file or folder") as caught:
        asyncio.run(start_engine(config, "INFO"))
    assert caught.value.code == "model_file"
