"""Broken bytes for fuzz tests: a hypothesis strategy of functions that damage an encoded record."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import strategies as st
from records import EXAMPLES, TYPES

VALUES = [(TYPES[kind], TYPES[kind].encode(record)) for kind, record in EXAMPLES.values()]


@st.composite
def mutations(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """Flips of bits, words overwritten, cuts, and pieces of other records spliced in."""
    steps = draw(
        st.lists(
            st.tuples(
                st.sampled_from(("flip", "word", "cut", "drop", "splice", "double")),
                st.integers(0, 2**16),
                st.integers(0, 2**16),
                st.sampled_from((0, 1, 9, 1000, 2**31 - 1, -1, -(2**31))) | st.integers(-(2**31), 2**31 - 1),
            ),
            min_size=1,
            max_size=6,
        )
    )

    def mutate(value: bytes) -> bytes:
        for kind, a, b, word in steps:
            if not value:
                break
            at, length = a % len(value), b % 64
            if kind == "flip":
                value = value[:at] + bytes([value[at] ^ (1 << b % 8)]) + value[at + 1 :]
            elif kind == "word":
                at -= at % 4
                value = value[:at] + word.to_bytes(4, "little", signed=True) + value[at + 4 :]
            elif kind == "cut":
                value = value[:at]
            elif kind == "drop":
                value = value[:at] + value[at + length :]
            elif kind == "double":
                value = value[:at] + value[at : at + length] + value[at:]
            else:
                other = VALUES[b % len(VALUES)][1]
                value = value[:at] + other[at % len(other) :]
        return value

    return mutate
