"""Checkpoints: one learner a job, and nothing that the row names is ever lost."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import cast

import pytest
from sqlalchemy import select

from learner.advantages import Tracker
from learner.checkpoint import Checkpoints, Position, commit
from learner.data import Counts
from learner.engine import Engine
from rollout.config import ConfigError
from rollout.store import Store, learning, tables
from rollout.store.learning import Checkpoint


class Weights:
    """An engine's part in a checkpoint: one process, whose state is a text."""

    rank = 0

    def __init__(self, text: str) -> None:
        self.text = text

    def barrier(self) -> None: ...

    def save(self, folder: Path) -> None:
        (folder / "weights").write_text(self.text)


def engine(text: str) -> Engine:
    return cast(Engine, Weights(text))


def row(path: Path, update: int = 1) -> Checkpoint:
    return Checkpoint(job="job", update=update, path=str(path), cursor=5)


def test_a_position_comes_back_with_everything_counted(store: Store) -> None:
    counts = Counts(judged=9, trained=4, dropped=Counter({"stale": 3, "untrusted": 2}))
    tracker = Tracker(0.2, {"": 0.5, "a/b": 1.0}, {"": 9, "a/b": 2})
    position = Position(
        update=3, published="p000002", tracker=tracker, counts=counts, probes=[[1, 2]], metrics={"kl": 0.5}
    )
    with store.write() as tx:
        learning.set_checkpoint(
            tx, Checkpoint(job="job", update=3, path="/c", cursor=9, state=position.state())
        )
    with store.read() as tx:
        found = learning.get_checkpoint(tx, "job")
    assert found is not None
    assert Position.of(found.state, Tracker(0.2)) == position


def named(store: Store) -> Path:
    with store.read() as tx:
        found = learning.get_checkpoint(tx, "job")
    assert found is not None
    return Path(found.path)


def test_a_folder_has_one_learner(sqlite_store: Store, tmp_path: Path) -> None:
    first, second = (Checkpoints(sqlite_store, tmp_path / "learner", "job") for _ in range(2))
    with first.held():
        with (
            pytest.raises(ConfigError, match=rf"process \d+ is learning job, in {tmp_path}/learner/job;"),
            second.held(),
        ):
            pass
        with Checkpoints(sqlite_store, tmp_path / "learner", "another").held():
            pass
    with second.held():
        pass


def test_a_committed_checkpoint_is_not_written_over(sqlite_store: Store, tmp_path: Path) -> None:
    """By a learner that the lock did not keep out: on another host, say."""
    first, second = (Checkpoints(sqlite_store, tmp_path, "job") for _ in range(2))
    left = second.write(engine("of one that died before its row"), 1)
    written = first.write(engine("of the first"), 1)
    assert left == written
    commit(sqlite_store, "", row(written), [("c1", 0)])
    with pytest.raises(ConfigError, match="another process is learning job"):
        second.write(engine("of the second"), 1)
    assert (named(sqlite_store) / "weights").read_text() == "of the first"


def test_the_row_moves_on_only_from_where_its_mover_began(store: Store, tmp_path: Path) -> None:
    first, second = (Checkpoints(store, tmp_path / name, "job") for name in ("one", "two"))
    begun = first.write(engine("1"), 1)
    commit(store, "", row(begun), [("c1", 0)])
    ahead = first.write(engine("2"), 2)
    commit(store, str(begun), row(ahead, 2), [("c2", 0)])
    late = second.write(engine("of another"), 2)
    with pytest.raises(ConfigError, match=f"is learning job, in {tmp_path}/one/job;"):
        commit(store, str(begun), row(late, 2), [("c3", 0)])
    assert named(store) == ahead
    with store.read() as tx:
        used = tables.used_samples.c.key
        assert list(tx.execute(select(used).order_by(used)).scalars()) == ["c1", "c2"]
