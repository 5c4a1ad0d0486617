"""``python -m learner run``: waits for the switch, then learns until it is switched off again.

Invariant: while learning is off this process holds no torch and no model: it asks the store every few seconds
and does nothing else. Switched off again it starts itself anew, which gives the memory back.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from types import FrameType

from learner.config import LearnerConfig
from rollout import config
from rollout.store import Store, learning

SETTING = "learning"


class Stop:
    """Set by SIGTERM and SIGINT; whoever waits on it wakes at once."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def listen(self) -> None:
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)

    def set(self) -> None:
        self._event.set()

    def is_set(self) -> bool:
        return self._event.is_set()

    def wait(self, seconds: float) -> bool:
        """Sleeps, or until stopped; whether stopped."""
        return self._event.wait(seconds)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._event.set()


def main(argv: list[str]) -> int:
    arguments = config.arguments("Learn from judged trajectories, while learning is on.").parse_args(argv)
    document = config.read(arguments.config, arguments.overrides)
    settings = config.section(document, "learner", LearnerConfig)
    store = Store.open(config.section(document, "store", config.StoreConfig).url)
    stop = Stop()
    stop.listen()
    try:
        if not wait_until_on(store, stop, settings.poll_seconds):
            return 0
        importlib.import_module("learner.loop").run(document, store, stop)
    finally:
        store.close()
    if stop.is_set():
        return 0
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return 1  # the launcher starts all processes again
    os.execv(sys.executable, [sys.executable, "-m", "learner", "run", *argv])


def wait_until_on(store: Store, stop: Stop, poll_seconds: float) -> bool:
    """False when stopped first."""
    if not is_on(store):
        announce(store, "off")
    while not is_on(store):
        if stop.wait(poll_seconds):
            return False
    return not stop.is_set()


def is_on(store: Store) -> bool:
    with store.read() as tx:
        return bool(learning.get_setting(tx, SETTING, False))


def announce(store: Store, state: str) -> None:
    """Changes the state that `ratchet learn status` shows and keeps its counters."""
    with store.write() as tx:
        status = learning.get_learner_status(tx) or {}
        learning.set_learner_status(tx, {**status, "state": state})
