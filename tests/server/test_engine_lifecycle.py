"""Engines that lose their policies, are killed, adopted and stopped."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from server.engine import processes
from server.engine.client import Engine
from server.engine.errors import EngineUnavailable
from server.engine.supervisor import EngineState
from tests.fixtures.engines import RunningEngine, eventually, start_supervisor, wait_ready
from tests.fixtures.models import write_adapter
from tests.server.test_engine import answer, assert_same, request, run, streamed

pytestmark = pytest.mark.engine


def state(running: RunningEngine) -> EngineState:
    found = running.state()
    assert found is not None
    return found


def test_a_policy_folder_deleted_under_load_harms_nobody(engine_other: RunningEngine, tmp_path: Path) -> None:
    """Also when many later loads could have pushed it out of the engine's memory."""
    instance = state(engine_other).instance

    async def check(engine: Engine) -> None:
        write_adapter(tmp_path / "kept", seed=1)
        await engine.load_adapter("kept", tmp_path / "kept")
        before = await answer(engine, model="kept")
        load = [
            asyncio.create_task(engine.chat(request(model="kept", max_tokens=200, ignore_eos=True)))
            for _ in range(6)
        ]
        shutil.rmtree(tmp_path / "kept")
        for number in range(12):
            path = tmp_path / str(number)
            write_adapter(path, seed=number + 2)
            await engine.load_adapter(f"n{number}", path)
            assert (await answer(engine, model=f"n{number}", max_tokens=2)).token_ids
            await engine.unload_adapter(f"n{number}")
            shutil.rmtree(path)
        assert all(len(result.choices[0].token_ids) == 200 for result in await asyncio.gather(*load))
        assert_same(await answer(engine, model="kept"), before)
        await engine.unload_adapter("kept")

    run(engine_other, check)
    assert state(engine_other).instance == instance


@pytest.mark.parametrize("victim", ["leader", "worker"])
def test_a_killed_engine_comes_back_as_another_instance(engine_other: RunningEngine, victim: str) -> None:
    before = state(engine_other)
    family = processes.members(before.pid)
    assert len(family) > 1
    target = before.pid if victim == "leader" else max(set(family) - {before.pid})

    async def killed_while_answering(engine: Engine) -> None:
        long = request(max_tokens=900, ignore_eos=True)
        whole = asyncio.create_task(engine.chat(long))
        stream = asyncio.create_task(streamed(engine, long))
        while (await engine.metrics())["vllm:num_requests_running"] < 2:
            await asyncio.sleep(0.05)
        os.kill(target, signal.SIGKILL)
        for task in (whole, stream):
            with pytest.raises(EngineUnavailable):
                await task

    run(engine_other, killed_while_answering)
    eventually(lambda: state_or_none(engine_other) not in (None, before.instance), 60, "another instance")
    assert processes.started_at(before.pid) is None
    assert not processes.members(before.pid)
    wait_ready(engine_other)

    async def answers(engine: Engine) -> None:
        assert (await answer(engine)).token_ids

    run(engine_other, answers)


def state_or_none(running: RunningEngine) -> str | None:
    found = running.state()
    return found.instance if found else None


def test_an_engine_outlives_its_supervisor_and_is_adopted(engine_other: RunningEngine) -> None:
    before = state(engine_other)
    argv = engine_other.supervisor.args
    assert isinstance(argv, list)
    refused = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 2
    assert "already has a supervisor" in refused.stderr
    engine_other.supervisor.kill()
    engine_other.supervisor.wait(10)
    assert engine_other.ready()
    second = start_supervisor(engine_other.config, engine_other.home, engine_other.replica)
    eventually(lambda: f"adopted engine {before.instance}" in second.log.read_text(), 60, "adopted")
    assert state(engine_other) == before
    assert second.ready()
    # From here on `engine_other` is ended through the supervisor that has it now.
    object.__setattr__(engine_other, "supervisor", second.supervisor)


def test_a_stopped_supervisor_leaves_nothing(engine_other: RunningEngine) -> None:
    """The last test of this file: the engine is gone afterwards."""
    before = state(engine_other)
    engine_other.supervisor.terminate()
    assert engine_other.supervisor.wait(60) == 0
    assert not processes.members(before.pid)
    assert processes.started_at(before.pid) is None
    assert engine_other.state() is None
    assert not engine_other.socket.exists()

    async def check(engine: Engine) -> None:
        assert not await engine.health()
        with pytest.raises(EngineUnavailable):
            await engine.models()
        with pytest.raises(EngineUnavailable):
            await engine.chat(request())
        with pytest.raises(EngineUnavailable):
            await streamed(engine, request())
        with pytest.raises(EngineUnavailable):
            await engine.metrics()

    run(engine_other, check)
