"""``GET /healthz`` (is every tier serving?) and ``GET /metrics``. Neither asks for a key."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from server.engine.errors import EngineRejected, EngineUnavailable
from server.gateway import gateway
from server.responses import json_response
from server.tiers import Fleet, Replica

router = APIRouter()
OPEN = 200
NOT_YET = 503
PASSED_ON = ("vllm:spec_decode_num_", "vllm:prefix_cache_", "vllm:num_requests_", "vllm:kv_cache_usage_perc")
"""Engine metrics that are passed on, by the beginning of their name."""
DRAFT_KINDS = ("drafted", "verified", "accepted", "checked", "right")
LOAD_KINDS = ("steps", "tokens", "seconds")


@router.get("/healthz")
async def healthz(request: Request) -> Response:
    body = health(gateway(request).fleet)
    if body["status"] == "ok":
        return json_response(body)
    return json_response(body, NOT_YET, {"retry-after": "2"})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    parts = gateway(request)
    engines = await asyncio.gather(*(_counters(replica) for replica in parts.fleet.replicas))
    text = parts.metrics.text() + "".join(engines).encode()
    return Response(text, OPEN, media_type=CONTENT_TYPE_LATEST)


async def _counters(replica: Replica) -> str:
    """What the engine counts of drafting and caching, as lines of the exposition format."""
    try:
        totals = await replica.engine.metrics()
        drafts = await replica.engine.speculation() if replica.drafts else None
    except (EngineUnavailable, EngineRejected):
        return ""  # a replica that is away is told by ratchet_replica_ready
    labels = f'replica="{replica.id}",tier="{replica.tier}"'
    passed_on = "".join(
        f"{name}{{{labels}}} {value}\n" for name, value in totals.items() if name.startswith(PASSED_ON)
    )
    return passed_on + (draft_lines(labels, drafts) if drafts else "")


def draft_lines(labels: str, report: dict[str, Any]) -> str:
    """What the controller of drafts counted: tokens by policy, and steps by their number of requests."""
    lines = [
        f'ratchet_drafts_total{{{labels},policy="{policy}",kind="{kind}"}} {counts[kind]}\n'
        for policy, counts in report["policies"].items()
        for kind in DRAFT_KINDS
    ]
    for load in report["loads"]:
        how = f'{labels},requests="{load["requests"]}",verifying="{str(load["verifying"]).lower()}"'
        lines += [f"ratchet_decode_{kind}_total{{{how}}} {load[kind]}\n" for kind in LOAD_KINDS]
    return "".join(lines)


def health(fleet: Fleet) -> dict[str, Any]:
    """ "ok" when every tier is ready, "degraded" when some are, "starting" when none is."""
    tiers = {}
    for name in fleet.tiers:
        replicas = fleet.of(name)
        ready = [replica for replica in replicas if replica.ready]
        tiers[name] = {
            "ready": bool(ready),
            "replicas": len(ready),
            "policy": fleet.serving.promoted,
            "why_not": {replica.id: replica.why_not for replica in replicas if not replica.ready},
        }
    up = [tier["ready"] for tier in tiers.values()]
    return {"status": "ok" if all(up) else "degraded" if any(up) else "starting", "tiers": tiers}
