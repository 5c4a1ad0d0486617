"""What callers saw of the swaps: times to first token inside and outside swap windows.

A promoted policy disturbs the service twice: while its weights load and are verified, and from the warm-up
of its prefixes to two seconds after the flip. The evaluation between the two is background work that has
nothing to do with swapping, so it counts as outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollout.episodes import Request
from rollout.evals.statistics import quantile

AFTER_FLIP_S = 2.0


@dataclass(frozen=True, slots=True)
class Window:
    """From `start` to `end`, unix seconds."""

    start: float
    end: float

    def meets(self, request: Request) -> bool:
        """Whether the wait for the first token fell into the window at least in part."""
        assert request.ttft_s is not None
        return request.sent_at <= self.end and request.sent_at + request.ttft_s >= self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """Times to first token of a set of requests."""

    n: int
    p50_s: float
    p99_s: float


def windows(flips: Sequence[dict[str, Any]], since: float) -> list[Window]:
    """Swap windows of the flips after `since`, from the timings that the gateway keeps."""
    found = []
    for flip in flips:
        if flip["flipped_at"] < since:
            continue
        for replica in flip.get("replicas", {}).values():
            start, placed_ms = replica.get("load_started_at"), replica.get("placed_ms")
            if start is not None and placed_ms is not None:
                found.append(Window(start, start + placed_ms / 1000))
        begun = flip.get("warm_started_at", flip["flipped_at"])
        found.append(Window(begun, flip["flipped_at"] + AFTER_FLIP_S))
    return found


def waits(requests: Sequence[Request], swaps: Sequence[Window]) -> dict[str, Waits]:
    """Times to first token of the streamed requests, ``inside`` and ``outside`` the windows."""
    streamed = [request for request in requests if request.ttft_s is not None]
    inside = [request for request in streamed if any(window.meets(request) for window in swaps)]
    kept = {id(request) for request in inside}
    outside = [request for request in streamed if id(request) not in kept]
    return {"inside": _waits(inside), "outside": _waits(outside)}


def _waits(requests: Sequence[Request]) -> Waits:
    times = [request.ttft_s for request in requests if request.ttft_s is not None]
    return Waits(n=len(times), p50_s=quantile(times, 0.5), p99_s=quantile(times, 0.99))
