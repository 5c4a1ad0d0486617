"""The demonstration, phase by phase, against a stack that is up.

1. wait until every tier serves, and note the first answer;
2. the sealed tasks with the policy that serves now. First and not last: by the end this policy will have been
   retired and unloaded, and the comparison pairs by task and sampling seed, not by time;
3. learning on: train-split traffic on both tiers, until enough policies were promoted and time is up;
4. learning off: what is in the gate is decided, still under traffic;
5. the same sealed tasks with the policy that serves then;
6. a repetitive workload with drafting; tables, picture, evidence.

Two cores do everything, so traffic comes in bursts: it slows down while the gate evaluates (which shortens
the evaluation more than it costs samples) and pauses while the learner has samples enough. A trickle instead
would cost most of a core: an engine reads all its weights for one request as it does for thirty.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import openai
from rich.console import Console

from clients.client import AsyncRatchet
from rollout import config, gateway
from rollout.demo import drafting, report
from rollout.demo.findings import Findings
from rollout.demo.progress import Progress
from rollout.demo.traffic import Log, Traffic
from rollout.demo.watch import UNDER_WAY, View, look
from rollout.episodes import Episode
from rollout.evals import suites
from rollout.evals.paired import Side, compare, evaluate
from rollout.records import PolicyState

READY_DEADLINE_S = 900.0


class DemoConfig(config.Section):
    """``[demo]``."""

    minutes: float = 18.0
    """Time for learning under traffic."""
    extra_minutes: float = 4.0
    """More of it while fewer than `policies` were promoted."""
    settle_minutes: float = 3.0
    """Most time for deciding what is in the gate when learning ends."""
    policies: int = 3
    """Policies to promote under traffic."""
    streams: int = 32
    """Episodes in flight."""
    slow_streams: int = 4
    """Episodes in flight while the gate evaluates."""
    backlog: int = 64
    """Outcomes that the learner has neither trained on nor dropped: with two batches it has enough, and
    traffic pauses,"""
    resume: int = 32
    """until so many are left."""
    fast_share: float = 0.4
    """Share of the traffic that asks for the fast tier."""
    streamed_share: float = 0.5
    """Share of the traffic that streams; time to first token is measured on it."""
    eval_tasks: int = suites.SEALED_SIZE
    eval_concurrency: int = 32
    """Episodes of the sealed tasks in flight on each tier; every tier gets its share of them."""
    seed: int = 0
    """First seed of the training tasks."""
    look_s: float = 2.0
    """Pause between two looks at the deployment."""


class DemoFailed(Exception):
    """The demonstration could not be carried out; the message says why."""


def main(args: argparse.Namespace) -> None:
    """Run the demonstration; exits 1 when a claim did not hold."""
    document = config.read(args.config, args.overrides)
    settings = config.section(document, "demo", DemoConfig)
    home = config.home(document)
    tiers = config.tiers(document)
    console = Console()
    demo = Demo(
        config=settings,
        client=gateway.client(document, retries=0),
        model=config.section(document, "model", config.ModelConfig).name,
        tiers=list(tiers),
        drafts="fast" in tiers and bool(tiers["fast"].speculation),
        home=home,
        console=console,
    )
    try:
        findings = asyncio.run(demo.run())
    except DemoFailed as failure:
        raise SystemExit(f"demo: {failure}") from None
    folder = home / "demo" / time.strftime("%Y%m%d-%H%M%S", time.localtime(findings.started_at))
    holds = report.write(
        report.Report(findings=findings, log=demo.log, view=demo.view, wanted_policies=settings.policies),
        folder,
        console,
    )
    if not holds:
        raise SystemExit(1)


@dataclass(slots=True, kw_only=True)
class Demo:
    config: DemoConfig
    client: AsyncRatchet
    model: str
    tiers: list[str]
    drafts: bool
    home: Path
    console: Console
    log: Log = field(default_factory=Log)
    view: View = field(default_factory=View)
    findings: Findings = field(default_factory=lambda: Findings(started_at=time.time()))
    paused: bool = False
    """No traffic until the learner has caught up."""

    async def run(self) -> Findings:
        found = self.findings
        with Progress(console=self.console, log=self.log, view=self.view) as progress:
            async with self._phase("start"):
                await self._wait_until_served(progress)
            found.baseline = self.view.promoted or ""
            async with self._phase("sealed tasks before"):
                await self._evaluate(found.baseline, progress)
            async with self._traffic() as traffic:
                async with self._phase("learning"):
                    await self._learn(traffic, progress)
                async with self._phase("settling"):
                    await self._settle(traffic, progress)
            found.last = self.view.promoted or ""
            if found.last != found.baseline:
                async with self._phase("sealed tasks after"):
                    await self._evaluate(found.last, progress)
                before, after = found.results[found.baseline], found.results[found.last]
                found.comparison = compare(found.last, after, found.baseline, before)
            async with self._phase("drafting"):
                await self._draft(progress)
        return found

    @contextlib.asynccontextmanager
    async def _phase(self, name: str) -> AsyncIterator[None]:
        begun = time.monotonic()
        yield
        self.findings.phases[name] = time.monotonic() - begun

    async def _wait_until_served(self, progress: Progress) -> None:
        deadline = time.monotonic() + READY_DEADLINE_S
        while not await _ready(self.client):
            if time.monotonic() > deadline:
                raise DemoFailed(f"not every tier was ready after {READY_DEADLINE_S:.0f} s; see /healthz")
            progress.show("waiting until every tier serves")
            await asyncio.sleep(self.config.look_s)
        try:
            answer = await self.client.chat.completions.create(
                model=self.model,
                messages=[{"role": "user", "content": "Say hello."}],
                max_completion_tokens=8,
            )
        except openai.OpenAIError as error:
            raise DemoFailed(f"the first request failed: {error}") from error
        self.findings.first_answer_s = time.time() - self.findings.started_at
        await look(self.client, self.view, self.home)
        progress.show(f"first answer, by {answer.model}", now=True)

    async def _evaluate(self, policy: str, progress: Progress) -> None:
        """All sealed tasks with `policy`, into the findings."""
        tasks = suites.sealed(self.config.eval_tasks)
        done = 0

        def note(_: Side, episode: Episode) -> None:
            nonlocal done
            done += 1
            self.log.ask(episode)
            progress.show(f"sealed tasks with {policy}: {done} of {len(tasks)}", now=done == len(tasks))

        side = Side(policy=policy, model=f"{self.model}@{policy}")
        results = await evaluate(self.client, tasks, [side], self.tiers, self.config.eval_concurrency, note)
        self.findings.results.update(results)

    @contextlib.asynccontextmanager
    async def _traffic(self) -> AsyncIterator[Traffic]:
        """Traffic in the background; leaving lets the episodes in flight finish."""
        traffic = Traffic(
            client=self.client,
            log=self.log,
            fast_share=self.config.fast_share,
            streamed_share=self.config.streamed_share,
            seed=self.config.seed,
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(traffic.drive())
            try:
                yield traffic
            finally:
                await traffic.stop()

    async def _learn(self, traffic: Traffic, progress: Progress) -> None:
        self.findings.learning_since = time.time()
        self.findings.consumed_before = self.view.consumed
        await self.client.rl.learning.set(True)
        begun = time.monotonic()
        while not self._enough((time.monotonic() - begun) / 60):
            await look(self.client, self.view, self.home)
            limit, why = self._pace()
            await traffic.pace(limit)
            progress.show(f"learning under traffic: {why}")
            await asyncio.sleep(self.config.look_s)
        await self.client.rl.learning.set(False)

    def _enough(self, minutes: float) -> bool:
        promoted = len(self.view.promotions(self.findings.learning_since))
        if promoted >= self.config.policies:
            return minutes >= self.config.minutes
        return minutes >= self.config.minutes + self.config.extra_minutes

    def _pace(self) -> tuple[int, str]:
        """How many episodes to keep in flight, and why."""
        if gated := self.view.in_state(PolicyState.GATE, PolicyState.CANARY):
            return self.config.slow_streams, f"slow while {gated[0]} is evaluated"
        waiting = self.log.reported - (self.view.consumed - self.findings.consumed_before)
        enough = self.config.resume + 1 if self.paused else self.config.backlog
        self.paused = waiting >= enough and not self.view.starving
        if self.paused:
            return 0, f"paused, {waiting} outcomes wait for the learner"
        return self.config.streams, f"{self.config.streams} at a time"

    async def _settle(self, traffic: Traffic, progress: Progress) -> None:
        """Until nothing is on its way to serve, or time is up; traffic goes on, so a swap is under load."""
        await traffic.pace(self.config.slow_streams)
        deadline = time.monotonic() + self.config.settle_minutes * 60
        await look(self.client, self.view, self.home)
        while self.view.in_state(*UNDER_WAY) and time.monotonic() < deadline:
            progress.show(f"deciding on {', '.join(self.view.in_state(*UNDER_WAY))}")
            await asyncio.sleep(self.config.look_s)
            await look(self.client, self.view, self.home)

    async def _draft(self, progress: Progress) -> None:
        if not self.drafts:
            self.findings.drafting = "off: [tiers.fast] has no speculation in this TOML"
            return
        progress.show("repetitive workload with drafting", now=True)
        self.findings.drafting = await drafting.measure(self.client, self.model)


async def _ready(client: openai.AsyncOpenAI) -> bool:
    try:
        await client.get(gateway.beside_api(client, "/healthz"), cast_to=object)
    except openai.OpenAIError:
        return False
    return True
