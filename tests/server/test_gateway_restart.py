"""A replica that is restarted under load: no request is lost, and it serves again once it is verified."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fixtures.engines import START_SECONDS, eventually, running_engine, write_config
from tests.server.gateways import Deployment, running_gateway

pytestmark = [pytest.mark.engine, pytest.mark.long]
REPLICAS = ("standard-0", "standard-1")


@pytest.fixture
def deployment(tmp_path: Path, tiny_moe: Path) -> Iterator[Deployment]:
    config = write_config(tmp_path / "deployment.toml", tmp_path, tiny_moe, {"standard": "float32"})
    config.write_text(config.read_text().replace("[tiers.standard]", "[tiers.standard]\nreplicas = 2"))
    found = Deployment(config, tmp_path, ['model.warm_start=""'])
    found.prepare()
    with (
        running_engine(config, tmp_path, REPLICAS[0]),
        running_engine(config, tmp_path, REPLICAS[1]),
        running_gateway(found),
    ):
        eventually(lambda: all(state(found, name)[1] for name in REPLICAS), 60, "both in rotation")
        yield found


def state(deployment: Deployment, replica: str) -> tuple[str | None, bool]:
    """The engine start, and whether it is in rotation."""
    (found,) = (row for row in deployment.state()["tiers"]["standard"] if row["id"] == replica)
    return found["instance"], found["ready"]


def test_no_request_is_lost(deployment: Deployment) -> None:
    before, stop = state(deployment, "standard-0")[0], threading.Event()

    def talk(number: int) -> list[int]:
        counts: list[int] = []
        while not stop.is_set():
            body = {
                "model": "ratchet",
                "messages": [{"role": "user", "content": f"{number} {len(counts)}"}],
                "max_tokens": 60,
                "ignore_eos": True,
            }
            answer = deployment.call("POST", "/v1/chat/completions", body)
            assert answer.status_code == 200, answer.text
            counts.append(answer.json()["usage"]["completion_tokens"])
        return counts

    def serves_anew() -> bool:
        instance, ready = state(deployment, "standard-0")
        return ready and instance not in (None, before)

    with ThreadPoolExecutor() as pool:
        talks = [pool.submit(talk, number) for number in range(2)]
        try:
            answer = deployment.call("POST", "/v1/rl/tiers/restart", {"replica": "standard-0"})
            assert answer.status_code == 200, answer.text
            # Now the other is the only one: it must stay.
            refused = deployment.call("POST", "/v1/rl/tiers/restart", {"replica": "standard-1"})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "force")
        finally:
            stop.set()
        counts = [talk.result() for talk in talks]
    eventually(serves_anew, START_SECONDS, "a new engine in rotation")
    assert all(counts)
    assert {count for talk in counts for count in talk} == {60}


def test_what_is_not_there_is_said(deployment: Deployment) -> None:
    answer = deployment.call("POST", "/v1/rl/tiers/restart", {"replica": "fast-7"})
    assert answer.status_code == 400
    assert "there are standard-0, standard-1" in answer.json()["error"]["message"]
