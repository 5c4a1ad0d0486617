"""JSON out: msgspec, since responses carry token ids by the thousand."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

from server.errors import ApiError


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def error_response(error: ApiError) -> Response:
    return json_response(error.body(), error.status, error.headers)


def listing(data: list[Any]) -> dict[str, Any]:
    """OpenAI's list envelope of a whole collection."""
    ids = [item["id"] if isinstance(item, dict) else item.id for item in data]
    return {
        "object": "list",
        "data": data,
        "first_id": ids[0] if ids else None,
        "last_id": ids[-1] if ids else None,
        "has_more": False,
    }
