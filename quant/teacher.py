"""Full precision as a teacher: it samples answers, and any engine says how likely it finds them.

Asked with the official client; what is vLLM's and not OpenAI's goes through the client's ``extra_body``.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import openai

from quant.divergence import Distribution
from rollout.evals import suites

TOP = 64
ANSWER_TOKENS = 100
AT_ONCE = 32
TEACHER_FORCED = 8
"""Requests at once while distributions are read: each answers with 64 log-probs a token."""
SUBJECTS = ("rivers", "sorting", "the moon", "a shop", "music", "chess", "bread", "Rome", "ants", "elections")
OPENINGS = ("Explain", "Write a story about", "List facts about", "Write Python code for", "Give advice on")


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt and the answer that full precision sampled."""

    ids: list[int]
    start: int
    """Where the answer begins."""


async def sample(
    client: openai.AsyncOpenAI, model: str, tokens: int, say: Callable[[str], None]
) -> list[Sample]:
    """Answers of at least `tokens` in all at temperature 1, half of them to chat, half to tool use."""
    samples: list[Sample] = []

    async def one(request: dict[str, Any], seed: int) -> Sample:
        answer = await client.chat.completions.create(
            model=model,
            temperature=1.0,
            max_tokens=ANSWER_TOKENS,
            seed=seed,
            extra_body={"return_token_ids": True},
            **request,
        )
        prompt = answer.to_dict()["prompt_token_ids"]
        said = answer.choices[0].to_dict()["token_ids"]
        assert isinstance(prompt, list)
        assert isinstance(said, list)
        return Sample([*prompt, *said], len(prompt))

    seed = 0
    while (found := sum(len(sample.ids) - sample.start for sample in samples)) < tokens:
        say(f"sampling: {found} of {tokens} tokens")
        tools = [
            {"messages": task.messages, "tools": task.tools}
            for task in suites.gate(f"teacher {seed}", AT_ONCE // 2)
        ]
        chats = [{"messages": messages} for messages in chat_prompts(AT_ONCE // 2, seed)]
        asked = enumerate([*tools, *chats], start=seed * AT_ONCE)
        samples += await asyncio.gather(*(one(request, number) for number, request in asked))
        seed += 1
    return samples


async def distributions(
    client: openai.AsyncOpenAI, model: str, samples: Sequence[Sample], say: Callable[[str], None]
) -> list[Distribution]:
    """Of every sampled position its likeliest tokens and the one that was sampled, in the samples' order."""
    slots, done = asyncio.Semaphore(TEACHER_FORCED), 0

    async def one(sample: Sample) -> list[Distribution]:
        nonlocal done
        async with slots:
            answer = await client.completions.create(
                model=model, prompt=sample.ids, max_tokens=1, extra_body={"prompt_logprobs": TOP}
            )
        done += 1
        if done % 20 == 0 or done == len(samples):
            say(f"distributions of {done} of {len(samples)} answers")
        entries: Any = answer.choices[0].to_dict()["prompt_logprobs"]
        return [
            {int(token): entry["logprob"] for token, entry in position.items()}
            for position in entries[sample.start :]
        ]

    answers = await asyncio.gather(*(one(sample) for sample in samples))
    return [position for answer in answers for position in answer]


def sampled_tokens(samples: Sequence[Sample]) -> list[int]:
    """The sampled tokens of all `samples`, one after another: those that `distributions` are of."""
    return [token for sample in samples for token in sample.ids[sample.start :]]


def chat_prompts(count: int, seed: int) -> list[list[dict[str, Any]]]:
    """`count` short conversations, different from each other."""
    chooser = random.Random(seed)
    return [
        [
            {
                "role": "user",
                "content": f"{chooser.choice(OPENINGS)} {chooser.choice(SUBJECTS)} ({seed}.{number}).",
            }
        ]
        for number in range(count)
    ]
