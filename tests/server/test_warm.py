"""Which prefixes are kept, and that one which the engine refuses does not end a warm-up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server.warm import LARGEST, PRIORITY
from tests.server.doubled import Doubled, doubled, publish, say


@pytest.fixture
def running(tmp_path: Path, tiny_moe: Path) -> Iterator[Doubled]:
    with doubled(tmp_path / "home", tiny_moe) as found:
        yield found


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def test_what_an_engine_answered_is_warmed_and_no_other(running: Doubled) -> None:
    long = "x" * LARGEST
    for _ in range(2):  # hottest first
        assert running.chat(messages=[system("refused later"), *say("hi")]).status_code == 200
    assert running.chat(messages=[system("kept"), *say("hi")]).status_code == 200
    assert running.chat(messages=[system(long), *say("hi")]).status_code == 200
    assert running.chat(messages=[system("never answered"), *say("fault:refused")]).status_code == 400
    policy = publish(running.deployment)
    running.deployment.place(policy)
    running.deployment.pass_gate(policy)
    running.double.refuses = "refused later"
    before = len(running.double.bodies)
    promoted = running.deployment.call("POST", "/v1/rl/tiers/promote", {"policy": policy})
    assert promoted.status_code == 200
    warmed = [body for body in running.double.bodies[before:] if body["priority"] == PRIORITY]
    assert [body["messages"][0]["content"] for body in warmed] == ["refused later", "kept"]
    assert running.deployment.state()["flips"][-1]["warmed_prefixes"] == 1
