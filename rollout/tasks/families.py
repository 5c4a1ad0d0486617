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
        [
            f"What is the weather in {city}?",
            f"Is it raining in {city}?",
            f"How warm is it in {city}?",
            f"Weather in {city}, please.",
            f"Tell me the temperature in {city}.",
            f"Will I need a coat in {city} today?",
            f"I am flying to {city}. What is it like outside?",
        ],
        f"Do I need an umbrella in {city} today?",
    )
    world = {"weather": {city.casefold(): {"celsius": draw.number(2, 34), "sky": "sunny"}}}
    return Draft(text=text, turns=[[("get_weather", {"city": city})]], world=world)


def timer(draw: Draw) -> Draft:
    minutes = draw.number(2, 90)
    text = draw.wording(
        [
            f"Set a timer for {minutes} minutes.",
            f"Remind me in {minutes} minutes.",
            f"Timer: {minutes} minutes.",
            f"Wake me up {minutes} minutes from now.",
            f"I need a {minutes} minute timer.",
            f"Let me know when {minutes} minutes are over.",
            f"Please count {minutes} minutes.",
        ],
        f"Start a {minutes} minute countdown.",
    )
    return Draft(text=text, turns=[[("set_timer", {"minutes": minutes})]])


def price(draw: Draw) -> Draft:
    item = draw.one("item")
    text = draw.wording(
        [
            f"How much is a {item}?",
            f"What does a {item} cost?",
            f"What do you charge for the {item}?",
            f"Price of a {item}, please.",
            f"Is the {item} expensive? What is its price?",
            f"Look up what a {item} costs.",
            f"I want to know the {item} price.",
        ],
        f"Tell me the price of the {item}.",
    )
    world = {"prices": {item: draw.number(5, 90)}}
    return Draft(text=text, turns=[[("get_price", {"item": item})]], world=world)


def convert(draw: Draw) -> Draft:
    amount = draw.number(5, 900)
    source, target = draw.rng.sample(CURRENCIES, 2)
    text = draw.wording(
        [
            f"Convert {amount} {source} to {target}.",
            f"How many {target} is {amount} {source}?",
            f"{amount} {source} in {target}?",
            f"Change {amount} {source} into {target}, please.",
            f"I have {amount} {source}. How much is that in {target}?",
            f"What is {amount} {source} worth in {target}?",
            f"Exchange {amount} {source} for {target}.",
        ],
        f"What do I get in {target} for {amount} {source}?",
    )
    return Draft(text=text, turns=[[("convert_currency", {"amount": amount, "from": source, "to": target})]])


def order(draw: Draw) -> Draft:
    item, quantity = draw.one("item"), draw.number(2, 30)
    text = draw.wording(
        [
            f"Order {quantity} of the {item}.",
            f"Buy {quantity} units of the {item}.",
            f"Please get me {quantity} of the {item}.",
            f"I need {quantity} of the {item}, order them.",
            f"Place an order: {item}, {quantity} pieces.",
            f"Put in an order for {quantity} units of the {item}.",
            f"The {item}, please. I take {quantity}.",
        ],
        f"I would like {quantity} pieces of the {item}, please order.",
    )
    return Draft(text=text, turns=[[("place_order", {"item": item, "quantity": quantity})]])


def cancel(draw: Draw) -> Draft:
    number = draw.number(100, 999)
    text = draw.wording(
        [
            f"Cancel order {number}.",
            f"Please cancel my order number {number}.",
            f"Order {number} should be cancelled.",
            f"Stop order {number}, please.",
            f"I changed my mind about order {number}, cancel it.",
            f"Call off order {number}.",
            f"Please withdraw order number {number}.",
        ],
        f"I do not want order {number} any more.",
    )
    return Draft(text=text, turns=[[("cancel_order", {"order_id": number})]])


def event(draw: Draw) -> Draft:
    title, day, time = draw.one("event"), str(draw.day()), draw.time()
    text = draw.wording(
        [
            f"Add {title} on {day} at {time}.",
            f"Put {title} in my calendar for {day}, {time}.",
            f"New event: {title}, {day}, {time}.",
            f"{title} is on {day} at {time}, add it.",
            f"Please note {title} for {day} at {time}.",
            f"On {day} at {time} I have {title}. Put it in.",
            f"Enter {title} at {time} on {day}.",
        ],
        f"Schedule {title} at {time} on {day}.",
    )
    return Draft(text=text, turns=[[("add_event", {"title": title, "date": day, "time": time})]])


def event_worked(draw: Draw) -> Draft:
    title, day, time, days = draw.one("event"), draw.day(), draw.time(), draw.rng.randint(1, 3)
    text = draw.wording(
        [
            f"Today is {day}. Add {title} in {days} days at {time}.",
            f"It is {day} today. Put {title} {days} days from now at {time}.",
            f"Today is {day}. In {days} days, at {time}, I have {title}. Add it.",
            f"The date is {day}. Note {title} {days} days from today at {time}.",
            f"It is {day}. Enter {title} at {time}, in {days} days.",
        ],
        f"Today: {day}. Schedule {title} at {time}, {days} days later.",
    )
    arguments = {"title": title, "date": str(later(day, days)), "time": time}
    return Draft(text=text, turns=[[("add_event", arguments)]])


def transfer(draw: Draw) -> Draft:
    account, to, amount = draw.one("account"), draw.one("name"), draw.number(5, 300)
    text = draw.wording(
        [
            f"Send {amount} to {to} from {account}.",
            f"From my {account} account, pay {to} {amount}.",
            f"Pay {to} {amount} out of {account}.",
            f"{to} gets {amount} from my {account} account.",
            f"Move {amount} from {account} to {to}.",
            f"Please wire {to} {amount}, taken from {account}.",
            f"I owe {to} {amount}. Take it from {account}.",
        ],
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
        [
            f"What does a {item} cost in {target}?",
            f"Price of the {item} in {target}?",
            f"How much is the {item}, in {target}?",
            f"Tell me in {target} what a {item} costs.",
            f"I pay in {target}. What does the {item} cost?",
            f"Give me the {item} price, converted to {target}.",
            f"Look up the {item} and convert its price to {target}.",
        ],
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
        [
            f"Cancel my order of the {item}.",
            f"Find my {item} order and cancel it.",
            f"Look for the {item} order, then cancel it.",
            f"Please cancel the {item} that I ordered.",
            f"I ordered a {item}. Cancel that, please.",
            f"Which order has the {item}? Cancel it.",
            f"The {item} order should be cancelled.",
        ],
        f"I do not want the {item} any more, cancel it.",
    )
    turns: list[Turn] = [[("find_order", {"item": item})], [("cancel_order", {"order_id": number})]]
    return Draft(text=text, turns=turns, world={"past_orders": {item: number}})


def balance_answer(draw: Draw) -> Draft:
    account, money = draw.one("account"), draw.number(10, 900)
    text = draw.wording(
        [
            f"How much money is in {account}?",
            f"Tell me the balance of {account}.",
            f"What is left in {account}?",
            f"Balance of my {account} account, please.",
            f"Check {account}. How much is there?",
            f"How much do I have in {account}?",
            f"I want to know how full my {account} account is.",
        ],
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
        [
            f"Cancel my {item} order and order {quantity} instead.",
            f"Find my order of the {item}, cancel it, then buy {quantity}.",
            f"Replace my {item} order by one of {quantity}: cancel it, then order.",
            f"I ordered the {item}. Cancel that and order {quantity}.",
            f"Look for my {item} order, cancel it and get {quantity} of it.",
            f"Drop the order of the {item} and buy {quantity} units.",
        ],
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
    text = draw.wording(
        [
            f"{wish}.",
            f"Please help: {wish}.",
            f"{wish}, please.",
            f"Could you do this? {wish}.",
            f"{wish}! Thanks.",
        ],
        f"Now: {wish}!",
    )
    return Draft(text=text, turns=[], answer=REFUSED, mentions=REFUSALS)


def recall(draw: Draw) -> Draft:
    name = draw.one("name")
    text = draw.wording(
        [
            f"My name is {name}. What is my name?",
            f"I am {name}. Say my name.",
            f"This is {name}. Who is speaking?",
            f"{name} here. Do you know my name?",
            f"You can call me {name}. What do you call me?",
            f"I am called {name}. How am I called?",
        ],
        f"They call me {name}. Who am I?",
    )
    return Draft(text=text, turns=[], answer=f"{name}.", mentions=[[name]])
