"""Checkpoints: a folder with the training state, then one row that makes it the one to resume from.

The row moves in the transaction that marks the samples of the update as used. So a learner that is killed
before it resumes from the update before, with those samples unused; killed after it, from this one.

Invariants: the folder that the row names is complete on disk, and nobody removes it; a job has one learner.
Two on one folder are kept apart by its lock, two on folders of their own by the row, which moves on only from
the checkpoint that its mover began from.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import Connection

from learner.advantages import Tracker
from learner.data import Counts
from learner.engine import Engine
from rollout.config import ConfigError
from rollout.store import Store, learning
from rollout.store.learning import Checkpoint


@dataclass(slots=True, kw_only=True)
class Position:
    """Where the job stands: what the checkpoint row carries besides the cursor."""

    update: int = 0
    published_update: int = 0
    published: str | None = None
    forgotten: str = ""
    """The last policy of this job that was rolled back; what was trained before it is gone."""
    base: str = ""
    tracker: Tracker
    counts: Counts
    probes: list[list[int]] = field(default_factory=list)
    """Ends of samples of the last batch, for the next fingerprint."""
    metrics: dict[str, Any] = field(default_factory=dict)

    def state(self) -> dict[str, Any]:
        """As JSON. Not `asdict`, which makes a Counter anew from its items, and so counts these."""
        state: dict[str, Any] = msgspec.to_builtins(self)
        return state

    @classmethod
    def of(cls, state: dict[str, Any], tracker: Tracker) -> Position:
        """The position that `state` describes; the beginning when it is empty."""
        if not state:
            return cls(tracker=tracker, counts=Counts())
        counts = state["counts"]
        known = Tracker(tracker.step, state["tracker"]["means"], state["tracker"]["counts"])
        dropped = Counter(counts["dropped"])
        return cls(**{**state, "tracker": known, "counts": Counts(**{**counts, "dropped": dropped})})


class Checkpoints:
    """The checkpoint folders of one job."""

    def __init__(self, store: Store, folder: Path, job: str) -> None:
        self.store, self.job = store, job
        self.folder = folder / job

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keeps other learners out until the block or the process ends; raises ConfigError when one is in."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with (self.folder.parent / f"{self.job}.lock").open("a+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.seek(0)
                raise _taken(self.job, f"process {lock.read()}", self.folder) from None
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
            yield

    def write(self, engine: Engine, update: int) -> Path:
        """Saves the training state under a name of its own. Every process calls it.

        Raises ConfigError when another learner has committed that very update.
        """
        target = self.folder / f"update-{update:06d}"
        partial = self.folder / f".{target.name}.partial"
        if engine.rank == 0:
            with self.store.read() as tx:
                row = learning.get_checkpoint(tx, self.job)
            if row is not None and Path(row.path) == target:
                raise _taken(self.job, "another process", self.folder)
            # What lies there was left by a learner that was killed before its row.
            shutil.rmtree(target, ignore_errors=True)
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        engine.barrier()
        engine.save(partial)
        engine.barrier()
        if engine.rank == 0:
            _sync_tree(partial)
            partial.rename(target)
            _sync(self.folder)
        return target

    def prune(self, keep: Path) -> None:
        """Removes every checkpoint but `keep`; only after the row names it."""
        for path in [*self.folder.glob("update-*"), *self.folder.glob(".update-*.partial")]:
            if path != keep:
                shutil.rmtree(path)


def commit(store: Store, before: str, checkpoint: Checkpoint, keys: Sequence[tuple[str, int]] = ()) -> None:
    """Marks `keys` as used and moves the row on, or neither. Raises as `move` does, and AlreadyUsed."""
    with store.write() as tx:
        move(tx, before, checkpoint)
        learning.mark_used(tx, checkpoint.job, checkpoint.update, keys)


def move(tx: Connection, before: str, checkpoint: Checkpoint) -> None:
    """Moves the row on from the folder `before` ("" for none). Raises ConfigError when it names another."""
    row = learning.get_checkpoint(tx, checkpoint.job)
    if row is not None and row.path != before:
        raise _taken(checkpoint.job, "another process", Path(row.path).parent)
    learning.set_checkpoint(tx, checkpoint)


def _taken(job: str, who: str, where: Path) -> ConfigError:
    return ConfigError(
        f"learner.job: {who} is learning {job}, in {where}; end one of the two, or give it another name"
    )


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
