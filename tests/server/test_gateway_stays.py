"""What must not end a gateway, nor cost it a replica or a policy for good."""

from __future__ import annotations

import json
import resource
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout import policies
from rollout.store import Store
from server.engine.supervisor import _write_atomically, read_state
from server.reconcile import _reject
from tests.fixtures import rows
from tests.fixtures.engines import eventually
from tests.server.doubled import Doubled, doubled, publish
from tests.server.engine_double import ADAPTED, BASE
from tests.server.gateways import is_ready

FILES = 256
TORN = ["", "{}", "[]", '{"instance": 3}', '{"instance": "a', "\0" * 40]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, tiny_moe: Path) -> Iterator[Doubled]:
    with doubled(
        tmp_path_factory.mktemp("stays"), tiny_moe, "gateway.max_connections=64", "gateway.retry_failed_s=0.2"
    ) as found:
        yield found


@pytest.mark.parametrize("content", TORN)
def test_a_state_file_that_cannot_be_read_means_no_engine(running: Doubled, content: str) -> None:
    file = running.deployment.home / "run" / "standard-0.json"
    whole = file.read_text()
    file.write_text(content)
    assert read_state(file) is None
    eventually(lambda: not is_ready(running.deployment, running.gateway), 10, "out of rotation")
    file.write_text(whole)
    eventually(lambda: is_ready(running.deployment, running.gateway), 10, "back in rotation")
    assert running.chat().status_code == 200


def test_idle_connections_use_up_no_files(running: Doubled) -> None:
    _, hard = resource.prlimit(running.gateway.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(running.gateway.pid, resource.RLIMIT_NOFILE, (FILES, hard))
    idle = []
    try:
        for _ in range(2 * FILES):
            idle.append(socket.create_connection(("127.0.0.1", running.deployment.port)))
        for _ in range(5):
            assert running.chat().status_code == 200
        open_files = len(list(Path(f"/proc/{running.gateway.pid}/fd").iterdir()))
        assert open_files < FILES / 2
        time.sleep(1)
        assert is_ready(running.deployment, running.gateway)
    finally:
        resource.prlimit(running.gateway.pid, resource.RLIMIT_NOFILE, (hard, hard))
        for connection in idle:
            connection.close()


@pytest.mark.parametrize(
    ("marks", "reason"),
    [
        ({"positions": [0, 2]}, "position outside 1..3"),
        ({"positions": [1, 4]}, "position outside 1..3"),
        ({"positions": [-1, 2]}, "position outside 1..3"),
        ({"positions": [1]}, "1 finite log-probs of the policy"),
        ({"policy": [ADAPTED]}, "2 finite log-probs of the policy"),
        ({"parent": [BASE] * 3}, "2 finite log-probs of the parent"),
        ({"base": []}, "2 finite log-probs of the base"),
        ({"token_ids": [5, 2**70, 7, 8]}, "an id that no vocabulary has"),
        ({"token_ids": [], "positions": []}, "0 finite log-probs"),
    ],
)
def test_a_fingerprint_that_fits_nothing_rejects_its_candidate_alone(
    running: Doubled, marks: dict[str, Any], reason: str
) -> None:
    bad = publish(running.deployment, **marks)
    eventually(lambda: running.deployment.policy(bad)["state"] == "rejected", 20, "rejected")
    assert reason in running.deployment.policy(bad)["reason"]
    assert is_ready(running.deployment, running.gateway)


def test_a_candidate_is_not_given_up_for_what_this_machine_lacks(running: Doubled) -> None:
    good = publish(running.deployment)
    running.deployment.place(good)
    with running.deployment.store() as store, store.write() as tx:
        policy_id = policies.reserve(tx)
        policies.register(tx, rows.manifest(policy_id), "/" + "x" * 300)  # OSError: the name is too long
    eventually(lambda: f"{policy_id} could not be verified" in running.log(), 20, "it was tried")
    assert running.deployment.policy(policy_id)["state"] == "candidate"
    assert is_ready(running.deployment, running.gateway)
    with running.deployment.store() as store, store.write() as tx:
        assert _reject(tx, policy_id, "the test is over")


@pytest.mark.parametrize("rival", [["*"], ["a", "b", "c", "d"]])
def test_a_candidate_is_not_given_up_for_a_gateway_that_was_faster(
    running: Doubled, rival: list[str]
) -> None:
    running.double.rival = rival
    policy_id = publish(running.deployment)
    running.deployment.place(policy_id)
    assert not running.double.rival
    assert running.deployment.policy(policy_id)["state"] == "candidate"
    with running.deployment.store() as store, store.write() as tx:
        assert _reject(tx, policy_id, "the test is over")


def test_a_gateway_without_file_descriptors_comes_back(running: Doubled) -> None:
    _, hard = resource.prlimit(running.gateway.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(running.gateway.pid, resource.RLIMIT_NOFILE, (3, hard))
    try:
        eventually(lambda: "standard-0: cannot be watched" in running.log(), 20, "it was noticed")
    finally:
        resource.prlimit(running.gateway.pid, resource.RLIMIT_NOFILE, (hard, hard))
    eventually(lambda: is_ready(running.deployment, running.gateway), 20, "back in rotation")


def test_two_gateways_reject_one_candidate(store: Store) -> None:
    with store.write() as tx:
        for i in range(8):
            policies.register(tx, rows.manifest(f"p{i + 1:06d}"), "/p")
    given_up: list[bool] = []

    def reject(policy_id: str) -> None:
        with store.write() as tx:
            given_up.append(_reject(tx, policy_id, "unfit"))

    for i in range(8):
        threads = [threading.Thread(target=reject, args=(f"p{i + 1:06d}",)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (len(given_up), sum(given_up)) == (24, 8)


def test_a_state_file_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: Any) -> None:
    synced: list[int] = []
    monkeypatch.setattr("os.fsync", synced.append)
    _write_atomically(tmp_path / "a.json", {"instance": "x"})
    assert json.loads((tmp_path / "a.json").read_text()) == {"instance": "x"}
    assert synced
