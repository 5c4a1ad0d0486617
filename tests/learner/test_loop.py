"""The loop on a tiny model: it learns, publishes, and a kill at any point costs nothing but time."""

from __future__ import annotations

import itertools
import multiprocessing
import random
import signal
import subprocess
import sys
import time
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file
from sqlalchemy import select

from rollout import artifacts, config, outcomes, policies
from rollout.records import Choice, PolicyKind, PolicyState
from rollout.seed import BASE_POLICY
from rollout.store import Store, completions, learning, tables
from tests.fixtures import rows
from tests.fixtures.models import RANK, TARGETS
from tests.learner import killing

KILLS = ["stepped", "checkpoint written", "checkpoint committed", "policy written", "policy registered"]


@pytest.fixture(scope="module")
def processes() -> ForkServerContext:
    """Processes that begin with everything imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.learner.killing"])
    return context


def deploy(home: Path, model: Path, samples: int, **settings: Any) -> tuple[dict[str, Any], Store]:
    """A store with the base promoted, learning on, and judged samples of it."""
    document = killing.document(home, model, **settings)
    home.mkdir(parents=True)
    store = Store.open(document["store"]["url"])
    store.migrate()
    rows.add_project(store)
    base = rows.manifest(BASE_POLICY, kind=PolicyKind.FULL, parent=None, base=artifacts.base_id(model))
    with store.write() as tx:
        policies.register(tx, base, str(model), state=PolicyState.PROMOTED, reason="initial")
    killing.switch_on(store)
    judge(store, 0, samples)
    return document, store


def judge(store: Store, start: int, stop: int) -> None:
    """Judged completions; the reward is whether the first sampled id is even."""
    for number in range(start, stop):
        rng = random.Random(number)
        prompt = [5, 6, 7, *(rng.randrange(3, 49000) for _ in range(20))]
        ids = [rng.randrange(3, 49000) for _ in range(rng.randrange(3, 8))]
        choice = Choice(
            index=0,
            message={"role": "assistant", "content": "x"},
            finish_reason="stop",
            token_ids=ids,
            logprobs=[-12.0] * len(ids),
        )
        made = rows.completion(
            f"c{number}", policy_id=BASE_POLICY, prompt_token_ids=prompt, choices=[choice], task="a/b/1"
        )
        with store.write() as tx:
            completions.insert(tx, made)
            outcomes.record(tx, rows.outcome(f"o{number}", completion_id=made.id, value=float(ids[0] % 2)))


def learn(
    processes: ForkServerContext,
    document: dict[str, Any],
    kill_at: str | None,
    out: Path | None = None,
    spoil: bool = False,
) -> int | None:
    arguments = (document, kill_at, str(out) if out else None, spoil)
    process = processes.Process(target=killing.learn, args=arguments)
    process.start()
    process.join(120)
    if process.exitcode is None:
        process.kill()
        pytest.fail("the learner did not end")
    return process.exitcode


def weights(document: dict[str, Any], store: Store) -> list[dict[str, Any]]:
    """Tensors of every registered adapter policy, each verified first."""
    with store.read() as tx:
        known = [p for p in policies.list_policies(tx) if p.manifest.kind is PolicyKind.ADAPTER]
        base = policies.get(tx, BASE_POLICY)
    assert base is not None
    for policy in known:
        artifacts.verify_policy(Path(policy.path), base.manifest.base, list(TARGETS), RANK)
    return [load_file(Path(policy.path) / "adapter_model.safetensors") for policy in known]


def used(store: Store) -> list[tuple[str, int]]:
    with store.read() as tx:
        table = tables.used_samples
        return sorted((row.key, row.update) for row in tx.execute(select(table)))


def wide_open() -> dict[str, Any]:
    """Bounds under which the invented log-probs of these samples all count."""
    return {"ratio_floor": 0.0, "sequence_band": [1e-9, 1e9]}


def test_a_kill_at_any_point_changes_nothing(
    tmp_path: Path, tiny_moe: Path, processes: ForkServerContext
) -> None:
    """Killed at each point in turn and started again, a learner publishes what an undisturbed one does."""
    document, store = deploy(tmp_path / "calm", tiny_moe, 17, **wide_open())
    passed = tmp_path / "passed"
    assert learn(processes, document, None, passed) == 0
    assert set(passed.read_text().splitlines()) == set(KILLS)
    calm, calm_used = weights(document, store), used(store)
    assert len(calm) == 2
    assert len(calm_used) == 16, "the seventeenth does not fill a batch"

    document, store = deploy(tmp_path / "killed", tiny_moe, 17, **wide_open())
    for point in KILLS:
        assert learn(processes, document, point) == -signal.SIGKILL
        weights(document, store)
    assert learn(processes, document, None) == 0
    assert used(store) == calm_used
    killed = weights(document, store)
    assert len(killed) == len(calm)
    for one, other in zip(killed, calm, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert abs(one[name] - other[name]).max() < 1e-6, name
    with store.read() as tx:
        status = learning.get_learner_status(tx)
    assert status is not None
    assert (status["trained"], status["judged"], status["updates"]) == (16, 16 + 1, 4)
    left = [path.name for path in (tmp_path / "killed" / "learner" / "continuous").iterdir()]
    assert left == ["update-000004"]


@pytest.mark.parametrize("spoilt", [0, 4])
def test_an_update_that_is_not_finite_is_no_update(
    tmp_path: Path, tiny_moe: Path, processes: ForkServerContext, spoilt: int
) -> None:
    """The samples from `spoilt` on are lost; for the rest a learner does as one that never had them."""
    document, store = deploy(tmp_path / "calm", tiny_moe, spoilt, **wide_open())
    judge(store, spoilt + 4, 12)
    assert learn(processes, document, None) == 0
    calm = weights(document, store)

    document, store = deploy(tmp_path / "spoilt", tiny_moe, spoilt, **wide_open())
    assert learn(processes, document, None) == 0
    judge(store, spoilt, 12)
    assert learn(processes, document, None, spoil=True) == 0
    with store.read() as tx:
        row = learning.get_checkpoint(tx, "continuous")
    assert row is not None
    assert (row.update, row.state["counts"]["dropped"]) == (spoilt // 4, {"not finite": 4})
    assert {key for key, _ in used(store)} == {f"c{number}" for number in range(spoilt + 4)}

    assert learn(processes, document, None) == 0
    spoilt_weights = weights(document, store)
    assert len(spoilt_weights) == len(calm) == 1
    for name, tensor in calm[0].items():
        assert abs(spoilt_weights[0][name] - tensor).max() < 1e-6, name
    with store.read() as tx:
        status = learning.get_learner_status(tx)
    assert status is not None
    assert (status["trained"], status["updates"], status["why_not"]) == (8, 2, {"not finite": 4})


def test_it_waits_for_a_slot_and_goes_on(
    tmp_path: Path, tiny_moe: Path, processes: ForkServerContext
) -> None:
    document, store = deploy(tmp_path / "home", tiny_moe, 16, **wide_open())
    document["engine"]["max_policies"] = 1
    assert learn(processes, document, None) == 0
    with store.read() as tx:
        (candidate,) = policies.list_policies(tx, [PolicyState.CANDIDATE])
        status = learning.get_learner_status(tx)
    assert status is not None
    assert status["state"] == "waiting for a free policy slot"
    assert status["updates"] == 4
    with store.write() as tx:
        policies.transition(
            tx, candidate.id, PolicyState.CANDIDATE, PolicyState.REJECTED, actor="test", reason="worse"
        )
    assert learn(processes, document, None) == 0
    with store.read() as tx:
        (second,) = policies.list_policies(tx, [PolicyState.CANDIDATE])
    assert second.manifest.parent == BASE_POLICY
    assert second.manifest.step == 4


def test_after_a_rollback_it_begins_from_the_promoted_policy(
    tmp_path: Path, tiny_moe: Path, processes: ForkServerContext
) -> None:
    document, store = deploy(tmp_path / "home", tiny_moe, 8, **wide_open())
    assert learn(processes, document, None) == 0
    with store.write() as tx:
        (candidate,) = policies.list_policies(tx, [PolicyState.CANDIDATE])
        steps = [PolicyState.CANDIDATE, PolicyState.GATE, PolicyState.CANARY]
        for frm, to in itertools.pairwise(steps):
            policies.transition(tx, candidate.id, frm, to, actor="test", evidence={"n": 1})
        policies.promote(tx, candidate.id, actor="test")
        policies.rollback(tx, actor="test", reason="worse in production")
    assert learn(processes, document, None) == 0
    with store.read() as tx:
        row = learning.get_checkpoint(tx, "continuous")
    assert row is not None
    assert row.state["restart"]
    judge(store, 8, 16)
    assert learn(processes, document, None) == 0
    with store.read() as tx:
        row = learning.get_checkpoint(tx, "continuous")
        (again,) = policies.list_policies(tx, [PolicyState.CANDIDATE])
    assert row is not None
    assert (row.update, row.state.get("restart")) == (4, None)
    assert (again.manifest.parent, again.manifest.step) == (BASE_POLICY, 4)
    # Two steps from no effect, as the first policy was; four steps would be about twice as far.
    first, second = (
        sum(float(abs(tensor).sum()) for name, tensor in adapter.items() if "lora_B" in name)
        for adapter in weights(document, store)
    )
    assert second < 1.4 * first


def test_reward_moves_the_probabilities(tmp_path: Path, tiny_moe: Path, processes: ForkServerContext) -> None:
    """After a few updates rewarded answers are likelier against unrewarded ones than before."""
    from learner import model as models
    from learner.batch import Sample, micro_batches
    from learner.model import Loading
    from tests.learner.training import ADAPTER

    document, store = deploy(tmp_path / "home", tiny_moe, 16, **wide_open())
    assert learn(processes, document, None) == 0
    with store.read() as tx:
        last = policies.list_policies(tx, [PolicyState.CANDIDATE])[-1]
        made = [completions.get(tx, f"c{number}") for number in range(16)]
    samples = []
    for completion in made:
        assert completion is not None
        prompt, ids = completion.prompt_token_ids, completion.choices[0].token_ids
        samples.append(
            Sample(
                tokens=prompt + ids,
                sampled=[False] * len(prompt) + [True] * len(ids),
                behaviour=[0.0] * len(prompt + ids),
                reward=float(ids[0] % 2),
            )
        )
    model = models.load(str(tiny_moe), ADAPTER, Loading(), seed=0)

    def margin() -> float:
        (batch,) = micro_batches(samples, max_tokens=10_000, pad_id=2)
        logprobs_N = model(batch).detach()
        good_N = batch.sample_N.apply_(lambda index: int(samples[index].reward))
        return float(logprobs_N[good_N == 1].mean() - logprobs_N[good_N == 0].mean())

    before = margin()
    models.set_adapter_weights(model, models.read_adapter(Path(last.path), ADAPTER))
    assert margin() > before + 0.05


def test_while_learning_is_off_no_torch_is_loaded(tmp_path: Path, tiny_moe: Path) -> None:
    _, store = deploy(tmp_path / "home", tiny_moe, 0)
    killing.switch_on(store, on=False)
    file = tmp_path / "off.toml"
    file.write_text(f'[home]\npath = "{tmp_path}/home"\n[learner]\npoll_seconds = 0.05\n')
    code = (
        "import sys, threading, os, signal, time\n"
        "from learner import switch\n"
        "threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()\n"
        f"code = switch.main(['--config', {str(file)!r}])\n"
        "assert not {'torch', 'deepspeed', 'transformers'} & set(sys.modules)\n"
        "sys.exit(code)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
    with store.read() as tx:
        status = learning.get_learner_status(tx)
    assert status is not None
    assert status["state"] == "off"


def test_a_terminated_learner_ends_cleanly(tmp_path: Path, tiny_moe: Path) -> None:
    document, store = deploy(tmp_path / "home", tiny_moe, 4, **wide_open())
    lines = [f'[home]\npath = "{tmp_path}/home"']
    for name in ("model", "engine", "learner"):
        lines.append(f"[{name}]")
        lines += [f"{key} = {_toml(value)}" for key, value in document[name].items()]
    file = tmp_path / "run.toml"
    file.write_text("\n".join(lines))
    assert config.read(file)["learner"]["rank"] == RANK
    process = subprocess.Popen([sys.executable, "-m", "learner", "run", "--config", str(file)])
    try:
        deadline = time.monotonic() + 120
        while not used(store):
            assert process.poll() is None, "the learner died"
            assert time.monotonic() < deadline
            time.sleep(0.1)
        with pytest.raises(config.ConfigError, match=f"process {process.pid} is learning continuous"):
            killing.learn(document, None)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
    with store.read() as tx:
        row = learning.get_checkpoint(tx, "continuous")
    assert row is not None
    assert Path(row.path).is_dir()


def _toml(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    return repr(value)
