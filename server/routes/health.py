"""``GET /healthz`` (is every tier serving?) and ``GET /metrics``. Neither asks for a key."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from server.gateway import gateway
from server.responses import json_response
from server.tiers import Fleet

router = APIRouter()
OPEN = 200
NOT_YET = 503


@router.get("/healthz")
async def healthz(request: Request) -> Response:
    body = health(gateway(request).fleet)
    if body["status"] == "ok":
        return json_response(body)
    return json_response(body, NOT_YET, {"retry-after": "2"})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    return Response(gateway(request).metrics.text(), OPEN, media_type=CONTENT_TYPE_LATEST)


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
