"""``python -m tests.bench.swap``: adapter swaps under load on both tiers. Is anything lost, is anyone late?

A gateway over both tiers answers streams without pause while one policy after another is published, loaded,
verified, warmed and promoted. A swap window lasts from the first load to two seconds after the flip. As
control, sham windows of the same lengths are laid where nothing happened. Time to first token is measured by
the client; the ratio is the p99 inside swap windows over the p99 outside, its interval a bootstrap over
windows. Requests that no window contains are outside.

Last line: ``{"lost":, "refused":, "load_ms_p50":, "ttft_p99_ratio":}`` and what the table says besides.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, islice, repeat
from pathlib import Path
from typing import Any

import httpx
import msgspec

from learner import publish as publishing
from learner.sft import sample_of
from quant.teacher import chat_prompts
from rollout import artifacts, policies
from rollout.artifacts import Artifacts
from rollout.config import ArtifactsConfig, section
from rollout.records import Fingerprint, FingerprintPrompt, PolicyKind, PolicyManifest
from rollout.tasks import demonstration, generate
from rollout.trajectories import PromptRenderer
from server.engine.client import Engine
from tests.bench import harness
from tests.server.gateways import Deployment, running_gateway

AFTER_FLIP_S = 2.0
PROBE_FAMILY = "event"
"""Policies are told apart on a gold demonstration of this family: on a tool call the adapter shows most."""
STEP = 0.02
"""Size of the random change between two policies, relative to the adapter's own entries."""
BOOTSTRAPS = 2000
ENOUGH = 300


@dataclass(slots=True)
class Answer:
    """One request as the client saw it."""

    began: float
    ttft: float | None = None
    ended: bool = False
    refused: bool = False


@dataclass(slots=True)
class Traffic:
    """Streams that follow one another until told to stop."""

    url: str
    key: str
    tokens: int
    stopping: bool = False
    answers: list[Answer] = field(default_factory=list)

    async def stream(self, http: httpx.AsyncClient, model: str, seed: int) -> None:
        number = 0
        while not self.stopping:
            number += 1
            messages = chat_prompts(1, seed * 100_003 + number)[0]
            self.answers.append(answer := Answer(time.time()))
            body = {
                "model": model,
                "messages": [{"role": "system", "content": "You answer briefly."}, *messages],
                "max_tokens": self.tokens,
                "stream": True,
                "store": True,
            }
            await self._one(http, body, answer)

    async def _one(self, http: httpx.AsyncClient, body: dict[str, Any], answer: Answer) -> None:
        headers = {"authorization": f"Bearer {self.key}"}
        try:
            async with http.stream("POST", self.url, json=body, headers=headers) as response:
                answer.refused = response.status_code != 200
                async for line in response.aiter_lines():
                    if answer.ttft is None and '"content":"' in line and '"role"' not in line:
                        answer.ttft = time.time() - answer.began
                    answer.ended |= line == "data: [DONE]"
        except httpx.TransportError as error:
            harness.say(f"lost: {error!r}")


def publish(deployment: Deployment, source: Path, seed: int, probes: list[FingerprintPrompt]) -> str:
    """Register a random neighbour of the adapter in `source` as a candidate."""
    with deployment.store() as store, store.write() as tx:
        policy_id = policies.reserve(tx)
    settings = json.loads((source / "adapter_config.json").read_text())
    manifest = PolicyManifest(
        id=policy_id,
        parent="p000000",
        base=artifacts.base_id(deployment.model_dir),
        kind=PolicyKind.ADAPTER,
        target_modules=sorted(settings["target_modules"]),
        rank=settings["r"],
        job="bench",
        step=seed,
        recipe={},
        files={},
        created_at=time.time(),
    )

    def write(folder: Path) -> None:
        neighbour(source, folder, seed)
        known = Fingerprint(policy=policy_id, parent="p000000", prompts=probes)
        (folder / artifacts.FINGERPRINT).write_bytes(msgspec.json.encode(known))

    path = Artifacts(section(deployment.document, "artifacts", ArtifactsConfig).root).write_policy(
        manifest, write
    )
    with deployment.store() as store, store.write() as tx:
        policies.register(tx, artifacts.read_manifest(path), str(path))
    return policy_id


def neighbour(source: Path, folder: Path, seed: int) -> None:
    """The adapter in `source`, a little changed."""
    import torch
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(source / "adapter_model.safetensors")
    for name, tensor in tensors.items():
        tensors[name] = tensor + STEP * tensor.std() * torch.randn(tensor.shape, generator=generator)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    shutil.copyfile(source / "adapter_config.json", folder / "adapter_config.json")


def probe_ids(model: Path) -> list[list[int]]:
    """Ends of demonstrations as the model reads them, as many and as long as the learner's."""
    renderer = PromptRenderer(model)
    tasks = (task for task in map(generate, count(), repeat("train")) if task.family == PROBE_FAMILY)
    samples = (
        sample_of(renderer, {"messages": task.messages + demonstration(task), "tools": task.tools})
        for task in islice(tasks, publishing.PROMPTS)
    )
    return [sample.tokens[-publishing.PROMPT_TOKENS :] for sample in samples]


async def probes_of(engine: Engine, folder: Path, prompts: list[list[int]]) -> list[FingerprintPrompt]:
    """The engine's own log-probs: this bench measures swaps, not what they are verified against."""
    await engine.load_adapter("probe", folder)
    probes = [
        _probe(ids, await engine.score("probe", ids), await engine.score("base", ids)) for ids in prompts
    ]
    await engine.unload_adapter("probe")
    return probes


def _probe(ids: list[int], policy: list[float | None], base: list[float | None]) -> FingerprintPrompt:
    rows = [
        (i, p, b)
        for i, (p, b) in enumerate(zip(policy, base, strict=True))
        if p is not None and b is not None
    ]
    return FingerprintPrompt(
        token_ids=ids,
        positions=[i for i, _, _ in rows],
        policy=[p for _, p, _ in rows],
        parent=[b for _, _, b in rows],
        base=[b for _, _, b in rows],
    )


async def swap(deployment: Deployment, policy_id: str) -> dict[str, Any]:
    """Wait until the candidate is verified, let it through the gate and promote it; its flip's timings."""
    while not await asyncio.to_thread(deployment.verified, policy_id):
        policy = await asyncio.to_thread(deployment.policy, policy_id)
        if policy["state"] == "rejected":
            raise harness.BenchError(f"{policy_id} was refused: {policy['reason']}")
        await asyncio.sleep(0.1)
    await asyncio.to_thread(deployment.pass_gate, policy_id)
    answer = await asyncio.to_thread(deployment.call, "POST", "/v1/rl/tiers/promote", {"policy": policy_id})
    if answer.status_code != 200:
        raise harness.BenchError(answer.text)
    flip: dict[str, Any] = (await asyncio.to_thread(deployment.state))["flips"][-1]
    return flip


async def all_probes(
    engine: Engine, adapter: Path, folder: Path, prompts: list[list[int]], swaps: int
) -> list[list[FingerprintPrompt]]:
    """Of every policy to come. Before the gateway runs: it would unload what it does not know."""
    probes = []
    async with engine:
        for number in range(swaps):
            neighbour(adapter, folder, number)
            probes.append(await probes_of(engine, folder, prompts))
    return probes


async def drive(
    deployment: Deployment, probes: list[list[FingerprintPrompt]], adapter: Path, args: argparse.Namespace
) -> tuple[list[Answer], list[dict[str, Any]], list[tuple[float, float]]]:
    """Traffic, with swaps and pauses in it; answers, flips and sham windows."""
    traffic = Traffic(f"{deployment.url}/v1/chat/completions", deployment.key, args.tokens)
    flips: list[dict[str, Any]] = []
    shams: list[tuple[float, float]] = []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=300) as http:
        streams = [
            asyncio.create_task(traffic.stream(http, ["ratchet", "ratchet-fast"][i % 2], i))
            for i in range(args.streams)
        ]
        try:
            # The caches are warm and the queues are full before anything counts.
            await asyncio.sleep(args.pause)
            traffic.answers.clear()
            for number, probe in enumerate(probes):
                policy_id = await asyncio.to_thread(publish, deployment, adapter, number, probe)
                flips.append(await swap(deployment, policy_id))
                await asyncio.sleep(AFTER_FLIP_S)
                begin, end = window(flips[-1])
                await asyncio.sleep(max(args.pause, end - begin))
                shams.append((time.time() - (end - begin), time.time()))
                harness.say(f"swap {number + 1} of {args.swaps}: {policy_id}, window {end - begin:.1f} s")
        finally:
            traffic.stopping = True
            await asyncio.gather(*streams)
    return traffic.answers, flips, shams


def window(flip: dict[str, Any]) -> tuple[float, float]:
    """From the first load to two seconds after the flip."""
    begins = [replica["load_started_at"] for replica in flip["replicas"].values()]
    return min(begins), flip["flipped_at"] + AFTER_FLIP_S


def inside(answers: Sequence[Answer], windows: Sequence[tuple[float, float]]) -> list[list[float]]:
    """Times to first token of the requests that began in each window."""
    return [
        [a.ttft for a in answers if a.ttft is not None and begin <= a.began < end] for begin, end in windows
    ]


def p99(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]


def ratio(groups: list[list[float]], outside: list[float]) -> tuple[float, float, float]:
    """p99 of all groups over p99 outside, with a 95 % interval: groups and outside resampled."""

    def flat(chosen: Sequence[list[float]]) -> list[float]:
        return [value for group in chosen for value in group]

    chooser = random.Random(1)
    samples = sorted(
        p99(flat(chooser.choices(groups, k=len(groups))) or outside)
        / p99(chooser.choices(outside, k=len(outside)))
        for _ in range(BOOTSTRAPS)
    )
    return p99(flat(groups)) / p99(outside), samples[BOOTSTRAPS // 40], samples[-BOOTSTRAPS // 40]


def summarise(
    answers: list[Answer], flips: list[dict[str, Any]], shams: list[tuple[float, float]]
) -> dict[str, Any]:
    windows = [window(flip) for flip in flips]
    swapping, sham = inside(answers, windows), inside(answers, shams)
    outside = [
        a.ttft for a in answers if a.ttft is not None and not any(b <= a.began < e for b, e in windows)
    ]
    during = [value for group in swapping for value in group]
    loads = [ms for flip in flips for r in flip["replicas"].values() if (ms := r["load_ms"]) is not None]
    swap_ratio, sham_ratio = ratio(swapping, outside), ratio(sham, outside)
    return {
        "lost": sum(not a.ended and not a.refused for a in answers),
        "refused": sum(a.refused for a in answers),
        "load_ms_p50": round(statistics.median(loads), 1),
        "ttft_p99_ratio": round(swap_ratio[0], 3),
        "ttft_p99_ratio_interval": [round(value, 3) for value in swap_ratio[1:]],
        "sham_p99_ratio": round(sham_ratio[0], 3),
        "sham_p99_ratio_interval": [round(value, 3) for value in sham_ratio[1:]],
        "ttft_p50_ms": [round(statistics.median(v) * 1e3) for v in (during, outside)],
        "ttft_p99_ms": [round(p99(v) * 1e3) for v in (during, outside)],
        "requests": len(answers),
        "requests_in_windows": len(during),
        "swaps": len(flips),
    }


def run(args: argparse.Namespace) -> None:
    chosen = harness.setting(args)
    with harness.adapter(chosen) as adapter, harness.engines(chosen, ["standard-0", "fast-0"]) as running:
        home = running["standard-0"].home
        overrides = [
            *chosen.overrides,
            f'home.path="{home}"',
            f'model.path="{chosen.model}"',
            'model.warm_start=""',
        ]
        deployment = Deployment(chosen.config, home, overrides)
        deployment.prepare()
        engine = running["standard-0"].client()
        probes = asyncio.run(
            all_probes(engine, adapter, home / "neighbours", probe_ids(chosen.model), args.swaps)
        )
        with running_gateway(deployment):
            outcome = asyncio.run(drive(deployment, probes, adapter, args))
    result = summarise(*outcome)
    if result["requests_in_windows"] < ENOUGH:
        harness.say(f"only {result['requests_in_windows']} requests in swap windows; raise --swaps")
    rows = [[name, json.dumps(value)] for name, value in result.items()]
    harness.report("Swaps under load (both tiers together)", rows, ["what", "value"], result)


def main() -> None:
    parser = harness.parser("adapter swaps under load")
    parser.add_argument("--swaps", type=int, default=12)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--pause", type=float, default=6.0, help="seconds between two swaps, at least")
    try:
        run(parser.parse_args())
    except harness.BenchError as error:
        sys.exit(f"bench: {error}")


if __name__ == "__main__":
    main()
