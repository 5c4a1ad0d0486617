"""``python -m tests.bench.batch``: what interactive requests notice of a full queue of batch work.

One engine of the fast tier, an adapter policy loaded. A caller asks one question after another and reads the
answers as they are streamed, for a while alone and for a while beside more batch requests than the engine
takes at once, the two in turn. Last line: ``{"interactive_p99_ratio":, "first_token_p99_ratio":,
"between_p99_ratio":, "interactive_p99_s":, "batch_tokens_per_second":, "batch_share":}``: 99th percentiles of
whole answers, of first tokens and of the time between tokens, with batch work over without; and what batch
work got done meanwhile, as a share of what it does alone.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from server.engine.client import Engine
from server.engine.launch import BATCH_PRIORITY
from tests.bench import harness
from tests.bench.harness import arrivals, body, chats, percentile

POLICY = "bench"
QUEUE = 96
"""Batch requests in flight at any time: more than an engine runs at once."""
BATCH_TOKENS = 200
PAUSE_S = 0.3
"""Between an answer and the next question: batch work may use it."""


@dataclass(slots=True)
class Waits:
    """What the caller saw, in seconds."""

    answers: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)


async def converse(engine: Engine, questions: int, tokens: int, seed: int, waits: Waits) -> None:
    for request in chats(questions, seed):
        gaps = [gap async for gap in arrivals(engine, body(POLICY, request, tokens))]
        waits.first.append(gaps[0])
        waits.between.extend(gaps[1:])
        waits.answers.append(sum(gaps))
        await asyncio.sleep(PAUSE_S)


class Batch:
    """A queue that is always full."""

    def __init__(self, engine: Engine) -> None:
        self.tokens = 0
        self._engine = engine
        self._seeds = itertools.count(10_000)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        workers = [asyncio.create_task(self._work()) for _ in range(QUEUE)]
        try:
            yield
        finally:
            for worker in workers:
                worker.cancel()
            for found in await asyncio.gather(*workers, return_exceptions=True):
                if isinstance(found, Exception):
                    raise found

    async def _work(self) -> None:
        while True:
            (request,) = chats(1, next(self._seeds))
            asked = body(POLICY, request, BATCH_TOKENS)
            async for event in self._engine.stream_chat(asked, priority=BATCH_PRIORITY):
                self.tokens += sum(len(piece.token_ids) for piece in event.pieces)


@dataclass(slots=True)
class Found:
    alone: Waits = field(default_factory=Waits)
    beside: Waits = field(default_factory=Waits)
    batch_beside: list[float] = field(default_factory=list)
    """Tokens a second of batch work beside the caller."""
    batch_alone: list[float] = field(default_factory=list)


async def measure(engine: Engine, policy: Path, args: argparse.Namespace) -> Found:
    found, batch = Found(), Batch(engine)
    await engine.load_adapter(POLICY, policy)
    await converse(engine, 4, args.answer_tokens, 0, Waits())
    for number in range(1, args.rounds + 1):
        await converse(engine, args.questions, args.answer_tokens, number, found.alone)
        async with batch.running():
            await _progress(batch)
            found.batch_alone.append(await _rate(batch, asyncio.sleep(args.batch_seconds)))
            talk = converse(engine, args.questions, args.answer_tokens, number + 500, found.beside)
            found.batch_beside.append(await _rate(batch, talk))
        alone, beside = (percentile(side.answers, 0.5) for side in (found.alone, found.beside))
        speeds = f"batch {found.batch_alone[-1]:.0f} and {found.batch_beside[-1]:.0f} tok/s"
        harness.say(f"round {number} of {args.rounds}: {alone:.2f} s alone, {beside:.2f} s beside; {speeds}")
    return found


async def _progress(batch: Batch) -> None:
    """Until the queue has produced something and the steps' times are known."""
    enough = batch.tokens + 20 * QUEUE
    while batch.tokens < enough:
        await asyncio.sleep(0.05)


async def _rate(batch: Batch, meanwhile: Any) -> float:
    """Batch tokens a second while `meanwhile` runs."""
    before, started = batch.tokens, time.monotonic()
    await meanwhile
    return (batch.tokens - before) / (time.monotonic() - started)


def show(found: Found) -> None:
    rows, ratios = [], {}
    for name, key in (("answers", "interactive"), ("first", "first_token"), ("between", "between")):
        alone, beside = getattr(found.alone, name), getattr(found.beside, name)
        for share in (0.5, 0.99):
            values = [percentile(side, share) for side in (alone, beside)]
            rows.append(
                [
                    f"{key.replace('_', ' ')}, p{round(100 * share)}, {len(beside)} seen",
                    *(f"{1000 * value:.0f} ms" for value in values),
                    f"{values[1] / values[0]:.2f}x",
                ]
            )
        ratios[f"{key}_p99_ratio"] = round(values[1] / values[0], 3)
    speeds = [sum(side) / len(side) for side in (found.batch_alone, found.batch_beside)]
    share = speeds[1] / speeds[0]
    rows.append(["batch tokens/s, alone and beside", *(f"{speed:.0f}" for speed in speeds), f"{share:.2f}x"])
    harness.report(
        f"Interactive requests beside {QUEUE} batch requests",
        rows,
        ["", "without batch work", "with", ""],
        ratios
        | {
            "interactive_p99_s": round(percentile(found.beside.answers, 0.99), 3),
            "batch_tokens_per_second": round(speeds[1], 1),
            "batch_share": round(share, 3),
        },
    )


def main() -> int:
    parser = harness.parser("Measures interactive latency beside a full queue of batch work.")
    parser.add_argument("--rounds", type=int, default=4, help="rounds without and with batch work")
    parser.add_argument("--questions", type=int, default=15, help="interactive requests of each half round")
    parser.add_argument("--answer-tokens", type=int, default=48, help="tokens of each interactive answer")
    parser.add_argument("--batch-seconds", type=float, default=5.0, help="batch work alone, each round")
    args = parser.parse_args()
    try:
        chosen = harness.setting(args)
        with harness.adapter(chosen) as policy, harness.engines(chosen, ["fast-0"]) as running:
            found = asyncio.run(_measured(running["fast-0"].client(), policy, args))
    except harness.BenchError as error:
        print(error, file=sys.stderr)
        return 1
    show(found)
    return 0


async def _measured(engine: Engine, policy: Path, args: argparse.Namespace) -> Found:
    async with engine:
        return await measure(engine, policy, args)


if __name__ == "__main__":
    sys.exit(main())
