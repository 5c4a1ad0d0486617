"""Short training runs, alone or as one of several processes; prints what came of each as JSON.

``torchrun --nproc_per_node 2 -m tests.learner.training MODEL STEPS 2:adapter 3:full``: the runs are ZeRO
stages with what trains, an adapter or all weights. The samples are the same whatever the number of processes,
and unequal in length, so the processes' shares differ.
"""

from __future__ import annotations

import json
import random
import sys

import torch

from learner import model as models
from learner.batch import Sample, micro_batches
from learner.engine import Engine, Settings
from learner.model import Adapter, Loading
from tests.fixtures.models import RANK, TARGETS

ADAPTER = Adapter(target_modules=tuple(TARGETS), rank=RANK, alpha=2 * RANK)


def samples(number: int, seed: int = 0) -> list[Sample]:
    """Random token sequences, some of which begin alike."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, 49000) for _ in range(24)] for _ in range(3)]
    made = []
    for _ in range(number):
        prompt = rng.choice(prompts) + [rng.randrange(3, 49000) for _ in range(rng.randrange(6))]
        answer = [rng.randrange(3, 49000) for _ in range(rng.randrange(4, 12))]
        tokens = prompt + answer
        made.append(
            Sample(
                tokens=tokens,
                sampled=[False] * len(prompt) + [True] * len(answer),
                behaviour=[0.0] * len(prompt) + [-5.0] * len(answer),
                policies=("p000000",),
            )
        )
    return made


def engine(model: str, *, stage: int = 0, full: bool = False) -> Engine:
    torch.manual_seed(0)
    settings = Settings(learning_rate=1e-2, max_grad_norm=1.0, zero_stage=stage, threads=1)
    return Engine(models.load(model, None if full else ADAPTER, Loading(), seed=0), settings)


def train(trained: Engine, steps: int) -> list[float]:
    """Losses of `steps` updates over several micro-batches each, with part of the tokens masked."""
    losses = []
    for step in range(steps):
        batches = micro_batches(samples(6, seed=step), max_tokens=64, pad_id=2)
        total = sum(len(batch.target_N) for batch in batches)
        kept = loss = 0.0
        for start in range(0, len(batches), trained.world):
            mine = start + trained.rank
            batch = batches[min(mine, len(batches) - 1)]
            keep_N = batch.target_N % 3 > 0
            nll = -(trained.logprobs(batch) * keep_N).sum() / total
            trained.backward(nll if mine < len(batches) else nll * 0.0)
            if mine < len(batches):
                kept += float(keep_N.sum())
                loss += float(nll.detach())
        kept, loss = trained.sum([kept, loss])
        trained.step(total / kept)
        losses.append(loss * total / kept)
    return losses


def main(model: str, steps: str, *runs: str) -> None:
    for run in runs:
        stage, kind = run.split(":")
        trained = engine(model, stage=int(stage), full=kind == "full")
        losses = train(trained, int(steps))
        weights = trained.weights()
        if trained.rank == 0:
            sums = {name: float(tensor.double().abs().sum()) for name, tensor in weights.items()}
            result = {"run": run, "world": trained.world, "losses": losses, "weights": sums}
            print("RESULT " + json.dumps(result), flush=True)
    trained.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
