"""Text to token ids and back.

What this is: the one tokenizer of server and offline API, over two prepared files: `tokenizer.json` (the
`tokenizers` library's format, whose Rust code does the work and releases the GIL meanwhile) and
`settings.json` (BOS, EOS, chat template). It is not chat rendering (chat_template.py) and not streaming
(detokenizer.py).

Decoding goes by bytes where it can. In byte-level vocabularies a token *is* a string of bytes, spelled with
one printable character per byte; in SentencePiece vocabularies with byte fallback it is text with ▁ for the
space, or one byte spelled <0xE2>. For both, `token_bytes` is a table look-up, a text is the UTF-8 decoding of
the joined bytes, and streaming is exact. Only vocabularies of other kinds go through the library's decoder.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as Backend

from octavo.errors import ModelFileError, ValidationError

_SPACE_MARK = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """A tokenizer loaded from a prepared folder. Read-only, and safe to use from several threads.

    chat_template, tool_template: Jinja sources (the second for requests with tools), None if the model has
    none. bos_token_id, eos_token_ids: None and empty if there are none. special_ids: the control tokens.
    adds_bos: whether encoding with special tokens begins with BOS. vocab_size: largest id + 1.

    Raises ModelFileError if the folder does not hold a usable tokenizer.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        try:
            settings: dict[str, Any] = json.loads((self.folder / "settings.json").read_text(encoding="utf-8"))
            self._backend = Backend.from_file(str(self.folder / "tokenizer.json"))
        except Exception as e:  # the library raises bare Exceptions for a malformed file
            raise ModelFileError(
                folder, f"does not hold a prepared tokenizer ({e}); remove the folder and start again"
            ) from e
        self.chat_template: str | None = settings["chat_template"]
        self.tool_template: str | None = settings["tool_template"]
        self.bos_token_id: int | None = settings["bos_token_id"]
        self.eos_token_ids: tuple[int, ...] = tuple(settings["eos_token_ids"])
        self.vocab_size: int = settings["vocab_size"]
        self.adds_bos: bool = settings["add_bos"]
        # "byte_level", "sentencepiece" or "other"; see the head note.
        self.decoding: str = settings["decoding"]
        self.strips_leading_space: bool = settings["strips_leading_space"]
        # What templates know as bos_token, eos_token and so on.
        self.special_names: dict[str, str] = {
            name: settings[name]
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
            if settings[name] is not None
        }
        added = self._backend.get_added_tokens_decoder()
        self._special = {token.content: token_id for token_id, token in added.items() if token.special}
        self.special_ids: frozenset[int] = frozenset(self._special.values())
        # The unknown token is a control token too, but plain text may well contain it.
        self._written_only_by_templates = self.special_ids - {settings["unk_token_id"]}
        # Stands for a control token while the text around it is encoded with control tokens turned off. Nobody can
        # guess it, so nobody can write it; and it is never seen in a result, so that it is random does no harm.
        self._separator = f"\ufdd0{secrets.token_hex(8)}\ufdd0"
        self._bytes: dict[int, bytes] = {}
        self._byte_of = _byte_spellings() if self.decoding == "byte_level" else {}

    @property
    def byte_exact(self) -> bool:
        """Whether a text is the UTF-8 decoding of its tokens' joined bytes."""
        return self.decoding != "other"

    @property
    def special_texts(self) -> list[str]:
        """The spellings of the control tokens."""
        return list(self._special)

    def special_token_id(self, text: str) -> int | None:
        """The id of the control token that is spelled `text`, or None."""
        return self._special.get(text)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; control tokens spelled out in it become control tokens. O(characters), without the GIL.

        With add_special_tokens, BOS is put first if this tokenizer does that, but never before a BOS that the
        text has.
        Raises ValidationError for text that is not valid Unicode (half of a surrogate pair).
        """
        ids = list(_encode(self._backend, text, add_special_tokens).ids)
        if add_special_tokens and self.adds_bos and ids[:2] == [self.bos_token_id, self.bos_token_id]:
            return ids[1:]
        return ids

    def encode_with_literals(self, text: str, literals: Mapping[str, str]) -> list[int]:
        """Token ids of `text` where some control-token spellings are meant as plain text; nothing is added before or after.

        literals: single characters that occur in `text` -> the spelling that each stands for. Control tokens
        elsewhere in `text` are control tokens. The ids are those of one text in which only the latter cut it
        into parts, so that the plain parts are encoded as any other text.

        Raises ValidationError if the tokenizer has no way to write a spelling as plain text.
        """
        encoding = _encode(self._backend, text, False, with_places=True)
        marked, controls, at = [], [], 0
        for place, token_id in enumerate(encoding.ids):
            if token_id in self.special_ids:
                span = encoding.token_to_chars(place)
                assert span is not None, "a control token has a place, as nothing was added to the text"
                marked += [text[at : span[0]], self._separator]
                controls.append(token_id)
                at = span[1]
        marked.append(text[at:])
        plain = "".join(marked).translate({ord(mark): spelling for mark, spelling in literals.items()})
        ids = _encode(self._plain_backend, plain, False).ids
        if not self._written_only_by_templates.isdisjoint(ids):
            raise ValidationError(
                f"this tokenizer cannot write {sorted(set(literals.values()))} as plain text; leave it out",
                param="messages",
            )
        separator_id = self._plain_backend.token_to_id(self._separator)
        rest = iter(controls)
        return [next(rest) if token_id == separator_id else token_id for token_id in ids]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`. Bytes that are not UTF-8 become U+FFFD; ids that name no token are nothing. O(ids)."""
        if not self.byte_exact:
            known = [i for i in ids if 0 <= i < self.vocab_size]
            return str(self._backend.decode(known, skip_special_tokens=skip_special_tokens))
        text = b"".join(self.visible_bytes(ids, skip_special_tokens)).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips_leading_space else text

    def visible_bytes(self, ids: Iterable[int], skip_special_tokens: bool) -> Iterable[bytes]:
        """The bytes of each token, leaving out control tokens if asked to."""
        hidden = self.special_ids if skip_special_tokens else frozenset()
        return (self.token_bytes(i) for i in ids if i not in hidden)

    def token_text(self, token_id: int) -> str:
        """What one token shows in lists of log probabilities: control tokens spelled out, part of a character as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, control tokens spelled out; empty for an id that names no token."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._find_bytes(token_id)
        return found

    @cached_property
    def _plain_backend(self) -> Backend:
        """The same tokenizer with control tokens turned off, and a separator that they can be put back for."""
        backend = Backend.from_str(self._backend.to_str())
        backend.encode_special_tokens = True
        backend.add_tokens([AddedToken(self._separator, normalized=False)])
        return backend

    def _find_bytes(self, token_id: int) -> bytes:
        spelled = self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        if spelled is None:
            return b""
        if self.decoding == "byte_level":
            # Added tokens are kept as they read, so any character that spells no byte means: all of it is
            # plain text.
            values = [self._byte_of.get(character) for character in spelled]
            plain = [value for value in values if value is not None]
            return bytes(plain) if len(plain) == len(values) else spelled.encode()
        if self.decoding == "sentencepiece":
            byte = _BYTE_TOKEN.fullmatch(spelled)
            return bytes([int(byte[1], 16)]) if byte else spelled.replace(_SPACE_MARK, " ").encode()
        return str(self._backend.decode([token_id], skip_special_tokens=False) or spelled).encode()


def _encode(backend: Backend, text: str, add_special_tokens: bool, with_places: bool = False) -> Encoding:
    # A batch of one: of the library's calls only those for batches release the GIL. The fast one knows no places.
    encode = backend.encode_batch if with_places else backend.encode_batch_fast
    try:
        return encode([text], add_special_tokens=add_special_tokens)[0]
    except (TypeError, UnicodeEncodeError):
        # The library says no more than that this is not text. Half of a surrogate pair comes out of a
        # careless JSON escape.
        broken = re.search("[\ud800-\udfff]", text)
        if broken is None:
            raise
        raise ValidationError(
            f"the text has {broken[0]!r}, half of a surrogate pair, at character {broken.start()}; send valid Unicode",
            param="prompt",
        ) from None


def _byte_spellings() -> dict[str, int]:
    """Character -> byte of byte-level vocabularies: printable Latin-1 bytes spell themselves, the others U+0100 onwards.

    Source: the byte encoder of GPT-2.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    spelled = {chr(byte): byte for byte in printable}
    return spelled | {chr(0x100 + place): byte for place, byte in enumerate(others)}
