"""Model names and tiers as callers write them, and which replica answers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.records import PRIORITY_HEADER, Policy, PolicyState
from server import routing
from server.engine.client import Engine
from server.engine.launch import BATCH_PRIORITY
from server.errors import ApiError
from server.sessions import Session
from server.tiers import AUTO, Fleet, Named, Replica, Serving
from tests.fixtures import rows

TIERS = ["standard", "fast"]
ENGINE = Engine(Path("/nowhere.sock"))


def replica(
    name: str, *, ready: bool = True, verified: set[str] | None = None, load: int = 0, drafts: bool = False
) -> Replica:
    made = Replica(
        id=name,
        tier=name.rpartition("-")[0],
        engine=ENGINE,
        state_file=Path("/nowhere.json"),
        full_precision=True,
        drafts=drafts,
        ready=ready,
        verified=verified if verified is not None else {"p000001"},
    )
    made.in_flight["p000001"] = load
    return made


def fleet(*replicas: Replica) -> Fleet:
    policy = Policy(
        id="p000001",
        state=PolicyState.PROMOTED,
        manifest=rows.manifest("p000001"),
        path="",
        reason=None,
        created_at=0,
        updated_at=0,
    )
    return Fleet(
        model="ratchet",
        tiers=TIERS,
        replicas=list(replicas),
        serving=Serving(promoted="p000001", previous=None, epoch=1),
        policies={"p000001": policy},
    )


@pytest.mark.parametrize(
    ("model", "service_tier", "expected"),
    [
        ("ratchet", None, Named("standard", None)),
        ("ratchet", "default", Named("standard", None)),
        ("ratchet", "fast", Named("fast", None)),
        ("ratchet", "auto", Named(AUTO, None)),
        ("ratchet-fast", None, Named("fast", None)),
        ("ratchet-fast", "auto", Named("fast", None)),
        ("ratchet-standard", None, Named("standard", None)),
        ("ratchet@p000001", "priority", Named("fast", "p000001")),
        ("ratchet-fast@p000001", None, Named("fast", "p000001")),
    ],
)
def test_names(model: str, service_tier: str | None, expected: Named) -> None:
    assert fleet().named(model, service_tier, "standard") == expected


@pytest.mark.parametrize(
    ("model", "service_tier", "status"),
    [
        ("other", None, 404),
        ("ratchet@p000009", None, 404),
        ("ratchet-slow", None, 404),
        ("ratchet", "scale", 400),
        ("ratchet-fast", "default", 400),
    ],
)
def test_wrong_names(model: str, service_tier: str | None, status: int) -> None:
    with pytest.raises(ApiError) as caught:
        fleet().named(model, service_tier, "standard")
    assert caught.value.status == status


def test_a_flip_needs_every_replica_in_rotation_and_one_a_tier() -> None:
    both = [replica("standard-0"), replica("fast-0")]
    assert fleet(*both).verified_everywhere("p000001") is None
    assert "fast-0" in (
        fleet(both[0], replica("fast-0", verified=set())).verified_everywhere("p000001") or ""
    )
    assert "fast" in (fleet(both[0], replica("fast-0", ready=False)).verified_everywhere("p000001") or "")
    spare = [*both, replica("fast-1", ready=False, verified=set())]
    assert fleet(*spare).verified_everywhere("p000001") is None


@settings(deadline=None)
@given(loads=st.lists(st.integers(0, 9), min_size=1, max_size=5), sticky=st.integers(0, 6))
def test_sticky_where_able_else_least_loaded(loads: list[int], sticky: int) -> None:
    replicas = [replica(f"standard-{i}", load=load) for i, load in enumerate(loads)]
    chosen = routing.choose(replicas, f"standard-{sticky}", None)
    assert chosen is not None
    assert chosen.id == f"standard-{sticky}" if sticky < len(loads) else routing.load(chosen) == min(loads)


@settings(deadline=None)
@given(loads=st.lists(st.integers(0, 9), min_size=1, max_size=5), prefix=st.binary(max_size=4))
def test_a_prefix_chooses_a_replica_within_its_part_of_the_load(loads: list[int], prefix: bytes) -> None:
    replicas = [replica(f"standard-{i}", load=load) for i, load in enumerate(loads)]
    chosen = routing.choose(replicas, None, prefix)
    assert chosen is not None
    assert routing.choose(list(reversed(replicas)), None, prefix) is chosen
    assert routing.load(chosen) + 1 <= math.ceil(1.25 * (sum(loads) + 1) / len(loads))


def test_a_replica_that_leaves_moves_only_its_own_prefixes_and_each_has_some() -> None:
    replicas = [replica(f"standard-{i}") for i in range(4)]
    prefixes = [str(number).encode() for number in range(200)]

    def chosen(among: list[Replica]) -> list[str]:
        return [found.id for prefix in prefixes if (found := routing.choose(among, None, prefix))]

    before, after = chosen(replicas), chosen(replicas[1:])
    assert {name: before.count(name) > 20 for name in before} == {r.id: True for r in replicas}
    assert [a for a, b in zip(after, before, strict=True) if b != "standard-0"] == [
        b for b in before if b != "standard-0"
    ]


def test_only_verified_replicas_in_rotation_are_able() -> None:
    replicas = [
        replica("standard-0", ready=False),
        replica("standard-1", verified=set()),
        replica("standard-2"),
    ]
    assert [r.id for r in routing.able(replicas, "p000001")] == ["standard-2"]


@pytest.mark.parametrize(
    ("standard", "fast", "tier"), [(0, 0, "standard"), (2, 1, "fast"), (1, 2, "standard")]
)
def test_auto_takes_the_less_loaded_tier(standard: int, fast: int, tier: str) -> None:
    replicas = [replica("standard-0", load=standard), replica("fast-0", load=fast)]
    assert routing.choose_tier(AUTO, replicas) == tier
    assert routing.choose_tier("fast", replicas) == "fast"


@pytest.mark.parametrize("params", [{"min_p": 0.1}, {"logit_bias": {"5": 1.0}}])
def test_what_a_drafting_engine_cannot_apply_goes_to_another_or_is_refused(params: dict[str, Any]) -> None:
    standard, fast = replica("standard-0"), replica("fast-0", drafts=True)
    assert routing.without_drafts(AUTO, [standard, fast], params) == [standard]
    assert routing.without_drafts(AUTO, [standard, fast], {"min_p": 0.0, "seed": 1}) == [standard, fast]
    with pytest.raises(ApiError) as caught:
        routing.without_drafts("fast", [fast], params)
    assert (caught.value.status, caught.value.param) == (400, *params)


def test_a_trajectory_is_held_for_a_bounded_time() -> None:
    session = Session()
    assert session.held(100.0, 600.0) is None
    session.answered("p000001", 100.0)
    session.answered("p000001", 500.0)
    assert session.held(700.0, 600.0) == "p000001"
    assert session.held(701.0, 600.0) is None
    session.answered("p000002", 701.0)
    assert session.held(1301.0, 600.0) == "p000002"


def test_a_new_engine_start_holds_nothing() -> None:
    one = replica("standard-0")
    one.forget("another", "starting")
    assert not one.ready
    assert one.verified == set()


@pytest.mark.parametrize(
    ("headers", "service_tier", "wanted"),
    [
        ({}, None, 0),
        ({}, "fast", 0),
        ({}, "flex", BATCH_PRIORITY),
        ({PRIORITY_HEADER: "batch"}, "fast", BATCH_PRIORITY),
        ({PRIORITY_HEADER: "interactive"}, "flex", 0),
    ],
)
def test_a_request_says_whether_it_may_wait(
    headers: dict[str, str], service_tier: str | None, wanted: int
) -> None:
    assert routing.priority(headers, service_tier) == wanted


def test_an_unknown_priority_is_refused() -> None:
    with pytest.raises(ApiError, match="must be 'interactive' or 'evaluation' or 'batch', not 'soon'"):
        routing.priority({PRIORITY_HEADER: "soon"}, None)
