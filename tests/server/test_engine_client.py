"""The client's reading of vLLM's streams, without an engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from server.engine.client import Engine
from server.engine.errors import EngineUnavailable
from server.engine.wire import server_sent

STREAM = 'data: {"a": "one\u2028two\x85"}\n\n: comment\n\ndata: {"b": 2}\r\n\r\ndata: [DONE]\n\n'.encode()


@pytest.mark.parametrize("size", [1, 2, 7, len(STREAM)])
def test_events_are_found_however_the_stream_is_cut(size: int) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for start in range(0, len(STREAM), size):
            yield STREAM[start : start + size]

    async def collect() -> list[str]:
        return [data.decode() async for data in server_sent(parts())]

    assert asyncio.run(collect()) == ['{"a": "one\u2028two\x85"}', '{"b": 2}', "[DONE]"]


def test_no_engine_is_unavailable() -> None:
    async def check() -> None:
        async with Engine("/nowhere.sock") as engine:
            assert not await engine.health()
            with pytest.raises(EngineUnavailable, match=r"nowhere\.sock"):
                await engine.models()

    asyncio.run(check())
