"""A real gateway process over real engines on the tiny model, and policies with true fingerprints."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
from tokenizers import Tokenizer

from rollout import artifacts, config, policies
from rollout.artifacts import Artifacts
from rollout.records import (
    Completion,
    Fingerprint,
    FingerprintPrompt,
    PolicyKind,
    PolicyManifest,
    PolicyState,
)
from rollout.seed import seed
from rollout.store import Store, completions
from tests.fixtures.engines import eventually
from tests.fixtures.models import RANK, TARGETS, write_adapter

READY_SECONDS = 60.0
PROMPTS, LENGTH, POSITIONS = 3, 24, 8


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _http() -> httpx.Client:
    """No kept connections: the gateway at the other end may have been killed since."""
    return httpx.Client(limits=httpx.Limits(max_keepalive_connections=0), timeout=120)


@dataclass
class Deployment:
    """One home with a store, policies and (somewhere) engines; gateways come and go on it."""

    config: Path
    home: Path
    overrides: list[str]
    port: int = field(default_factory=free_port)
    http: httpx.Client = field(default_factory=_http)

    @property
    def document(self) -> dict[str, Any]:
        return config.read(self.config, self.overrides)

    @property
    def model_dir(self) -> Path:
        return Path(self.document["model"]["path"])

    @property
    def key(self) -> str:
        return (self.home / "dev.key").read_text().strip()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def no_whitespace(self) -> dict[str, float]:
        """``logit_bias`` against tokens of whitespace alone: a grammar lets a random model spin on them."""
        tokenizer = Tokenizer.from_file(str(self.model_dir / "tokenizer.json"))
        texts = tokenizer.decode_batch([[i] for i in range(tokenizer.get_vocab_size())])
        return {str(i): -100.0 for i, text in enumerate(texts) if text and not text.strip()}

    def prepare(self) -> None:
        """Migrate and seed, as `ratchet up` does."""
        self.home.mkdir(parents=True, exist_ok=True)
        with self.store() as store:
            store.migrate()
            seed(store, self.document)

    @contextmanager
    def store(self) -> Iterator[Store]:
        store = Store.open(config.section(self.document, "store", config.StoreConfig).url)
        try:
            yield store
        finally:
            store.close()

    def recorded(self, completion_id: str) -> Completion:
        with self.store() as store, store.read() as tx:
            found = completions.get(tx, completion_id)
        assert found is not None
        return found

    def client(self, **options: Any) -> openai.OpenAI:
        values: dict[str, Any] = {"api_key": self.key, "max_retries": 0, "timeout": 120}
        return openai.OpenAI(base_url=f"{self.url}/v1", **(values | options))

    def async_client(self, **options: Any) -> openai.AsyncOpenAI:
        values: dict[str, Any] = {"api_key": self.key, "max_retries": 0, "timeout": 120}
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", **(values | options))

    def call(self, method: str, path: str, body: Any = None, key: str | None = None) -> httpx.Response:
        headers = {"authorization": f"Bearer {key or self.key}"}
        return self.http.request(method, f"{self.url}{path}", json=body, headers=headers)

    def policy(self, policy_id: str) -> dict[str, Any]:
        body: dict[str, Any] = self.call("GET", f"/v1/rl/policies/{policy_id}").json()
        return body

    def state(self) -> dict[str, Any]:
        body: dict[str, Any] = self.call("GET", "/v1/rl/tiers").json()
        return body

    def new_policy(self, seed: int, *, parent: str = "p000000", register: bool = True) -> str:
        """Publish a random adapter with a true fingerprint, as a candidate."""
        with self.store() as store:
            with store.write() as tx:
                policy_id = policies.reserve(tx)
            manifest = PolicyManifest(
                id=policy_id,
                parent=parent,
                base=artifacts.base_id(self.model_dir),
                kind=PolicyKind.ADAPTER,
                target_modules=list(TARGETS),
                rank=RANK,
                job="test",
                step=seed,
                recipe={},
                files={},
                created_at=time.time(),
            )
            files = Artifacts(config.section(self.document, "artifacts", config.ArtifactsConfig).root)
            parent_path = None if parent == "p000000" else files.path(parent)
            path = files.write_policy(
                manifest,
                lambda folder: self._write(folder, seed, policy_id, (parent, parent_path)),
            )
            if register:
                with store.write() as tx:
                    policies.register(tx, artifacts.read_manifest(path), str(path))
        return policy_id

    def _write(self, folder: Path, seed: int, policy_id: str, parent: tuple[str, Path | None]) -> None:
        made = folder / "made"
        write_adapter(made, seed)
        for file in list(made.iterdir()):
            file.rename(folder / file.name)
        made.rmdir()
        fingerprint = true_fingerprint(self.model_dir, folder, policy_id, *parent)
        (folder / "fingerprint.json").write_bytes(msgspec.json.encode(fingerprint))

    def pass_gate(self, policy_id: str) -> None:
        """What the judge does when a candidate won."""
        with self.store() as store, store.write() as tx:
            policies.transition(tx, policy_id, PolicyState.CANDIDATE, PolicyState.GATE, actor="test")
            policies.transition(
                tx, policy_id, PolicyState.GATE, PolicyState.CANARY, actor="test", evidence={"won": True}
            )

    def verified(self, policy_id: str) -> bool:
        replicas = [replica for tier in self.state()["tiers"].values() for replica in tier]
        return all(policy_id in replica["verified"] for replica in replicas)

    def place(self, policy_id: str) -> None:
        eventually(lambda: self.verified(policy_id), READY_SECONDS, f"{policy_id} verified everywhere")


@contextmanager
def running_gateway(
    deployment: Deployment, *overrides: str, wait: bool = True
) -> Iterator[subprocess.Popen[bytes]]:
    """A gateway process; ended at the end, if a test has not done so."""
    arguments = [f"gateway.port={deployment.port}", *deployment.overrides, *overrides]
    with running_module(deployment.config, arguments, deployment.home / "gateway.log", "server") as process:
        if wait:
            eventually(lambda: is_ready(deployment, process), READY_SECONDS, "the gateway is ready")
        yield process


@contextmanager
def running_module(
    config: Path, overrides: list[str], log: Path, *command: str
) -> Iterator[subprocess.Popen[bytes]]:
    """``python -m COMMAND`` of a deployment; ended at the end, if a test has not done so."""
    argv = [sys.executable, "-m", *command, "--config", str(config)]
    argv += [part for override in overrides for part in ("--set", override)]
    with log.open("ab") as output:
        process = subprocess.Popen(argv, stdout=output, stderr=output)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(30)


def is_ready(deployment: Deployment, process: subprocess.Popen[bytes] | None = None) -> bool:
    assert process is None or process.poll() is None, (deployment.home / "gateway.log").read_text()[-3000:]
    return answers(lambda: deployment.http.get(f"{deployment.url}/healthz").status_code == 200)


def answers(ask: Callable[[], bool]) -> bool:
    try:
        return ask()
    except httpx.TransportError:
        return False


def true_fingerprint(
    model_dir: Path, adapter: Path, policy_id: str, parent: str, parent_path: Path | None
) -> Fingerprint:
    """What the learner computes: log-probs of policy, parent and base by another implementation."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    prompts = torch.randint(100, 20_000, (PROMPTS, LENGTH), generator=torch.Generator().manual_seed(7))

    def logprobs(path: Path | None) -> Any:
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        if path is not None:
            model = PeftModel.from_pretrained(model, str(path))
        with torch.no_grad():
            logits = model(prompts).logits[:, :-1].log_softmax(-1)
        return logits.gather(-1, prompts[:, 1:, None])[..., 0]

    base, policy = logprobs(None), logprobs(adapter)
    before = base if parent_path is None else logprobs(parent_path)
    rows = []
    for row in range(PROMPTS):
        top = (policy[row] - before[row]).abs().topk(POSITIONS).indices.sort().values
        rows.append(
            FingerprintPrompt(
                token_ids=prompts[row].tolist(),
                positions=(top + 1).tolist(),
                policy=policy[row][top].tolist(),
                parent=before[row][top].tolist(),
                base=base[row][top].tolist(),
            )
        )
    return Fingerprint(policy=policy_id, parent=parent, prompts=rows)


def tool(name: str, *parameters: str, strict: bool = False) -> dict[str, Any]:
    """A function tool whose parameters are short choices. Made `strict`, a forced call ends soon."""
    schema = {
        "type": "object",
        "properties": {parameter: {"type": "string", "enum": ["a", "b"]} for parameter in parameters},
        "required": list(parameters),
        "additionalProperties": False,
    }
    function: dict[str, Any] = {"name": name, "description": f"does {name}", "parameters": schema}
    if strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def lines(response: httpx.Response) -> list[Any]:
    """Data of a whole event stream."""
    found = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in found]
