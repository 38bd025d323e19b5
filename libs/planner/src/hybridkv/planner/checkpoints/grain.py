"""Which boundaries of a prompt are looked at, so that a long one costs no more than a bound.

Requests part near the ends of prompts, so there all boundaries count. Before that only every so many do; they are the
same ones for every prompt, so that what one leaves there another finds. Boundaries are counted from 1, at the end of
the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import msgspec


class Grain(msgspec.Struct, frozen=True):
    """How finely. A prompt of at most `max_places` boundaries is looked at whole.

    Raises:
        ValueError: a number is not positive, or `fine_places` leaves less than two of `max_places`.
    """

    max_places: int = 4096
    """Boundaries that are looked at."""
    fine_places: int = 2048
    """Of these, the last ones of a prompt: all there are. More than the longest distance that is learned from."""
    coarse_step: int = 32
    """Before them the first of all, and those whose number is a multiple of it, or of a multiple of it."""

    def __post_init__(self) -> None:
        if not 0 < self.fine_places < self.max_places - 1 or self.coarse_step <= 0:
            raise ValueError(f"a grain needs 0 < fine_places < max_places - 1 and a positive step, got {self}")

    def places(self, num_places: int) -> Sequence[int]:
        """Of so many boundaries those that are looked at, descending."""
        if num_places <= self.max_places:
            return range(num_places, 0, -1)
        coarse, most = num_places - self.fine_places, self.max_places - self.fine_places - 1
        step = self.coarse_step * -(-coarse // (self.coarse_step * most))
        return tuple(chain(range(num_places, coarse, -1), range(coarse // step * step, 1, -step), (1,)))

    def cell(self, place: int) -> int:
        """The boundary at which it is said that somebody parted at `place`: the last coarse one up to there, or the
        first of all."""
        return max(1, place // self.coarse_step * self.coarse_step)

    def behind(self, place: int) -> int:
        """The first coarse boundary from `place` on. Who was there was at `place`, too."""
        return -(-place // self.coarse_step) * self.coarse_step


def offsets(marks: int) -> Iterator[int]:
    """The places of the bits of `marks`, descending."""
    while marks:
        offset = marks.bit_length() - 1
        yield offset
        marks ^= 1 << offset
