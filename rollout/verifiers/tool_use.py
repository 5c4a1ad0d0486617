"""The verifier of `tool_use`: were the calls the right ones, is the world as it should be, is it said.

It trusts nothing that the episode computed: calls are read from the messages and run again in a fresh
world, beside the gold calls in another.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

from rollout.tasks import Call, Task
from rollout.tasks.world import BadCall, World, coerce

CALL_MARKUP = re.compile(r"</?tool_call>")


class ToolUse:
    name = "tool_use"
    version = "1"

    def check(self, task: Task, messages: list[dict[str, Any]]) -> str | None:
        """What is wrong, or None: exactly the gold calls (in any order), the gold end state, the answer."""
        turns = [message for message in messages if message["role"] == "assistant"]
        if not turns:
            raise ValueError("no assistant message")
        made = calls_of(turns)
        if made is None:
            return "arguments are not JSON"
        gold = [call for turn in task.goal.turns for call in turn]
        offered = {tool["function"]["name"] for tool in task.tools}
        if any(call.name not in offered for call in made):
            return "a tool that was not offered"
        if Counter(map(_signature, made)) != Counter(map(_signature, gold)):
            return "no call" if gold and not made else "wrong calls"
        if _end_state(task, made) != _end_state(task, gold):
            return "wrong end state"
        return _wrong_answer(task, turns[-1])


def calls_of(turns: list[dict[str, Any]]) -> list[Call] | None:
    """Every tool call of the assistant messages `turns`; None when arguments do not parse."""
    made = []
    for turn in turns:
        for call in turn.get("tool_calls") or []:
            try:
                arguments = json.loads(call["function"]["arguments"])
            except (ValueError, RecursionError):  # not JSON, a number of too many digits, too deep
                return None
            made.append(Call(name=call["function"]["name"], arguments=arguments))
    return made


def _signature(call: Call) -> str:
    """Equal for calls that mean the same: types as the schema has them, text without case and spacing."""
    try:
        arguments = coerce(call.name, call.arguments)
    except BadCall:
        return f"{call.name} refused"  # no gold call is
    return f"{call.name} {json.dumps(_normal(arguments), sort_keys=True)}"


def _end_state(task: Task, calls: list[Call]) -> str:
    world = World(task.world)
    for call in calls:
        world.execute(call.name, call.arguments)
    return json.dumps(_normal(world.tables), sort_keys=True)


def _normal(value: Any) -> Any:
    if isinstance(value, str):
        return " ".join(value.casefold().split()).rstrip(".")
    if isinstance(value, dict):
        return {str(key): _normal(item) for key, item in value.items()}
    if isinstance(value, list):
        # Rows of a table are a set: which of two orders came first does not matter.
        return sorted((_normal(item) for item in value), key=lambda item: json.dumps(item, sort_keys=True))
    return value


def _wrong_answer(task: Task, last: dict[str, Any]) -> str | None:
    if task.goal.answer is None:
        return None
    if last.get("tool_calls"):
        return "no final answer"
    said = " ".join((last.get("content") or "").casefold().replace(",", "").split())
    if not said or CALL_MARKUP.search(said):
        return "no final answer"
    if not all(any(_mentions(said, text) for text in group) for group in task.goal.mentions):
        return "wrong answer"
    return None


def _mentions(said: str, text: str) -> bool:
    """Whether `text` stands in `said` as whole words: 5 is not mentioned by 15 or 5.2."""
    return re.search(rf"(?<![\w.]){re.escape(text.casefold())}(?!\w|\.\d)", said) is not None
