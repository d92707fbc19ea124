"""From a model's files to the two files that text handling needs: `tokenizer.json` and `settings.json`.

What this is: the one place that knows where the tokenizer and the chat template of a model are kept, in a
Hugging Face folder or inside a GGUF file. It is not the tokenizer (text/tokenizer.py), which reads the two
files and nothing else.

Why a converted copy: the HTTP process must start fast and must not import transformers, and building a
tokenizer from GGUF metadata costs more than loading a built one. The copy lies in a cache, one folder per
content:

    $OCTAVO_CACHE or ~/.cache/octavo
        tokenizers/<digest>/
            tokenizer.json      the `tokenizers` library's own format
            settings.json       what that format has no place for

The digest is SHA-256 over what the tokenizer is made of and our format number, not over the path or the time:
the contents of the tokenizer files of a folder, the `tokenizer.*` metadata of a GGUF file. So a moved or
re-quantized model finds its copy, and an edited one never finds an old copy. A folder of the cache is written
aside and renamed into place: it exists whole or not at all, and of two processes that race one wins and both
use the winner's. Where the cache cannot be written, a temporary folder serves, which goes when the process
ends.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer, processors

from octavo.errors import ModelFileError
from octavo.weights.gguf_metadata import GgufMetadata
from octavo.weights.gguf_tokenizer import ConvertedTokenizer, bos_post_processor, convert_gguf_tokenizer

# Part of the digest. Raise it whenever the same source would give other files.
_FORMAT = 1

_TOKENIZER = "tokenizer.json"
_SETTINGS = "settings.json"

# Files that a slow tokenizer may consist of; one of the first two kinds must be there.
_SLOW_FILES = (
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "spiece.model",
    "added_tokens.json",
)
_SIDE_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/tool_use.jinja",
    "generation_config.json",
    "config.json",
)


def prepare_tokenizer(model_path: str | Path) -> Path:
    """The folder that holds the tokenizer of a model in our form, made if it is not in the cache yet.

    model_path: a Hugging Face model folder, or a .gguf file. Costs tens of milliseconds once cached.
    Raises ModelFileError if the model has no tokenizer, or one that cannot be converted.
    """
    path = Path(model_path)
    if path.is_dir():
        digest = _folder_digest(path)
        metadata = None
    elif path.is_file():
        metadata = GgufMetadata(path)
        digest = _digest_of([("gguf", metadata.digest("tokenizer.").encode())])
    else:
        raise ModelFileError(path, "is not there; give a model folder or a .gguf file")
    cached = _cache_root() / "tokenizers" / digest
    if _whole(cached):
        return cached
    converted = convert_gguf_tokenizer(metadata) if metadata else _convert_folder(path)
    return _store(cached, converted.backend.to_str(), _settings(converted))


def _whole(folder: Path) -> bool:
    return (folder / _TOKENIZER).is_file() and (folder / _SETTINGS).is_file()


def _cache_root() -> Path:
    named = os.environ.get("OCTAVO_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "octavo"


def _digest_of(parts: Iterable[tuple[str, bytes]]) -> str:
    digest = hashlib.sha256(f"octavo tokenizer {_FORMAT}".encode())
    for name, content in parts:
        digest.update(f"\0{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:32]


def _folder_digest(folder: Path) -> str:
    has_ours = (folder / _TOKENIZER).is_file()
    names = (_TOKENIZER, *_SIDE_FILES) if has_ours else (*_SLOW_FILES, *_SIDE_FILES)
    try:
        return _digest_of((n, (folder / n).read_bytes()) for n in names if (folder / n).is_file())
    except OSError as e:
        raise ModelFileError(folder, f"its tokenizer files cannot be read ({e})") from e


def _store(cached: Path, backend: str, settings: dict[str, Any]) -> Path:
    """Write the two files to `cached`, or to a temporary folder if that cannot be. Returns where they are."""
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{cached.name[:8]}-", dir=cached.parent))
    except OSError:
        temporary = Path(tempfile.mkdtemp(prefix="octavo-tokenizer-"))
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        _write(temporary, backend, settings)
        return temporary
    try:
        _write(aside, backend, settings)
        aside.chmod(0o755)
        if cached.exists() and not _whole(cached):
            shutil.rmtree(cached, ignore_errors=True)
        aside.rename(cached)
    except OSError:
        # Renaming onto a folder that is not empty fails: another process was first, and its copy is as good
        # as ours.
        if not _whole(cached):
            atexit.register(shutil.rmtree, aside, ignore_errors=True)
            _write(aside, backend, settings)
            return aside
        shutil.rmtree(aside, ignore_errors=True)
    return cached


def _write(folder: Path, backend: str, settings: dict[str, Any]) -> None:
    (folder / _TOKENIZER).write_text(backend, encoding="utf-8")
    (folder / _SETTINGS).write_text(json.dumps(settings, ensure_ascii=False, indent=1), encoding="utf-8")


def _settings(converted: ConvertedTokenizer) -> dict[str, Any]:
    backend = converted.backend
    vocab = backend.get_vocab(with_added_tokens=True)
    settings: dict[str, Any] = {
        "format": _FORMAT,
        "chat_template": converted.chat_template,
        "tool_template": converted.tool_template,
        "eos_token_ids": list(converted.eos_token_ids),
        "vocab_size": max(vocab.values(), default=-1) + 1,
    }
    for name in ("bos", "eos", "unk", "pad"):
        text = converted.names.get(name)
        settings[f"{name}_token"] = text
        settings[f"{name}_token_id"] = None if text is None else backend.token_to_id(text)
    settings["add_bos"] = _adds(backend, settings["bos_token_id"])
    decoding, strips_space = _decoding(json.loads(backend.to_str())["decoder"])
    return settings | {
        "decoding": decoding,
        "byte_level": decoding == "byte_level",
        "strips_leading_space": strips_space,
    }


def _adds(backend: Tokenizer, bos_token_id: int | None) -> bool:
    """Whether encoding a prompt puts BOS before it. Tried out, as the ways to say so in the file are many."""
    return bos_token_id is not None and backend.encode("a").ids[:1] == [bos_token_id]


def _decoding(decoder: dict[str, Any] | None) -> tuple[str, bool]:
    """How tokens become text: "byte_level", "sentencepiece" (both byte by byte) or "other"; and whether a text loses its
    first space.
    """
    steps = [] if decoder is None else decoder.get("decoders", [decoder])
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return "byte_level", False
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"]:
        replaces = steps[0].get("pattern") == {"String": "▁"} and steps[0].get("content") == " "
        strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
        if replaces and steps[3:] in ([], [strip]):
            return "sentencepiece", bool(steps[3:])
    return "other", False


def _convert_folder(folder: Path) -> ConvertedTokenizer:
    config = _json(folder / "tokenizer_config.json")
    special = _json(folder / "special_tokens_map.json")
    if (folder / _TOKENIZER).is_file():
        try:
            backend = Tokenizer.from_file(str(folder / _TOKENIZER))
        except Exception as e:  # the library raises bare Exceptions for a malformed file
            raise ModelFileError(
                folder / _TOKENIZER, f"cannot be loaded ({_line(e)}); download it again"
            ) from e
    else:
        backend = _convert_slow(folder)
    backend.no_truncation()
    backend.no_padding()
    names = {}
    for name in ("bos", "eos", "unk", "pad"):
        token = _spelling(config.get(f"{name}_token")) or _spelling(special.get(f"{name}_token"))
        if token is not None and backend.token_to_id(token) is not None:
            names[name] = token
    _apply_add_bos(backend, config.get("add_bos_token"), names.get("bos"))
    template, tool_template = _templates(folder, config)
    return ConvertedTokenizer(
        backend, template, tool_template, names, _eos_token_ids(folder, backend, names.get("eos"))
    )


def _convert_slow(folder: Path) -> Tokenizer:
    if not any((folder / name).is_file() for name in _SLOW_FILES):
        raise ModelFileError(
            folder, f"has no tokenizer: neither {_TOKENIZER} nor tokenizer.model nor vocab.json is there"
        )
    try:
        from transformers import AutoTokenizer  # the only use: once per model, for files of an old kind

        return cast(Tokenizer, AutoTokenizer.from_pretrained(str(folder)).backend_tokenizer)
    except Exception as e:
        raise ModelFileError(
            folder, f"its tokenizer files cannot be converted ({_line(e)}); add a {_TOKENIZER}"
        ) from e


def _apply_add_bos(backend: Tokenizer, wanted: bool | None, bos: str | None) -> None:
    """Make BOS follow an explicit `add_bos_token`, which outranks what tokenizer.json says, as in transformers."""
    bos_id = None if bos is None else backend.token_to_id(bos)
    if wanted is None or bos is None or bos_id is None or wanted == _adds(backend, bos_id):
        return
    if wanted:
        backend.post_processor = bos_post_processor(bos, bos_id)
    else:
        # A template of the prompt alone, as a processor can be replaced but not taken away.
        backend.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B:1")


def _templates(folder: Path, config: dict[str, Any]) -> tuple[str | None, str | None]:
    """The chat template and the one for requests with tools; files of their own outrank tokenizer_config.json."""
    named = config.get("chat_template")
    if isinstance(named, list):
        found = {entry.get("name"): entry.get("template") for entry in named}
    else:
        found = {"default": named or _json(folder / "chat_template.json").get("chat_template")}
    files = {
        "default": folder / "chat_template.jinja",
        "tool_use": folder / "additional_chat_templates" / "tool_use.jinja",
    }
    for name, file in files.items():
        if file.is_file():
            found[name] = file.read_text(encoding="utf-8")
    return found.get("default"), found.get("tool_use")


def _eos_token_ids(folder: Path, backend: Tokenizer, eos: str | None) -> tuple[int, ...]:
    """The tokenizer's end token and those that generation_config.json (or else config.json) names."""
    ids = [] if eos is None else [backend.token_to_id(eos)]
    for name in ("generation_config.json", "config.json"):
        listed = _json(folder / name).get("eos_token_id")
        if listed is not None:
            ids += listed if isinstance(listed, list) else [listed]
            break
    return tuple(dict.fromkeys(i for i in ids if isinstance(i, int)))


def _spelling(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) and text else None


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ModelFileError(file, f"is not readable JSON ({_line(e)}); download it again") from e
    if not isinstance(content, dict):
        raise ModelFileError(file, "does not hold a JSON object; download it again")
    return content


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
