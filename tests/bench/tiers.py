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
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

from quant import serving
from quant.divergence import Divergence, compare
from quant.teacher import distributions, sample, sampled_tokens
from server.engine.client import Engine
from server.engine.launch import BASE_MODEL
from tests.bench import harness
from tests.fixtures.engines import RunningEngine

POLICY = "bench"
LOADS = (1, 8, 32)
ADAPTER_LOAD = 8


@dataclass(slots=True)
class Tier:
    """A running tier as this bench uses it."""

    engine: Engine
    client: openai.AsyncOpenAI
    """The same engine as vLLM has it, for what only it answers."""
    speeds: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    """Tokens a second of each round, by model name and number of requests."""


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
) -> tuple[dict[str, Tier], Divergence]:
    """Speeds and distributions of both tiers, under the adapter in folder `policy`."""
    tiers: dict[str, Tier] = {}
    for name in ("standard", "fast"):
        engine = running[f"{name}-0"]
        tiers[name] = Tier(engine.client(), serving.client(engine.socket))
        await tiers[name].engine.load_adapter(POLICY, policy)
    samples = await sample(tiers["standard"].client, POLICY, args.tokens, harness.say)
    standard, fast = [
        await distributions(tier.client, POLICY, samples, harness.say) for tier in tiers.values()
    ]
    found = compare(standard, fast, sampled_tokens(samples))
    harness.say(f"quality: KL {found.kl:.5f}, top-1 agreement {found.top1:.4f}")
    await measure_speed(tiers, args.rounds, args.answer_tokens)
    for tier in tiers.values():
        await tier.engine.close()
        await tier.client.close()
    return tiers, found


def show(tiers: dict[str, Tier], found: Divergence) -> None:
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
    rows.append([f"KL per token, {found.positions} tokens", "", f"{found.kl:.5f}", ""])
    rows.append(["KL, 99th percentile", "", f"{found.kl_99:.5f}", ""])
    rows.append(["top-1 agreement", "", f"{100 * found.top1:.2f} %", ""])
    result: dict[str, Any] = {
        "fast_over_standard": gains,
        "kl": round(found.kl, 6),
        "top1": round(found.top1, 4),
    }
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
            tiers, found = asyncio.run(measure(running, policy, args))
    except harness.BenchError as error:
        print(error, file=sys.stderr)
        return 1
    show(tiers, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
