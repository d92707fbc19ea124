"""Random numbers that depend on nothing but a seed and a position.

The token at position i of a sequence is chosen with `uniform(seed, i)`, whatever ran beside it, however
often it was preempted and whichever process computed it. There is no generator and no state: a number is a
hash of its two arguments.

The hash is the output function of SplitMix64 on a key and a counter: the seed is mixed into a key first, so
that neighbouring seeds give unrelated streams, and then the counter walks from that key in steps of the
golden ratio, as SplitMix64 does. The two uses below start from keys of their own, so a derived seed never
repeats a number of its parent's stream.

Source: G. Steele, D. Lea, C. Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014
(SplitMix64).
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_SIGN = 1 << 63
# Arbitrary odd words (fractions of sqrt 2 and sqrt 3) that keep the two uses of one seed apart.
_DOMAIN_UNIFORM = 0x6A09E667F3BCC909
_DOMAIN_DERIVED = 0xBB67AE8584CAA73B


def derived_seed(seed: int, index: int) -> int:
    """The seed of the sequence `index` of a request whose seed is `seed`.

    Both may be any integer and count as 64-bit two's complement. For one seed, different indices give
    different results (the map is one to one); the result is from -2**63 to 2**63 - 1.

    >>> derived_seed(7, 0) != derived_seed(7, 1) != derived_seed(8, 0)
    True
    """
    word = _hash(seed, index, _DOMAIN_DERIVED)
    return word - (1 << 64) if word & _SIGN else word


def uniform(seed: int, position: int) -> float:
    """A number from [0, 1) for the token `position` (0 is the first generated) of the sequence with `seed`.

    A multiple of 2**-53, so that every value is exact and 1 never comes up.

    >>> uniform(7, 0) == uniform(7, 0) and 0 <= uniform(-1, 3) < 1
    True
    """
    return (_hash(seed, position, _DOMAIN_UNIFORM) >> 11) * 2.0**-53


def _hash(seed: int, counter: int, domain: int) -> int:
    key = _mix((seed + domain) & _MASK)
    return _mix((key + (counter + 1) * _GOLDEN) & _MASK)


def _mix(word: int) -> int:
    """The output function of SplitMix64: a bijection of 64-bit words in which every input bit moves every
    output bit."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)
