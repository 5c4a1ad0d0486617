"""The gateway's parts, built once from the deployment's TOML and passed down. No module holds state.

request -> auth -> schemas -> exchange (turns, sessions, routing, capture) -> engine.client -> streaming
store   -> reconcile -> tiers.Fleet <- flip
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from fastapi import Request

from rollout import artifacts, config
from rollout.store import Store
from rollout.trajectories import PromptRenderer
from server.auth import Auth
from server.config import GatewayConfig
from server.engine import launch
from server.engine.client import Engine
from server.exchange import Exchanges
from server.flip import Flips
from server.metrics import Metrics
from server.reconcile import Reconciler
from server.sessions import Sessions
from server.tiers import Fleet, Replica
from server.turns import Turns
from server.warm import Prefixes
from server.writer import Writer

log = logging.getLogger(__name__)
T = TypeVar("T")
READERS = 2
"""Threads that read trajectories and policies."""
FULL_PRECISION = ("float32",)
"""Recipes whose log-probs must agree with the learner's absolutely, not only by difference."""


@dataclass(slots=True, kw_only=True)
class Gateway:
    config: GatewayConfig
    store: Store
    writer: Writer
    auth: Auth
    fleet: Fleet
    reconciler: Reconciler
    exchanges: Exchanges
    flips: Flips
    metrics: Metrics
    readers: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(READERS, thread_name_prefix="reader")
    )

    async def read(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run what may read much in threads of its own: chat requests wait for none of it."""
        return await asyncio.get_running_loop().run_in_executor(self.readers, function, *arguments)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Between entry and exit the writer commits and the reconciler reconciles."""
        self.writer.start()
        reconciling = asyncio.create_task(self.reconciler.run())
        reconciling.add_done_callback(_die_with)
        try:
            yield
        finally:
            reconciling.remove_done_callback(_die_with)
            reconciling.cancel()
            await asyncio.gather(reconciling, return_exceptions=True)
            self.readers.shutdown(wait=False, cancel_futures=True)
            await asyncio.to_thread(self.writer.stop)
            for replica in self.fleet.replicas:
                await replica.engine.close()
            self.store.close()


def gateway(request: Request) -> Gateway:
    """The gateway that serves this request."""
    parts: Gateway = request.app.state.gateway
    return parts


def build(document: dict[str, Any]) -> Gateway:
    """All parts of a deployment's gateway. Raises ConfigError, StoreError."""
    own = config.section(document, "gateway", GatewayConfig)
    model = config.section(document, "model", config.ModelConfig)
    engine = config.section(document, "engine", config.EngineConfig)
    store = Store.open(config.section(document, "store", config.StoreConfig).url)
    fleet = _fleet(document, model)
    metrics = Metrics(fleet)
    writer = Writer(store)
    prefixes = Prefixes()
    base = artifacts.base_id(model.path)
    reconciler = Reconciler(
        config=own, engine=engine, base=base, store=store, writer=writer, fleet=fleet, metrics=metrics
    )
    return Gateway(
        config=own,
        store=store,
        writer=writer,
        auth=Auth(store, own.key_cache_s),
        fleet=fleet,
        reconciler=reconciler,
        metrics=metrics,
        exchanges=Exchanges(
            config=own,
            max_model_len=engine.max_model_len,
            base=base,
            writer=writer,
            fleet=fleet,
            turns=Turns(
                store=store,
                sessions=Sessions(store, own.trajectories_in_memory),
                renderer=PromptRenderer(Path(model.path)),
            ),
            prefixes=prefixes,
            metrics=metrics,
        ),
        flips=Flips(
            config=own,
            store=store,
            writer=writer,
            fleet=fleet,
            reconciler=reconciler,
            prefixes=prefixes,
            metrics=metrics,
        ),
    )


def _fleet(document: dict[str, Any], model: config.ModelConfig) -> Fleet:
    tiers = config.tiers(document)
    replicas = []
    for name, tier in tiers.items():
        for index in range(tier.replicas):
            replica = launch.replica(document, f"{name}-{index}")
            replicas.append(
                Replica(
                    id=replica.id,
                    tier=name,
                    engine=Engine(replica.socket),
                    state_file=replica.state_file,
                    full_precision=tier.recipe in FULL_PRECISION,
                    drafts=bool(tier.speculation),
                )
            )
    return Fleet(model=model.name, tiers=list(tiers), replicas=replicas)


def _die_with(reconciling: asyncio.Task[None]) -> None:
    """Without its reconciler a gateway would serve an ever staler view: end, and be started again."""
    if not reconciling.cancelled() and (error := reconciling.exception()) is not None:
        log.critical("the reconciler failed", exc_info=error)
        os.kill(os.getpid(), signal.SIGTERM)
