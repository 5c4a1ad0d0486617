"""Learners that are killed at a chosen point: run in a process of their own by `test_loop`."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from learner import loop
from learner.switch import Stop
from rollout.store import Store, learning
from tests.fixtures.models import RANK, TARGETS

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed  # noqa: F401 - so that the server of forks has it


def document(home: Path, model: Path, **settings: Any) -> dict[str, Any]:
    """A deployment of the tiny model."""
    return {
        "home": {"path": str(home)},
        "store": {"url": f"sqlite:///{home}/ratchet.db"},
        "artifacts": {"root": f"{home}/artifacts"},
        "model": {"path": str(model), "build": ""},
        "engine": {"target_modules": list(TARGETS), "max_policies": 8},
        "learner": {
            "folder": f"{home}/learner",
            "rank": RANK,
            "alpha": 2 * RANK,
            "batch_size": 4,
            "publish_every": 2,
            "learning_rate": 1e-2,
            "threads": 1,
            "poll_seconds": 0.05,
            **settings,
        },
    }


def learn(settings: dict[str, Any], kill_at: str | None, out: str | None = None, spoil: bool = False) -> None:
    """Runs the loop until no samples are left, or kills this very process at the named point.

    `out`: where to leave the names of the points passed. `spoil`: the first update overflows.
    """
    torch.set_num_threads(1)
    if spoil:
        mock.patch("learner.loop.advantages", lambda samples, *_: [math.inf] * len(samples)).start()
    store, stop = Store.open(settings["store"]["url"]), Stop()
    passed: list[str] = []

    class Ending(Stop):
        """Stops as soon as the loop would wait."""

        def wait(self, seconds: float) -> bool:
            self.set()
            return True

    def watch(point: str) -> None:
        passed.append(point)
        if point == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    stop = Ending()
    loop.run(settings, store, stop, watch)
    store.close()
    if out is not None:
        Path(out).write_text("\n".join(passed))


def switch_on(store: Store, on: bool = True) -> None:
    with store.write() as tx:
        learning.set_setting(tx, "learning", on)
