"""The three verdicts on a loaded policy, for every distance from the policy, its parent and the base."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.records import Fingerprint, FingerprintPrompt
from server.fingerprint import SEPARATION, Measured, Verdict, check, positions

N = 8
logprobs = st.lists(st.floats(-20, 0), min_size=N, max_size=N)
TOLERANCE = 1e-3


def fingerprint(policy: list[float], parent: list[float], base: list[float]) -> Fingerprint:
    prompt = FingerprintPrompt(
        token_ids=list(range(N + 1)), positions=list(range(1, N + 1)), policy=policy, parent=parent, base=base
    )
    return Fingerprint(policy="p000002", parent="p000001", prompts=[prompt])


def distance(a: list[float], b: list[float]) -> float:
    return math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) / N)


@settings(deadline=None)
@given(policy=logprobs, parent=logprobs, base=logprobs, by_parent=st.booleans())
def test_the_policy_itself_matches_or_cannot_be_told(
    policy: list[float], parent: list[float], base: list[float], by_parent: bool
) -> None:
    measured = Measured(policy=policy, reference=parent if by_parent else base, reference_is_parent=by_parent)
    verdict = check(fingerprint(policy, parent, base), measured, TOLERANCE).verdict
    near = min(distance(policy, parent), distance(policy, base))
    if math.isclose(near, SEPARATION, rel_tol=1e-6):
        return
    assert verdict is (Verdict.MATCH if near > SEPARATION else Verdict.CANNOT_TELL)


@settings(deadline=None)
@given(
    policy=logprobs, parent=logprobs, base=logprobs, by_parent=st.booleans(), answers=st.sampled_from([0, 1])
)
def test_an_adapter_without_effect_never_matches(
    policy: list[float], parent: list[float], base: list[float], by_parent: bool, answers: int
) -> None:
    silent = [parent, base][answers]
    measured = Measured(policy=silent, reference=parent if by_parent else base, reference_is_parent=by_parent)
    assert check(fingerprint(policy, parent, base), measured, None).verdict is not Verdict.MATCH


@settings(deadline=None)
@given(
    policy=logprobs, parent=logprobs, base=logprobs, shift=st.lists(st.floats(-3, 3), min_size=N, max_size=N)
)
def test_what_the_tier_does_to_all_policies_alike_cancels(
    policy: list[float], parent: list[float], base: list[float], shift: list[float]
) -> None:
    def shifted(values: list[float]) -> list[float]:
        return [value + s for value, s in zip(values, shift, strict=True)]

    near = min(distance(policy, parent), distance(policy, base))
    if near < 2 * SEPARATION:
        return
    measured = Measured(policy=shifted(policy), reference=shifted(parent), reference_is_parent=True)
    known = fingerprint(policy, parent, base)
    assert check(known, measured, None).verdict is Verdict.MATCH
    off = statistics.median(map(abs, shift))
    if off > 1.01 * TOLERANCE:
        assert check(known, measured, TOLERANCE).verdict is Verdict.MISMATCH


def test_no_positions_cannot_tell() -> None:
    empty = Fingerprint(policy="a", parent="b", prompts=[])
    measured = Measured(policy=[], reference=[], reference_is_parent=True)
    assert check(empty, measured, None).verdict is Verdict.CANNOT_TELL


def test_positions_are_picked_from_whole_prompts() -> None:
    known = fingerprint([0.0] * N, [0.0] * N, [0.0] * N)
    assert positions(known, [[None, *(float(i) for i in range(N))]]) == [float(i) for i in range(N)]
    with pytest.raises(ValueError, match="position 1"):
        positions(known, [[None] * (N + 1)])


def test_noise_as_large_as_the_change_is_still_told_apart_from_no_effect() -> None:
    change = [0.02 * (-1) ** i for i in range(N)]
    noise = [0.02 * (-1) ** (i // 2) for i in range(N)]
    base = [-2.0] * N
    policy = [b + c for b, c in zip(base, change, strict=True)]
    known = fingerprint(policy, base, base)

    def seen(values: list[float]) -> Verdict:
        noisy = [value + n for value, n in zip(values, noise, strict=True)]
        return check(known, Measured(policy=noisy, reference=base, reference_is_parent=True), None).verdict

    assert seen(policy) is Verdict.MATCH
    assert seen(base) is Verdict.MISMATCH


def test_a_token_that_was_routed_elsewhere_does_not_refuse_the_policy() -> None:
    policy, parent = [-1.0] * N, [-3.0] * N
    routed = [-1.6, *policy[1:]]
    measured = Measured(policy=routed, reference=parent, reference_is_parent=True)
    assert check(fingerprint(policy, parent, [-2.0] * N), measured, TOLERANCE).verdict is Verdict.MATCH
    everywhere = Measured(
        policy=[value - 0.01 for value in policy], reference=parent, reference_is_parent=True
    )
    verdict = check(fingerprint(policy, parent, [-2.0] * N), everywhere, TOLERANCE).verdict
    assert verdict is Verdict.MISMATCH
