"""``python -m tests.bench.speculation``: does drafting pay, and does its controller know when?

One engine of the fast tier, drafting by n-grams, an adapter policy loaded. Each workload runs with no draft
verified, with all of them, and as the controller decides, one right after the other and in the next round
in the reverse order, because the machine's speed drifts more between minutes than the ways differ. What the
controller has measured is kept from round to round, as it would be in service.

Last line: ``{"spec_over_plain": {WORKLOAD: {"1":, "8":}}, "auto_over_best": {...}, "acceptance": {...},
"spec_over_plain_1":}``: speeds with drafting as the controller decides over
without, over the better of all and none, accepted over verified tokens, and the first of repetitive text.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quant.teacher import chat_prompts
from server.engine.client import Engine
from tests.bench import harness

POLICY = "bench"
MODES = ("none", "all", "auto")
LOADS = (1, 8, 32)
SPECULATION = '{ method = "ngram", num_speculative_tokens = 5, prompt_lookup_min = 2, prompt_lookup_max = 4 }'
FIELDS = ("name", "city", "street", "code", "phone", "country", "mail", "title")
Messages = list[dict[str, Any]]


def code_edit(count: int, seed: int) -> list[Messages]:
    """Functions to give back with one name changed."""

    def ask(number: int) -> Messages:
        first = (seed + number) % len(FIELDS)
        names = [FIELDS[(first + step) % len(FIELDS)] for step in range(4)]
        code = "\n".join(f"def field_{name}(row):\n    return row['{name}'].strip()\n" for name in names)
        return [{"role": "user", "content": f"Rename `row` to `line` in this code:\n```python\n{code}```"}]

    return [ask(number) for number in range(count)]


def json_rows(count: int, seed: int) -> list[Messages]:
    """A table to write as JSON."""

    def ask(number: int) -> Messages:
        rows = [{"id": seed * 100 + number + step, "city": "Bergen", "open": True} for step in range(4)]
        text = json.dumps(rows, indent=1)
        return [{"role": "user", "content": f"Repeat this JSON exactly:\n```json\n{text}\n```"}]

    return [ask(number) for number in range(count)]


WORKLOADS: dict[str, tuple[Callable[[int, int], list[Messages]], float]] = {
    "code edit": (code_edit, 0.0),
    "JSON": (json_rows, 0.0),
    "free text": (chat_prompts, 1.0),
}
"""Prompts and temperature."""


class Counted:
    """Speeds of each workload, load and mode, and tokens verified and accepted while all were."""

    def __init__(self) -> None:
        self.speeds: dict[tuple[str, int, str], list[float]] = defaultdict(list)
        self.verified: dict[str, int] = defaultdict(int)
        self.accepted: dict[str, int] = defaultdict(int)


async def run(engine: Engine, prompts: list[Messages], temperature: float, tokens: int) -> float:
    """Tokens a second."""

    async def one(messages: Messages) -> int:
        body = {"model": POLICY, "messages": messages, "max_tokens": tokens, "temperature": temperature}
        answer = await engine.chat(body | {"ignore_eos": True})
        return sum(len(choice.token_ids) for choice in answer.choices)

    started = time.monotonic()
    made: list[int] = await asyncio.gather(*(one(messages) for messages in prompts))
    speed: float = sum(made) / (time.monotonic() - started)
    return speed


async def measure(engine: Engine, policy: Path, args: argparse.Namespace) -> Counted:
    counted = Counted()
    await engine.load_adapter(POLICY, policy)
    for number in range(args.rounds + 1):
        for workload, (prompts, temperature) in WORKLOADS.items():
            for load in LOADS:
                for mode in MODES if number % 2 else reversed(MODES):
                    await engine.choose_drafts(mode)
                    before = await _counts(engine)
                    speed = await run(engine, prompts(load, number), temperature, args.answer_tokens)
                    after = await _counts(engine)
                    if not number:
                        continue
                    counted.speeds[workload, load, mode].append(speed)
                    if mode == "all":
                        counted.verified[workload] += after["verified"] - before["verified"]
                        counted.accepted[workload] += after["accepted"] - before["accepted"]
                speeds = [counted.speeds[workload, load, mode][-1:] for mode in MODES]
                harness.say(f"round {number} of {args.rounds}: {workload}, {load}: {speeds or 'not counted'}")
    return counted


async def _counts(engine: Engine) -> dict[str, int]:
    counts: dict[str, int] = (await engine.speculation())["policies"].get(POLICY, {})
    return defaultdict(int, counts)


def show(counted: Counted) -> None:
    def ratio(workload: str, load: int, other: str) -> float:
        """Of the controller over `other`: median over rounds of the ratio within the round."""
        own, others = (counted.speeds[workload, load, mode] for mode in ("auto", other))
        return round(statistics.median(a / b for a, b in zip(own, others, strict=True)), 3)

    rows: list[list[str]] = []
    gains: dict[str, dict[str, float]] = {}
    kept: dict[str, dict[str, float]] = {}
    for workload in WORKLOADS:
        gains[workload] = {str(load): ratio(workload, load, "none") for load in LOADS}
        # The better way is the one with the higher median, not the luckier of the two in each round.
        kept[workload] = {
            str(load): ratio(workload, load, _better(counted, workload, load)) for load in LOADS
        }
        for load in LOADS:
            speeds = [statistics.median(counted.speeds[workload, load, mode]) for mode in MODES]
            shown = [f"{speed:.1f}" for speed in speeds]
            ratios = [f"{gains[workload][str(load)]:.2f}x", f"{kept[workload][str(load)]:.2f}x"]
            rows.append([f"{workload}, {load} requests", *shown, *ratios])
    acceptance = {
        workload: round(counted.accepted[workload] / max(counted.verified[workload], 1), 3)
        for workload in WORKLOADS
    }
    rows += [
        [f"acceptance, {workload}", "", f"{share:.2f}", "", "", ""] for workload, share in acceptance.items()
    ]
    harness.report(
        "Drafting, tokens/s",
        rows,
        ["", "no drafts", "all", "controller", "over none", "over the better"],
        {
            "spec_over_plain": gains,
            "auto_over_best": kept,
            "acceptance": acceptance,
            "spec_over_plain_1": max(gains["code edit"]["1"], gains["JSON"]["1"]),
        },
    )


def _better(counted: Counted, workload: str, load: int) -> str:
    return max(("none", "all"), key=lambda mode: statistics.median(counted.speeds[workload, load, mode]))


def main() -> int:
    parser = harness.parser("Measures drafting and its controller on repetitive and on free text.")
    parser.add_argument("--rounds", type=int, default=4, help="rounds of measurements")
    parser.add_argument("--answer-tokens", type=int, default=96, help="tokens of each answer")
    args = parser.parse_args()
    args.overrides = [*args.overrides, f"tiers.fast.speculation={SPECULATION}"]
    try:
        chosen = harness.setting(args)
        with harness.adapter(chosen) as policy, harness.engines(chosen, ["fast-0"]) as running:
            counted = asyncio.run(_measured(running["fast-0"].client(), policy, args))
    except harness.BenchError as error:
        print(error, file=sys.stderr)
        return 1
    show(counted)
    return 0


async def _measured(engine: Engine, policy: Path, args: argparse.Namespace) -> Counted:
    async with engine:
        return await measure(engine, policy, args)


if __name__ == "__main__":
    sys.exit(main())
