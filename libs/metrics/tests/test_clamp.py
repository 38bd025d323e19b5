"""Negative counts become zero, with at most one warning per interval and no number lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hybridkv.metrics import TokenClamp


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@given(st.lists(st.tuples(st.integers(-1000, 1000), st.floats(0.0, 30.0)), max_size=50))
def test_negative_values_become_zero_and_others_do_not_change(seen: list[tuple[int, float]]) -> None:
    clock = Clock()
    warned_at_s: list[float] = []
    clamp = TokenClamp(lambda text: warned_at_s.append(clock.now_s), clock)
    for value, later_s in seen:
        clock.now_s += later_s
        assert clamp.clamp("ram", value) == (max(value, 0), max(-value, 0))
    assert bool(warned_at_s) == any(value < 0 for value, _ in seen)
    assert all(later - earlier >= 60.0 for earlier, later in zip(warned_at_s, warned_at_s[1:], strict=False))  # noqa: RUF007


def test_a_warning_names_the_source_and_sums_the_skipped_ones() -> None:
    clock, texts = Clock(), list[str]()
    clamp = TokenClamp(texts.append, clock)
    clamp.clamp("ram", -7)
    clamp.clamp("ram", -100)
    clock.now_s = 61.0
    clamp.clamp("disk", -5)
    assert texts == [
        "ram counted -7, taken as 0; 1 counts were below zero since the last such warning, -7 together",
        "disk counted -5, taken as 0; 2 counts were below zero since the last such warning, -105 together",
    ]
