"""``python -m tests.bench.tiers``: what the fast tier gains over standard, what bounds it, and what it costs.

Both tiers, and a third engine that is the fast tier with drafting, run at once with the same adapter policy
loaded, but only one has work at a time. Speeds are medians over rounds of pairs measured one right after
the other, first one tier then the other, and in the next round the other way about, because the machine's
speed drifts more between minutes than the tiers differ. Latencies are those of one streamed round.

Beside the fast tier stands the step that multiplies nothing: the same engine with its products left out.

Quality is teacher-forced: standard samples answers, and both tiers give the distribution of every sampled
position. The divergence is KL(standard || fast) over the tokens that are in the top 64 of both, everything
else taken together as one outcome.

Last line: ``{"fast_over_standard": {"1":, "4":, "8":, "32":}, "tools_fast_over_standard": {...}, "kl":,
"top1":, "adapter_over_base":, "weights_ratio":, "spec_over_standard_1":, "noop_share": {...}}``;
`adapter_over_base` is the worse of the two tiers at 8 requests.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import torch

from quant import serving
from quant.divergence import Divergence, compare
from quant.teacher import distributions, sample, sampled_tokens
from server.engine.client import Engine
from server.engine.launch import BASE_MODEL
from tests.bench import harness, noop, speculation
from tests.bench.harness import Latencies, Request, chats, percentile, tool_uses
from tests.fixtures.engines import RunningEngine

POLICY = "bench"
LOADS = (1, 4, 8, 32)
ADAPTER_LOAD = 8
STANDARD, FAST, DRAFTING = "standard", "fast", "drafting"
CHAT, TOOLS, BARE, NOOP, REPETITIVE = "chat", "tool use", "no adapter", "no products", "repetitive"
PROMPTS: dict[str, Callable[[int, int], list[Request]]] = {CHAT: chats, TOOLS: tool_uses}


@dataclass(slots=True)
class Tier:
    """A running tier as this bench uses it."""

    engine: Engine
    client: openai.AsyncOpenAI
    """The same engine as vLLM has it, for what only it answers."""
    weights: dict[str, int] = field(default_factory=dict)
    """Bytes by kind (`noop.BenchWorker.weight_bytes`)."""
    speeds: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    """Tokens a second of each round, by workload and number of requests."""
    waits: dict[tuple[str, int], Latencies] = field(default_factory=dict)


async def run(tier: Tier, workload: str, load: int, tokens: int, seed: int) -> float:
    """Tokens a second."""
    if workload == REPETITIVE:
        requests = [{"messages": messages} for messages in speculation.code_edit(load, seed)]
        return await harness.tokens_per_second(tier.engine, POLICY, requests, tokens, temperature=0.0)
    requests = PROMPTS.get(workload, chats)(load, seed)
    if workload != NOOP:
        model = BASE_MODEL if workload == BARE else POLICY
        return await harness.tokens_per_second(tier.engine, model, requests, tokens)
    await call_worker(tier, "leave_products_out", [True])
    try:
        return await harness.tokens_per_second(tier.engine, POLICY, requests, tokens)
    finally:
        await call_worker(tier, "leave_products_out", [False])


async def call_worker(tier: Tier, method: str, arguments: list[Any]) -> Any:
    body = {"method": method, "args": arguments}
    answer = await tier.client.post("http://engine/collective_rpc", body=body, cast_to=object)
    assert isinstance(answer, dict)
    return answer["results"][0]


async def measure_speed(tiers: dict[str, Tier], rounds: int, tokens: int) -> None:
    """Fill `speeds`; one unmeasured round first."""
    cases: list[tuple[str, int, tuple[str, ...]]] = []
    cases += [(workload, load, (STANDARD, FAST)) for workload in PROMPTS for load in LOADS]
    cases += [(BARE, ADAPTER_LOAD, (STANDARD, FAST)), (REPETITIVE, 1, (STANDARD, FAST, DRAFTING))]
    cases += [(NOOP, load, (FAST,)) for load in LOADS]
    for number in range(rounds + 1):
        for workload, load, names in cases if number % 2 else reversed(cases):
            for name in names if number % 2 else reversed(names):
                speed = await run(tiers[name], workload, load, tokens, seed=number)
                if number:
                    tiers[name].speeds[workload, load].append(speed)
        found = [
            f"{name} {[round(tier.speeds[CHAT, load][-1]) for load in LOADS]}"
            for name, tier in tiers.items()
            if number and name != DRAFTING
        ]
        harness.say(f"speed: round {number} of {rounds}, {', '.join(found) or 'not counted'}")


async def measure_waits(tiers: dict[str, Tier], rounds: int, tokens: int) -> None:
    """Fill `waits` from prompts that no engine has seen yet."""
    for workload, prompts in PROMPTS.items():
        for load in LOADS:
            for name in (STANDARD, FAST):
                requests = prompts(load, rounds + 1)
                tiers[name].waits[workload, load] = await harness.latencies(
                    tiers[name].engine, POLICY, requests, tokens
                )
                if workload == TOOLS:  # once more: now their prefix is in the cache
                    tiers[name].waits[f"{workload} again", load] = await harness.latencies(
                        tiers[name].engine, POLICY, requests, tokens
                    )
        harness.say(f"latencies: {workload}")


def paired(numerator: list[float], denominator: list[float]) -> float:
    """Median over rounds of the ratio within the round."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


async def measure(
    running: dict[str, RunningEngine], policy: Path, args: argparse.Namespace
) -> tuple[dict[str, Tier], Divergence]:
    """Everything, under the adapter in folder `policy`."""
    tiers: dict[str, Tier] = {}
    for name in (STANDARD, FAST, DRAFTING):
        engine = running[f"{name}-0"]
        tiers[name] = tier = Tier(engine.client(), serving.client(engine.socket))
        await tier.engine.load_adapter(POLICY, policy)
        tier.weights = await call_worker(tier, "weight_bytes", [])
    samples = await sample(tiers[STANDARD].client, POLICY, args.tokens, harness.say)
    standard, fast = [
        await distributions(tiers[name].client, POLICY, samples, harness.say) for name in (STANDARD, FAST)
    ]
    found = compare(standard, fast, sampled_tokens(samples))
    harness.say(f"quality: KL {found.kl:.5f}, top-1 agreement {found.top1:.4f}")
    await measure_speed(tiers, args.rounds, args.answer_tokens)
    await measure_waits(tiers, args.rounds, args.answer_tokens)
    for tier in tiers.values():
        await tier.engine.close()
        await tier.client.close()
    return tiers, found


def bytes_a_second() -> float:
    """What this machine reads from memory with all its cores: the best of a few passes over 1 GB."""
    values = torch.ones(2**28)
    passes = []
    for _ in range(8):
        started = time.perf_counter()
        values.sum()
        passes.append(values.nbytes / (time.perf_counter() - started))
    return max(passes)


def bytes_a_step(weights: dict[str, int], config: dict[str, Any], load: int) -> float:
    """Weights that a step reads when every token's experts are drawn evenly; an embedding is looked up."""
    chosen: float = config["num_experts_per_tok"] / config["num_local_experts"]
    return weights["rest"] + weights["experts"] * (1.0 - (1.0 - chosen) ** load)


def show(tiers: dict[str, Tier], found: Divergence, config: dict[str, Any]) -> None:
    standard, fast = tiers[STANDARD], tiers[FAST]
    result: dict[str, Any] = {}
    rows = []
    for key, workload in (("fast_over_standard", CHAT), ("tools_fast_over_standard", TOOLS)):
        gains = result[key] = {}
        for load in LOADS:
            case = (workload, load)
            gains[str(load)] = round(paired(fast.speeds[case], standard.speeds[case]), 3)
            speeds = [f"{statistics.median(tier.speeds[case]):.1f}" for tier in (standard, fast)]
            rows.append([f"tokens/s, {workload}, {load} at once", *speeds, f"{gains[str(load)]:.2f}x"])
    result |= {"kl": round(found.kl, 6), "top1": round(found.top1, 4)}
    adapter = [
        paired(tier.speeds[CHAT, ADAPTER_LOAD], tier.speeds[BARE, ADAPTER_LOAD]) for tier in (standard, fast)
    ]
    result["adapter_over_base"] = round(min(adapter), 3)
    rows.append([f"adapter over none, {ADAPTER_LOAD} at once", *(f"{ratio:.2f}" for ratio in adapter), ""])
    sizes = [sum(tier.weights.values()) for tier in (standard, fast)]
    result["weights_ratio"] = round(sizes[1] / sizes[0], 3)
    rows.append(["weights, MB", *(f"{size / 1e6:.0f}" for size in sizes), f"{result['weights_ratio']:.2f}x"])
    drafting = tiers[DRAFTING].speeds[REPETITIVE, 1]
    result["spec_over_standard_1"] = round(paired(drafting, standard.speeds[REPETITIVE, 1]), 3)
    speeds = [f"{statistics.median(tier.speeds[REPETITIVE, 1]):.1f}" for tier in (standard, fast)]
    drafted = f"{statistics.median(drafting):.1f} drafting, {result['spec_over_standard_1']:.2f}x"
    rows.append(["tokens/s, repetitive, 1", *speeds, drafted])
    rows += [*_quality_rows(found), *_wait_rows(standard, fast)]
    result["noop_share"] = {
        str(load): round(paired(fast.speeds[CHAT, load], fast.speeds[NOOP, load]), 3) for load in LOADS
    }
    rows += _bound_rows(fast, config)
    harness.report("Tiers", rows, ["", STANDARD, FAST, "gain"], result)


def _quality_rows(found: Divergence) -> list[list[str]]:
    return [
        [f"KL per token, {found.positions} tokens", "", f"{found.kl:.5f}", ""],
        ["KL, 99th percentile", "", f"{found.kl_99:.5f}", ""],
        ["top-1 agreement", "", f"{100 * found.top1:.2f} %", ""],
    ]


def _wait_rows(standard: Tier, fast: Tier) -> list[list[str]]:
    rows = []
    for workload, load in standard.waits:
        both = [tier.waits[workload, load] for tier in (standard, fast)]
        shown = [
            f"{statistics.median(waits.first):.2f} s; {1000 * statistics.median(waits.between):.0f} /"
            f" {1000 * percentile(waits.between, 0.99):.0f} ms"
            for waits in both
        ]
        rows.append([f"first token; between, p50 / p99, {workload}, {load}", *shown, ""])
    return rows


def _bound_rows(fast: Tier, config: dict[str, Any]) -> list[list[str]]:
    rate = bytes_a_second()
    rows = []
    for load in LOADS:
        step, bare = (1000 * load / statistics.median(fast.speeds[name, load]) for name in (CHAT, NOOP))
        reading = 1000 * bytes_a_step(fast.weights, config, load) / rate
        share = paired(fast.speeds[CHAT, load], fast.speeds[NOOP, load])
        bound = f"{bare:.1f} without products, {reading:.1f} to read the weights at {rate / 1e9:.0f} GB/s"
        rows.append([f"ms a step, {load} at once", "", f"{step:.1f}", f"{bound} ({share:.2f})"])
    return rows


def main() -> int:
    parser = harness.parser("Compares the fast tier with standard: speed, latency, divergence, and bounds.")
    parser.add_argument("--rounds", type=int, default=4, help="rounds of speed measurements")
    parser.add_argument("--answer-tokens", type=int, default=48, help="tokens of each measured answer")
    parser.add_argument("--tokens", type=int, default=5000, help="sampled tokens for the divergence")
    args = parser.parse_args()
    try:
        chosen = harness.setting(args)
        extra = [*chosen.engine.extra_args, "--worker-extension-cls", noop.NAME]
        drafting = f'{{ recipe = "cpu-int8", speculation = {speculation.SPECULATION} }}'
        own = [f"engine.extra_args={json.dumps(extra)}", f"tiers.drafting={drafting}"]
        chosen = dataclasses.replace(chosen, overrides=[*chosen.overrides, *own])
        replicas = [f"{name}-0" for name in (STANDARD, FAST, DRAFTING)]
        with harness.adapter(chosen) as policy, harness.engines(chosen, replicas) as running:
            tiers, found = asyncio.run(measure(running, policy, args))
    except harness.BenchError as error:
        print(error, file=sys.stderr)
        return 1
    show(tiers, found, json.loads((chosen.model / "config.json").read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
