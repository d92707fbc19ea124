"""Where a text ends because one of some given strings came up.

What this is: a filter between the detokenizer and whoever shows the text. It lets text through as soon as it
cannot be part of a stop string any more, and ends the text at the first stop string, whatever pieces the text
arrives in.

The rule: characters are read one by one; the first stop string to be **complete** ends the text; if several
are complete with the same character, the longest of them. The text is cut where that one begins. It follows
that no stop string is in what is let through (it would have been complete earlier), that the result does not
depend on the pieces, and that no token is generated only to see whether a longer stop string that began
earlier would be completed too. With DEFGz, DEF, EF and BCDEFG:

    x x A B C D E F y y        DEF and EF are complete at the same F; DEF is longer; "xxABC" is the text
          ^ BCDEFG is not complete at that F, so it has no say

Held back is the longest end of the text that a stop string begins with, and nothing else. Each stop string
keeps how many of its characters the end of the text matches, with the failure links of Knuth, Morris and
Pratt, so that a character costs O(stop strings) however long they are.

Source: Knuth, Morris, Pratt: Fast pattern matching in strings (1977).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from octavo.errors import ValidationError


class StopStrings:
    """Cuts one text at the first of `stops`; `include` keeps the stop string itself.

    Raises ValidationError for an empty stop string.

    >>> stops = StopStrings(["END"], include=False)
    >>> stops.push("the E"), stops.push("N of it"), stops.push(" EN"), stops.push("D.")
    (('the ', None), ('EN of it', None), (' ', None), ('', 'END'))
    """

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        if "" in stops:
            raise ValidationError("a stop string is empty; leave it out", param="stop")
        self._include = include
        # Longest first: the first to be found complete at a character is then the one that wins.
        self._stops = sorted(set(stops), key=lambda stop: (-len(stop), stop))
        self._links = [_failure_links(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self._firsts = frozenset(stop[0] for stop in self._stops)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str, *, matching: bool = True) -> tuple[str, str | None]:
        """Take the next piece; returns the text to show now and the stop string that was found, if any.

        With matching off (before `min_tokens`) the piece passes as it is, together with what was held back,
        and takes no part in any match: a stop string has to lie entirely in text pushed after that. After a
        stop string was found, nothing passes any more.
        """
        if self.found is not None:
            return "", self.found
        if not matching:
            return self.flush() + text, None
        if not self._held and self._firsts.isdisjoint(text):
            return text, None
        for place, character in enumerate(text):
            stop = self._advance(character)
            if stop is not None:
                self.found = stop
                read = self._held + text[: place + 1]
                self._held = ""
                return (read if self._include else read[: len(read) - len(stop)]), stop
        pending = self._held + text
        shown = len(pending) - max(self._matched)
        self._held = pending[shown:]
        return pending[:shown], None

    def flush(self) -> str:
        """The text still held back, to show when the text is over for another reason. Starts matching anew."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def _advance(self, character: str) -> str | None:
        """Read one character; the stop string that it completes, or None."""
        complete = None
        for i, stop in enumerate(self._stops):
            matched = self._matched[i]
            while matched and stop[matched] != character:
                matched = self._links[i][matched - 1]
            if stop[matched] == character:
                matched += 1
            if matched == len(stop):
                complete = complete or stop
                matched = 0
            self._matched[i] = matched
        return complete


@lru_cache(maxsize=64)
def _failure_links(stop: str) -> tuple[int, ...]:
    """For each character: the length of the longest proper beginning of `stop` that ends there.

    Kept, as all sequences of all prompts of a call have the same stop strings.
    """
    links = [0] * len(stop)
    length = 0
    for place in range(1, len(stop)):
        while length and stop[length] != stop[place]:
            length = links[length - 1]
        if stop[length] == stop[place]:
            length += 1
        links[place] = length
    return tuple(links)
