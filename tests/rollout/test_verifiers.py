"""One contract for every verifier, and what `tool_use` tells apart."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollout.tasks import SPLITS, Task, demonstration, generate
from rollout.verifiers import VERIFIERS, Attempt, Verdict, verify


class Broken:
    name, version = "broken", "1"

    def check(self, task: Task, messages: list[dict[str, Any]]) -> str | None:
        raise ZeroDivisionError("by design")


@pytest.mark.parametrize("domain", sorted(VERIFIERS))
@pytest.mark.parametrize("split", SPLITS)
class TestContract:
    """What holds for every verifier."""

    def test_the_gold_attempt_is_worth_one(self, domain: str, split: str) -> None:
        for seed in range(500):
            task = generate(seed, split, domain)
            verdict = verify(task, Attempt(messages=demonstration(task)))
            assert verdict.value == 1.0, (task, verdict)

    def test_silence_is_worth_zero(self, domain: str, split: str) -> None:
        for seed in range(100):
            task = generate(seed, split, domain)
            verdict = verify(task, Attempt(messages=[{"role": "assistant", "content": ""}]))
            assert (verdict.value, verdict.error) == (0.0, None)
            assert verdict.reason

    def test_another_tasks_gold_is_worth_zero(self, domain: str, split: str) -> None:
        for seed in range(100):
            task, other = generate(seed, split, domain), generate(seed + 1, split, domain)
            if task.goal != other.goal and task.goal.answer != "Sorry, I cannot do that.":
                assert verify(task, Attempt(messages=demonstration(other))).value == 0.0

    def test_a_fault_is_an_error_and_never_a_zero(self, domain: str, split: str) -> None:
        task = generate(0, split, domain)
        verdict = verify(task, Attempt(messages=[], fault="engine gone"))
        assert (verdict.value, verdict.error) == (None, "engine gone")
        no_turn = verify(task, Attempt(messages=[]))
        assert no_turn.value is None
        assert no_turn.error is not None

    def test_it_says_who_judged(self, domain: str, split: str) -> None:
        task = generate(0, split, domain)
        verdict = verify(task, Attempt(messages=demonstration(task)))
        assert verdict.verifier == VERIFIERS[domain].name
        assert verdict.version == VERIFIERS[domain].version

    def test_it_does_not_change_what_it_judges(self, domain: str, split: str) -> None:
        task = generate(3, split, domain)
        messages = demonstration(task)
        verify(task, Attempt(messages=messages))
        assert messages == demonstration(task)
        assert task == generate(3, split, domain)


def test_a_verifier_that_dies_gives_an_error() -> None:
    verdict = verify(generate(0, "train"), Attempt(messages=[]), Broken())
    assert verdict.value is None
    assert verdict.error == "broken failed: ZeroDivisionError: by design"


def example(family: str) -> Task:
    """The first training task of `family`."""
    return next(task for seed in range(9999) if (task := generate(seed, "train")).family == family)


def attempt(*turns: dict[str, Any] | str) -> Attempt:
    """Assistant messages: a text, or calls as ``{name: arguments}``."""
    messages: list[dict[str, Any]] = []
    for turn in turns:
        if isinstance(turn, str):
            messages.append({"role": "assistant", "content": turn})
            continue
        calls = [
            {"id": f"c{i}", "type": "function", "function": {"name": n, "arguments": json.dumps(a)}}
            for i, (n, a) in enumerate(turn.items())
        ]
        messages.append({"role": "assistant", "content": None, "tool_calls": calls})
    return Attempt(messages=messages)


def judged(task: Task, *turns: dict[str, Any] | str) -> Verdict:
    return verify(task, attempt(*turns))


def gold(task: Task, turn: int = 0) -> dict[str, Any]:
    return {call.name: dict(call.arguments) for call in task.goal.turns[turn]}


def test_numbers_as_text_and_other_case_and_spacing_are_the_same() -> None:
    task = example("order")
    arguments = task.goal.turns[0][0].arguments
    loose = {"item": f" {arguments['item'].upper()} ", "quantity": str(arguments["quantity"])}
    assert judged(task, {"place_order": loose}).value == 1.0


def test_a_wrong_a_missing_or_an_extra_argument_is_zero() -> None:
    task = example("order")
    arguments = task.goal.turns[0][0].arguments
    assert judged(task, {"place_order": arguments | {"quantity": 999}}).value == 0.0
    assert judged(task, {"place_order": {"item": arguments["item"]}}).value == 0.0
    assert judged(task, {"place_order": arguments | {"note": "x"}}).value == 0.0


def test_an_extra_call_is_zero() -> None:
    task = example("timer")
    extra = {"set_timer": gold(task)["set_timer"], "get_weather": {"city": "Paris"}}
    assert judged(task, extra).value == 0.0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("{", "arguments are not JSON"),
        ('{"minutes": ' + "9" * 5000 + "}", "arguments are not JSON"),
        ('{"minutes": ' + "[" * 5000 + "]" * 5000 + "}", "arguments are not JSON"),
        ('{"minutes": ' + "[" * 500 + "]" * 500 + "}", "wrong calls"),
        ('{"minutes": 1e999}', "wrong calls"),
        ('{"minutes": NaN}', "wrong calls"),
    ],
)
def test_arguments_of_no_use_are_zero(arguments: str, reason: str) -> None:
    task = example("timer")
    call = {"id": "c", "type": "function", "function": {"name": "set_timer", "arguments": arguments}}
    bad = Attempt(messages=[{"role": "assistant", "content": None, "tool_calls": [call]}])
    verdict = verify(task, bad)
    assert (verdict.value, verdict.reason) == (0.0, reason)


def test_calls_may_come_in_either_order_and_in_one_turn() -> None:
    task = example("reorder")
    calls = {call.name: dict(call.arguments) for turn in task.goal.turns for call in turn}
    assert judged(task, dict(reversed(calls.items()))).value == 1.0


def test_a_final_answer_must_name_the_value_and_come_without_calls() -> None:
    task = example("balance_answer")
    calls, right = gold(task), task.goal.answer
    assert judged(task, calls, f"You have {right}.").value == 1.0
    assert judged(task, calls, f"You have 1{right}.").value == 0.0
    assert judged(task, calls, f"You have {right}.75").value == 0.0
    assert judged(task, calls).value == 0.0


def test_a_call_left_in_the_text_is_no_answer() -> None:
    task = example("unanswerable")
    assert judged(task, "Sorry, I cannot do that.").value == 1.0
    assert judged(task, 'Sorry. <tool_call>{"name": </tool_call>').value == 0.0
    assert judged(task, "Of course!").value == 0.0
