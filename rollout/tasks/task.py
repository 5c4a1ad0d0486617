"""The task record, and what a correct episode of it is."""

from __future__ import annotations

from typing import Any

import msgspec

SPLITS = ("train", "held_out")


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One tool call, arguments parsed."""

    name: str
    arguments: dict[str, Any]


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """What a correct episode does."""

    turns: list[list[Call]]
    """Gold calls of each turn that makes calls, in order; empty when no call is right."""
    answer: str | None = None
    """Gold text of a last turn without calls; None when the last calls end the task."""
    mentions: list[list[str]] = []
    """The final text must contain one alternative of every group (case and commas ignored)."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One task of one domain, whole: what is asked, the world it is asked in, and what is right."""

    id: str
    """``DOMAIN/SPLIT/FAMILY/SEED``: what callers send as ``metadata.task``. The learner takes the path
    before the last part for the kind of task, so tasks of one family share a baseline."""
    domain: str
    split: str
    family: str
    """The kind of task; evaluations report by it."""
    messages: list[dict[str, Any]]
    """System (constant per toolset) and user message."""
    tools: list[dict[str, Any]]
    """OpenAI function tools offered."""
    world: dict[str, Any]
    """Tables of the simulated world before the episode."""
    goal: Goal
    max_turns: int
    """Completions the episode may use; running out is a failure of the model, not of the harness."""
    max_tokens: int
    """Completion tokens a turn may use."""
