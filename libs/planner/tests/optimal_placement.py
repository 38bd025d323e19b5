"""Optimal positions of states for one prompt, given where later requests diverge from it.

Reference for the planner's guesses. A request that diverges at depth d resumes at the deepest state at or before d and
computes the tokens between again. With N depths and M states, the least loss is found state by state: the loss of the
first m states up to depth j, the place of the m-th, is the least over the place i of the state before it. For a given j
each i contributes a straight line in the number of requests before j, and both slopes and queries are sorted, so the
lower hull of these lines answers all j in one pass: O(N) per state, O(NM) in all. The method is that of "Sparse Prefix
Caching" (arXiv 2605.05219).
"""

from __future__ import annotations

from collections.abc import Sequence

Partings = Sequence[tuple[int, float]]
"""(depth, number of requests that diverge there), ascending by depth."""
_Line = tuple[float, float, int]
"""Slope, height at 0, and the place that the line stands for."""


def lost_tokens(partings: Partings, base: int, stops: Sequence[int]) -> float:
    """Tokens that requests compute again, with states at `base` and at `stops`."""
    return sum(weight * (depth - max([base, *(stop for stop in stops if stop <= depth)])) for depth, weight in partings)


def optimal_stops(partings: Partings, base: int, max_stops: int, price: float = 0.0) -> tuple[int, ...]:
    """Returns the stops, at most `max_stops`, with the least loss when each costs `price` tokens. All depths are above
    `base`."""
    depths = [base, *(depth for depth, _ in partings)]
    weight_before, moment_before = [0.0, 0.0], [0.0, 0.0]
    for depth, weight in partings:
        weight_before.append(weight_before[-1] + weight)
        moment_before.append(moment_before[-1] + weight * depth)
    num = len(depths)
    # With the last state at depths[i]: the loss of the requests before depths[i], and the place of the state before it.
    lost: list[float | None] = [0.0] + [None] * (num - 1)
    befores: list[list[int]] = []
    best, best_row = (float("inf"), 0), 0
    for row in range(min(max_stops, num - 1) + 1):
        closed = [
            (lost_i + moment_before[num] - moment_before[i] - depths[i] * (weight_before[num] - weight_before[i]), i)
            for i, lost_i in enumerate(lost)
            if lost_i is not None
        ]
        total, last = min(closed, default=(float("inf"), 0))
        if total + row * price < best[0]:
            best, best_row = (total + row * price, last), row
        lost, before = _next_state(lost, depths, weight_before, moment_before)
        befores.append(before)
    stops, at = [], best[1]
    for row in range(best_row, 0, -1):
        stops.append(depths[at])
        at = befores[row - 1][at]
    return tuple(reversed(stops))


def _next_state(
    lost: Sequence[float | None], depths: Sequence[int], weight_before: Sequence[float], moment_before: Sequence[float]
) -> tuple[list[float | None], list[int]]:
    """Adds one state: the least loss by its place, and for each place that of the state before it."""
    num = len(depths)
    following: list[float | None] = [None] * num
    before = [0] * num
    hull: list[_Line] = []  # slopes falling
    first = 0
    for j in range(1, num):
        i, lost_i = j - 1, lost[j - 1]
        if lost_i is not None:
            line = (-float(depths[i]), lost_i - moment_before[i] + depths[i] * weight_before[i], i)
            while len(hull) - first >= 2 and _is_above(hull[-2], hull[-1], line):
                hull.pop()
            hull.append(line)
        if first == len(hull):
            continue
        weight = weight_before[j]
        while len(hull) - first >= 2 and _height(hull[first + 1], weight) <= _height(hull[first], weight):
            first += 1
        following[j] = moment_before[j] + _height(hull[first], weight)
        before[j] = hull[first][2]
    return following, before


def _height(line: _Line, at: float) -> float:
    return line[0] * at + line[1]


def _is_above(left: _Line, middle: _Line, right: _Line) -> bool:
    """Whether the middle line is nowhere below both others."""
    return (right[1] - left[1]) * (left[0] - middle[0]) <= (middle[1] - left[1]) * (left[0] - right[0])
