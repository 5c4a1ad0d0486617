"""``python -m quant accept --tier fast``: may this tier's recipe be served?

Full precision runs first: it samples answers to chat and tool-use prompts, says how likely each token was,
and attempts tasks. Then it ends, the tier's recipe runs on the same weights with the same adapter, and does
the same with the same tokens and the same seeds. One engine at a time, so a model needs no more memory than
when it is served. What was found is kept in the deployment's folder, where engines look before they start.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import openai
import torch

from quant import acceptance, divergence
from quant.acceptance import Finding
from quant.divergence import Distribution
from quant.recipes import RECIPES
from quant.serving import engine
from quant.teacher import Sample, distributions, sample, sampled_tokens
from rollout import artifacts
from rollout.config import ConfigError, ModelConfig, home, read, section, tiers
from rollout.episodes import Episode
from rollout.evals import paired, suites
from rollout.evals.paired import Result, Side
from rollout.evals.statistics import Interval, paired_difference, pairs
from rollout.tasks import Task
from rollout.verifiers.tool_use import CALL_MARKUP, calls_of

BASE = "base"
POLICY = "policy"
ENGINE_TIER = "default"
"""What an engine that is asked without a gateway takes for its tier."""
CONCURRENCY = 32
SUITE = "acceptance"


@dataclass(slots=True)
class Answers:
    """What one side did."""

    distributions: list[Distribution] = field(default_factory=list)
    """Of every sampled position, in the order of the samples."""
    results: list[Result] = field(default_factory=list)
    valid: dict[str, bool] = field(default_factory=dict)
    """By task: every call parsed and named a tool that was offered."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tier", default="fast", help="the tier that is tested")
    parser.add_argument("--reference", default="standard", help="the tier in full precision")
    parser.add_argument("--recipe", help="another recipe than the tier's own")
    parser.add_argument("--weights", type=Path, help="other weights for the tested side (`quantize`)")
    parser.add_argument("--policy", help="folder of an adapter policy; default: the model's warm start")
    parser.add_argument("--tokens", type=int, default=5000, help="sampled tokens to compare on")
    parser.add_argument("--tasks", type=int, default=800, help="paired tasks")


def main(args: argparse.Namespace) -> int:
    """Print what was found and keep it; 0 when the recipe is accepted."""
    document = read(args.config, args.overrides)
    names = tiers(document)
    for tier in (args.reference, args.tier):
        if tier not in names:
            raise ConfigError(f"tiers.{tier}: there is no such table in {args.config}")
    recipe = args.recipe or names[args.tier].recipe
    if recipe not in RECIPES:
        raise ConfigError(f"recipe {recipe!r} is not one of {', '.join(RECIPES)}")
    model = section(document, "model", ModelConfig)
    if not (Path(model.path) / "config.json").exists():
        raise ConfigError(f"model.path: {model.path} is not there; build it: python -m learner build")
    signal.signal(signal.SIGTERM, _stop)
    finding = asyncio.run(_test(args, recipe, names[args.tier].kv_cache_dtype, model))
    target = acceptance.write(home(document), finding)
    print(_table(finding))
    for sentence in finding.failures:
        print(f"not kept: {sentence}")
    print(f"recipe {recipe} is {'refused' if finding.failures else 'accepted'}; kept in {target}")
    return 1 if finding.failures else 0


async def _test(args: argparse.Namespace, recipe: str, kv_cache_dtype: str, model: ModelConfig) -> Finding:
    base = artifacts.base_id(model.path)
    adapter = _adapter(args.policy or model.warm_start, base, required=args.policy is not None)
    tasks = suites.gate(SUITE, args.tasks)
    # Drafting and acceptance records are other questions than the recipe's.
    plain = [f"tiers.{tier}.speculation={{}}" for tier in {args.reference, args.tier}]
    shared = [*args.overrides, *plain]
    reference, other, weights = Answers(), Answers(), Path(model.path)
    async with engine(args.config, shared, args.reference, weights) as client:
        name = await _load(client, adapter)
        samples = await sample(client, name, args.tokens, _say)
        await _answer(client, name, samples, tasks, reference, f"{args.reference}: full precision")
    candidate = [*shared, f'tiers.{args.tier}.recipe="{recipe}"']
    async with engine(args.config, candidate, args.tier, args.weights or weights) as client:
        name = await _load(client, adapter)
        await _answer(client, name, samples, tasks, other, f"{args.tier}: {recipe}")
    found = divergence.compare(reference.distributions, other.distributions, sampled_tokens(samples))
    score = paired.compare(recipe, other.results, args.reference, reference.results)
    return Finding(
        recipe=recipe,
        kv_cache_dtype=kv_cache_dtype,
        kv_bytes=_kv_bytes(Path(model.path), recipe, kv_cache_dtype),
        base=base,
        policy=None if adapter is None else str(adapter),
        tokens=found.positions,
        kl=found.kl,
        kl_99=found.kl_99,
        top1=found.top1,
        perplexity_ratio=found.perplexity_ratio,
        tasks=score.counts.n,
        reference_success=score.counts.b / max(score.counts.n, 1),
        success=score.counts.a / max(score.counts.n, 1),
        score=score.difference,
        validity=_difference(other.valid, reference.valid),
        limits=RECIPES[recipe].limits,
        tested_at=time.time(),
    )


def _kv_bytes(model: Path, recipe: str, kv_cache_dtype: str) -> int:
    """Of one token in the cache: a key and a value for each head that has its own, in every layer."""
    config = json.loads((model / "config.json").read_text())
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    device = "gpu" if torch.cuda.is_available() else "cpu"
    dtype = RECIPES[recipe].dtype_on(device) if kv_cache_dtype == "auto" else kv_cache_dtype
    values: int = config["num_hidden_layers"] * 2 * (config.get("num_key_value_heads") or heads) * size
    return values * {"float32": 4, "bfloat16": 2}.get(dtype, 1)


def _adapter(folder: str | None, base: str, required: bool) -> Path | None:
    """The adapter to load on both sides; None without one. A warm start of another base is left out."""
    if folder is None:
        return None
    manifest = Path(folder) / "manifest.json"
    if not manifest.exists():
        raise ConfigError(f"{folder}: no manifest.json; name the folder of an adapter policy")
    if json.loads(manifest.read_text())["base"] == base:
        return Path(folder).resolve()
    if required:
        raise ConfigError(f"{folder}: an adapter of another base than model.path")
    _say("the warm start belongs to another base: testing the bare base")
    return None


async def _load(client: openai.AsyncOpenAI, adapter: Path | None) -> str:
    if adapter is None:
        return BASE
    body = {"lora_name": POLICY, "lora_path": str(adapter)}
    await client.post("/load_lora_adapter", body=body, cast_to=str)
    return POLICY


async def _answer(
    client: openai.AsyncOpenAI,
    model: str,
    samples: Sequence[Sample],
    tasks: Sequence[Task],
    answers: Answers,
    label: str,
) -> None:
    """Fill `answers`: the distribution of every sampled position, then every task."""
    answers.distributions = await distributions(client, model, samples, lambda text: _say(f"{label}: {text}"))

    def note(side: Side, episode: Episode) -> None:
        answers.valid[episode.task.id] = well_formed(episode)
        if len(answers.valid) % 50 == 0 or len(answers.valid) == len(tasks):
            _say(f"{label}: {len(answers.valid)} of {len(tasks)} tasks")

    side = Side(policy=label, model=model)
    done = await paired.evaluate(client, tasks, [side], [ENGINE_TIER], CONCURRENCY, note)
    answers.results = done[label]


def well_formed(episode: Episode) -> bool:
    """Whether every call of an attempt parses and names an offered tool, and no markup is left over."""
    turns = [message for message in episode.messages if message["role"] == "assistant"]
    calls = calls_of(turns)
    offered = {tool["function"]["name"] for tool in episode.task.tools}
    return (
        calls is not None
        and all(call.name in offered for call in calls)
        and not any(CALL_MARKUP.search(turn.get("content") or "") for turn in turns)
    )


def _difference(valid: dict[str, bool], reference: dict[str, bool]) -> Interval:
    tasks = sorted(reference)
    return paired_difference(pairs([valid[task] for task in tasks], [reference[task] for task in tasks]))


def _table(finding: Finding) -> str:
    limits = finding.limits
    rows = [
        (f"KL a token, {finding.tokens} tokens", f"{finding.kl:.6f}", f"at most {limits.kl}"),
        ("KL, 99th percentile", f"{finding.kl_99:.6f}", ""),
        ("top-1 agreement", f"{finding.top1:.4f}", f"at least {limits.top1}"),
        ("perplexity ratio", f"{finding.perplexity_ratio:.4f}", f"at most {1 + limits.perplexity}"),
        ("validity of tool calls, difference", str(finding.validity), f"no loss above {limits.validity}"),
        (
            f"task success, difference over {finding.tasks}",
            str(finding.score),
            f"no loss above {limits.score}",
        ),
        ("task success", f"{finding.success:.3f}", f"full precision {finding.reference_success:.3f}"),
        ("cache, bytes a token", f"{finding.kv_bytes}", ""),
    ]
    return "\n".join(f"{what:<45} {value:<26} {limit}" for what, value, limit in rows)


def _stop(number: int, frame: FrameType | None) -> None:
    """Ends the test by an exception, and so the engine that it began."""
    raise SystemExit(128 + number)


def _say(text: str) -> None:
    """Progress, on standard error."""
    print(f"[accept] {text}", file=sys.stderr, flush=True)
