"""Waiting on a CPU: vLLM's processes sleep until they are told, instead of asking without end.

An engine's scheduler and its worker take turns. While one computes, the other asks the shared memory between
them again and again for up to a second, on the core that the first computes with: with two engines on two
cores that costs a sixth of all tokens. Here the reader waits for the writer's ping, and looks by itself once
a millisecond, because a ping that follows another closely may be dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

RECENT_S = 1.0
"""After this long without a message vLLM's own rule waits for pings alone."""
LOOK_MS = 1


def waiting(stock: Callable[..., None]) -> Callable[..., None]:
    """`SpinCondition.wait`, which never returns at once for having read a message a moment ago."""

    def wait(condition: Any, timeout_ms: int | None = None) -> None:
        recent = time.monotonic() <= condition.last_read + RECENT_S
        condition.busy_loop_s = 0.0
        stock(condition, LOOK_MS if recent else timeout_ms)

    return wait
