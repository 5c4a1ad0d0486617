"""What a step of an engine takes by its number of rows, measured while it works.

A machine is not always equally fast: two engines that share its cores slow each other down. So sizes are kept
relative to each other, and how fast the machine is at the moment is followed apart, from every step. What was
last measured while another engine was busy then does not stand beside what was measured while it was not.
"""

from __future__ import annotations

import statistics
from collections import deque
from itertools import pairwise

MEMORY = 7
"""Steps of one size whose median is what such a step takes."""
ENOUGH = 3
"""Steps of one size before they count."""


FOLLOW = 0.15
"""Weight of the latest step in the machine's pace."""
JUMP = 4.0
"""A step that is off by more than this factor is no sign of the machine's pace."""


class Pace:
    """How long everything takes at the moment, over how long it took when its size was measured first."""

    def __init__(self) -> None:
        self.now = 1.0

    def follow(self, expected: float, seconds: float) -> None:
        """A step took `seconds` that should have taken `expected` at the present pace."""
        if expected / JUMP < seconds < expected * JUMP:
            self.now *= (seconds / expected) ** FOLLOW


class StepTimes:
    """Seconds a step takes by its number of rows: medians of the latest, interpolated, never falling."""

    def __init__(self, pace: Pace | None = None) -> None:
        """`pace`: shared with other steps of the same machine."""
        self._pace = pace or Pace()
        self._recent: dict[int, deque[float]] = {}
        self._points: list[tuple[int, float]] | None = None

    def observe(self, rows: int, seconds: float) -> None:
        if self.knows(rows):
            self._pace.follow(statistics.median(self._recent[size_of(rows)]) * self._pace.now, seconds)
        self._recent.setdefault(size_of(rows), deque(maxlen=MEMORY)).append(seconds / self._pace.now)
        self._points = None

    def knows(self, rows: int) -> bool:
        return len(self._recent.get(size_of(rows), ())) >= ENOUGH

    def at(self, rows: int, least: tuple[int, float] | None = None) -> float | None:
        """None while nothing is known. Past the largest size seen, a row costs what it cost up to there.

        `least`, rows and seconds, takes the place of what is known of smaller steps.
        """
        points = self._known()
        if not points:
            return None
        if least is not None:
            points = [least, *(point for point in points if point[0] > least[0])]
        if rows <= points[0][0]:
            return points[0][1]
        for (low, fast), (high, slow) in pairwise(points):
            if rows <= high:
                return fast + (slow - fast) * (rows - low) / (high - low)
        (first, fast), (last, slow) = points[0], points[-1]
        return slow + (slow - fast) * (rows - last) / max(last - first, 1)

    def range(self) -> tuple[int, int]:
        """Rows of the smallest and of the largest step that are known; nothing is known while both are 0."""
        points = self._known()
        return (points[0][0], points[-1][0]) if points else (0, 0)

    def _known(self) -> list[tuple[int, float]]:
        if self._points is None:
            longest, self._points = 0.0, []
            for size in sorted(size for size, times in self._recent.items() if len(times) >= ENOUGH):
                longest = max(longest, statistics.median(self._recent[size]))
                self._points.append((size, longest))
        return [(size, seconds * self._pace.now) for size, seconds in self._points]


def size_of(rows: int) -> int:
    """Exact up to 31 rows, then in steps of about 5 %."""
    step = 1 << max(0, rows.bit_length() - 5)
    return rows // step * step
