"""The default model: a mixture of experts that computes what the dense model does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from learner import build, upcycle
from learner.build import BuildError
from rollout import artifacts
from rollout.config import ModelConfig

WARM_START = Path(__file__).parents[2] / "deploy" / "warm-start"


def tiny_llama(layers: int = 2) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def test_upcycling_keeps_the_function() -> None:
    dense = tiny_llama()
    mixture = upcycle.upcycle(dense, groups=4, seed=0)
    assert mixture.config.num_local_experts == 8
    ids = torch.randint(0, 300, (2, 40))
    assert upcycle.max_logit_difference(dense, mixture, ids) < 1e-4
    experts = mixture.model.layers[0].mlp.experts.gate_up_proj
    assert not torch.equal(experts[0], experts[1])


def test_the_router_depends_on_the_seed_alone() -> None:
    dense = tiny_llama()
    one, same, other = (upcycle.upcycle(dense, groups=2, seed=seed) for seed in (1, 1, 2))
    gates = [model.model.layers[1].mlp.gate.weight for model in (one, same, other)]
    assert torch.equal(gates[0], gates[1])
    assert not torch.equal(gates[0], gates[2])


def test_the_default_model_is_exact_and_the_warm_start_is_made_for_it(tmp_path: Path) -> None:
    path = tmp_path / "models" / "default"
    lines: list[str] = []
    model = ModelConfig(path=str(path))
    assert build.ensure(model, lines.append) == path
    made = json.loads((path / "ratchet.json").read_text())
    assert made["max_logit_difference"] < 1e-3
    assert [entry.name for entry in path.parent.iterdir()] == ["default"]
    tokenizer = AutoTokenizer.from_pretrained(path)
    source = upcycle.gguf_file()
    dense = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    mixture = AutoModelForCausalLM.from_pretrained(path)
    assert mixture.config.num_local_experts == 8
    assert mixture.config.num_experts_per_tok == 2
    text = "def fibonacci(n):\n    return n if n < 2 else"
    ids = tokenizer(text, return_tensors="pt").input_ids
    assert upcycle.max_logit_difference(dense, mixture, ids) < 1e-3
    assert tokenizer.chat_template == upcycle.TEMPLATE.read_text()
    base = artifacts.base_id(path)
    artifacts.verify_policy(WARM_START, base, ["q_proj", "k_proj", "v_proj", "o_proj"], 16)
    # A second call finds it and touches nothing.
    before = (path / "model.safetensors").stat().st_mtime_ns
    lines.clear()
    build.ensure(model, lines.append)
    assert lines == []
    assert (path / "model.safetensors").stat().st_mtime_ns == before


def test_a_model_that_cannot_be_used_is_refused_with_what_to_change(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"model\.build: no recipe 'nope'; known: smollm2-moe"):
        build.ensure(ModelConfig(path=str(tmp_path / "x"), build="nope"), print)
    with pytest.raises(BuildError, match=r"holds no config\.json"):
        build.ensure(ModelConfig(path=str(tmp_path / "x"), build=""), print)
    dense = tmp_path / "dense"
    dense.mkdir()
    (dense / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(BuildError, match=r"\(llama\) has no experts"):
        build.ensure(ModelConfig(path=str(dense)), print)


@pytest.mark.parametrize(
    ("settings", "experts"),
    [
        ({"num_local_experts": 8}, 8),
        ({"num_experts": 128}, 128),
        ({"n_routed_experts": 64}, 64),
        ({"text_config": {"num_experts": 16}}, 16),
        ({"hidden_size": 5}, 0),
    ],
)
def test_experts_are_found_under_every_name(settings: dict[str, int], experts: int) -> None:
    assert build.expert_count(settings) == experts


def test_nothing_half_written_is_left(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "part").write_text("x")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError):
        build.write_folder(tmp_path / "model", fail)
    assert list(tmp_path.iterdir()) == []
