"""The simulated tools of the `tool_use` domain: their schemas and the small world that they act on.

A world is plain JSON (tables by name), so a task can carry its own and a verifier can replay the gold
calls in a fresh copy. Invariant: `World.execute` is deterministic and never raises on what a model sends:
a bad call is answered with ``{"error": ...}``, as a real tool would.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

JSON = dict[str, Any]
Handler = Callable[[JSON, JSON], JSON]

RATES = {"USD": 1.0, "EUR": 0.9, "GBP": 0.8, "CHF": 0.95, "JPY": 150.0}
"""Units of each currency that one US dollar buys. Fixed: a task must have one answer."""


class BadCall(Exception):
    """A call that a tool refuses; the message is what the model is told."""


def plain(value: float) -> int | float:
    """Two decimals at most, and no ``.0``: what a tool prints. Raises BadCall for infinity and NaN."""
    if not math.isfinite(value):
        raise BadCall("not a finite number")
    rounded = round(value, 2)
    return int(rounded) if rounded == int(rounded) else rounded


def _lookup(table: str, argument: str, result: str) -> Handler:
    """A tool that reads ``world[table][arguments[argument]]`` and answers it as `result`."""

    def handler(world: JSON, arguments: JSON) -> JSON:
        found = world.get(table, {}).get(arguments[argument].strip().casefold())
        if found is None:
            raise BadCall(f"unknown {argument}")
        return dict(found) if isinstance(found, dict) else {result: found}

    return handler


def _append(table: str, number: str | None = None) -> Handler:
    """A tool that adds its arguments as a row of `table`; answers ``ok``, or the row's number."""

    def handler(world: JSON, arguments: JSON) -> JSON:
        rows = world.setdefault(table, [])
        rows.append(arguments)
        return {number: world.get("next_number", 100) + len(rows)} if number else {"ok": True}

    return handler


def _convert_currency(_: JSON, arguments: JSON) -> JSON:
    source, target = arguments["from"].upper(), arguments["to"].upper()
    if source not in RATES or target not in RATES:
        raise BadCall("unknown currency")
    return {"amount": plain(arguments["amount"] / RATES[source] * RATES[target])}


def _cancel_order(world: JSON, arguments: JSON) -> JSON:
    cancelled = world.setdefault("cancelled", [])
    if arguments["order_id"] in cancelled:
        raise BadCall("already cancelled")
    cancelled.append(arguments["order_id"])
    return {"ok": True}


def _transfer(world: JSON, arguments: JSON) -> JSON:
    accounts = world.get("accounts", {})
    account = arguments["account"].strip().casefold()
    if account not in accounts:
        raise BadCall("unknown account")
    if not 0 < arguments["amount"] <= accounts[account]:
        raise BadCall("not enough money")
    accounts[account] = plain(accounts[account] - arguments["amount"])
    world.setdefault("transfers", []).append(arguments)
    return {"ok": True}


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    description: str
    parameters: dict[str, str]
    """JSON type by argument; every argument is required."""
    handler: Handler

    def schema(self) -> JSON:
        """The tool as the OpenAI API writes it."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": {
                    "type": "object",
                    "properties": {name: {"type": kind} for name, kind in self.parameters.items()},
                    "required": list(self.parameters),
                },
            },
        }


_STR, _INT, _NUM = "string", "integer", "number"

TOOLS: dict[str, Tool] = {
    tool.name: tool
    for tool in (
        Tool("get_weather", "Weather now", {"city": _STR}, _lookup("weather", "city", "weather")),
        Tool("set_timer", "Start a timer", {"minutes": _INT}, _append("timers")),
        Tool("get_price", "Price in USD", {"item": _STR}, _lookup("prices", "item", "usd")),
        Tool(
            "convert_currency", "Convert money", {"amount": _NUM, "from": _STR, "to": _STR}, _convert_currency
        ),
        Tool("place_order", "Buy items", {"item": _STR, "quantity": _INT}, _append("orders", "order_id")),
        Tool("find_order", "Order of an item", {"item": _STR}, _lookup("past_orders", "item", "order_id")),
        Tool("cancel_order", "Cancel an order", {"order_id": _INT}, _cancel_order),
        Tool("add_event", "Add to calendar", {"title": _STR, "date": _STR, "time": _STR}, _append("events")),
        Tool("get_balance", "Money in account", {"account": _STR}, _lookup("accounts", "account", "balance")),
        Tool("transfer", "Send money", {"account": _STR, "to": _STR, "amount": _NUM}, _transfer),
    )
}


class World:
    """One task's world while an episode acts on it. Not shared between episodes."""

    def __init__(self, tables: JSON) -> None:
        self.tables: JSON = copy.deepcopy(tables)

    def execute(self, name: str, arguments: Any) -> JSON:
        """Run one call and return the tool's answer; a call no tool accepts is answered with its error."""
        try:
            typed = coerce(name, arguments)
            return TOOLS[name].handler(self.tables, typed)
        except BadCall as refusal:
            return {"error": str(refusal)}


def coerce(name: str, arguments: Any) -> JSON:
    """`arguments` with the types that the tool's schema names: ``"5"`` is taken for 5.

    Raises BadCall for an unknown tool, a missing or an unknown argument, or a value of no use.
    """
    tool = TOOLS.get(name)
    if tool is None:
        raise BadCall("unknown tool")
    if not isinstance(arguments, dict) or set(arguments) != set(tool.parameters):
        raise BadCall(f"needs exactly the arguments {', '.join(tool.parameters)}")
    return {key: _typed(key, kind, arguments[key]) for key, kind in tool.parameters.items()}


def _typed(key: str, kind: str, value: Any) -> Any:
    if kind == _STR:
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            return str(value)
        raise BadCall(f"{key} must be a string")
    try:
        number = plain(float(value)) if not isinstance(value, bool) else None
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is None or (kind == _INT and not isinstance(number, int)):
        raise BadCall(f"{key} must be a {'whole ' if kind == _INT else ''}number")
    return number
