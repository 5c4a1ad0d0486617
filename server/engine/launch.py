"""How a replica's vLLM is started: arguments, environment and the files of one engine.

`launch` is a pure function of the replica's configuration, its recipe and what the host offers, so what
will run can be read, tested and printed without running it. Nothing here starts a process.

Invariant: every engine computes what capture relies on (log-probs of the policy at its temperature, no
sampling defaults taken from the model, one API process that holds all names) whatever its tier.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quant import acceptance
from quant.recipes import RECIPES, Recipe
from rollout import artifacts, positions
from rollout.config import ConfigError, EngineConfig, ModelConfig, TierConfig, home, section, tiers

BASE_MODEL = "base"
"""Name under which every engine serves its base weights."""
DRAIN_SECONDS = 5
"""How long vLLM lets running requests finish once it is told to stop."""
SPARE_ADAPTERS = 2
"""Adapters an engine keeps in memory beyond those it can compute with, so that one still in use by a
request in flight is never read again from a folder that may be gone."""
KEEP_ALIVE_SECONDS = 60
"""How long vLLM keeps an idle connection. The client gives it up earlier: a request sent on a connection
that is being closed would look like a dead engine."""
BATCH_PRIORITY = 10
"""vLLM's priority from which a request is batch work; a smaller number is served earlier."""
WORKER_EXTENSION = "server.engine.worker.extension.RatchetWorker"
DRAFTS = "ratchet_drafts"
"""Key of vLLM's ``--additional-config``: which drafted tokens are verified ("auto", "all", "none")."""
_SOCKET_PATH_LIMIT = 107
"""Bytes of a Unix socket's path (sun_path without its terminator)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One engine of the deployment: ``standard-0`` is the first replica of tier ``standard``."""

    id: str
    tier: str
    recipe: Recipe
    model: ModelConfig
    engine: EngineConfig
    kv_cache_dtype: str
    speculation: dict[str, Any] | None
    drafts: str
    home: Path
    place: int
    """Position among the deployment's replicas, which divide the cores of this machine."""
    of: int
    """How many these are."""

    @property
    def socket(self) -> Path:
        return self.home / "run" / f"{self.id}.sock"

    @property
    def state_file(self) -> Path:
        return self.home / "run" / f"{self.id}.json"

    @property
    def log_file(self) -> Path:
        return self.home / "logs" / f"{self.id}.log"


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What the machine offers an engine."""

    device: str
    """"gpu" or "cpu"."""
    cores: str
    """Cores this process may use, as ``0,1``."""
    preload: tuple[Path, ...]
    """Libraries to load first, in order."""
    missing: tuple[str, ...]
    """Libraries worth having that were not found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Everything a process needs to become this replica."""

    argv: list[str]
    env: dict[str, str]
    """Added to the parent's environment."""
    socket: Path
    state_file: Path
    log_file: Path
    notes: list[str] = field(default_factory=list)
    """What the operator should know; first lines of the log."""


def replica(document: dict[str, Any], replica_id: str) -> Replica:
    """The replica named `replica_id` of a deployment.

    Raises ConfigError when there is no such tier, replica or recipe.
    """
    tier = replica_id.rpartition("-")[0]
    tier_configs: dict[str, TierConfig] = tiers(document)
    known = [f"{name}-{i}" for name, config in tier_configs.items() for i in range(config.replicas)]
    if replica_id not in known:
        raise ConfigError(
            f"--replica {replica_id}: the configuration has {', '.join(known) or 'no replicas'}"
        )
    config = tier_configs[tier]
    if config.recipe not in RECIPES:
        raise ConfigError(f"tiers.{tier}.recipe: {config.recipe!r} is not one of {', '.join(RECIPES)}")
    found = Replica(
        id=replica_id,
        tier=tier,
        recipe=RECIPES[config.recipe],
        model=section(document, "model", ModelConfig),
        engine=section(document, "engine", EngineConfig),
        kv_cache_dtype=config.kv_cache_dtype,
        speculation=config.speculation,
        drafts=config.drafts,
        home=home(document),
        place=known.index(replica_id),
        of=len(known),
    )
    if len(os.fsencode(found.socket)) > _SOCKET_PATH_LIMIT:
        raise ConfigError(
            f"home.path: {found.socket} is longer than {_SOCKET_PATH_LIMIT} bytes, a socket's limit"
        )
    return found


def check_accepted(replica: Replica) -> list[str]:
    """What the operator should know of the recipe's acceptance test.

    Raises ConfigError when the recipe failed it on this very model.
    """
    if not replica.recipe.quantized and replica.kv_cache_dtype == "auto":
        return []
    what = replica.recipe.name
    if replica.kv_cache_dtype != "auto":
        what += f" with a cache in {replica.kv_cache_dtype}"
    again = f"python -m quant accept --tier {replica.tier}"
    try:
        finding = acceptance.read(replica.home, replica.recipe.name, replica.kv_cache_dtype)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if finding is None or finding.base != artifacts.base_id(replica.model.path):
        return [f"recipe {what} was not tested on this model: {again}"]
    if finding.failures:
        raise ConfigError(
            f"tiers.{replica.tier}.recipe: {what} failed its acceptance test: "
            f"{'; '.join(finding.failures)}. Choose another recipe, or test it again: {again}"
        )
    return []


def detect(engine: EngineConfig) -> Host:
    """Look at this machine once. `engine.device` of ``cpu`` or ``gpu`` settles the device."""
    device = engine.device if engine.device != "auto" else ("gpu" if _gpu_answers() else "cpu")
    if device not in ("cpu", "gpu"):
        raise ConfigError(f"engine.device: {device!r} is not one of auto, cpu, gpu")
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    found: list[Path] = []
    missing: list[str] = []
    for name, places in {
        "libtcmalloc": _library_places("libtcmalloc_minimal.so.4", "libtcmalloc.so.4"),
        # vLLM's CPU kernels run several times faster on Intel's OpenMP run time than on GNU's.
        "libiomp5": [Path(sys.prefix) / "lib" / "libiomp5.so"],
    }.items():
        path = next((place for place in places if place.exists()), None)
        if path is None:
            missing.append(name)
        else:
            found.append(path)
    return Host(device=device, cores=cores, preload=tuple(found), missing=tuple(missing))


def launch(replica: Replica, host: Host) -> Launch:
    """Arguments and environment of `replica` on `host`.

    Raises ConfigError when the recipe is for another kind of device.
    """
    recipe = replica.recipe
    if recipe.device not in ("any", host.device):
        raise ConfigError(
            f"tiers.{replica.tier}.recipe: {recipe.name!r} needs a {recipe.device}, this is a {host.device}"
        )
    env = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(KEEP_ALIVE_SECONDS),
        "TOKENIZERS_PARALLELISM": "false",
    }
    notes = [f"replica {replica.id}: recipe {recipe.name} on {host.device}"]
    if host.device == "cpu":
        env |= _cpu_env(replica, host)
        notes += [f"{name} not found: the engine runs slower without it" for name in host.missing]
    argv = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *_model_args(replica),
        *_adapter_args(replica.engine),
        *_capture_args(),
        *(
            ["--enforce-eager"]
            if host.device == "cpu" and "--enforce-eager" not in recipe.args_on(host.device)
            else []
        ),
        *recipe.args_on(host.device),
        *(["--kv-cache-dtype", replica.kv_cache_dtype] if replica.kv_cache_dtype != "auto" else []),
        *_drafting_args(replica),
        *replica.engine.extra_args,
    ]
    return Launch(
        argv=argv,
        env=env | dict(recipe.env),
        socket=replica.socket,
        state_file=replica.state_file,
        log_file=replica.log_file,
        notes=notes,
    )


def _model_args(replica: Replica) -> list[str]:
    engine = replica.engine
    return [
        *("--model", replica.model.path, "--served-model-name", BASE_MODEL),
        *("--uds", str(replica.socket)),
        *("--max-model-len", str(engine.max_model_len), "--max-num-seqs", str(engine.max_num_seqs)),
        *(["--long-prefill-token-threshold", str(engine.prefill_chunk)] if engine.prefill_chunk else []),
        # On a CPU vLLM's own default is 128: prompts of a few hundred tokens would hardly ever hit.
        *(["--block-size", str(engine.block_size)] if engine.block_size else []),
        *(["--hf-overrides", json.dumps(scaled)] if (scaled := positions.overrides(replica.model)) else []),
        *(["--dtype", engine.dtype] if "--dtype" not in replica.recipe.engine_args else []),
        *("--scheduling-policy", "priority"),
        *("--enable-auto-tool-choice", "--tool-call-parser", replica.model.tool_parser),
        # The names of loaded adapters live in the API process: there must be one.
        *("--api-server-count", "1"),
        *("--shutdown-timeout", str(DRAIN_SECONDS)),
        "--disable-uvicorn-access-log",
    ]


def _adapter_args(engine: EngineConfig) -> list[str]:
    return [
        "--enable-lora",
        *("--max-loras", str(engine.max_policies)),
        *("--max-cpu-loras", str(engine.max_policies + SPARE_ADAPTERS)),
        *("--max-lora-rank", str(engine.max_lora_rank)),
        *("--lora-target-modules", *engine.target_modules),
        *("--worker-extension-cls", WORKER_EXTENSION),
    ]


def _drafting_args(replica: Replica) -> list[str]:
    if not replica.speculation:
        return []
    return [
        *("--speculative-config", json.dumps(replica.speculation)),
        *("--additional-config", json.dumps({DRAFTS: replica.drafts})),
    ]


def _capture_args() -> list[str]:
    return [
        *("--generation-config", "vllm"),
        *("--logprobs-mode", "processed_logprobs"),
        *("--max-logprobs", "64"),
        "--enable-prompt-tokens-details",
        "--enable-request-id-headers",
    ]


def _cpu_env(replica: Replica, host: Host) -> dict[str, str]:
    threads = replica.engine.threads
    env = {
        "VLLM_CPU_KVCACHE_SPACE": str(replica.engine.kv_cache_gb),
        # vLLM's own "auto" keeps one core per worker back: on two cores it would compute on one.
        "VLLM_CPU_OMP_THREADS_BIND": _own_cores(replica, host) if threads == "auto" else threads,
    }
    if host.preload:
        env["LD_PRELOAD"] = ":".join(map(str, host.preload))
    return env


def _own_cores(replica: Replica, host: Host) -> str:
    """The share of `replica`, as ``0,1``; with fewer cores than replicas, one core that others use too.

    The threads of an engine wait for one another in every layer, so two engines on the same cores wait for
    each other's: on two cores one of them starves.
    """
    cores = host.cores.split(",")
    first = replica.place * len(cores) // replica.of
    end = (replica.place + 1) * len(cores) // replica.of
    return ",".join(cores[first : max(end, first + 1)])


def _gpu_answers() -> bool:
    if shutil.which("nvidia-smi") is None:
        return False
    try:
        answer = subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return False
    return answer.returncode == 0 and b"GPU" in answer.stdout


def _library_places(*names: str) -> list[Path]:
    folders = [Path("/usr/lib") / f"{os.uname().machine}-linux-gnu", Path("/usr/lib64"), Path("/usr/lib")]
    return [folder / name for folder in folders for name in names]
