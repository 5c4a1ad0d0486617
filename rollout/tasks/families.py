"""The families of `tool_use` tasks: what is asked, in which world, and what is right.

Every function draws all it says from a `Draw`, so that the two splits share no task. Gold answers are a
few words: an episode's cost is its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rollout.tasks.values import Draw, later
from rollout.tasks.world import RATES, UNITS, plain

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
    avoids: list[str] = field(default_factory=list)


# One turn of calls -----------------------------------------------------------------------------------


def _weather_world(city: str, celsius: int, sky: str = "sunny") -> dict[str, Any]:
    return {"weather": {city.casefold(): {"celsius": celsius, "sky": sky}}}


def weather(draw: Draw) -> Draft:
    city = draw.one("city")
    text = draw.wording(
        [f"What is the weather in {city}?", f"Is it raining in {city}?", f"How warm is it in {city}?"],
        f"Do I need an umbrella in {city} today?",
    )
    world = _weather_world(city, draw.number(2, 34))
    return Draft(text=text, turns=[[("get_weather", {"city": city})]], world=world)


def timer(draw: Draw) -> Draft:
    minutes = draw.number(2, 90)
    text = draw.wording(
        [f"Set a timer for {minutes} minutes.", f"Remind me in {minutes} minutes."],
        f"Start a {minutes} minute countdown.",
    )
    return Draft(text=text, turns=[[("set_timer", {"minutes": minutes})]])


def timer_worked(draw: Draw) -> Draft:
    hours, minutes = draw.rng.randint(1, 3), draw.number(4, 55)
    text = draw.wording(
        [f"Set a timer for {hours} h {minutes} min.", f"Wake me in {hours} h and {minutes} min."],
        f"Count down {hours} h {minutes} min.",
    )
    return Draft(text=text, turns=[[("set_timer", {"minutes": hours * 60 + minutes})]])


def weather_and_timer(draw: Draw) -> Draft:
    city, minutes = draw.one("city"), draw.number(2, 90)
    text = draw.wording(
        [f"Check the weather in {city} and set a timer for {minutes} minutes."],
        f"Give me the weather in {city}, and a {minutes} minute timer.",
    )
    calls: Turn = [("get_weather", {"city": city}), ("set_timer", {"minutes": minutes})]
    return Draft(text=text, turns=[calls], world=_weather_world(city, draw.number(2, 34)))


def price(draw: Draw) -> Draft:
    item = draw.one("item")
    text = draw.wording(
        [f"How much is a {item}?", f"What does a {item} cost?"], f"Tell me the price of the {item}."
    )
    world = {"prices": {item: draw.number(5, 90)}}
    return Draft(text=text, turns=[[("get_price", {"item": item})]], world=world)


def convert(draw: Draw) -> Draft:
    amount = draw.number(5, 900)
    source, target = draw.rng.sample(CURRENCIES, 2)
    text = draw.wording(
        [f"Convert {amount} {source} to {target}.", f"How many {target} is {amount} {source}?"],
        f"What do I get in {target} for {amount} {source}?",
    )
    return Draft(text=text, turns=[[("convert_currency", {"amount": amount, "from": source, "to": target})]])


def order(draw: Draw) -> Draft:
    item, quantity = draw.one("item"), draw.number(2, 30)
    text = draw.wording(
        [f"Order {quantity} of the {item}.", f"Buy {quantity} units of the {item}."],
        f"I would like {quantity} pieces of the {item}, please order.",
    )
    return Draft(text=text, turns=[[("place_order", {"item": item, "quantity": quantity})]])


def order_worked(draw: Draw) -> Draft:
    item, each, rooms = draw.one("item"), draw.number(2, 8), draw.rng.randint(2, 5)
    text = draw.wording(
        [
            f"Order the {item}, {each} for each of {rooms} rooms.",
            f"We are {rooms} teams and each needs {each} of the {item}. Order them.",
        ],
        f"Buy the {item} for {rooms} offices, {each} per office.",
    )
    return Draft(text=text, turns=[[("place_order", {"item": item, "quantity": each * rooms})]])


def mail(draw: Draw) -> Draft:
    to, subject = draw.address(draw.one("name")), draw.one("subject")
    text = draw.wording(
        [f"Email {to} about the {subject}.", f"Send a mail to {to}, subject {subject}."],
        f"Write to {to}. The subject is {subject}.",
    )
    return Draft(text=text, turns=[[("send_email", {"to": to, "subject": subject})]])


def cancel(draw: Draw) -> Draft:
    number = draw.number(100, 999)
    text = draw.wording(
        [f"Cancel order {number}.", f"Please cancel my order number {number}."],
        f"I do not want order {number} any more.",
    )
    return Draft(text=text, turns=[[("cancel_order", {"order_id": number})]])


def event(draw: Draw) -> Draft:
    title, day, time = draw.one("event"), str(draw.day()), draw.time()
    text = draw.wording(
        [f"Add {title} on {day} at {time}.", f"Put {title} in my calendar for {day}, {time}."],
        f"Schedule {title} at {time} on {day}.",
    )
    return Draft(text=text, turns=[[("add_event", {"title": title, "date": day, "time": time})]])


def event_worked(draw: Draw) -> Draft:
    title, day, time, days = draw.one("event"), draw.day(), draw.time(), draw.rng.randint(1, 3)
    text = draw.wording(
        [
            f"Today is {day}. Add {title} in {days} days at {time}.",
            f"It is {day} today. Put {title} {days} days from now at {time}.",
        ],
        f"Today: {day}. Schedule {title} at {time}, {days} days later.",
    )
    arguments = {"title": title, "date": str(later(day, days)), "time": time}
    return Draft(text=text, turns=[[("add_event", arguments)]])


def _product(draw: Draw) -> tuple[str, int]:
    a, b = draw.number(11, 99), draw.rng.randint(3, 99)
    sign = draw.rng.choice("+-*")
    return f"{a} {sign} {b}", {"+": a + b, "-": a - b, "*": a * b}[sign]


def total(draw: Draw) -> Draft:
    expression, _ = _product(draw)
    text = draw.wording(
        [f"What is {expression}?", f"Compute {expression}."], f"Work out {expression} for me."
    )
    return Draft(text=text, turns=[[("calculate", {"expression": expression})]])


def note(draw: Draw) -> Draft:
    content = f"{draw.one('name')} wants the {draw.one('item')}"
    text = draw.wording([f"Note: {content}", f"Write down: {content}"], f"Save this note: {content}")
    return Draft(text=text, turns=[[("add_note", {"text": content})]])


def book(draw: Draw) -> Draft:
    place, friends, time = draw.one("restaurant"), draw.number(2, 9), draw.time()
    worked = draw.rng.random() < 0.5
    who = f"me and {friends} friends" if worked else f"{friends} people"
    text = draw.wording(
        [f"Book {place} for {who} at {time}.", f"Get a table at {place} at {time} for {who}."],
        f"Reserve for {who} at {place}, {time}.",
    )
    arguments = {"restaurant": place, "people": friends + worked, "time": time}
    return Draft(text=text, turns=[[("book_table", arguments)]])


def transfer(draw: Draw) -> Draft:
    account, to, amount = draw.one("account"), draw.one("name"), draw.number(5, 300)
    text = draw.wording(
        [f"Send {amount} to {to} from {account}.", f"From my {account} account, pay {to} {amount}."],
        f"Transfer {amount} out of {account} to {to}.",
    )
    calls: Turn = [("transfer", {"account": account, "to": to, "amount": amount})]
    return Draft(text=text, turns=[calls], world={"accounts": {account: amount + draw.number(10, 500)}})


def units(draw: Draw) -> Draft:
    value = draw.number(2, 200)
    source, target = draw.rng.choice(list(UNITS))
    text = draw.wording(
        [f"Convert {value} {source} to {target}.", f"How many {target} are {value} {source}?"],
        f"Express {value} {source} in {target}.",
    )
    return Draft(text=text, turns=[[("convert_units", {"value": value, "from": source, "to": target})]])


# Two to four turns -----------------------------------------------------------------------------------


def price_convert(draw: Draw) -> Draft:
    item, usd = draw.one("item"), draw.number(5, 90)
    target = draw.rng.choice(CURRENCIES[1:])
    amount = plain(usd * RATES[target])
    text = draw.wording(
        [f"What does a {item} cost in {target}?", f"Price of the {item} in {target}?"],
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


def stock_order(draw: Draw) -> Draft:
    item, wanted = draw.one("item"), draw.number(2, 30)
    enough = draw.rng.random() < 0.5
    stock = wanted + draw.rng.randint(1, 40) if enough else draw.rng.randint(0, wanted - 1)
    text = draw.wording(
        [f"If there are at least {wanted} of the {item} in stock, order {wanted}."],
        f"Check the {item}. Order {wanted} if the stock is {wanted} or more.",
    )
    look: Turn = [("check_stock", {"item": item})]
    world = {"stock": {item: stock}}
    if enough:
        return Draft(
            text=text, turns=[look, [("place_order", {"item": item, "quantity": wanted})]], world=world
        )
    return Draft(text=text, turns=[look], world=world, answer=f"Only {stock}.", mentions=[[str(stock)]])


def order_number(draw: Draw) -> Draft:
    item, quantity, before = draw.one("item"), draw.number(2, 30), draw.number(100, 900)
    text = draw.wording(
        [f"Order {quantity} of the {item} and tell me the order number."],
        f"Buy {quantity} of the {item}. What is the order number?",
    )
    return Draft(
        text=text,
        turns=[[("place_order", {"item": item, "quantity": quantity})]],
        world={"next_number": before},
        answer=str(before + 1),
        mentions=[[str(before + 1)]],
    )


def contact_answer(draw: Draw) -> Draft:
    name = draw.one("name")
    address = draw.address(name)
    text = draw.wording(
        [f"What is the email address of {name}?", f"Tell me {name}'s email."], f"Where can I mail {name}?"
    )
    return Draft(
        text=text,
        turns=[[("find_contact", {"name": name})]],
        world={"contacts": {name.casefold(): address}},
        answer=address,
        mentions=[[address]],
    )


def contact_mail(draw: Draw) -> Draft:
    name, subject = draw.one("name"), draw.one("subject")
    address = draw.address(name)
    text = draw.wording(
        [f"Email {name} about the {subject}.", f"Send {name} a mail, subject {subject}."],
        f"Write {name} a mail. The subject is {subject}.",
    )
    return Draft(
        text=text,
        turns=[
            [("find_contact", {"name": name})],
            [("send_email", {"to": address, "subject": subject})],
        ],
        world={"contacts": {name.casefold(): address}},
    )


def find_cancel(draw: Draw) -> Draft:
    item, number = draw.one("item"), draw.number(100, 999)
    text = draw.wording(
        [f"Cancel my order of the {item}.", f"Find my {item} order and cancel it."],
        f"I do not want the {item} any more, cancel it.",
    )
    turns: list[Turn] = [[("find_order", {"item": item})], [("cancel_order", {"order_id": number})]]
    return Draft(text=text, turns=turns, world={"past_orders": {item: number}})


def sum_note(draw: Draw) -> Draft:
    expression, result = _product(draw)
    text = draw.wording(
        [f"Compute {expression} and note the result."],
        f"Work out {expression}, then save the result as a note.",
    )
    turns: list[Turn] = [[("calculate", {"expression": expression})], [("add_note", {"text": str(result)})]]
    return Draft(text=text, turns=turns)


def find_book(draw: Draw) -> Draft:
    city, place = draw.one("city"), draw.one("restaurant")
    people, time = draw.number(2, 9), draw.time()
    text = draw.wording(
        [f"Book the best restaurant in {city} for {people} at {time}."],
        f"Find the best place in {city} and reserve for {people} at {time}.",
    )
    booking = {"restaurant": place, "people": people, "time": time}
    return Draft(
        text=text,
        turns=[[("find_restaurant", {"city": city})], [("book_table", booking)]],
        world={"restaurants": {city.casefold(): place}},
    )


def balance_answer(draw: Draw) -> Draft:
    account, money = draw.one("account"), draw.number(10, 900)
    text = draw.wording(
        [f"How much money is in {account}?", f"Tell me the balance of {account}."],
        f"What do I have in my {account} account?",
    )
    return Draft(
        text=text,
        turns=[[("get_balance", {"account": account})]],
        world={"accounts": {account: money}},
        answer=str(money),
        mentions=[[str(money)]],
    )


def transfer_all(draw: Draw) -> Draft:
    account, to, money = draw.one("account"), draw.one("name"), draw.number(10, 900)
    text = draw.wording(
        [f"Send all the money in {account} to {to}."], f"Empty my {account} account, it all goes to {to}."
    )
    turns: list[Turn] = [
        [("get_balance", {"account": account})],
        [("transfer", {"account": account, "to": to, "amount": money})],
    ]
    return Draft(text=text, turns=turns, world={"accounts": {account: money}}, answer="Done.")


def weather_units(draw: Draw) -> Draft:
    city, celsius = draw.one("city"), draw.number(2, 34)
    fahrenheit = plain(UNITS["celsius", "fahrenheit"](celsius))
    text = draw.wording(
        [f"How warm is it in {city} in fahrenheit?"], f"Temperature in {city}, in fahrenheit please."
    )
    turns: list[Turn] = [
        [("get_weather", {"city": city})],
        [("convert_units", {"value": celsius, "from": "celsius", "to": "fahrenheit"})],
    ]
    return Draft(
        text=text,
        turns=turns,
        world=_weather_world(city, celsius),
        answer=str(fahrenheit),
        mentions=[[str(fahrenheit)]],
    )


def mail_note(draw: Draw) -> Draft:
    name, subject = draw.one("name"), draw.one("subject")
    address = draw.address(name)
    text = draw.wording(
        [f"Mail {name} about the {subject}. Note: mailed"],
        f"Send {name} a mail, subject {subject}. Note: mailed",
    )
    turns: list[Turn] = [
        [("find_contact", {"name": name})],
        [("send_email", {"to": address, "subject": subject})],
        [("add_note", {"text": "mailed"})],
    ]
    return Draft(text=text, turns=turns, world={"contacts": {name.casefold(): address}}, answer="Done.")


def market_order(draw: Draw) -> Draft:
    item, limit, quantity = draw.one("item"), draw.number(20, 60), draw.number(2, 9)
    usd, stock = limit - draw.rng.randint(1, 15), quantity + draw.rng.randint(1, 30)
    text = draw.wording(
        [f"Look up price and stock of the {item}. If under {limit}, order {quantity}."],
        f"Price and stock of the {item}? Order {quantity} if it is under {limit}.",
    )
    turns: list[Turn] = [
        [("get_price", {"item": item})],
        [("check_stock", {"item": item})],
        [("place_order", {"item": item, "quantity": quantity})],
    ]
    return Draft(text=text, turns=turns, world={"prices": {item: usd}, "stock": {item: stock}})


# No call ---------------------------------------------------------------------------------------------


def unanswerable(draw: Draw) -> Draft:
    wish = draw.one("unanswerable")
    text = draw.wording([f"{wish}.", f"Please help: {wish}."], f"Now: {wish}!")
    return Draft(text=text, turns=[], answer=REFUSED, mentions=REFUSALS)


def recall(draw: Draw) -> Draft:
    name = draw.one("name")
    text = draw.wording(
        [f"My name is {name}. What is my name?", f"I am {name}. Say my name."],
        f"They call me {name}. Who am I?",
    )
    return Draft(text=text, turns=[], answer=f"{name}.", mentions=[[name]])


def larger(draw: Draw) -> Draft:
    small, gap = draw.number(2, 80), draw.rng.randint(2, 40)
    pair = draw.rng.sample([small, small + gap], 2)
    text = draw.wording(
        [f"Which is larger, {pair[0]} or {pair[1]}?"], f"Tell me the bigger number: {pair[0]} or {pair[1]}."
    )
    return Draft(
        text=text,
        turns=[],
        answer=f"{small + gap}.",
        mentions=[[str(small + gap)]],
        avoids=[str(small)],
    )
