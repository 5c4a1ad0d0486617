"""Which drafted tokens are worth verifying, decided before every step.

A drafted token costs a row of the next step whether it is accepted or not, and saves its request a step when
it is. Both sides are measured while the engine works: how long a step of so many rows takes, and how often a
request's drafts turn out right. Of all that was drafted those tokens are verified with which the expected
tokens a second are highest; often that is none. What the policy samples does not change: verification
accepts and refuses as the distribution demands, however many tokens were put up for it.

Two facts make this cheap. A drafter that looks tokens up has a draft for every request at no cost, and the
chance that one is accepted is the chance that the policy would have sampled it: so a draft that was *not*
verified is compared with what was then sampled, and nothing has to be tried out to know whether it would
have paid. And what a step costs depends on its rows alone, near enough: interpolated between the counts seen.

Invariant: the tokens of a request that are verified are the first of its draft.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from server.engine.worker.steps import Pace, StepTimes, size_of

LOOK_EVERY = 128
"""Steps after which the other way is taken once, so that its cost stays known."""
LOOK_UNKNOWN_EVERY = 8
"""The same while that cost is not known."""


@dataclass(slots=True)
class Rate:
    """How often the next drafted token is right, the latest counting most."""

    keep: float
    """Weight of what was known when one more is seen."""
    right: float = 0.0
    seen: float = 0.0

    def observe(self, right: bool) -> None:
        self.right = self.right * self.keep + right
        self.seen = self.seen * self.keep + 1.0

    def estimate(self, prior: float, weight: float) -> float:
        return (self.right + prior * weight) / (self.seen + weight)


@dataclass(slots=True)
class Counts:
    """Of one policy since the engine began. `right` of `checked` were or would have been accepted."""

    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    checked: int = 0
    right: int = 0


@dataclass(slots=True)
class Load:
    """Steps with one number of requests, one way."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0


@dataclass(slots=True, frozen=True)
class Step:
    """A step that computes nothing but the next tokens of running requests."""

    requests: frozenset[str]
    rows: int
    verified: int
    """Drafted tokens among the rows."""


@dataclass(slots=True)
class _Request:
    rate: Rate = field(default_factory=lambda: Rate(keep=0.9))
    draft: list[int] = field(default_factory=list)
    verified: int = 0


class Controller:
    """The decisions of one engine. Not thread-safe: called from the worker's one thread."""

    def __init__(self, mode: str = "auto") -> None:
        self.mode = mode
        """"auto", or "all" or "none" of what is drafted; measured all the same."""
        pace = Pace()
        self.plain, self.verifying = StepTimes(pace), StepTimes(pace)
        self.policies: dict[str, Counts] = {}
        self.loads: dict[tuple[int, bool], Load] = {}
        self._rates: dict[str, Rate] = {}
        self._requests: dict[str, _Request] = {}
        self._step: Step | None = None
        self._began = 0.0
        self._produced = 0
        self._since_look = 0

    def began(self, step: Step | None, now: float) -> None:
        """A step begins; None when it computes prompts too. Until now the step before it lasted."""
        last, began = self._step, self._began
        self._step, self._began = step, now
        if last is None or step is None or not last.requests & step.requests:
            return
        seconds, count = now - began, len(last.requests)
        (self.verifying if last.verified else self.plain).observe(last.rows, seconds)
        load = self.loads.setdefault((size_of(count), last.verified > 0), Load())
        load.steps += 1
        load.tokens += self._produced
        load.seconds += seconds

    def choose(
        self, policies: Mapping[str, str], sampled: Sequence[list[int]], drafts: Sequence[list[int]]
    ) -> list[list[int]]:
        """What is verified of `drafts`, the continuations proposed after `sampled`.

        All three in the order of the batch; `policies` is the policy of each request by its id.
        """
        self._produced = sum(map(len, sampled))
        self._requests = {name: self._requests.get(name) or _Request() for name in policies}
        rates = []
        for (name, policy), new, draft in zip(policies.items(), sampled, drafts, strict=True):
            request = self._requests[name]
            self._check(request, policy, new)
            request.draft = draft
            self.policies.setdefault(policy, Counts()).drafted += len(draft)
            general = self._rates.setdefault(policy, Rate(keep=0.995)).estimate(0.5, 2.0)
            rates.append(request.rate.estimate(general, 2.0))
        lengths = self._lengths(sum(1 for new in sampled if new), rates, [len(draft) for draft in drafts])
        for (name, policy), length in zip(policies.items(), lengths, strict=True):
            self._requests[name].verified = length
            self.policies[policy].verified += length
        return [draft[:length] for draft, length in zip(drafts, lengths, strict=True)]

    def _check(self, request: _Request, policy: str, new: list[int]) -> None:
        """Compare the last draft with what was sampled in its place."""
        if not new:
            return
        counts = self.policies.setdefault(policy, Counts())
        general = self._rates.setdefault(policy, Rate(keep=0.995))
        counts.accepted += min(len(new) - 1, request.verified)
        for proposed, token in zip(request.draft, new, strict=False):
            right = proposed == token
            request.rate.observe(right)
            general.observe(right)
            counts.checked += 1
            counts.right += right
            if not right:
                break

    def _lengths(self, count: int, rates: Sequence[float], lengths: Sequence[int]) -> list[int]:
        """How much of each draft is verified."""
        offered = sum(lengths)
        if self.mode == "none":
            return [0] * len(lengths)
        if self.mode == "all" or not offered:
            return list(lengths)
        best = self._best(count, rates, lengths)
        self._since_look += 1
        other_is_known = self.plain.knows(count) if best else self.verifying.knows(count + offered)
        if self._since_look >= (LOOK_EVERY if other_is_known else LOOK_UNKNOWN_EVERY):
            self._since_look = 0
            best = 0 if best else offered
        return likeliest(rates, lengths, best)

    def _best(self, count: int, rates: Sequence[float], lengths: Sequence[int]) -> int:
        """The number of drafted tokens with which the expected tokens a second are highest."""
        plain = self.plain.at(count)
        if plain is None or self.verifying.at(count) is None:
            return sum(lengths)
        chances = sorted((p**n for p, most in zip(rates, lengths, strict=True) for n in range(1, most + 1)))
        best, highest, expected = 0, count / plain, float(count)
        for number, chance in enumerate(reversed(chances), start=1):
            expected += chance
            # Of sizes never tried the best is hoped, or one bad try with all drafts would settle it.
            seconds = self.verifying.at(count + number, least=(count, plain))
            assert seconds is not None
            if expected / seconds > highest:
                best, highest = number, expected / seconds
        return best

    def report(self) -> dict[str, object]:
        """Counts by policy, and steps, tokens and seconds by number of requests with and without drafts."""
        return {
            "mode": self.mode,
            "policies": {
                policy: {
                    "drafted": counts.drafted,
                    "verified": counts.verified,
                    "accepted": counts.accepted,
                    "checked": counts.checked,
                    "right": counts.right,
                }
                for policy, counts in self.policies.items()
            },
            "loads": [
                {
                    "requests": count,
                    "verifying": verifying,
                    "steps": load.steps,
                    "tokens": load.tokens,
                    "seconds": load.seconds,
                }
                for (count, verifying), load in sorted(self.loads.items())
            ],
        }


def likeliest(rates: Sequence[float], lengths: Sequence[int], number: int) -> list[int]:
    """How many of each draft are among the `number` tokens most likely to be accepted.

    `rates` is the chance that a draft's next token is right, given that those before it were.

    >>> likeliest([0.9, 0.5], [3, 3], 3)
    [3, 0]
    """
    places = [
        (-(rate**depth), depth, place)
        for place, (rate, most) in enumerate(zip(rates, lengths, strict=True))
        for depth in range(1, most + 1)
    ]
    chosen = [0] * len(rates)
    for _, _, place in sorted(places)[:number]:
        chosen[place] += 1
    return chosen
