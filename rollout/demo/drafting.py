"""One repetitive workload on the fast tier, to see what drafting (speculative decoding) does.

Tokens per step come from the stream itself: an engine that drafts sends several tokens in one event.
Acceptance comes from the engine's counters, where the gateway's ``/metrics`` passes them on.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import openai
from openai.types.chat import ChatCompletionChunk

from rollout import gateway

REQUESTS = 4
MAX_TOKENS = 96
ROWS = 4
COUNTER = re.compile(
    r"^vllm:spec_decode_num_(draft_tokens|accepted_tokens)(?:_total)?(?:\{[^}]*\})? ([0-9.e+]+)$"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    tokens: int
    steps: int
    seconds: float
    drafted: int | None
    """None when the engine's counters are not passed on."""
    accepted: int | None

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def acceptance(self) -> float | None:
        if not self.drafted or self.accepted is None:
            return None
        return self.accepted / self.drafted


async def measure(client: openai.AsyncOpenAI, model: str) -> Drafting:
    """Run the workload, one request after another: at batch 1 drafting has the most to win."""
    before = await _counters(client)
    start = time.perf_counter()
    counts = [await _one(client, model, number) for number in range(REQUESTS)]
    seconds = time.perf_counter() - start
    after = await _counters(client)
    drafted, accepted = (
        int(after[name] - before[name]) if name in after and name in before else None
        for name in ("draft_tokens", "accepted_tokens")
    )
    return Drafting(
        tokens=sum(tokens for tokens, _ in counts),
        steps=sum(steps for _, steps in counts),
        seconds=seconds,
        drafted=drafted,
        accepted=accepted,
    )


def prompt(number: int) -> str:
    """A table to write again, which is what a small model still does after it was trained on tool calls."""
    rows = [{"id": 100 * number + row, "city": "Bergen", "open": True} for row in range(ROWS)]
    return f"Repeat this JSON exactly:\n```json\n{json.dumps(rows, indent=1)}\n```"


async def _one(client: openai.AsyncOpenAI, model: str, number: int) -> tuple[int, int]:
    """(tokens, events that carried tokens) of one greedy answer, which goes on to its last token."""
    stream: AsyncIterator[ChatCompletionChunk] = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt(number)}],
        temperature=0.0,
        max_completion_tokens=MAX_TOKENS,
        service_tier="fast",
        store=False,
        stream=True,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    tokens = steps = 0
    async for chunk in stream:
        for choice in chunk.choices:
            ids: list[Any] = (choice.model_extra or {}).get("token_ids") or []
            tokens += len(ids)
            steps += bool(ids)
    return tokens, steps


async def _counters(client: openai.AsyncOpenAI) -> dict[str, float]:
    """Sums over engines of vLLM's drafting counters in the gateway's metrics."""
    text: str = await client.get(gateway.beside_api(client, "/metrics"), cast_to=str)
    totals: dict[str, float] = {}
    for line in text.splitlines():
        if found := COUNTER.match(line):
            totals[found[1]] = totals.get(found[1], 0.0) + float(found[2])
    return totals
