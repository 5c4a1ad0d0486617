"""The families of `tool_use` tasks: what is asked, in which world, and what is right.

Every function draws all it says from a `Draw`, so that the two splits share no task. Gold answers are a
few words: an episode's cost is its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rollout.tasks.values import Draw, later
from rollout.tasks.world import RATES, plain

Turn = list[tuple[str, dict[str, Any]]]
CURRENCIES = tuple(RATES)
REFUSED = "Sorry, I cannot do that."
REFUSALS = [["cannot", "can't", "can not", "unable", "not able", "sorry", "no tool"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A task before it has an id and tools."""

    text: str
    turns: list[Turn]
    world: dict[str, Any] = field(default_factory=dict)
    answer: str | None = None
    mentions: list[list[str]] = field(default_factory=list)


# One turn of calls -----------------------------------------------------------------------------------


def weather(draw: Draw) -> Draft:
    city = draw.one("city")
    text = draw.wording(
        f"What is the weather in {city}?",
        f"Is it raining in {city}?",
        f"How warm is it in {city}?",
        f"Do I need an umbrella in {city} today?",
    )
    world = {"weather": {city.casefold(): {"celsius": draw.number(2, 34), "sky": "sunny"}}}
    return Draft(text=text, turns=[[("get_weather", {"city": city})]], world=world)


def timer(draw: Draw) -> Draft:
    minutes = draw.number(2, 90)
    text = draw.wording(
        f"Set a timer for {minutes} minutes.",
        f"Remind me in {minutes} minutes.",
        f"Start a {minutes} minute countdown.",
    )
    return Draft(text=text, turns=[[("set_timer", {"minutes": minutes})]])


def price(draw: Draw) -> Draft:
    item = draw.one("item")
    text = draw.wording(
        f"How much is a {item}?", f"What does a {item} cost?", f"Tell me the price of the {item}."
    )
    world = {"prices": {item: draw.number(5, 90)}}
    return Draft(text=text, turns=[[("get_price", {"item": item})]], world=world)


def convert(draw: Draw) -> Draft:
    amount = draw.number(5, 900)
    source, target = draw.rng.sample(CURRENCIES, 2)
    text = draw.wording(
        f"Convert {amount} {source} to {target}.",
        f"How many {target} is {amount} {source}?",
        f"What do I get in {target} for {amount} {source}?",
    )
    return Draft(text=text, turns=[[("convert_currency", {"amount": amount, "from": source, "to": target})]])


def order(draw: Draw) -> Draft:
    item, quantity = draw.one("item"), draw.number(2, 30)
    text = draw.wording(
        f"Order {quantity} of the {item}.",
        f"Buy {quantity} units of the {item}.",
        f"I would like {quantity} pieces of the {item}, please order.",
    )
    return Draft(text=text, turns=[[("place_order", {"item": item, "quantity": quantity})]])


def cancel(draw: Draw) -> Draft:
    number = draw.number(100, 999)
    text = draw.wording(
        f"Cancel order {number}.",
        f"Please cancel my order number {number}.",
        f"I do not want order {number} any more.",
    )
    return Draft(text=text, turns=[[("cancel_order", {"order_id": number})]])


def event(draw: Draw) -> Draft:
    title, day, time = draw.one("event"), str(draw.day()), draw.time()
    text = draw.wording(
        f"Add {title} on {day} at {time}.",
        f"Put {title} in my calendar for {day}, {time}.",
        f"Schedule {title} at {time} on {day}.",
    )
    return Draft(text=text, turns=[[("add_event", {"title": title, "date": day, "time": time})]])


def event_worked(draw: Draw) -> Draft:
    title, day, time, days = draw.one("event"), draw.day(), draw.time(), draw.rng.randint(1, 3)
    text = draw.wording(
        f"Today is {day}. Add {title} in {days} days at {time}.",
        f"It is {day} today. Put {title} {days} days from now at {time}.",
        f"Today: {day}. Schedule {title} at {time}, {days} days later.",
    )
    arguments = {"title": title, "date": str(later(day, days)), "time": time}
    return Draft(text=text, turns=[[("add_event", arguments)]])


def transfer(draw: Draw) -> Draft:
    account, to, amount = draw.one("account"), draw.one("name"), draw.number(5, 300)
    text = draw.wording(
        f"Send {amount} to {to} from {account}.",
        f"From my {account} account, pay {to} {amount}.",
        f"Transfer {amount} out of {account} to {to}.",
    )
    calls: Turn = [("transfer", {"account": account, "to": to, "amount": amount})]
    return Draft(text=text, turns=[calls], world={"accounts": {account: amount + draw.number(10, 500)}})


# Two or three turns -----------------------------------------------------------------------------------


def price_convert(draw: Draw) -> Draft:
    item, usd = draw.one("item"), draw.number(5, 90)
    target = draw.rng.choice(CURRENCIES[1:])
    amount = plain(usd * RATES[target])
    text = draw.wording(
        f"What does a {item} cost in {target}?",
        f"Price of the {item} in {target}?",
        f"How many {target} do I need for a {item}?",
    )
    turns: list[Turn] = [
        [("get_price", {"item": item})],
        [("convert_currency", {"amount": usd, "from": "USD", "to": target})],
    ]
    return Draft(
        text=text,
        turns=turns,
        world={"prices": {item: usd}},
        answer=f"{amount} {target}",
        mentions=[[str(amount)]],
    )


def find_cancel(draw: Draw) -> Draft:
    item, number = draw.one("item"), draw.number(100, 999)
    text = draw.wording(
        f"Cancel my order of the {item}.",
        f"Find my {item} order and cancel it.",
        f"I do not want the {item} any more, cancel it.",
    )
    turns: list[Turn] = [[("find_order", {"item": item})], [("cancel_order", {"order_id": number})]]
    return Draft(text=text, turns=turns, world={"past_orders": {item: number}})


def balance_answer(draw: Draw) -> Draft:
    account, money = draw.one("account"), draw.number(10, 900)
    text = draw.wording(
        f"How much money is in {account}?",
        f"Tell me the balance of {account}.",
        f"What do I have in my {account} account?",
    )
    return Draft(
        text=text,
        turns=[[("get_balance", {"account": account})]],
        world={"accounts": {account: money}},
        answer=str(money),
        mentions=[[str(money)]],
    )


def reorder(draw: Draw) -> Draft:
    item, number, quantity = draw.one("item"), draw.number(100, 999), draw.number(2, 30)
    text = draw.wording(
        f"Cancel my {item} order and order {quantity} instead.",
        f"Find my order of the {item}, cancel it, then buy {quantity}.",
        f"Cancel the {item} that I ordered. Then order {quantity} of it.",
    )
    turns: list[Turn] = [
        [("find_order", {"item": item})],
        [("cancel_order", {"order_id": number})],
        [("place_order", {"item": item, "quantity": quantity})],
    ]
    return Draft(text=text, turns=turns, world={"past_orders": {item: number}})


# No call ---------------------------------------------------------------------------------------------


def unanswerable(draw: Draw) -> Draft:
    wish = draw.one("unanswerable")
    text = draw.wording(f"{wish}.", f"Please help: {wish}.", f"Now: {wish}!")
    return Draft(text=text, turns=[], answer=REFUSED, mentions=REFUSALS)


def recall(draw: Draw) -> Draft:
    name = draw.one("name")
    text = draw.wording(
        f"My name is {name}. What is my name?",
        f"I am {name}. Say my name.",
        f"They call me {name}. Who am I?",
    )
    return Draft(text=text, turns=[], answer=f"{name}.", mentions=[[name]])
