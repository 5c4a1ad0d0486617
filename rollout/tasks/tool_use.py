"""The `tool_use` domain: everyday requests to simulated tools.

About half of the tasks end with the right calls of the first turn (several arguments, values to work
out), a third need two to four turns in which a result is used, the rest are right only without a call.
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
    "shop": ("check_stock", "place_order"),
    "mail": ("find_contact", "send_email"),
    "returns": ("find_order", "cancel_order"),
    "calendar": ("add_event", "set_timer"),
    "sums": ("calculate", "add_note"),
    "dining": ("find_restaurant", "book_table"),
    "bank": ("get_balance", "transfer"),
    "units": ("get_weather", "convert_units"),
    "office": ("find_contact", "send_email", "add_note"),
    "market": ("get_price", "check_stock", "place_order"),
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
    "weather": _family(families.weather, "home", "units"),
    "timer": _family(families.timer, "home", "calendar"),
    "timer_worked": _family(families.timer_worked, "home", "calendar"),
    "weather_and_timer": _family(families.weather_and_timer, "home"),
    "price": _family(families.price, "prices", "market"),
    "convert": _family(families.convert, "prices", weight=1.5),
    "order": _family(families.order, "shop", "market"),
    "order_worked": _family(families.order_worked, "shop", "market", weight=1.5),
    "mail": _family(families.mail, "mail", "office", weight=1.5),
    "cancel": _family(families.cancel, "returns"),
    "event": _family(families.event, "calendar", weight=1.5),
    "event_worked": _family(families.event_worked, "calendar", weight=1.5),
    "sum": _family(families.total, "sums"),
    "note": _family(families.note, "sums", "office"),
    "book": _family(families.book, "dining", weight=1.5),
    "transfer": _family(families.transfer, "bank", weight=1.5),
    "units": _family(families.units, "units"),
    # two to four turns
    "price_convert": _family(families.price_convert, "prices", weight=1.5),
    "stock_order": _family(families.stock_order, "shop", weight=1.5),
    "order_number": _family(families.order_number, "shop", "market"),
    "contact_answer": _family(families.contact_answer, "mail", "office"),
    "contact_mail": _family(families.contact_mail, "mail", "office", weight=1.5),
    "find_cancel": _family(families.find_cancel, "returns", weight=1.5),
    "sum_note": _family(families.sum_note, "sums"),
    "find_book": _family(families.find_book, "dining"),
    "balance_answer": _family(families.balance_answer, "bank"),
    "transfer_all": _family(families.transfer_all, "bank"),
    "weather_units": _family(families.weather_units, "units"),
    "mail_note": _family(families.mail_note, "office"),
    "market_order": _family(families.market_order, "market"),
    # no call
    "unanswerable": _family(families.unanswerable, *TOOLSETS, weight=2.5),
    "recall": _family(families.recall, *TOOLSETS, weight=1.5),
    "larger": _family(families.larger, *TOOLSETS, weight=1.5),
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
        goal=Goal(turns=turns, answer=draft.answer, mentions=draft.mentions, avoids=draft.avoids),
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
