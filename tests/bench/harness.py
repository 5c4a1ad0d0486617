"""What every bench needs: engines started as a deployment starts them, an adapter policy, load, and a report.

Engines run in a home of their own under a temporary folder, so a bench never meets a deployment that is up,
and end with the bench.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.table import Table

from quant.teacher import chat_prompts
from rollout import artifacts
from rollout.config import EngineConfig, ModelConfig, arguments, read, section
from rollout.evals import suites
from server.engine.client import Engine
from tests.fixtures.engines import RunningEngine

START_SECONDS = 600.0


class BenchError(Exception):
    """The bench cannot run; the message says what is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is measured: a deployment's configuration and the model folder it names."""

    config: Path
    overrides: list[str]
    model: Path
    engine: EngineConfig
    warm_start: Path | None


def say(text: str) -> None:
    """Progress, on standard error: standard output ends with the JSON line."""
    print(f"[bench] {text}", file=sys.stderr, flush=True)


def parser(description: str) -> argparse.ArgumentParser:
    """``--config``, ``--set`` and ``--model``."""
    made = arguments(description)
    made.add_argument(
        "--model", type=Path, help="model folder; default: the configuration's, built when missing"
    )
    return made


def setting(args: argparse.Namespace) -> Setting:
    """Read the configuration and make sure that the model is there. Raises BenchError."""
    document = read(args.config, args.overrides)
    model = section(document, "model", ModelConfig)
    path = args.model or Path(model.path)
    if not (path / "config.json").exists():
        if args.model is not None or model.build is None:
            raise BenchError(f"{path}: no model there")
        say(f"building {path}")
        command = [sys.executable, "-m", "learner", "build", "--config", str(args.config)]
        subprocess.run([*command, *(f"--set={text}" for text in args.overrides)], check=True)
    return Setting(
        config=args.config,
        overrides=args.overrides,
        model=path.resolve(),
        engine=section(document, "engine", EngineConfig),
        warm_start=_warm_start(model.warm_start, path),
    )


def _warm_start(configured: str | None, model: Path) -> Path | None:
    """The deployment's first adapter, when there is one and it was made for this model."""
    if configured is None or not (Path(configured) / "manifest.json").exists():
        return None
    manifest = json.loads((Path(configured) / "manifest.json").read_text())
    return Path(configured).resolve() if manifest["base"] == artifacts.base_id(model) else None


@contextmanager
def engines(chosen: Setting, replicas: Sequence[str]) -> Iterator[dict[str, RunningEngine]]:
    """Running engines by replica id, all healthy; ended with their processes at the end, SIGTERM included."""
    signal.signal(signal.SIGTERM, _stop)
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        home = Path(scratch)
        running = {replica: _start(chosen, home, replica) for replica in replicas}
        try:
            for engine in running.values():
                _wait_ready(engine)
            yield running
        finally:
            for engine in running.values():
                engine.supervisor.terminate()
            for engine in running.values():
                engine.supervisor.wait(60)


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _start(chosen: Setting, home: Path, replica: str) -> RunningEngine:
    argv = [sys.executable, "-m", "server.engine", "--config", str(chosen.config), "--replica", replica]
    argv += [f"--set={text}" for text in chosen.overrides]
    argv += [f'--set=model.path="{chosen.model}"']
    say(f"starting {replica}")
    process = subprocess.Popen(argv, env=os.environ | {"RATCHET_HOME": str(home)})
    return RunningEngine(chosen.config, home, replica, process)


def _wait_ready(engine: RunningEngine) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not engine.ready():
        if engine.supervisor.poll() is not None or time.monotonic() > deadline:
            log = engine.log.read_text(errors="replace")[-4000:] if engine.log.exists() else "(no log)"
            raise BenchError(f"{engine.replica} did not start:\n{log}")
        time.sleep(0.2)


@contextmanager
def adapter(chosen: Setting) -> Iterator[Path]:
    """Folder of an adapter of the model: the deployment's warm start, else a random one."""
    if chosen.warm_start is not None:
        yield chosen.warm_start
        return
    with tempfile.TemporaryDirectory(prefix="bench-adapter-") as scratch:
        say("no warm start for this model: measuring with a random adapter")
        write_random_adapter(Path(scratch), chosen.model, chosen.engine)
        yield Path(scratch)


def write_random_adapter(folder: Path, model: Path, engine: EngineConfig) -> None:
    """A LoRA in PEFT's format on `engine.target_modules`, as strong as an early policy's."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    hidden = config["hidden_size"]
    size = config.get("head_dim") or hidden // heads
    shapes = {
        "q_proj": (hidden, heads * size),
        "k_proj": (hidden, kv_heads * size),
        "v_proj": (hidden, kv_heads * size),
        "o_proj": (heads * size, hidden),
    }
    unknown = set(engine.target_modules) - set(shapes)
    if unknown:
        raise BenchError(f"no shapes known for {sorted(unknown)}: name a warm start in the configuration")
    generator = torch.Generator().manual_seed(1)
    rank, tensors = engine.max_lora_rank, {}
    for layer in range(config["num_hidden_layers"]):
        for name in engine.target_modules:
            inputs, outputs = shapes[name]
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) / inputs**0.5
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) * 0.005
    save_file(tensors, folder / "adapter_model.safetensors")
    peft = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(model), "r": rank}
    peft |= {"lora_alpha": rank, "target_modules": engine.target_modules, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(peft))


Request = dict[str, Any]
"""What a request asks: ``messages`` and perhaps ``tools``."""


def chats(count: int, seed: int) -> list[Request]:
    """Short questions, different from each other."""
    return [{"messages": messages} for messages in chat_prompts(count, seed)]


def tool_uses(count: int, seed: int) -> list[Request]:
    """Questions that offer tools, about 300 tokens each, no two the same."""
    tasks = suites.gate(f"bench {seed}", count)
    return [{"messages": task.messages, "tools": task.tools} for task in tasks]


def body(model: str, request: Request, tokens: int, temperature: float = 1.0) -> dict[str, Any]:
    """An answer of exactly `tokens`."""
    asked = {"model": model, "max_tokens": tokens, "temperature": temperature, "ignore_eos": True}
    return request | asked


async def tokens_per_second(
    engine: Engine, model: str, requests: Sequence[Request], tokens: int, temperature: float = 1.0
) -> float:
    """Generated tokens a second with all `requests` at once, each of exactly `tokens`."""

    async def one(request: Request) -> int:
        answer = await engine.chat(body(model, request, tokens, temperature))
        return sum(len(choice.token_ids) for choice in answer.choices)

    started = time.monotonic()
    made = await asyncio.gather(*map(one, requests))
    return sum(made) / (time.monotonic() - started)


@dataclass(slots=True)
class Latencies:
    """In seconds."""

    first: list[float] = field(default_factory=list)
    """Until a request's first token."""
    between: list[float] = field(default_factory=list)
    """Between a request's tokens as they arrive."""


async def latencies(engine: Engine, model: str, requests: Sequence[Request], tokens: int) -> Latencies:
    """Of all `requests` at once, streamed."""
    found = Latencies()

    async def one(request: Request) -> None:
        gaps = [gap async for gap in arrivals(engine, body(model, request, tokens))]
        found.first.append(gaps[0])
        found.between.extend(gaps[1:])

    await asyncio.gather(*map(one, requests))
    return found


async def arrivals(engine: Engine, asked: dict[str, Any]) -> AsyncIterator[float]:
    """Seconds until the first token of a streamed answer, then from each arrival to the next."""
    last = time.monotonic()
    async for event in engine.stream_chat(asked):
        if any(piece.token_ids for piece in event.pieces):
            now = time.monotonic()
            yield now - last
            last = now


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def report(
    title: str, rows: Sequence[Sequence[str]], header: Sequence[str], result: Mapping[str, Any]
) -> None:
    """The table, then the last line: `result` as one JSON object."""
    table = Table(title=title)
    for name in header:
        table.add_column(name)
    for row in rows:
        table.add_row(*row)
    Console(width=110).print(table)
    print(json.dumps(result), flush=True)
