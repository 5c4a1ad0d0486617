"""The HTTP application: routes, the one place where errors become responses, request ids, limits."""

from __future__ import annotations

import logging
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import unquote

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import DataError, SQLAlchemyError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server import errors
from server.gateway import Gateway
from server.responses import error_response
from server.routes import chat, feedback, health, learning, models, policies, tiers, trajectories

log = logging.getLogger(__name__)


def create_app(gateway: Gateway) -> FastAPI:
    """The application around `gateway`, which runs from start-up to shut-down."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with gateway.running():
            yield

    app = FastAPI(title="Ratchet", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.gateway = gateway
    for module in (chat, feedback, health, learning, models, policies, tiers, trajectories):
        app.include_router(module.router)
    app.add_exception_handler(errors.ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(DataError, _data_error)
    app.add_exception_handler(SQLAlchemyError, _store_error)
    app.add_exception_handler(Exception, _server_error)
    app.add_middleware(Edge)
    app.add_middleware(RequestIds)
    return app


class HttpMiddleware(ABC):
    """What sees HTTP requests; everything else goes straight on."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handle = self._http if scope["type"] == "http" else self._app
        await handle(scope, receive, send)

    @abstractmethod
    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""


class RequestIds(HttpMiddleware):
    """``x-request-id`` on every response, the caller's own where it sent one."""

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        sent = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        request_id = sent[:128] or f"req_{uuid.uuid4().hex}".encode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        await self._app(scope, receive, send_with_id)


class Edge(HttpMiddleware):
    """Refuses what no route can use: a NUL in the path or the query, a body beyond the limit.

    Of such a body nothing is read that comes after the limit, and nothing at all when it says its length.
    """

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        if "\0" in scope["path"] or "\0" in unquote(scope["query_string"].decode("latin-1")):
            refusal = errors.invalid("The URL must not contain the character NUL.", code="invalid_value")
            await error_response(refusal)(scope, receive, send)
            return
        limit_mb: int = scope["app"].state.gateway.config.max_body_mb
        declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        size = 0

        async def receive_at_most() -> Message:
            nonlocal size
            _check_size(int(declared), limit_mb)
            message = await receive()
            size += len(message.get("body", b""))
            _check_size(size, limit_mb)
            return message

        await self._app(scope, receive_at_most, send)


def _check_size(size: int, limit_mb: int) -> None:
    if size > limit_mb * 1_000_000:
        raise errors.too_large(limit_mb)


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, errors.ApiError)
    return error_response(error)


async def _http_error(request: Request, error: Exception) -> Response:
    """The framework's own refusals: unknown routes and methods."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    message = {404: f"There is no route {where}.", 405: f"The method of {where} is not allowed."}.get(
        error.status_code, str(error.detail)
    )
    return error_response(errors.ApiError(error.status_code, message, code="unknown_route"))


async def _validation_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = ".".join(str(part) for part in first["loc"][1:]) or None
    return error_response(errors.invalid(f"'{param}' is wrong: {first['msg']}.", param, "invalid_value"))


async def _data_error(request: Request, error: Exception) -> Response:
    log.error("%s %s: %s", request.method, request.url.path, error)
    return error_response(errors.cannot_be_stored())


async def _store_error(request: Request, error: Exception) -> Response:
    log.error("%s %s: store: %s", request.method, request.url.path, error)
    return error_response(errors.store_unavailable())


async def _server_error(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return error_response(errors.server_failed())
