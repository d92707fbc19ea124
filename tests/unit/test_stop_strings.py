"""Stop strings end the text at the same place whatever pieces it comes in, and nothing is held back without need."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from octavo.errors import ValidationError
from octavo.text.stop_strings import StopStrings

TEXTS = st.text(alphabet="abAB", max_size=30)
STOPS = st.lists(st.text(alphabet="abAB", min_size=1, max_size=5), max_size=4)


def feed(stops: list[str], include: bool, pieces: list[str]) -> tuple[str, str | None]:
    state = StopStrings(stops, include)
    shown, found = "", None
    for piece in pieces:
        text, found = state.push(piece)
        shown += text
    return shown + state.flush(), found


def expected(stops: list[str], include: bool, text: str) -> tuple[str, str | None]:
    """By trying every end: the first stop string to be complete, the longest of those."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def cut(text: str, places: list[int]) -> list[str]:
    bounds = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in pairwise(bounds)]


@given(STOPS, st.booleans(), TEXTS, st.lists(st.integers(0, 30)))
@example(["DEFGz", "DEF", "EF", "BCDEFG"], False, "xxABCDEFyyABCDEFGzz", list(range(20)))
def test_any_pieces_give_the_text_before_the_first_stop_string(
    stops: list[str], include: bool, text: str, places: list[int]
) -> None:
    assert feed(stops, include, cut(text, places)) == expected(stops, include, text)


@given(STOPS, TEXTS, st.lists(st.integers(0, 30)))
def test_no_stop_string_is_in_what_is_shown(stops: list[str], text: str, places: list[int]) -> None:
    shown, _ = feed(stops, False, cut(text, places))
    assert text.startswith(shown)
    assert not any(stop in shown for stop in stops)


@given(st.text(alphabet="ab", min_size=1, max_size=4), TEXTS)
def test_one_stop_string_is_a_split(stop: str, text: str) -> None:
    assert feed([stop], False, list(text))[0] == text.split(stop)[0]


@given(STOPS, st.lists(st.text(alphabet="abAB", max_size=6), max_size=8))
def test_only_the_longest_beginning_of_a_stop_string_is_held_back(
    stops: list[str], pieces: list[str]
) -> None:
    state, read, shown = StopStrings(stops, False), "", ""
    for piece in pieces:
        text, found = state.push(piece)
        if found:
            break
        read, shown = read + piece, shown + text
        beginnings = {stop[:n] for stop in stops for n in range(len(stop))} | {""}
        assert read[len(shown) :] == max((b for b in beginnings if read.endswith(b)), key=len)


def test_overlapping_stop_strings_leave_none_in_the_text() -> None:
    assert feed(["DEFGz", "DEF", "EF", "BCDEFG"], False, list("xxABCDEFyy")) == ("xxABC", "DEF")
    assert feed(["DEFGz", "DEF", "EF", "BCDEFG"], True, ["xxABCDEFGzz"]) == ("xxABCDEF", "DEF")


def test_nothing_passes_after_a_stop_string() -> None:
    state = StopStrings(["\n"], include=False)
    assert state.push("a\nb") == ("a", "\n")
    assert state.push("c") == ("", "\n")
    assert state.push("d", matching=False) == ("", "\n")
    assert state.flush() == ""


def test_held_text_comes_out_at_the_end() -> None:
    state = StopStrings(["STOP"], include=False)
    assert state.push("no STO") == ("no ", None)
    assert state.flush() == "STO"
    assert state.flush() == ""


def test_text_before_matching_starts_takes_no_part() -> None:
    state = StopStrings(["ab"], include=False)
    assert state.push("xab a", matching=False) == ("xab a", None)
    assert state.push("b ") == ("b ", None)
    assert state.push("cab") == ("c", "ab")
    held = StopStrings(["ab"], include=False)
    assert held.push("a") == ("", None)
    assert held.push("b", matching=False) == ("ab", None)


def test_no_stop_strings_pass_everything() -> None:
    assert feed([], False, ["a", "b"]) == ("ab", None)


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValidationError, match="empty"):
        StopStrings(["a", ""], include=False)
