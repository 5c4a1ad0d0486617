"""Batch work beside interactive requests, in vLLM's own scheduler: who is in a step, by what steps take."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from server.engine.launch import BATCH_PRIORITY
from server.engine.worker import plugin
from server.engine.worker.batch import Room, fits

BLOCK = 16
PROMPT = 8


@dataclass
class Run:
    """A scheduler whose steps take as long as `seconds` says, and every step's requests."""

    scheduler: Scheduler
    seconds: Callable[[int], float]
    now: float = 0.0
    steps: list[set[str]] = field(default_factory=list)

    def add(self, *names: str, priority: int = 0, tokens: int = 10**6) -> None:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        for name in names:
            prompt = [7] * PROMPT
            self.scheduler.add_request(Request(name, prompt, params, None, priority=priority))

    def step(self) -> set[str]:
        """Schedule one step and give every complete request of it a token."""
        output = self.scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        self.now += self.seconds(output.total_num_scheduled_tokens)
        told = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[9] for _ in names],
        )
        self.scheduler.update_from_output(output, told)
        self.steps.append(set(names))
        return self.steps[-1]


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch, tiny_moe: Path) -> Callable[..., Run]:
    monkeypatch.setattr(Scheduler, "schedule", Scheduler.schedule)  # put back at the end
    plugin.register()

    def make(seconds: Callable[[int], float], *, places: int = 8, blocks: int = 1000) -> Run:
        config = VllmConfig(
            model_config=ModelConfig(model=str(tiny_moe), dtype="float32", max_model_len=1024),
            scheduler_config=SchedulerConfig(
                max_num_seqs=places,
                max_num_batched_tokens=512,
                max_model_len=1024,
                is_encoder_decoder=False,
                policy="priority",
                async_scheduling=False,
            ),
            cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=False),
        )
        config.cache_config.num_gpu_blocks = blocks
        attention = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        cache = KVCacheConfig(
            num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], attention)]
        )
        made = Scheduler(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
        )
        run = Run(made, seconds)
        monkeypatch.setattr(time, "monotonic", lambda: run.now)
        return run

    return make


def as_on_a_cpu(rows: int) -> float:
    return 1.0 + 0.5 * rows


def as_on_a_gpu(rows: int) -> float:
    return 1.0


def low(count: int) -> list[str]:
    return [f"batch {number}" for number in range(count)]


def test_batch_work_has_the_engine_for_itself_while_nobody_waits(running: Callable[..., Run]) -> None:
    run = running(as_on_a_cpu)
    run.add(*low(4), priority=BATCH_PRIORITY)
    assert all(run.step() == set(low(4)) for _ in range(10))


def test_where_rows_cost_time_batch_work_steps_aside_and_comes_back(running: Callable[..., Run]) -> None:
    run = running(as_on_a_cpu)
    run.add(*low(4), priority=BATCH_PRIORITY)
    for _ in range(10):
        run.step()
    run.add("chat", tokens=20)
    steps = [run.step() for _ in range(22)]
    assert steps[0] == {"chat"}
    assert steps[:20] == [{"chat"}] * 20
    assert steps[20:] == [set(low(4))] * 2


def test_where_rows_cost_nothing_all_work_is_in_every_step(running: Callable[..., Run]) -> None:
    run = running(as_on_a_gpu)
    run.add(*low(4), priority=BATCH_PRIORITY)
    for _ in range(10):
        run.step()
    run.add("chat")
    for _ in range(5):  # until it is known how long a step of one row takes
        run.step()
    assert [run.step() for _ in range(5)] == [{"chat", *low(4)}] * 5


def test_batch_requests_that_wait_are_not_admitted_into_steps_they_would_make_long(
    running: Callable[..., Run],
) -> None:
    run = running(as_on_a_cpu)
    run.add("chat", tokens=30)
    for _ in range(10):
        run.step()
    run.add(*low(2), priority=BATCH_PRIORITY, tokens=5)
    steps = [run.step() for _ in range(20)]
    assert steps == [{"chat"}] * 20
    assert run.step() == set(low(2))


@pytest.mark.parametrize("short_of", ["places", "cache"])
def test_an_interactive_request_gets_the_place_and_the_cache_of_held_batch_work(
    short_of: str, running: Callable[..., Run]
) -> None:
    # Four batch requests take all places, or nearly all blocks.
    run = running(
        as_on_a_cpu, places=4 if short_of == "places" else 8, blocks=1000 if short_of == "places" else 5
    )
    run.add(*low(4), priority=BATCH_PRIORITY, tokens=6)
    run.step()
    run.add("chat", tokens=4)
    for _ in range(20):
        run.step()
    chat = [number for number, step in enumerate(run.steps) if "chat" in step]
    assert len(chat) == 4
    assert chat[-1] < 8
    # Nothing of the batch was lost: each got its six tokens, the one that gave way in two parts.
    counts = [sum(name in step for step in run.steps) for name in low(4)]
    assert min(counts) >= 6
    assert not run.scheduler.has_requests()


def test_paused_nothing_gives_way(running: Callable[..., Run]) -> None:
    from vllm.v1.core.sched.interface import PauseState

    run = running(as_on_a_cpu, places=2)
    run.add(*low(2), priority=BATCH_PRIORITY)
    run.step()
    run.add("chat")
    run.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert [run.step() for _ in range(3)] == [set()] * 3
    assert len(run.scheduler.running) == 2


def test_room_grows_by_no_more_than_one_row_past_what_was_seen() -> None:
    room, clock = Room(), itertools.count()
    assert room.rows(1) == 0
    for _ in range(4):
        room.scheduled({"a": 1}, next(clock))
    assert room.rows(1) == 1


def test_requests_that_fit_are_the_first_ones() -> None:
    assert fits([], 0) == 0
    assert fits([5, 1], 4) == 0
    assert fits([1, 1, 1], 2) == 2
    assert fits([1, 1], 9) == 2
