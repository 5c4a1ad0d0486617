"""Reads of much beside requests that must not wait for them."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import httpx

from rollout.store import completions
from server.app import create_app
from server.gateway import READERS, build
from tests.fixtures import rows
from tests.fixtures.engines import write_config
from tests.server.gateways import Deployment


def test_reads_that_take_long_hold_up_no_other_request(tmp_path: Path, tiny_moe: Path) -> None:
    home = tmp_path / "home"
    toml = write_config(tmp_path / "deployment.toml", home, tiny_moe, {"standard": "float32"})
    deployment = Deployment(toml, home, ['model.warm_start=""'])
    deployment.prepare()
    parts = build(deployment.document)
    with parts.store.write() as tx:
        completions.insert(tx, rows.completion("c0", trajectory_id="t"))
    over = threading.Event()
    for _ in range(READERS):
        parts.readers.submit(over.wait)

    async def main() -> None:
        transport = httpx.ASGITransport(create_app(parts))
        headers = {"authorization": f"Bearer {deployment.key}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://g", headers=headers) as client:
            paths = ["/v1/rl/trajectories/t", "/v1/rl/policies", "/v1/rl/policies/p000000"] * 30
            reads = [asyncio.create_task(client.get(path)) for path in paths]
            assert (await client.get("/v1/rl/learning")).status_code == 200
            assert not any(read.done() for read in reads)
            over.set()
            assert {(await read).status_code for read in reads} == {200}

    try:
        asyncio.run(main())
    finally:
        over.set()
        parts.readers.shutdown()
        parts.store.close()
