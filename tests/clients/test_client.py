"""`.rl` and the `ratchet` commands against a real gateway process; no engine is needed for what they ask."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from clients import AsyncRatchet, Ratchet, cli
from clients.calls import Trajectory
from rollout.store import completions
from tests.fixtures import rows
from tests.fixtures.engines import eventually, write_config
from tests.server.gateways import Deployment, answers, running_gateway


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, tiny_moe: Path) -> Iterator[Deployment]:
    home = tmp_path_factory.mktemp("clients")
    config = write_config(
        home / "deployment.toml", home, tiny_moe, {"standard": "float32", "fast": "cpu-int8"}
    )
    found = Deployment(config, home, ['model.warm_start=""'])
    found.prepare()
    with found.store() as store, store.write() as tx:
        for turn in range(2):
            completions.insert(
                tx, rows.completion(f"c{turn}", trajectory_id="run/1", turn=turn, task="timer")
            )
    with running_gateway(found, wait=False) as process:
        eventually(
            lambda: (
                process.poll() is None
                and answers(lambda: httpx.get(f"{found.url}/metrics").status_code == httpx.codes.OK)
            ),
            60,
            "the gateway answers",
        )
        yield found


@pytest.fixture
def client(gateway: Deployment) -> Iterator[Ratchet]:
    with Ratchet(base_url=f"{gateway.url}/v1", api_key=gateway.key, max_retries=0) as client:
        yield client


def test_feedback_is_written_and_read_back(client: Ratchet) -> None:
    first = client.rl.feedback(completion_id="c0", value=1.0, source="verifier", verifier="v", id="mine")
    again = client.rl.feedback(completion_id="c0", value=1.0, source="verifier", verifier="v", id="mine")
    assert first.id == again.id == "mine"
    assert first.trusted
    whole = client.rl.feedback(trajectory_id="run/1", value=True)
    assert whole.value == 1.0
    trajectory = client.rl.trajectories.retrieve("run/1")
    assert trajectory.task == "timer"
    assert {outcome.id for outcome in trajectory.outcomes} == {"mine", whole.id}
    assert "prompt_token_ids" not in trajectory.completions[0]
    exact = client.rl.trajectories.retrieve("run/1", tokens=True)
    assert exact.completions[0]["prompt_token_ids"] == [1, 2, 3, 4]


def test_a_long_trajectory_is_read_page_by_page(gateway: Deployment, client: Ratchet) -> None:
    expected = [f"long-{turn}" for turn in range(250)]
    with gateway.store() as store, store.write() as tx:
        turns = [rows.completion(f"long-{turn}", trajectory_id="long", turn=turn) for turn in range(250)]
        completions.insert_many(tx, [(turn, []) for turn in reversed(turns)])
        completions.insert(tx, rows.completion("elsewhere", trajectory_id="other"))
    whole = client.rl.trajectories.retrieve("long")
    assert [turn["id"] for turn in whole.completions] == expected
    assert (whole.has_more, whole.last_id) == (False, "long-249")

    async def ask() -> Trajectory:
        async with AsyncRatchet(base_url=f"{gateway.url}/v1", api_key=gateway.key, max_retries=0) as client:
            return await client.rl.trajectories.retrieve("long", tokens=True)

    assert [turn["id"] for turn in asyncio.run(ask()).completions] == expected
    page = gateway.call("GET", "/v1/rl/trajectories/long?limit=2&after=long-5").json()
    assert [turn["id"] for turn in page["completions"]] == ["long-6", "long-7"]
    assert (page["has_more"], page["last_id"]) == (True, "long-7")
    last = gateway.call("GET", "/v1/rl/trajectories/long?limit=200&after=long-49").json()
    assert (len(last["completions"]), last["has_more"]) == (200, False)
    assert len(gateway.call("GET", "/v1/rl/trajectories/long").json()["completions"]) == 100


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=201", "limit"),
        ("limit=x", "limit"),
        ("after=c99", "after"),
        ("after=elsewhere", "after"),
    ],
)
def test_a_wrong_page(gateway: Deployment, query: str, param: str) -> None:
    refused = gateway.call("GET", f"/v1/rl/trajectories/run%2F1?{query}")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_a_different_judgement_under_the_same_id_is_refused(client: Ratchet) -> None:
    client.rl.feedback(completion_id="c1", value=0.0, id="once")
    with pytest.raises(openai.APIStatusError) as refused:
        client.rl.feedback(completion_id="c1", value=1.0, id="once")
    assert refused.value.status_code == httpx.codes.PRECONDITION_FAILED


def test_policies_tiers_and_learning(client: Ratchet) -> None:
    assert [policy.id for policy in client.rl.policies.list()] == ["p000000"]
    policy = client.rl.policies.retrieve("p000000")
    assert policy.state == "promoted"
    serving = client.rl.tiers.retrieve()
    assert serving.promoted == "p000000"
    assert {tier: [r.ready for r in replicas] for tier, replicas in serving.tiers.items()} == {
        "standard": [False],
        "fast": [False],
    }
    assert client.rl.learning.set(True).enabled
    assert client.rl.learning.retrieve().enabled
    assert not client.rl.learning.set(False).enabled


def test_a_promotion_that_cannot_be_is_an_error(client: Ratchet) -> None:
    with pytest.raises(openai.APIStatusError):
        client.rl.tiers.promote("p000099")
    with pytest.raises(openai.APIStatusError):
        client.rl.tiers.rollback(reason="nothing before it")


def test_the_asynchronous_client_does_the_same(gateway: Deployment) -> None:
    async def ask() -> None:
        async with AsyncRatchet(base_url=f"{gateway.url}/v1", api_key=gateway.key, max_retries=0) as client:
            outcome = await client.rl.feedback(completion_id="c0", value=0.5, metric="style")
            assert outcome.metric == "style"
            assert (await client.rl.trajectories.retrieve("run/1")).id == "run/1"
            assert (await client.rl.policies.list())[0].id == "p000000"
            assert (await client.rl.policies.retrieve("p000000")).id == "p000000"
            assert (await client.rl.tiers.retrieve()).promoted == "p000000"
            assert (await client.rl.learning.set(True)).enabled
            assert (await client.rl.learning.retrieve()).enabled

    asyncio.run(ask())


def ratchet(gateway: Deployment, *arguments: str) -> int:
    return cli.main([*arguments, "--config", str(gateway.config), "--set", f"gateway.port={gateway.port}"])


def test_commands_ask_the_gateway(
    gateway: Deployment, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "RATCHET_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert ratchet(gateway, "learn", "on") == 0
    assert "learning is on" in capsys.readouterr().out
    assert ratchet(gateway, "learn", "off") == 0
    assert ratchet(gateway, "learn", "status") == 0
    assert "learning is off" in capsys.readouterr().out
    assert ratchet(gateway, "policies") == 0
    assert "p000000" in capsys.readouterr().out
    assert ratchet(gateway, "status") == 1, "no tier is ready without engines"
    assert "standard-0" in capsys.readouterr().out


def test_a_gateway_that_is_not_there_is_named(
    gateway: Deployment, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    assert ratchet(gateway, "status") == 1
    assert "no gateway answers at 127.0.0.1:9" in capsys.readouterr().err


def test_a_key_that_may_not_is_told_so(
    gateway: Deployment, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-unknown")
    assert ratchet(gateway, "status") == 1
    assert "API key" in capsys.readouterr().err
