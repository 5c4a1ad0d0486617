"""Checkpoints: a folder with the training state, then one row that makes it the one to resume from.

The row moves in the transaction that marks the samples of the update as used. So a learner that is killed
before it resumes from the update before, with those samples unused; killed after it, from this one.

Invariant: the folder that the row names is complete on disk.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from learner.engine import Engine
from rollout.store import Store, learning
from rollout.store.learning import Checkpoint


class Checkpoints:
    """The checkpoint folders of one job."""

    def __init__(self, folder: Path, job: str) -> None:
        self.folder = folder / job

    def write(self, engine: Engine, update: int) -> Path:
        """Saves the training state under a name of its own. Every process calls it."""
        target = self.folder / f"update-{update:06d}"
        partial = self.folder / f".{target.name}.partial"
        if engine.rank == 0:
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


def commit(store: Store, checkpoint: Checkpoint, keys: Sequence[tuple[str, int]]) -> None:
    """Marks `keys` as used and moves the row, or neither. Raises AlreadyUsed."""
    with store.write() as tx:
        learning.mark_used(tx, checkpoint.job, checkpoint.update, keys)
        learning.set_checkpoint(tx, checkpoint)


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
