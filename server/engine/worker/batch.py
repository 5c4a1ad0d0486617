"""Batch work steps aside: it fills what interactive requests leave of a step.

vLLM's priorities say who is admitted first; once admitted, every request is in every step, and on a CPU each
row makes the step longer for all. Here, while interactive requests are running, those of low priority join a
step only as long as it stays about as short as without them, by what steps of so many rows have taken so far.
Where rows cost nothing, as on a GPU with room, all of them join. With nobody waiting for an answer, batch
work has the engine for itself.

Invariant: an interactive request that waits for cache gets that of a held batch request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from server.engine.launch import BATCH_PRIORITY
from server.engine.worker.steps import StepTimes

SLACK = 1.15
"""How much longer than without batch work a step may be with it."""
CROWDED = 0.9
"""Share of the cache in use from which waiting requests may lack room in it."""


class Room:
    """How many rows batch work may have. Not thread-safe: called from the scheduler's one thread."""

    def __init__(self) -> None:
        self.times = StepTimes()
        self._last: tuple[frozenset[str], int] | None = None
        self._began = 0.0

    def scheduled(self, rows: dict[str, int], now: float) -> None:
        """A step with `rows` tokens of each request begins; until now the one before it lasted."""
        requests = frozenset(rows)
        if self._last is not None and self._last[0] & requests:
            self.times.observe(self._last[1], now - self._began)
        self._last, self._began = ((requests, sum(rows.values())) if rows else None), now

    def rows(self, interactive: int) -> int:
        """Beside so many rows of interactive requests; never more than one past the largest step seen.

        No row at all while it is not known how long a step as small as theirs takes.
        """
        smallest, largest = self.times.range()
        alone = self.times.at(interactive)
        if alone is None or interactive < smallest:
            return 0
        free = 0
        while interactive + free <= largest:
            longer = self.times.at(interactive + free + 1)
            if longer is None or longer > SLACK * alone:
                break
            free += 1
        return free


def fits(costs: Sequence[int], room: int) -> int:
    """How many of the first requests, which need so many rows each, have room together.

    >>> fits([1, 1, 64], 10)
    2
    """
    for number, cost in enumerate(costs):
        room -= cost
        if room < 0:
            return number
    return len(costs)


def schedule(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`Scheduler.schedule`, which leaves batch requests out of steps that they would make too long."""

    def scheduled(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        room: Room = scheduler.__dict__.setdefault("ratchet_room", Room())
        limit = scheduler.max_num_active_reqs
        held = _hold(scheduler, room)
        try:
            output = stock(scheduler, *args, **kwargs)
        finally:
            scheduler.max_num_active_reqs = limit
        now = time.monotonic()
        room.scheduled(output.num_scheduled_tokens, now)
        if held and _interactive(scheduler.waiting) and _full(scheduler):
            _give_way(scheduler, held[-1], now)
        return output

    return scheduled


def _hold(scheduler: Any, room: Room) -> list[Any]:
    """Leave out of the next step what does not fit into it; those requests, first come first."""
    waiting, running = _interactive(scheduler.waiting), _interactive(scheduler.running)
    batch = [request for request in scheduler.running if request.priority >= BATCH_PRIORITY]
    if not (waiting or running) or not (batch or len(scheduler.waiting) > len(waiting)):
        return []
    chunk = scheduler.scheduler_config.long_prefill_token_threshold or scheduler.max_num_scheduled_tokens
    free = room.rows(sum(_rows(request, chunk) for request in [*running, *waiting]))
    costs = [_rows(request, chunk) for request in batch]
    joining = fits(costs, free)
    for request in batch[joining:]:
        # The step that is scheduled next has the number after this one.
        request.next_decode_eligible_step = scheduler.current_step + 2
    more = joining == len(batch) and free - sum(costs) >= chunk
    active = len(scheduler.running) + len(waiting) + more
    scheduler.max_num_active_reqs = min(scheduler.max_num_active_reqs, active)
    return batch[joining:]


def _full(scheduler: Any) -> bool:
    """Whether places or cache keep waiting requests out, and not a pause or the size of a step."""
    places = scheduler.max_num_active_reqs - len(scheduler.running)
    crowded: bool = places < 1 or scheduler.kv_cache_manager.usage > CROWDED
    return crowded and scheduler.pause_state.name == "UNPAUSED"


def _give_way(scheduler: Any, request: Any, now: float) -> None:
    """Free what a held request holds; it will be computed anew, from what the prefix cache kept."""
    if request in scheduler.running:
        scheduler.running.remove(request)
        scheduler._preempt_request(request, now)


def _interactive(requests: Iterable[Any]) -> list[Any]:
    return [request for request in requests if request.priority < BATCH_PRIORITY]


def _rows(request: Any, chunk: int) -> int:
    """Tokens of `request` in its next step."""
    ahead = request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
    return max(1, min(int(ahead), chunk))
