"""Log probabilities in the three forms that clients know: chat, completions, and vLLM's `prompt_logprobs`.

A token that is only part of a character has no text of its own. Its name is then `bytes:` and its bytes in
hexadecimal, as in OpenAI's legacy API, so that two such tokens never share a name; the chat form has the
exact bytes beside it.

Offsets count characters of the choice's text. A token that completes a character and the tokens before it
that began it all have the offset of that character; a token that leaves no text (a hidden special token) has
the offset of what follows.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from typing import Any

from octavo.outputs import TokenLogprobs
from octavo.server.engine_api import TokenizerAPI

IMPOSSIBLE = -9999.0  # JSON has no infinity
COMPLETION_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def finite(logprob: float) -> float:
    """`logprob`, or -9999.0 if it cannot be written as JSON."""
    return logprob if math.isfinite(logprob) else IMPOSSIBLE


def token_name(tokenizer: TokenizerAPI, token_id: int) -> str:
    """What to call a token in a reply."""
    raw = tokenizer.token_bytes(token_id)
    try:
        raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
    return tokenizer.token_text(token_id)


def ranked(entry: TokenLogprobs, top: int) -> list[tuple[int, float]]:
    """The `top` likeliest tokens of an entry, from likely to unlikely."""
    return sorted(entry.items(), key=lambda item: -finite(item[1]))[:top]


def chat_logprobs(
    tokenizer: TokenizerAPI, token_ids: Sequence[int], entries: Sequence[TokenLogprobs], top: int
) -> dict[str, Any]:
    """Generated tokens in the form of chat completions; `top` alternatives for each."""
    content = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        item = _chat_token(tokenizer, token_id, entry[token_id])
        item["top_logprobs"] = [_chat_token(tokenizer, *other) for other in ranked(entry, top)]
        content.append(item)
    return {"content": content, "refusal": None}


def prompt_logprobs(
    tokenizer: TokenizerAPI, entries: Sequence[TokenLogprobs | None], top: int
) -> list[dict[str, Any] | None]:
    """Prompt tokens in vLLM's form: the token itself and `top` alternatives by id, null for the first token."""
    return [
        None
        if entry is None
        else {
            str(token_id): {"logprob": finite(logprob), "decoded_token": token_name(tokenizer, token_id)}
            for token_id, logprob in _itself_and_top(entry, top)
        }
        for entry in entries
    ]


class CompletionLogprobs:
    """Writes the log probabilities of one choice of a completion, piece by piece.

    top: alternatives for each token. skip_special: special tokens leave no text.
    """

    def __init__(self, tokenizer: TokenizerAPI, top: int, *, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._skip_special = skip_special
        self._num_characters = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def skip(self, text: str) -> None:
        """Text without tokens stands before what follows."""
        self._num_characters += len(text)

    def echo(
        self, text: str, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]
    ) -> dict[str, list[Any]]:
        """The prompt's tokens, laid along `text`; a token that is not found there (a start token) leaves
        none.
        """
        raw, at, offsets = text.encode(), 0, []
        for token_id in token_ids:
            offsets.append(self._num_characters)
            piece = self._tokenizer.token_bytes(token_id)
            if piece and raw.startswith(piece, at):
                self._num_characters += len(self._decoder.decode(piece))
                at += len(piece)
        self._decoder.reset()
        self._num_characters = len(text)
        return self._lists(token_ids, entries, offsets)

    def generated(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
        """The next generated tokens."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._num_characters)
            if not (self._skip_special and self._is_special(token_id)):
                piece = self._tokenizer.token_bytes(token_id)
                self._num_characters += len(self._decoder.decode(piece))
        return self._lists(token_ids, entries, offsets)

    def _is_special(self, token_id: int) -> bool:
        return self._tokenizer.special_token_id(self._tokenizer.token_text(token_id)) == token_id

    def _lists(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None], offsets: list[int]
    ) -> dict[str, list[Any]]:
        lists: dict[str, list[Any]] = {name: [] for name in COMPLETION_LISTS}
        for token_id, entry, offset in zip(token_ids, entries, offsets, strict=True):
            lists["tokens"].append(token_name(self._tokenizer, token_id))
            lists["token_logprobs"].append(None if entry is None else finite(entry[token_id]))
            lists["top_logprobs"].append(None if entry is None else self._alternatives(entry))
            lists["text_offset"].append(offset)
        return lists

    def _alternatives(self, entry: TokenLogprobs) -> dict[str, float]:
        names: dict[str, float] = {}
        for token_id, logprob in _itself_and_top(entry, self._top):
            # Different tokens may have one spelling; the token itself, then the likelier one keeps it.
            names.setdefault(token_name(self._tokenizer, token_id), finite(logprob))
        return names


def _itself_and_top(entry: TokenLogprobs, top: int) -> list[tuple[int, float]]:
    itself = next(iter(entry.items()))
    return [itself, *(item for item in ranked(entry, top) if item[0] != itself[0])]


def _chat_token(tokenizer: TokenizerAPI, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": token_name(tokenizer, token_id),
        "logprob": finite(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }
