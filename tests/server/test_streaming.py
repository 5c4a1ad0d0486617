"""Streams to callers, apart from any gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from starlette.types import Message

from server.streaming import Connection, EventStream


def test_a_backlog_does_not_hide_that_the_caller_left() -> None:
    sent, gone = asyncio.run(_stream_to_a_caller_who_leaves())
    assert gone == [True]
    assert len(sent) < 10


async def _stream_to_a_caller_who_leaves() -> tuple[list[bytes], list[bool]]:
    left = asyncio.Event()
    sent: list[bytes] = []
    gone: list[bool] = []

    async def backlog() -> AsyncGenerator[bytes]:
        for _ in range(1000):
            yield b"event"

    async def receive() -> Message:
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            sent.append(message["body"])
            left.set()

    async def finish(caller_left: bool) -> None:
        gone.append(caller_left)

    stream = EventStream(b"first", backlog(), Connection(receive), finish, {})
    await stream({"type": "http"}, receive, send)
    return sent, gone
