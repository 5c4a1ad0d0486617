"""A gateway over the session's two engines, shared by the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures.engines import RunningEngine
from tests.server.gateways import Deployment, running_gateway


@pytest.fixture(scope="module")
def deployment(
    tiny_deployment: tuple[Path, Path], engine_standard: RunningEngine, engine_fast: RunningEngine
) -> Iterator[Deployment]:
    """Both tiers on the tiny model behind a running gateway; no adapter is left loaded afterwards."""
    config, home = tiny_deployment
    found = Deployment(config, home, ['model.warm_start=""'])
    found.prepare()
    with running_gateway(found):
        yield found
    for engine in (engine_standard, engine_fast):
        engine.unload_all()
