"""The controller of drafts, on a machine that is simulated and on which the best can be worked out."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.engine.worker.speculation import Controller, Rate, Step, likeliest
from server.engine.worker.steps import StepTimes

DEPTH = 4
Choose = Callable[[list[list[int]]], list[list[int]]]


class Machine:
    """Steps that take ``fixed + per_row * rows`` seconds, more when they verify, and requests that never end.

    Request i accepts its next drafted token with chance ``rates[i]``; tokens are 1 where a draft is right
    and 0 where it is not, and drafts are all ones.
    """

    def __init__(self, rates: Sequence[float], fixed: float, per_row: float, verifying: float, seed: int):
        self.rates, self.fixed, self.per_row, self.verifying = rates, fixed, per_row, verifying
        self.random = random.Random(seed)
        self.pace = 1.0
        self.now = 0.0
        self.tokens = 0

    def run(self, steps: int, choose: Choose, began: Callable[[Step], None]) -> None:
        verified: list[list[int]] = [[] for _ in self.rates]
        names = frozenset(map(str, range(len(self.rates))))
        for _ in range(steps):
            drafted = sum(map(len, verified))
            rows = len(self.rates) + drafted
            began(Step(names, rows, drafted))
            self.now += self.seconds(rows, drafted)
            sampled = [
                self._sample(rate, len(draft)) for rate, draft in zip(self.rates, verified, strict=True)
            ]
            self.tokens += sum(map(len, sampled))
            verified = choose(sampled)

    def seconds(self, rows: int, drafted: int) -> float:
        seconds = self.fixed + self.per_row * rows + (self.verifying if drafted else 0.0)
        return seconds * self.pace * self.random.uniform(0.95, 1.05)

    def _sample(self, rate: float, drafted: int) -> list[int]:
        tokens = [int(self.random.random() < rate)]
        while tokens[-1] and len(tokens) <= drafted:
            tokens.append(int(self.random.random() < rate))
        return tokens


def goodput(machine: Machine, controller: Controller | None, on: bool = True, steps: int = 3000) -> float:
    """Tokens a second after the first 500 steps, in which everything is measured for the first time."""
    choose, began = driven(machine, controller, on)
    machine.run(500, choose, began)
    tokens, now = machine.tokens, machine.now
    machine.run(steps, choose, began)
    return (machine.tokens - tokens) / (machine.now - now)


def driven(
    machine: Machine, controller: Controller | None, on: bool = True
) -> tuple[Choose, Callable[[Step], None]]:
    """What `machine` asks and tells: `controller`, or nobody, and then all drafts are verified or none."""
    policies = {str(i): "p" for i in range(len(machine.rates))}
    draft = [1] * DEPTH

    def choose(sampled: list[list[int]]) -> list[list[int]]:
        if controller is None:
            return [draft if on else [] for _ in sampled]
        return controller.choose(policies, sampled, [draft for _ in sampled])

    def began(step: Step) -> None:
        if controller is not None:
            controller.began(step, machine.now)

    return choose, began


@pytest.mark.parametrize(
    "rates", [[0.0], [0.3], [0.95], [0.0] * 8, [0.6] * 8, [0.95] * 8, [0.9] * 2 + [0.05] * 6]
)
@pytest.mark.parametrize("per_row", [0.001, 0.01, 0.05])
def test_never_worse_than_the_better_of_on_and_off(rates: list[float], per_row: float) -> None:
    def speed(controller: Controller | None, on: bool = True) -> float:
        return goodput(Machine(rates, 0.05, per_row, 0.005, seed=7), controller, on)

    best = max(speed(None, on=True), speed(None, on=False))
    assert speed(Controller()) >= 0.97 * best


def test_a_mix_of_requests_gains_more_than_either_way() -> None:
    rates = [0.95] * 4 + [0.02] * 12
    speeds = [
        goodput(Machine(rates, 0.05, 0.005, 0.002, seed=3), controller, on)
        for controller, on in ((Controller(), True), (None, True), (None, False))
    ]
    assert speeds[0] > 1.08 * max(speeds[1:])


def test_what_was_measured_on_a_busy_machine_is_not_held_against_drafts_on_a_free_one() -> None:
    """Random answers while another engine is busy, so that drafts are last verified then; then repetition."""
    controller, machine = Controller(), Machine([0.02], 0.05, 0.01, 0.005, seed=5)
    goodput(machine, controller)
    machine.pace = 2.5
    goodput(machine, controller)
    machine.pace, machine.rates = 1.0, [0.95]
    machine.run(60, *driven(machine, controller))
    before = controller.policies["p"].verified
    machine.run(100, *driven(machine, controller))
    assert controller.policies["p"].verified - before > 90 * DEPTH


def test_switched_off_it_verifies_everything_and_counts() -> None:
    controller = Controller("all")
    machine = Machine([0.0], 0.01, 1.0, 0.0, seed=1)
    goodput(machine, controller, steps=100)
    counts = controller.policies["p"]
    assert counts.verified == counts.drafted == 600 * DEPTH
    assert counts.right == counts.accepted == 0 < counts.checked
    assert controller.report()["mode"] == "all"


def test_what_was_not_verified_is_compared_all_the_same() -> None:
    controller = Controller()
    controller.choose({"a": "p"}, [[5]], [[6, 7, 8]])
    controller.choose({"a": "p"}, [[6]], [[]])
    assert (controller.policies["p"].checked, controller.policies["p"].right) == (1, 1)


def test_a_step_with_prompts_is_not_timed() -> None:
    controller = Controller()
    decode = Step(frozenset("ab"), 2, 0)
    for step, now in ((decode, 0.0), (None, 1.0), (decode, 9.0), (Step(frozenset("c"), 1, 0), 10.0)):
        controller.began(step, now)
    assert not controller.loads


@given(
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 5)), max_size=6).flatmap(
        lambda drafts: st.tuples(st.just(drafts), st.integers(0, sum(length for _, length in drafts)))
    )
)
def test_the_likeliest_tokens_are_the_first_of_their_drafts(
    case: tuple[list[tuple[float, int]], int],
) -> None:
    drafts, number = case
    rates, lengths = [rate for rate, _ in drafts], [length for _, length in drafts]
    chosen = likeliest(rates, lengths, number)
    assert sum(chosen) == number
    assert all(0 <= count <= most for count, most in zip(chosen, lengths, strict=True))
    taken = [rate ** (n + 1) for rate, count in zip(rates, chosen, strict=True) for n in range(count)]
    left = [
        rate ** (n + 1)
        for rate, count, most in zip(rates, chosen, lengths, strict=True)
        for n in range(count, most)
    ]
    assert not taken or not left or min(taken) >= max(left)


def test_step_times_are_interpolated_and_never_fall() -> None:
    times = StepTimes()
    assert times.at(1) is None
    for rows, seconds in ((1, 0.1), (5, 0.3), (9, 0.2)):
        for _ in range(3):
            times.observe(rows, seconds)
    assert times.knows(5)
    assert not times.knows(4)
    assert times.at(0) == 0.1
    assert times.at(3) == pytest.approx(0.2)
    assert times.at(9) == 0.3
    assert times.at(17) == pytest.approx(0.5)


def test_a_rate_forgets() -> None:
    rate = Rate(keep=0.5)
    for right in [True] * 20 + [False] * 10:
        rate.observe(right)
    assert rate.estimate(0.5, 0.0) < 0.01
