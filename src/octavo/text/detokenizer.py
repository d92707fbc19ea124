"""Text of a growing sequence, piece by piece.

What this is: the state that turns one token after the other into new text, so that the pieces joined are the
text of all the tokens, and no piece ends inside a character. It knows nothing of stop strings
(stop_strings.py).

    tokens   "Hello"   " "+F0 9F    98 80     " w"          a character may be spread over tokens, also over
    three or four pieces   "Hello"   " "          "😀"      " w"

Where tokens are bytes (byte-level and SentencePiece vocabularies) their bytes go through an incremental UTF-8
decoder: exact by construction, with U+FFFD only for bytes that can no longer become a character.
SentencePiece texts lose their first space; a continuation of a prompt that shows any text does not begin a
text, so it keeps its space.

For other vocabularies a token's text depends on its neighbours, so a window of the last tokens is decoded
twice, without and with the new token, and the difference is what is new.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from octavo.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"

# How many tokens before the new one a vocabulary of another kind gets as neighbours.
_WINDOW_TOKENS = 6

_UTF8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """New text for each new token of one sequence.

    prompt_token_ids: what the sequence continues; only whether it shows any text matters (and, for
    vocabularies whose tokens are not bytes, its last tokens). skip_special_tokens: leave control tokens out.

    The pieces joined, with `flush` at the end, are `tokenizer.decode` of the same ids, apart from the first
    space above.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, prompt_token_ids: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._token_bytes = tokenizer.token_bytes
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decode = _UTF8("replace").decode
        shows_text = any(tokenizer.visible_bytes(prompt_token_ids, skip_special_tokens))
        self._strips_space = tokenizer.strips_leading_space and not shows_text
        self._window = (
            None if tokenizer.byte_exact else _Window(tokenizer, skip_special_tokens, prompt_token_ids)
        )

    def push(self, token_id: int) -> str:
        """The text that `token_id` adds: maybe none, if it is hidden or ends inside a character."""
        if token_id in self._hidden:
            return ""
        if self._window is not None:
            return self._window.push(token_id)
        text = self._decode(self._token_bytes(token_id))
        if self._strips_space and text:
            self._strips_space = False
            return text.removeprefix(" ")
        return text

    def flush(self) -> str:
        """What is left when no token will follow: U+FFFD for an unfinished character, else nothing."""
        if self._window is not None:
            return self._window.flush()
        return self._decode(b"", True)


class _Window:
    """Incremental decoding where a token's text depends on the tokens before it."""

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool, prompt_token_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids = list(prompt_token_ids[-_WINDOW_TOKENS:])
        # The text of the first `_num_shown` ids of the window has been shown (or is the prompt's).
        self._num_shown = len(self._ids)

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        new = self._unseen()
        if not new or new.endswith(_REPLACEMENT):
            return ""
        self._num_shown = len(self._ids)
        excess = max(0, self._num_shown - _WINDOW_TOKENS)
        del self._ids[:excess]
        self._num_shown -= excess
        return new

    def flush(self) -> str:
        new = self._unseen()
        self._num_shown = len(self._ids)
        return new

    def _unseen(self) -> str:
        before = self._tokenizer.decode(self._ids[: self._num_shown], skip_special_tokens=self._skip)
        return self._tokenizer.decode(self._ids, skip_special_tokens=self._skip)[len(before) :]
