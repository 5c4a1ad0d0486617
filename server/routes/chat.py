"""``POST /v1/chat/completions``."""

from __future__ import annotations

import string
from urllib.parse import quote

from fastapi import APIRouter, Request, Response

from rollout.records import Scope
from server.gateway import gateway
from server.responses import json_response
from server.schemas import chat_request
from server.streaming import ClientGone, Connection, EventStream, Names, caller_events

router = APIRouter()
CLIENT_CLOSED_REQUEST = 499
AS_IT_IS = string.punctuation.replace("%", "")
"""Beside letters and digits; all else of a trajectory's name is percent-encoded UTF-8 in its header."""


@router.post("/v1/chat/completions")
async def create(request: Request) -> Response:
    parts = gateway(request)
    caller = await parts.auth.caller(request.headers.get("authorization"), Scope.INFERENCE)
    body = chat_request(await request.body())
    exchange = await parts.exchanges.open(caller, body, request.headers)
    names = Names(exchange, parts.fleet.answered_by(exchange.recorder.request.policy_id))
    headers = {"x-trajectory-id": quote(exchange.turn.trajectory_id, safe=AS_IT_IS)}
    connection = Connection(request.receive)
    events = caller_events(exchange, names)

    async def finish(gone: bool) -> None:
        await events.aclose()
        if gone:
            await exchange.abandon()
        exchange.close()

    gone = True
    handed_on = False
    try:
        if body.stream:
            first = await connection.race(anext(events))
            stream = EventStream(first, events, connection, finish, headers)
            handed_on = True
            return stream
        result = await connection.race(exchange.answer())
        gone = False
        return json_response(names.body(result), headers=headers)
    except ClientGone:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        if not handed_on:
            connection.close()
            await finish(gone)
