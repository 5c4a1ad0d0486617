"""The learning loop, top to bottom.

judged outcomes -> samples (`data`) -> advantages -> update (`update`, `objectives.rl`) -> checkpoint
(`checkpoint`) -> every few updates a candidate policy (`publish`). It runs beside serving and never in step
with it: samples come from whatever policies answered, and importance weights account for the difference.

It waits for judged samples, and for a free slot when a policy is due: training on would only take it further
from the policies that sample. A candidate that the gate rejects changes nothing here: training goes on from
the weights it has, the promoted policy stays parent and KL reference. Only when a policy of this job was
promoted and then rolled back does it start again from the promoted weights. An update that is not finite is
no update: its samples are dropped, and the process starts again from the checkpoint before.

Invariant: rank 0 alone talks to the store; every decision reaches the others by broadcast.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from learner import publish
from learner.advantages import Tracker, advantages
from learner.batch import Sample
from learner.checkpoint import Checkpoints, Position, commit, move
from learner.config import LearnerConfig
from learner.data import Feed, Limits, keys_of
from learner.session import Session, open_session
from learner.switch import Stop, is_on
from learner.update import Abandoned, Metrics, Reference, update
from rollout import config, policies
from rollout.artifacts import Artifacts, read_manifest
from rollout.config import ArtifactsConfig, ConfigError, EngineConfig
from rollout.records import Policy, PolicyKind, PolicyState
from rollout.store import Store, completions, learning
from rollout.store.learning import Checkpoint

STATUS_EVERY = 30.0
"""Seconds between two writes of an unchanged status."""

Watch = Callable[[str], None]
"""Told of each point in the loop at which a kill must do no harm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What all processes do next."""

    kind: Literal["stop", "wait", "train", "publish"]
    samples: list[Sample] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)
    promoted: Policy | None = None
    policy_id: str = ""


def run(document: dict[str, Any], store: Store, stop: Stop, watch: Watch = lambda point: None) -> None:
    """Learns until stopped or switched off. Raises ConfigError when another process learns the same job."""
    settings = config.section(document, "learner", LearnerConfig)
    checkpoints = Checkpoints(store, Path(settings.folder), settings.job)
    with checkpoints.held() if os.environ.get("RANK", "0") == "0" else nullcontext():
        with store.read() as tx:
            row = learning.get_checkpoint(tx, settings.job)
            promoted = _promoted(policies.serving(tx).promoted, policies.list_policies(tx))
        fresh = _starts_anew(row)
        adapter = Path(promoted.path) if fresh and promoted.manifest.kind is PolicyKind.ADAPTER else None
        session = open_session(document, seed=settings.seed, initial=adapter)
        if row is not None and not fresh:
            session.engine.load(Path(row.path))
        loop = Loop(document, store, session, checkpoints, row)
        loop.stop, loop.watch = stop, watch
        try:
            loop.run()
        finally:
            session.engine.close()


class Loop:
    stop: Stop
    watch: Watch

    def __init__(
        self,
        document: dict[str, Any],
        store: Store,
        session: Session,
        checkpoints: Checkpoints,
        row: Checkpoint | None,
    ) -> None:
        self.store, self.session, self.checkpoints = store, session, checkpoints
        self.settings = session.settings
        self.max_policies = config.section(document, "engine", EngineConfig).max_policies
        self.artifacts = Artifacts(config.section(document, "artifacts", ArtifactsConfig).root)
        state = {k: v for k, v in row.state.items() if k != "restart"} if row else {}
        self.position = Position.of(state, Tracker(self.settings.baseline_step))
        if self.position.base not in ("", session.base):
            raise ConfigError(
                f"learner.job: {self.settings.job} was learning on another model; give it another name"
            )
        self.position.base = session.base
        self.path = row.path if row else ""
        """What the row names."""
        self.fresh = _starts_anew(row)
        """Whether the weights of now did not come from `path`."""
        self.feed = Feed(
            store,
            self.settings.job,
            Limits(max_staleness=self.settings.max_staleness, max_tokens=self.settings.max_sample_tokens),
            row.cursor if row else 0,
            self.position.counts,
        )
        self._reference: Reference | None = None
        self._announced = ("", 0.0)

    def run(self) -> None:
        while True:
            step = self.session.engine.broadcast(self._decide() if self.session.engine.rank == 0 else None)
            assert step is not None
            if step.kind == "stop":
                return
            if step.kind == "wait":
                self.stop.wait(self.settings.poll_seconds)
            elif step.kind == "publish":
                self._publish(step)
            else:
                try:
                    self._train(step)
                except Abandoned:
                    return

    def _decide(self) -> Step:
        """Rank 0's choice of what comes next."""
        if self.stop.is_set() or not is_on(self.store) or self._rolled_back():
            return Step(kind="stop")
        with self.store.read() as tx:
            promoted = _promoted(policies.serving(tx).promoted, policies.list_policies(tx))
            slots = policies.slots_free(tx, self.max_policies)
        if self.position.update - self.position.published_update >= self.settings.publish_every:
            if slots < 1:
                self._announce("waiting for a free policy slot")
                return Step(kind="wait")
            self._announce("publishing")
            with self.store.write() as tx:
                return Step(kind="publish", promoted=promoted, policy_id=policies.reserve(tx))
        samples = self.feed.take(self.settings.batch_size)
        if samples is None:
            self._announce(f"waiting for samples: {self.feed.waiting} of {self.settings.batch_size}")
            return Step(kind="wait")
        self._announce(f"update {self.position.update + 1}")
        weights = advantages(samples, self.position.tracker, self.settings.negative_weight)
        return Step(kind="train", samples=samples, advantages=weights, promoted=promoted)

    def _train(self, step: Step) -> None:
        """One update; it counts from the transaction on that marks its samples and moves the row."""
        assert step.promoted is not None
        stop = self.stop.is_set
        metrics = update(self.session, step.samples, step.advantages, self._referred(step.promoted), stop)
        self.watch("stepped")
        if not self.session.engine.broadcast(_finite(metrics)):
            if self.session.engine.rank == 0:
                self._discard(step)
            raise Abandoned
        position = self.position
        position.update += 1
        folder = self.checkpoints.write(self.session.engine, position.update)
        self.watch("checkpoint written")
        if self.session.engine.rank == 0:
            for sample in step.samples:
                position.tracker.observe(sample.strata, sample.reward)
            position.probes = _probes(step.samples)
            position.metrics = asdict(metrics)
            commit(self.store, self.path, self._row(str(folder)), keys_of(step.samples))
            self.watch("checkpoint committed")
            self.checkpoints.prune(folder)
            self._announce(f"update {position.update} done")
            print(_line(position.update, metrics), flush=True)
        self.path, self.fresh = str(folder), False

    def _discard(self, step: Step) -> None:
        """Drops the samples of an update that spoilt the weights; they would spoil them again."""
        counts = self.position.counts
        counts.trained -= len(step.samples)
        counts.dropped["not finite"] += len(step.samples)
        row = self._row(self.path, restart=self.fresh)
        commit(self.store, self.path, row, keys_of(step.samples))
        self._announce(f"starting again: update {self.position.update + 1} was not finite")
        print(f"update {self.position.update + 1} was not finite; its samples are dropped", flush=True)

    def _publish(self, step: Step) -> None:
        """A candidate policy of the present weights."""
        assert step.promoted is not None
        session, position = self.session, self.position
        lineage = publish.Lineage(
            base=session.base,
            parent=step.promoted.id,
            parent_weights=self._referred(step.promoted).weights,
            job=self.settings.job,
            step=position.update,
            recipe=_recipe(self.settings),
        )
        probes = session.engine.broadcast(position.probes)
        mark = publish.fingerprint(session.engine, step.policy_id, lineage, probes, session.pad_id)
        weights = session.engine.weights()
        position.published_update, position.published = position.update, step.policy_id
        if session.engine.rank == 0:
            manifest = publish.manifest_of(step.policy_id, session.adapter, lineage)
            folder = publish.write(self.artifacts, manifest, session.adapter, weights, mark)
            self.watch("policy written")
            sealed = read_manifest(folder)
            with self.store.write() as tx:
                policies.register(tx, sealed, str(folder))
                move(tx, self.path, self._row(self.path))
            self.watch("policy registered")
            self._announce(f"published {step.policy_id}")
            print(f"published {step.policy_id} after update {position.update}", flush=True)

    def _row(self, folder: str, **extra: Any) -> Checkpoint:
        return Checkpoint(
            job=self.settings.job,
            update=self.position.update,
            path=folder,
            cursor=self.feed.cursor,
            state={**self.position.state(), **extra},
        )

    def _rolled_back(self) -> bool:
        """Whether a policy of this job was promoted and taken back; then the job begins anew."""
        with self.store.read() as tx:
            taken_back = [
                policy.id
                for policy in policies.list_policies(tx, [PolicyState.ROLLED_BACK])
                if policy.manifest.job == self.settings.job and policy.id > self.position.forgotten
            ]
        if not taken_back:
            return False
        self.position.forgotten = max(taken_back)
        self.position.published_update = self.position.update
        commit(self.store, self.path, self._row(self.path, restart=True))
        self._announce(f"starting again from the promoted policy: {self.position.forgotten} was rolled back")
        return True

    def _referred(self, promoted: Policy) -> Reference:
        if self._reference is None or self._reference.policy != promoted.id:
            like = self.session.engine.weights()
            weights = publish.weights_of(promoted, self.session.adapter, like)
            self._reference = Reference(policy=promoted.id, weights=weights)
        return self._reference

    def _announce(self, state: str) -> None:
        """Writes the status for people, when it changed or is old."""
        now = time.monotonic()
        if state == self._announced[0] and now - self._announced[1] < STATUS_EVERY:
            return
        self._announced = (state, now)
        counts = self.feed.status()
        with self.store.write() as tx:
            recorded = completions.counts(tx)
            status = {
                "state": state,
                "seen": recorded.total,
                "kept": recorded.trainable,
                "judged": counts.judged,
                "trained": counts.trained,
                "why_not": dict(counts.dropped),
                "updates": self.position.update,
                "policy": self.position.published,
                "metrics": self.position.metrics,
            }
            learning.set_learner_status(tx, status)


def _promoted(promoted: str | None, known: list[Policy]) -> Policy:
    for policy in known:
        if policy.id == promoted:
            return policy
    raise ConfigError("nothing is promoted in this store; run `python -m rollout seed` first")


def _starts_anew(row: Checkpoint | None) -> bool:
    """Whether learning begins with the promoted weights and not with those that the row names."""
    return row is None or bool(row.state.get("restart"))


def _finite(metrics: Metrics) -> bool:
    return all(map(math.isfinite, asdict(metrics).values()))


def _probes(samples: list[Sample]) -> list[list[int]]:
    """Ends of samples as different as the batch has: the answers, which training changes most."""
    by_stratum = {sample.strata[-1:]: sample.tokens for sample in samples}
    chosen = [*by_stratum.values(), *(sample.tokens for sample in samples)][: publish.PROMPTS]
    return [tokens[-publish.PROMPT_TOKENS :] for tokens in chosen]


def _recipe(settings: LearnerConfig) -> dict[str, Any]:
    names = (
        "batch_size",
        "learning_rate",
        "warmup_updates",
        "negative_weight",
        "ratio_cap",
        "ratio_floor",
        "sequence_band",
        "kl_coefficient",
    )
    return {"objective": "rl", **{name: getattr(settings, name) for name in names}}


def _line(number: int, m: Metrics) -> str:
    return (
        f"update {number}: reward {m.reward:.3f} over {m.samples} samples, {m.taught} taught, "
        f"{m.tokens} tokens, {m.positions} computed, kl {m.kl:.4f}, mismatch {m.mismatch:.4f}, "
        f"truncated {m.truncated:.3f}, masked {m.masked:.3f}, rejected {m.rejected:.3f}, "
        f"grad {m.grad_norm:.2f}, {m.seconds:.1f} s"
    )
