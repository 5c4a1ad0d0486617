"""Several processes under ZeRO learn what one process without it learns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from learner.engine import RescaledAdamW

STEPS = 2


def runs(launcher: list[str], model: Path, *wanted: str) -> dict[str, dict[str, Any]]:
    """Results of `tests.learner.training` by kind of run."""
    done = subprocess.run(
        [*launcher, "-m", "tests.learner.training", str(model), str(STEPS), *wanted],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return {result["run"].split(":")[1]: result for result in results}


@pytest.fixture(scope="module")
def alone(tiny_moe: Path) -> dict[str, dict[str, Any]]:
    return runs([sys.executable], tiny_moe, "0:adapter", "0:full")


@pytest.fixture(scope="module")
def together(tiny_moe: Path) -> dict[str, dict[str, Any]]:
    """Two processes: ZeRO-2 on an adapter, ZeRO-3 on every weight of a model with distinct experts."""
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    return runs([torchrun, "--standalone", "--nproc_per_node", "2"], tiny_moe, "2:adapter", "3:full")


@pytest.mark.parametrize("kind", ["adapter", "full"])
def test_two_processes_equal_one(
    alone: dict[str, dict[str, Any]], together: dict[str, dict[str, Any]], kind: str
) -> None:
    one, two = alone[kind], together[kind]
    assert (one["world"], two["world"]) == (1, 2)
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-6)
    assert one["losses"][0] != one["losses"][1]
    assert two["weights"].keys() == one["weights"].keys()
    for name, total in one["weights"].items():
        assert two["weights"][name] == pytest.approx(total, rel=1e-5), name


def test_the_learning_rate_rises_and_goes_on_where_a_checkpoint_left_it() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = RescaledAdamW([weight], lr=0.4, weight_decay=0.0)
    optimizer.warmup = 4

    def moved(by: RescaledAdamW) -> float:
        before = float(weight.detach())
        weight.grad = torch.ones(1)
        by.step()
        return before - float(weight.detach())

    # Adam moves by the whole rate while all gradients are alike.
    assert [moved(optimizer) for _ in range(3)] == pytest.approx([0.1, 0.2, 0.3], rel=1e-5)
    resumed = RescaledAdamW([weight], lr=0.4, weight_decay=0.0)
    resumed.warmup = 4
    resumed.load_state_dict(optimizer.state_dict())
    assert [moved(resumed) for _ in range(3)] == pytest.approx([0.4, 0.4, 0.4], rel=1e-5)
