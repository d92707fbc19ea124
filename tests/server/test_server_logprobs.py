"""Offsets and names of tokens, against the definition."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fake_engine import ByteTokenizer
from octavo.server.logprobs import CompletionLogprobs, finite, ranked, token_name

TOKENIZER = ByteTokenizer()


@given(prompt=st.text(max_size=12), text=st.text(max_size=12))
def test_offsets_point_at_the_character_that_a_token_belongs_to(prompt: str, text: str) -> None:
    writer = CompletionLogprobs(TOKENIZER, 0, skip_special=True)
    parts = []
    for piece, write in ((prompt, lambda ids, e: writer.echo(prompt, ids, e)), (text, writer.generated)):
        ids = list(piece.encode())
        parts.append(write(ids, [{token_id: -1.0} for token_id in ids]))
    offsets = [offset for part in parts for offset in part["text_offset"]]
    whole = prompt + text
    owner = [i for i, character in enumerate(whole) for _ in character.encode()]
    assert offsets == owner


def test_hidden_special_token_leaves_no_text() -> None:
    ids = [72, 256, 105]
    entries = [{token_id: -1.0} for token_id in ids]
    for skip, expected in ((True, [0, 1, 1]), (False, [0, 1, 8])):
        writer = CompletionLogprobs(TOKENIZER, 0, skip_special=skip)
        assert writer.generated(ids, entries)["text_offset"] == expected


def test_start_token_that_is_not_in_the_prompt_leaves_no_text() -> None:
    writer = CompletionLogprobs(TOKENIZER, 0, skip_special=True)
    lists = writer.echo("Hi", [257, 72, 105], [None, {72: -1.0}, {105: -1.0}])
    assert lists["text_offset"] == [0, 0, 1]
    assert writer.generated([33], [{33: -1.0}])["text_offset"] == [2]


def test_names_of_parts_of_characters_differ() -> None:
    names = {token_name(TOKENIZER, token_id) for token_id in range(256)}
    assert len(names) == 256 and "\ufffd" not in names
    assert token_name(TOKENIZER, 256) == "<|end|>"


def test_alternatives_are_ranked_and_finite() -> None:
    entry = {5: -3.0, 1: -1.0, 2: -2.0, 9: float("-inf")}
    assert [token_id for token_id, _ in ranked(entry, 3)] == [1, 2, 5]
    assert finite(float("-inf")) == finite(float("nan")) == -9999.0
