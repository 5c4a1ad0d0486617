"""How the gateway listens: uvicorn with a bound on connections, whoever opens them and however many.

Invariant: connections never use up the process's file descriptors, which engines and the store need too. A
connection without a request in progress makes room for a new one; one that has never sent anything is closed
after a while.
"""

from __future__ import annotations

import asyncio
import resource

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.config import GatewayConfig

SILENT_S = 30
"""How long a new connection may send nothing."""
SHARE = 4
"""One of so many file descriptors is a caller's; the others are engines', the store's and spare."""


def serve(app: ASGIApp, config: GatewayConfig) -> None:
    """Until SIGTERM or SIGINT."""
    uvicorn.run(
        app,
        host=config.host,
        port=config.port,
        http=BoundedProtocol,
        access_log=False,
        log_config=None,
        limit_concurrency=_most_connections(config.max_connections),
        timeout_graceful_shutdown=10,
        timeout_keep_alive=config.keep_alive_s,
    )


class BoundedProtocol(HttpToolsProtocol):
    """One connection. When all are busy, uvicorn itself answers a further request with 503."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # uvicorn starts this timer only behind a response.
        self.timeout_keep_alive_task = self.loop.call_later(SILENT_S, self.timeout_keep_alive_handler)
        if self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency:
            idle = (other for other in self.connections if other is not self and _idle(other))
            if (other := next(idle, None)) is not None:
                self.connections.discard(other)
                other.transport.close()


def _idle(connection: object) -> bool:
    """Whether it waits for its caller to ask something."""
    assert isinstance(connection, HttpToolsProtocol)
    return connection.cycle is None or connection.cycle.response_complete


def _most_connections(wanted: int) -> int:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return wanted if hard == resource.RLIM_INFINITY else max(1, min(wanted, hard // SHARE))
