"""Messages between vLLM's processes on a CPU: all arrive, and nobody spins for them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from vllm.distributed.device_communicators import shm_broadcast
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue, SpinCondition

from server.engine.worker import plugin

Queues = tuple[MessageQueue, MessageQueue]


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SpinCondition, "wait", SpinCondition.wait)  # put back at the end
    plugin.register()
    once = SpinCondition.wait
    plugin.register()
    assert SpinCondition.wait is once


@pytest.fixture
def queues() -> Iterator[Queues]:
    """The writer and the reader of one queue."""
    writer = MessageQueue(n_reader=1, n_local_reader=1)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    with ThreadPoolExecutor() as pool:
        ready = pool.submit(writer.wait_until_ready)
        reader.wait_until_ready()
        ready.result(timeout=30)
    yield writer, reader
    reader.shutdown()
    writer.shutdown()


def test_a_reader_never_spins(queues: Queues, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, reader = queues
    spun: list[None] = []
    monkeypatch.setattr(shm_broadcast, "sched_yield", lambda: spun.append(None))
    registered, waits = SpinCondition.wait, threading.Event()

    def wait(condition: SpinCondition, timeout_ms: int | None = None) -> None:
        waits.set()
        registered(condition, timeout_ms)

    monkeypatch.setattr(SpinCondition, "wait", wait)
    with ThreadPoolExecutor() as pool:
        for number in range(20):
            waits.clear()
            received = pool.submit(reader.dequeue, timeout=30)
            assert waits.wait(30)
            writer.enqueue(number, timeout=30)
            assert received.result(timeout=30) == number
    assert not spun


def test_messages_arrive_whose_pings_are_dropped(queues: Queues, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, reader = queues
    monkeypatch.setattr(SpinCondition, "notify", lambda condition: None)
    with ThreadPoolExecutor() as pool:
        received = pool.submit(lambda: [reader.dequeue(timeout=30) for _ in range(300)])
        for number in range(300):
            writer.enqueue(number, timeout=30)
        assert received.result(timeout=60) == list(range(300))
