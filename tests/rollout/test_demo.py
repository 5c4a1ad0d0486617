"""The demonstration's parts, and the whole of it on a scripted service with a real store and a real judge."""

from __future__ import annotations

import asyncio
import io
import json
import math
import os
from pathlib import Path

import pytest
from rich.console import Console

from rollout import policies
from rollout.demo import report, service, watch
from rollout.demo.program import Demo, DemoConfig
from rollout.demo.service import Window
from rollout.demo.traffic import Log, Traffic
from rollout.episodes import Request
from rollout.records import Placement, PolicyState
from rollout.store import Store, placements
from tests.fixtures import rows
from tests.rollout.scripted import TIERS, Service
from tests.rollout.test_promotion import judge


def request(sent_at: float, ttft_s: float | None) -> Request:
    return Request(
        sent_at=sent_at, ttft_s=ttft_s, seconds=1.0, tier="default", policy="p1", completion_id="c"
    )


def test_a_wait_that_meets_a_window_counts_as_inside() -> None:
    swaps = [Window(10.0, 12.0)]
    made = [request(5.0, 1.0), request(9.5, 1.0), request(11.0, 3.0), request(12.5, 0.1), request(11.0, None)]
    found = service.waits(made, swaps)
    assert (found["inside"].n, found["outside"].n) == (2, 2)
    assert found["inside"].p50_s == 2.0
    assert math.isnan(service.waits([], swaps)["inside"].p99_s)


def test_windows_are_the_load_and_the_flip_and_not_the_evaluation_between() -> None:
    replicas = {
        "standard-0": {"load_started_at": 100.0, "placed_ms": 1500.0},
        "fast-0": {"load_started_at": None, "placed_ms": None},
    }
    flip = {"flipped_at": 160.0, "warm_started_at": 158.0, "replicas": replicas}
    old = {"flipped_at": 50.0, "replicas": {}}
    assert service.windows([old, flip], since=90.0) == [Window(100.0, 101.5), Window(158.0, 162.0)]


def test_memory_counts_a_process_with_its_children(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert watch.memory(tmp_path) == {}
    (tmp_path / "run" / "up.json").write_text(json.dumps({str(os.getpid()): 1}))
    ((_, mib),) = watch.memory(tmp_path).items()
    assert mib > 10


def test_traffic_keeps_to_its_pace_and_finishes_what_it_began() -> None:
    api = Service(skills={"p000001": 0.5}, promoted="p000001")
    log = Log()

    async def play() -> None:
        traffic = Traffic(client=api.client(), log=log, fast_share=0.5, streamed_share=0.5)
        driving = asyncio.create_task(traffic.drive())
        await asyncio.sleep(0)
        assert not api.bodies
        await traffic.pace(3)
        while log.reported < 40:
            assert traffic.running <= 3
            await asyncio.sleep(0)
        await traffic.stop()
        await driving
        assert traffic.running == 0

    asyncio.run(play())
    tallies = log.tallies.values()
    assert not log.failures
    assert {tier for _, tier in log.tallies} <= {"standard", "fast"}
    assert sum(tally.episodes for tally in tallies) == log.reported == len(api.outcomes)
    assert sum(tally.requests for tally in tallies) == len(log.requests) == len(api.bodies)
    assert all(body["store"] and "/train/" in body["metadata"]["task"] for body in api.bodies)
    assert {body["service_tier"] for body in api.bodies} == {"default", "fast"}
    assert any(body.get("stream") for body in api.bodies)


def test_a_failed_request_is_counted_and_is_no_episode() -> None:
    api = Service(skills={"p000001": 1.0}, promoted="p000001", failing=2)
    log = Log()

    async def play() -> None:
        traffic = Traffic(client=api.client(), log=log, fast_share=0.0, streamed_share=0.0)
        driving = asyncio.create_task(traffic.drive())
        await traffic.pace(2)
        while log.reported < 5:
            await asyncio.sleep(0)
        await traffic.stop()
        await driving

    asyncio.run(play())
    assert len(log.failures) == 2
    assert log.tallies["none", "standard"].failed == 2
    assert log.tallies["none", "standard"].episodes == 0


class Publisher:
    """Stands in for the learner: a better candidate for every 40 outcomes while learning is on."""

    def __init__(self, api: Service, store: Store) -> None:
        self.api, self.store = api, store
        self.skills = iter((0.55, 0.7, 0.85, 0.95))

    async def run(self) -> None:
        trained = 0
        while True:
            await asyncio.sleep(0.005)
            with self.store.read() as tx:
                waiting = policies.list_policies(
                    tx, [PolicyState.CANDIDATE, PolicyState.GATE, PolicyState.CANARY]
                )
            self.api.learner = {"state": "reading", "seen": len(self.api.outcomes), "trained": trained}
            if self.api.learning_on and not waiting and len(self.api.outcomes) >= trained + 40:
                trained = len(self.api.outcomes)
                if (skill := next(self.skills, None)) is not None:
                    self._publish(skill)

    def _publish(self, skill: float) -> None:
        with self.store.write() as tx:
            policy_id = policies.reserve(tx)
            self.api.skills[policy_id] = skill
            policies.register(tx, rows.manifest(policy_id), f"/{policy_id}")
            placements.set_placement(tx, "standard-0", "i1", policy_id, Placement.VERIFIED)


@pytest.fixture
def deployed(sqlite_store: Store) -> Store:
    with sqlite_store.write() as tx:
        policies.register(tx, rows.manifest("p000001"), "/p1", state=PolicyState.PROMOTED, reason="initial")
        placements.heartbeat(tx, "standard-0", "standard", "i1", True)
    return sqlite_store


def demonstration(
    settings: DemoConfig, api: Service, home: Path, console: Console, *, drafts: bool = False
) -> Demo:
    return Demo(
        config=settings,
        client=api.client(),
        model="ratchet",
        tiers=list(TIERS),
        drafts=drafts,
        home=home,
        console=console,
    )


def test_the_whole_demonstration(deployed: Store, tmp_path: Path) -> None:
    api = Service(skills={"p000001": 0.4}, promoted="p000001", store=deployed)
    settings = DemoConfig(
        minutes=0.02, extra_minutes=2.0, settle_minutes=0.2, streams=8, eval_tasks=60, look_s=0.02
    )
    console = Console(file=(tmp_path / "printed").open("w"), width=160)
    demo = demonstration(settings, api, tmp_path, console)

    async def play() -> None:
        gate = judge(deployed, api)
        background = [asyncio.create_task(Publisher(api, deployed).run()), asyncio.create_task(gate.run())]
        await demo.run()
        for task in background:
            task.cancel()
        await asyncio.wait(background)

    asyncio.run(play())
    found = report.Report(findings=demo.findings, log=demo.log, view=demo.view, wanted_policies=3)
    assert report.write(found, tmp_path / "out", console) is True
    console.file.close()

    evidence = json.loads((tmp_path / "out" / report.EVIDENCE).read_text())
    assert all(evidence["claims"].values())
    assert len(evidence["promoted"]) >= 3
    assert evidence["baseline"] == "p000001"
    assert evidence["last"] == evidence["promoted"][-1]
    assert evidence["requests"]["failed"] == 0
    assert evidence["requests"]["sent"] >= len(evidence["sealed_results"]["p000001"])
    assert evidence["comparison"]["n"] == 60
    assert evidence["comparison"]["difference_95"][0] > 0
    assert evidence["ttft"]["inside"]["n"] > 0
    assert {row["tier"] for row in evidence["traffic"]} == {"standard", "fast"}
    assert api.learning_on is False
    assert (tmp_path / "out" / report.PICTURE).read_bytes().startswith(b"\x89PNG")
    printed = (tmp_path / "printed").read_text()
    assert "requests" in printed
    assert "difference on 60 paired sealed tasks" in printed


def test_a_demonstration_without_promotions_says_so(deployed: Store, tmp_path: Path) -> None:
    api = Service(skills={"p000001": 0.4}, promoted="p000001", store=deployed)
    settings = DemoConfig(minutes=0.0, extra_minutes=0.005, settle_minutes=0.0, eval_tasks=10, look_s=0.02)
    console = Console(file=(tmp_path / "printed").open("w"), width=160)
    demo = demonstration(settings, api, tmp_path, console, drafts=True)
    asyncio.run(demo.run())
    found = report.Report(findings=demo.findings, log=demo.log, view=demo.view, wanted_policies=3)
    assert report.write(found, tmp_path / "out", console) is False
    console.file.close()
    printed = (tmp_path / "printed").read_text()
    assert "NO  at least 3 policies were swapped in under traffic (0)" in printed
    assert "nothing to compare" in printed


def test_traffic_pauses_while_the_learner_has_samples_enough(tmp_path: Path) -> None:
    settings = DemoConfig(streams=8, backlog=64, resume=32)
    api = Service(skills={}, promoted="p000001")
    demo = demonstration(settings, api, tmp_path, Console(file=io.StringIO()))

    def pace(reported: int, trained: int, state: str = "update 1") -> int:
        demo.log.reported = reported
        demo.view.learner = {"state": state, "trained": trained}
        return demo._pace()[0]

    assert pace(63, 0) == 8
    assert pace(64, 0) == 0
    assert pace(96, 32) == 0
    assert pace(96, 64) == 8
    # Outcomes that no sample was made of must not hold the traffic up.
    assert pace(160, 64) == 0
    assert pace(160, 64, "waiting for samples: 12 of 32") == 8
