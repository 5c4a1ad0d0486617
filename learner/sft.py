"""``python -m learner sft``: supervised learning from demonstrations, and the warm start made by it.

Demonstrations are conversations (``{"messages": [...], "tools": [...]}``, one JSON object a line) or, without
a file, the gold ones of the training tasks. They are rendered turn by turn as the gateway joins turns, so the
model learns from exactly the ids that it will see and be asked to sample.

Invariant: the same configuration, seed and data give the same samples in the same order; a line of output and
at most one folder for each step.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learner import publish
from learner.batch import Sample, micro_batches
from learner.model import without_effect
from learner.objectives.sft import negative_log_likelihood
from learner.session import Session, open_session
from rollout import config, tasks
from rollout.artifacts import Artifacts
from rollout.seed import BASE_POLICY
from rollout.trajectories import Break, PromptRenderer

WARM_START = "p000001"

Conversation = dict[str, Any]


class DataError(Exception):
    """A demonstration cannot be learned from; the message says which and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the command line asks for."""

    steps: int
    batch_size: int
    learning_rate: float
    seed: int
    out: Path
    keep: tuple[int, ...]
    data: Path | None


def main(argv: list[str]) -> int:
    parser = config.arguments("Learn from demonstrations; write an adapter policy.")
    parser.add_argument("--steps", type=int, default=13)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="folder of the policy")
    parser.add_argument("--keep", default="", help="also write OUT-N after step N: 4,6,8")
    parser.add_argument("--data", type=Path, help="JSON lines; default: demonstrations of generated tasks")
    arguments = parser.parse_args(argv)
    train(config.read(arguments.config, arguments.overrides), _plan(arguments))
    return 0


def train(document: dict[str, Any], plan: Plan) -> None:
    """The whole run: model, steps, policy folders."""
    session = open_session(document, seed=plan.seed, learning_rate=plan.learning_rate, warmup=1)
    renderer = PromptRenderer(session.path)
    started = time.monotonic()
    for step, conversations in enumerate(_batches(plan), start=1):
        samples = [sample_of(renderer, conversation) for conversation in conversations]
        loss, norm = learn(session, samples)
        seconds = time.monotonic() - started
        print(f"step {step}/{plan.steps} loss {loss:.3f} grad {norm:.2f} {seconds:.0f} s", flush=True)
        if step in plan.keep or step == plan.steps:
            target = plan.out if step == plan.steps else plan.out.with_name(f"{plan.out.name}-{step}")
            _write(session, target, _lineage(session, plan, step), samples)
    session.engine.close()


def learn(session: Session, samples: Sequence[Sample]) -> tuple[float, float]:
    """One update; the mean loss per token in nats and the gradient norm."""
    engine = session.engine
    batches = micro_batches(
        samples, max_tokens=session.settings.tokens_per_micro_batch, pad_id=session.pad_id
    )
    total = sum(sample.num_sampled for sample in samples)
    loss = 0.0
    # Every process makes the same number of calls; a process without a batch of its own adds zero.
    for start in range(0, len(batches), engine.world):
        mine = start + engine.rank
        nll = negative_log_likelihood(engine.logprobs(batches[min(mine, len(batches) - 1)])) / total
        if mine >= len(batches):
            nll = nll * 0.0
        engine.backward(nll)
        loss += float(nll.detach())
    return engine.sum([loss])[0], engine.step()


def sample_of(renderer: PromptRenderer, conversation: Conversation) -> Sample:
    """A conversation as one token sequence; what the assistant says, its stop token included, is sampled.

    Raises DataError when there is no assistant turn or the template does not render turn after turn.
    """
    messages, tools = conversation["messages"], conversation.get("tools")
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise DataError("a demonstration has no assistant message")
    tokens = renderer.prompt_ids(messages[: answers[0]], tools)
    sampled = [False] * len(tokens)
    for number, answer in enumerate(answers):
        before = renderer.render(messages[:answer], tools, generation_prompt=True)
        after = renderer.render(messages[: answer + 1], tools, generation_prompt=False)
        if not after.startswith(before):
            raise DataError("the template does not render an assistant turn after its generation prompt")
        said = renderer.encode(after[len(before) :].rstrip("\n"))
        tokens += said
        sampled += [True] * len(said)
        if number + 1 < len(answers):
            until = messages[: answers[number + 1]]
            suffix = renderer.suffix(until, answer, tools, renderer.text(said[-1]))
            if isinstance(suffix, Break):
                raise DataError(suffix.reason)
            tokens += suffix
            sampled += [False] * len(suffix)
    return Sample(tokens=tokens, sampled=sampled, behaviour=[0.0] * len(tokens))


def _batches(plan: Plan) -> Iterator[list[Conversation]]:
    source = _file(plan.data) if plan.data else _generated(plan.seed)
    for _ in range(plan.steps):
        yield [next(source) for _ in range(plan.batch_size)]


def _generated(seed: int) -> Iterator[Conversation]:
    """Gold demonstrations of training tasks, from a range of seeds that belongs to `seed`."""
    number = 1_000_000 * (seed + 1)
    while True:
        task = tasks.generate(number, "train")
        yield {"messages": task.messages + tasks.demonstration(task), "tools": task.tools}
        number += 1


def _file(path: Path) -> Iterator[Conversation]:
    """The file's conversations, over and over."""
    conversations = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    if not conversations:
        raise DataError(f"{path} holds no demonstrations")
    while True:
        yield from conversations


def _lineage(session: Session, plan: Plan, step: int) -> publish.Lineage:
    return publish.Lineage(
        base=session.base,
        parent=BASE_POLICY,
        parent_weights=without_effect(session.engine.weights()),
        job="sft",
        step=step,
        recipe={
            "objective": "sft",
            "data": plan.data.name if plan.data else "tool_use/train demonstrations",
            "batch_size": plan.batch_size,
            "learning_rate": plan.learning_rate,
            "seed": plan.seed,
        },
    )


def _write(session: Session, target: Path, lineage: publish.Lineage, samples: Sequence[Sample]) -> None:
    engine = session.engine
    prompts = [sample.tokens for sample in samples]
    mark = publish.fingerprint(engine, WARM_START, lineage, prompts, session.pad_id)
    weights = engine.weights()
    if engine.rank == 0:
        partial = target.with_name(f".{target.name}.partial")
        manifest = publish.manifest_of(WARM_START, session.adapter, lineage)
        folder = publish.write(Artifacts(partial), manifest, session.adapter, weights, mark)
        publish.export(folder, target)
        shutil.rmtree(partial)
        print(f"wrote {target}", flush=True)
    engine.barrier()


def _plan(arguments: argparse.Namespace) -> Plan:
    return Plan(
        steps=arguments.steps,
        batch_size=arguments.batch_size,
        learning_rate=arguments.learning_rate,
        seed=arguments.seed,
        out=arguments.out,
        keep=tuple(int(step) for step in arguments.keep.split(",") if step),
        data=arguments.data,
    )
