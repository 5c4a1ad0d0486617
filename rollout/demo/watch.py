"""What the deployment does while the demo runs: policies, learner, flips (through the API) and memory."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import openai

from clients.calls import Policy
from clients.client import AsyncRatchet
from rollout.records import PolicyState

UNDER_WAY = (PolicyState.CANDIDATE, PolicyState.GATE, PolicyState.CANARY)
KIB_PER_MIB = 1024


@dataclass(slots=True, kw_only=True)
class View:
    """The deployment as it was last seen."""

    policies: dict[str, Policy] = field(default_factory=dict)
    tiers: dict[str, Any] = field(default_factory=dict)
    """``GET /v1/rl/tiers``."""
    learner: dict[str, Any] = field(default_factory=dict)
    """The learner's own account."""
    peak_mib: dict[str, float] = field(default_factory=dict)
    """Most resident memory of each process seen so far, children included."""
    errors: list[str] = field(default_factory=list)

    @property
    def consumed(self) -> int:
        """Samples that the learner has trained on or dropped, by its own account."""
        dropped: dict[str, int] = self.learner.get("why_not", {})
        return int(self.learner.get("trained", 0)) + sum(dropped.values())

    @property
    def starving(self) -> bool:
        """Whether the learner has too few samples for an update, by its own account."""
        return str(self.learner.get("state", "")).startswith("waiting for samples")

    @property
    def promoted(self) -> str | None:
        name: str | None = self.tiers.get("promoted")
        return name

    @property
    def flips(self) -> list[dict[str, Any]]:
        """Promotions and rollbacks with their timings, oldest first."""
        rows: list[dict[str, Any]] = self.tiers.get("flips", [])
        return rows

    def in_state(self, *states: PolicyState) -> list[str]:
        return [policy.id for policy in self.policies.values() if policy.state in states]

    def promotions(self, since: float) -> list[str]:
        """Policies promoted after `since` (unix seconds), in order."""
        moments = [
            (float(step["at"]), policy.id)
            for policy in self.policies.values()
            for step in policy.history
            if step["to"] == PolicyState.PROMOTED and step["at"] >= since and step["frm"] is not None
        ]
        return [policy for _, policy in sorted(moments)]


async def look(client: AsyncRatchet, view: View, home: Path) -> None:
    """Refresh `view`. A request that fails is noted, and the view stays as it was."""
    try:
        view.policies = {policy.id: policy for policy in await client.rl.policies.list()}
        view.tiers = cast(dict[str, Any], await client.get("/rl/tiers", cast_to=object))
        view.learner = (await client.rl.learning.retrieve()).status or {}
    except openai.OpenAIError as error:
        view.errors.append(f"{type(error).__name__}: {error}")
    for name, mib in memory(home).items():
        view.peak_mib[name] = max(mib, view.peak_mib.get(name, 0.0))


def memory(home: Path) -> dict[str, float]:
    """Resident MiB of each process of the stack with all its descendants, by name."""
    parents = {pid: parent for pid in _pids() if (parent := _parent(pid)) is not None}
    found: dict[str, float] = {}
    for root in sorted(_roots(home)):
        name = _name(root)
        if name is not None:
            family = _family(root, parents)
            found[name] = sum(_resident_kib(pid) for pid in family) / KIB_PER_MIB
    return found


def _roots(home: Path) -> set[int]:
    """The processes that `ratchet up` started; of a stack started by hand, its engines' supervisors."""
    run = home / "run"
    try:
        return {int(pid) for pid in json.loads((run / "up.json").read_text())}
    except FileNotFoundError:
        states = [json.loads(path.read_text()) for path in run.glob("*.json")]
        return {state["supervisor"] for state in states if "supervisor" in state}


def _name(pid: int) -> str | None:
    """What a process runs (``server.engine standard-0``); None when it is gone."""
    try:
        argv = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return None
    if "-m" not in argv:
        return argv[0] or None
    start = argv.index("-m") + 1
    words = [argv[start]]
    if words[0] == "rollout":
        words.append(argv[start + 1])
    if "--replica" in argv:
        words.append(argv[argv.index("--replica") + 1])
    return " ".join(words)


def _family(root: int, parents: dict[int, int]) -> set[int]:
    family, frontier = {root}, {root}
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier} - family
        family |= frontier
    return family


def _pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def _parent(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(stat.rpartition(")")[2].split()[1])


def _resident_kib(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    lines = [line for line in status.splitlines() if line.startswith("VmRSS:")]
    return int(lines[0].split()[1]) if lines else 0
