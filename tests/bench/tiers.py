"""``python -m tests.bench.tiers``: what the fast tier gains over standard, and what it costs in quality.

Both tiers run at once with the same adapter policy loaded, but only one has work at a time. Speeds are
medians of pairs measured one right after the other, first one tier then the other, and in the next round
the other way about, because the machine's speed drifts more between minutes than the tiers differ.

Quality is teacher-forced: standard samples answers, and both tiers give the distribution of every sampled
position. The divergence is KL(standard || fast) over the tokens that are in the top 64 of both, everything
else taken together as one outcome.

Last line: ``{"fast_over_standard": {"1":, "8":, "32":}, "kl":, "top1":, "adapter_over_base":}``;
`adapter_over_base` is the worse of the two tiers at 8 requests.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from server.engine.client import Engine
from server.engine.launch import BASE_MODEL
from tests.bench import harness
from tests.fixtures.engines import RunningEngine

POLICY = "bench"
LOADS = (1, 8, 32)
ADAPTER_LOAD = 8
TOP = 64
ANSWER_TOKENS = 100
MIN_REST = 1e-9
"""Smallest probability of the remainder: below it, rounding of the 64 log-probs decides its sign."""

Distribution = Mapping[int, float]
"""Log-probs in nats of the likeliest tokens of one position."""

Positions = list[tuple[Distribution, Distribution]]
"""Standard's and fast's distribution of each sampled position."""


@dataclass(slots=True)
class Tier:
    """A running tier as this bench uses it."""

    engine: Engine
    http: httpx.AsyncClient
    speeds: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    """Tokens a second of each round, by model name and number of requests."""


def divergence(standard: Distribution, fast: Distribution) -> float:
    """KL(standard || fast) in nats over shared tokens and the remainder; a lower bound of the full one."""
    shared = standard.keys() & fast.keys()
    total = sum(math.exp(standard[token]) * (standard[token] - fast[token]) for token in shared)
    rest = max(1 - sum(math.exp(standard[token]) for token in shared), MIN_REST)
    rest_fast = max(1 - sum(math.exp(fast[token]) for token in shared), MIN_REST)
    return total + rest * math.log(rest / rest_fast)


def mean_divergence(positions: Positions) -> float:
    return statistics.fmean(divergence(standard, fast) for standard, fast in positions)


def agreement(positions: Positions) -> float:
    """Share of positions whose likeliest token is the same in both tiers."""
    return statistics.fmean(likeliest(standard) == likeliest(fast) for standard, fast in positions)


def likeliest(distribution: Distribution) -> int:
    return max(distribution, key=lambda token: distribution[token])


async def sample(engine: Engine, tokens: int) -> list[tuple[int, list[int]]]:
    """Answers of at least `tokens` in all, sampled at temperature 1: (prompt length, prompt and answer)."""
    made: list[tuple[int, list[int]]] = []
    seed = 1000
    while sum(len(ids) - start for start, ids in made) < tokens:
        bodies = [
            {
                "model": POLICY,
                "messages": messages,
                "max_tokens": ANSWER_TOKENS,
                "temperature": 1.0,
                "seed": seed,
            }
            for messages in harness.prompts(32, seed)
        ]
        for answer in await asyncio.gather(*(engine.chat(body) for body in bodies)):
            prompt = answer.prompt_token_ids
            made.append((len(prompt), prompt + answer.choices[0].token_ids))
        seed += 1
    return made


async def distributions(http: httpx.AsyncClient, samples: list[tuple[int, list[int]]]) -> list[Distribution]:
    """The tier's top of every sampled position, in the order of the samples."""
    slots = asyncio.Semaphore(8)

    async def one(start: int, ids: list[int]) -> list[Distribution]:
        body = {"model": POLICY, "prompt": ids, "max_tokens": 1, "prompt_logprobs": TOP}
        async with slots:
            response = await http.post("/v1/completions", json=body)
        response.raise_for_status()
        entries = response.json()["choices"][0]["prompt_logprobs"][start:]
        return [{int(token): entry["logprob"] for token, entry in position.items()} for position in entries]

    answers = await asyncio.gather(*(one(start, ids) for start, ids in samples))
    return [position for answer in answers for position in answer]


async def measure_speed(tiers: dict[str, Tier], rounds: int, tokens: int) -> None:
    """Fill `speeds`; one unmeasured round first."""
    cases = [(POLICY, load) for load in LOADS] + [(BASE_MODEL, ADAPTER_LOAD)]
    for number in range(rounds + 1):
        order = list(tiers.values()) if number % 2 else list(reversed(tiers.values()))
        for model, load in cases if number % 2 else reversed(cases):
            for tier in order:
                speed = await harness.tokens_per_second(tier.engine, model, load, tokens, seed=number)
                if number:
                    tier.speeds.setdefault((model, load), []).append(speed)
        found = [
            f"{name} {[round(speed[-1]) for speed in tier.speeds.values()]}" for name, tier in tiers.items()
        ]
        harness.say(f"speed: round {number} of {rounds}, {', '.join(found) if number else 'not counted'}")


def paired(numerator: list[float], denominator: list[float]) -> float:
    """Median over rounds of the ratio within the round."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


async def measure(
    running: dict[str, RunningEngine], policy: Path, args: argparse.Namespace
) -> tuple[dict[str, Tier], Positions]:
    """Speeds and distributions of both tiers, under the adapter in folder `policy`."""
    tiers: dict[str, Tier] = {}
    for name in ("standard", "fast"):
        engine = running[f"{name}-0"]
        transport = httpx.AsyncHTTPTransport(uds=str(engine.socket))
        http = httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=600)
        tiers[name] = Tier(engine.client(), http)
        await tiers[name].engine.load_adapter(POLICY, policy)
    harness.say(f"quality: sampling {args.tokens} tokens on standard")
    samples = await sample(tiers["standard"].engine, args.tokens)
    standard, fast = [await distributions(tier.http, samples) for tier in tiers.values()]
    positions = list(zip(standard, fast, strict=True))
    harness.say(f"quality: KL {mean_divergence(positions):.5f}, top-1 agreement {agreement(positions):.4f}")
    await measure_speed(tiers, args.rounds, args.answer_tokens)
    for tier in tiers.values():
        await tier.engine.close()
        await tier.http.aclose()
    return tiers, positions


def show(tiers: dict[str, Tier], positions: Positions) -> None:
    standard_speeds, fast_speeds = tiers["standard"].speeds, tiers["fast"].speeds
    rows, gains = [], {}
    for load in LOADS:
        case = (POLICY, load)
        gains[str(load)] = round(paired(fast_speeds[case], standard_speeds[case]), 3)
        speeds = [f"{statistics.median(speed[case]):.1f}" for speed in (standard_speeds, fast_speeds)]
        rows.append([f"tokens/s, {load} requests", *speeds, f"{gains[str(load)]:.2f}x"])
    adapter = [
        paired(speed[(POLICY, ADAPTER_LOAD)], speed[(BASE_MODEL, ADAPTER_LOAD)])
        for speed in (standard_speeds, fast_speeds)
    ]
    rows.append([f"adapter over none, {ADAPTER_LOAD} requests", *(f"{ratio:.2f}" for ratio in adapter), ""])
    divergences = sorted(divergence(standard, fast) for standard, fast in positions)
    kl, top1 = statistics.fmean(divergences), agreement(positions)
    rows.append([f"KL per token, {len(positions)} tokens", "", f"{kl:.5f}", ""])
    rows.append(["KL, 99th percentile", "", f"{divergences[int(0.99 * len(divergences))]:.5f}", ""])
    rows.append(["top-1 agreement", "", f"{100 * top1:.2f} %", ""])
    result: dict[str, Any] = {"fast_over_standard": gains, "kl": round(kl, 6), "top1": round(top1, 4)}
    result["adapter_over_base"] = round(min(adapter), 3)
    harness.report("Tiers", rows, ["", "standard", "fast", "gain"], result)


def main() -> int:
    parser = harness.parser("Compares the fast tier with standard: speed, divergence, cost of an adapter.")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of speed measurements")
    parser.add_argument("--answer-tokens", type=int, default=48, help="tokens of each measured answer")
    parser.add_argument("--tokens", type=int, default=5000, help="sampled tokens for the divergence")
    args = parser.parse_args()
    try:
        chosen = harness.setting(args)
        with harness.adapter(chosen) as policy, harness.engines(chosen, ["standard-0", "fast-0"]) as running:
            tiers, positions = asyncio.run(measure(running, policy, args))
    except harness.BenchError as error:
        print(error, file=sys.stderr)
        return 1
    show(tiers, positions)
    return 0


if __name__ == "__main__":
    sys.exit(main())
