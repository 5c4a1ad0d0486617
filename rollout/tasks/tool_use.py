"""The `tool_use` domain: everyday requests to simulated tools.

About half of the tasks end with the right calls of the first turn (several arguments, values to work
out), a third need two or three turns in which a result is used, the rest are right only without a call.
Each family is a function of a `Draw` that gives a `Draft`; `FAMILIES` lists them with toolset and weight.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rollout.tasks import families
from rollout.tasks.families import Draft
from rollout.tasks.task import Call, Goal, Task
from rollout.tasks.values import Draw
from rollout.tasks.world import TOOLS, World

NAME = "tool_use"
SYSTEM = "Be brief."
MAX_TOKENS = 64

TOOLSETS: dict[str, tuple[str, ...]] = {
    "home": ("get_weather", "set_timer"),
    "prices": ("get_price", "convert_currency"),
    "orders": ("place_order", "find_order", "cancel_order"),
    "calendar": ("add_event", "set_timer"),
    "bank": ("get_balance", "transfer"),
}
"""A fixed list: every request of one toolset begins with the same tokens, so engines find them cached."""


@dataclass(frozen=True, slots=True)
class Family:
    make: Callable[[Draw], Draft]
    toolsets: tuple[str, ...]
    weight: float


def _family(make: Callable[[Draw], Draft], *toolsets: str, weight: float = 1.0) -> Family:
    return Family(make, toolsets, weight)


FAMILIES: dict[str, Family] = {
    # one turn of calls
    "weather": _family(families.weather, "home"),
    "timer": _family(families.timer, "home", "calendar"),
    "price": _family(families.price, "prices"),
    "convert": _family(families.convert, "prices", weight=1.5),
    "order": _family(families.order, "orders", weight=1.5),
    "cancel": _family(families.cancel, "orders"),
    "event": _family(families.event, "calendar", weight=1.5),
    "event_worked": _family(families.event_worked, "calendar", weight=0.5),
    "transfer": _family(families.transfer, "bank", weight=1.5),
    # two or three turns
    "price_convert": _family(families.price_convert, "prices", weight=2.0),
    "find_cancel": _family(families.find_cancel, "orders", weight=2.5),
    "balance_answer": _family(families.balance_answer, "bank", weight=2.5),
    "reorder": _family(families.reorder, "orders"),
    # no call
    "unanswerable": _family(families.unanswerable, *TOOLSETS),
    "recall": _family(families.recall, *TOOLSETS, weight=1.5),
}


def generate(seed: int, split: str) -> Task:
    """Task number `seed` of `split`; the same on every machine and Python version."""
    digest = hashlib.sha256(f"{NAME}/{split}/{seed}".encode()).digest()
    rng = random.Random(int.from_bytes(digest[:8], "big"))
    name = rng.choices(list(FAMILIES), [family.weight for family in FAMILIES.values()])[0]
    family = FAMILIES[name]
    toolset = rng.choice(family.toolsets)
    draft = family.make(Draw(rng, split))
    turns = [[Call(name=tool, arguments=arguments) for tool, arguments in turn] for turn in draft.turns]
    return Task(
        id=f"{NAME}/{split}/{name}/{seed}",
        domain=NAME,
        split=split,
        family=name,
        messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": draft.text}],
        tools=[TOOLS[tool].schema() for tool in TOOLSETS[toolset]],
        world=draft.world,
        goal=Goal(turns=turns, answer=draft.answer, mentions=draft.mentions),
        max_turns=len(turns) + (draft.answer is not None),
        max_tokens=MAX_TOKENS,
    )


def demonstration(task: Task) -> list[dict[str, Any]]:
    """Gold continuation of ``task.messages``; see `rollout.tasks.demonstration`."""
    world = World(task.world)
    messages: list[dict[str, Any]] = []
    for number, turn in enumerate(task.goal.turns):
        calls = [
            {
                "id": f"call_{number}_{index}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for index, call in enumerate(turn)
        ]
        messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        results = [json.dumps(world.execute(call.name, call.arguments)) for call in turn]
        # The results of a last turn of calls would be read by nobody.
        if number + 1 < task.max_turns:
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": result}
                for call, result in zip(calls, results, strict=True)
            ]
    if task.goal.answer is not None:
        messages.append({"role": "assistant", "content": task.goal.answer})
    return messages
