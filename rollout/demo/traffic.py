"""The demo's traffic: train-split episodes on both tiers, as many at a time as the pace allows.

Every episode is a real caller's: it names its trajectory, asks for storage, and reports the outcome. The
learner's samples are this traffic. Requests are not retried, so each failure is seen and counted.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections import deque
from dataclasses import dataclass, field

import openai

from rollout import episodes
from rollout.episodes import Ask, Episode, Request
from rollout.evals.statistics import Interval, wilson
from rollout.tasks import generate

RECENT = 200
"""Episodes in the moving success rate."""
FAILURE_PAUSE_S = 0.5
TIERS = {"standard": "default", "fast": "fast"}
"""What `service_tier` asks for each tier."""


@dataclass(slots=True, kw_only=True)
class Tally:
    """What one policy did on one tier."""

    requests: int = 0
    failed: int = 0
    episodes: int = 0
    successes: int = 0
    completion_tokens: int = 0
    first_at: float = float("inf")
    last_at: float = 0.0

    @property
    def success(self) -> Interval:
        return wilson(self.successes, self.episodes)

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens over the time from its first request to its last answer."""
        seconds = self.last_at - self.first_at
        return self.completion_tokens / seconds if seconds > 0 else 0.0


@dataclass(slots=True, kw_only=True)
class Log:
    """Everything that the demo asked and got, evaluations included."""

    requests: list[Request] = field(default_factory=list)
    tallies: dict[tuple[str, str], Tally] = field(default_factory=dict)
    """By policy and tier; traffic only."""
    recent: deque[bool] = field(default_factory=lambda: deque(maxlen=RECENT))
    reported: int = 0
    """Outcomes written."""
    report_failures: list[str] = field(default_factory=list)

    @property
    def failures(self) -> list[str]:
        failed = [request.error for request in self.requests if request.error is not None]
        return failed + self.report_failures

    def ask(self, episode: Episode) -> None:
        """Note an episode of an evaluation: its requests count, its success is counted elsewhere."""
        self.requests += episode.requests

    def add(self, episode: Episode) -> None:
        """Note an episode of the traffic, under the policy that it began with."""
        self.requests += episode.requests
        for request in episode.requests:
            tally = self._tally(request)
            tally.requests += 1
            tally.failed += request.error is not None
            tally.completion_tokens += request.completion_tokens
            tally.first_at = min(tally.first_at, request.sent_at)
            tally.last_at = max(tally.last_at, request.sent_at + request.seconds)
        if episode.success is not None:
            tally = self._tally(episode.requests[0])
            tally.episodes += 1
            tally.successes += episode.success
            self.recent.append(episode.success)

    def _tally(self, request: Request) -> Tally:
        tier = next((tier for tier, asked in TIERS.items() if asked == request.tier), request.tier)
        return self.tallies.setdefault((request.policy or "none", tier), Tally())


@dataclass(slots=True, kw_only=True)
class Traffic:
    """Episodes without end, `limit` at a time; `limit` may change while it runs."""

    client: openai.AsyncOpenAI
    log: Log
    fast_share: float
    streamed_share: float
    seed: int = 0
    limit: int = 0
    running: int = 0
    stopping: bool = False
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def drive(self) -> None:
        """Run until `stop`; returns when the episodes in flight have finished."""
        rng = random.Random(self.seed)
        async with asyncio.TaskGroup() as group:
            while True:
                async with self._changed:
                    await self._changed.wait_for(lambda: self.stopping or self.running < self.limit)
                    if self.stopping:
                        return
                    self.running += 1
                group.create_task(self._episode(self.seed, rng.random(), rng.random()))
                self.seed += 1

    async def stop(self) -> None:
        """Begin no more episodes."""
        async with self._changed:
            self.stopping = True
            self._changed.notify_all()

    async def pace(self, limit: int) -> None:
        """Keep `limit` episodes in flight from now on."""
        async with self._changed:
            self.limit = limit
            self._changed.notify_all()

    async def _episode(self, seed: int, tier_draw: float, stream_draw: float) -> None:
        tier = "fast" if tier_draw < self.fast_share else "standard"
        ask = Ask(service_tier=TIERS[tier], stream=stream_draw < self.streamed_share)
        task = generate(seed, "train")
        try:
            episode = await episodes.run(self.client, task, ask, f"demo-{uuid.uuid4().hex}")
            self.log.add(episode)
            await self._report(episode)
            if episode.fault is not None:
                # A service that is down is asked again, but not as fast as a loop can ask.
                await asyncio.sleep(FAILURE_PAUSE_S)
        finally:
            async with self._changed:
                self.running -= 1
                self._changed.notify_all()

    async def _report(self, episode: Episode) -> None:
        try:
            await episodes.report(self.client, episode)
            self.log.reported += 1
        except openai.OpenAIError as error:
            self.log.report_failures.append(f"{time.time():.0f} feedback: {type(error).__name__}: {error}")
