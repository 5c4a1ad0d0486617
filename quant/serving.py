"""One engine, started as a deployment starts it, in a folder of its own, for a test of its recipe.

It is asked over its socket with the official client; what is vLLM's and not OpenAI's goes through the
client's ``extra_body``.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import openai

START_SECONDS = 900.0
STOP_SECONDS = 60.0
POLL_SECONDS = 0.3


class EngineFailed(Exception):
    """The engine did not start; the message ends with its log."""


@asynccontextmanager
async def engine(
    config: Path, overrides: Sequence[str], tier: str, weights: Path
) -> AsyncIterator[openai.AsyncOpenAI]:
    """The first replica of `tier` on the model folder `weights`, with all the cores. Raises EngineFailed."""
    with tempfile.TemporaryDirectory(prefix="accept-") as folder:
        home, replica = Path(folder), f"{tier}-0"
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        argv = [sys.executable, "-m", "server.engine", "--config", str(config), "--replica", replica]
        own = [f'engine.threads="{cores}"', f'model.path="{weights.resolve()}"']
        argv += [f"--set={text}" for text in [*overrides, *own]]
        process = subprocess.Popen(argv, env=os.environ | {"RATCHET_HOME": folder})
        try:
            async with client(home / "run" / f"{replica}.sock") as asked:
                await _wait(process, asked, home, replica)
                yield asked
        finally:
            process.terminate()
            process.wait(STOP_SECONDS)


def client(socket: Path) -> openai.AsyncOpenAI:
    """The official client for the engine that listens on `socket`."""
    transport = httpx2.AsyncHTTPTransport(uds=str(socket))
    http = httpx2.AsyncClient(transport=transport, timeout=httpx2.Timeout(None, connect=5.0))
    return openai.AsyncOpenAI(base_url="http://engine/v1", api_key="none", http_client=http, max_retries=0)


async def _wait(
    process: subprocess.Popen[bytes], asked: openai.AsyncOpenAI, home: Path, replica: str
) -> None:
    """Until the engine answers. What it says it runs (its state file) is gone once it has died."""
    state, log, began = home / "run" / f"{replica}.json", home / "logs" / f"{replica}.log", False
    async with asyncio.timeout(START_SECONDS):
        while not await _healthy(asked):
            died, began = began and not state.exists(), began or state.exists()
            if died or process.poll() is not None:
                said = log.read_text(errors="replace")[-3000:] if log.exists() else "see above"
                raise EngineFailed(f"{log.stem} did not start: {said}")
            await asyncio.sleep(POLL_SECONDS)


async def _healthy(asked: openai.AsyncOpenAI) -> bool:
    try:
        await asked.get("http://engine/health", cast_to=object)
    except openai.APIError:
        return False
    return True
